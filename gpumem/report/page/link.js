// ---- the view as a link ------------------------------------------------------------------------
// Every choice stands after the # of the page's address, so that a copy of the address shows the
// same. Usual values are left out.

const LINKED = { run: "number", with: "number", axis: "text", by: "text", from: "number", to: "number", low: "number",
  high: "number", at: "number", block: "number", policy: "number", owner: "number", stream: "number", only: "text",
  least: "number", most: "number", find: "text" };

function readLink() {
  const found = {};
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    if (LINKED[name] === "text") found[name] = text;
    else if (LINKED[name] === "number" && Number.isFinite(Number(text))) found[name] = Number(text);
  }
  return found;
}

function writeLink(state) {
  const query = new URLSearchParams();
  for (const name in LINKED) if (state[name] != null) query.set(name, state[name]);
  const hash = query.toString();
  if (hash !== location.hash.slice(1)) history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}

async function copyLink(button) {
  const name = button.textContent;
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "Copied";
  } catch {
    button.textContent = "See the address bar";
  }
  setTimeout(() => { button.textContent = name; }, 1500);
}
