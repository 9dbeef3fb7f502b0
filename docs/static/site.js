// Names in tables break between their words. A button at each piece of code copies it: of a console the commands alone, without their prompts.
function copied(text, isConsole) {
  if (!isConsole) return text;
  return text.split("\n").filter(line => line.startsWith("$ ")).map(line => line.slice(2)).join("\n");
}

addEventListener("DOMContentLoaded", () => {
  for (const name of document.querySelectorAll("code .pre")) {
    // An option stays whole; long names in narrow columns break after these, not anywhere.
    if (name.textContent.startsWith("-")) name.style.whiteSpace = "nowrap";
    else if (name.closest("td")) name.innerHTML = name.innerHTML.replace(/[_.(]/g, "$&<wbr>");
  }
  for (const code of document.querySelectorAll(".highlight pre")) {
    const button = document.createElement("button");
    const isConsole = code.closest(".highlight-console") !== null;
    button.textContent = "copy";
    button.onclick = async () => {
      await navigator.clipboard.writeText(copied(code.textContent, isConsole));
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    };
    code.parentElement.append(button);
  }
});
