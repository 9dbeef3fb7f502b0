// ---- refused requests: the first facts of a page where a run ended with one ---------------------

function refusedPanel(app) {
  const { refusals } = app.run.facts, panel = element("refused-panel");
  panel.hidden = !refusals.length;
  if (panel.hidden) return;
  const last = refusals[refusals.length - 1];
  if (last.ended) element("notice").after(panel);
  else element("figures").after(panel);
  element("refused-title").textContent = last.ended ? `Refused at the end: ${bytes(last.nbytes)}` : `Refused: ${plural(refusals.length, "request")}`;
  const names = ["Requested", "<By", "<Limit", "In use", "Reserved", "Of it free", "Largest free", "Device free", "Moment before"];
  fillTable("refused", names, refusals.toReversed(), (each) => {
    const figures = [each.in_use, each.reserved, each.free, each.largest_free, each.device_free];
    const onclick = () => app.goTo(momentBefore(each));
    return [
      make("th", { scope: "row" }, bytes(each.nbytes)),
      wordsCell(each.owner || "unknown"),
      cell(each.limit ? `${each.limit_name}, ${bytes(each.limit)}` : "–", "words"),
      ...figures.map((value) => cell(bytes(value))),
      make("td", {}, make("button", { type: "button", onclick }, app.whereText(app.run.x(momentBefore(each), app.view.axis)))),
    ];
  });
  element("refused-advice").textContent = last.advice && `${last.advice[0].toUpperCase()}${last.advice.slice(1)}.`;
  element("refused-stack").hidden = !last.stack.length;
  element("refused-stack").querySelector("summary").textContent = stackName(last.own.map(frameOf));
  element("refused-frames").replaceChildren(...last.stack.map(frameOf).map(frameLine));
}

// A refusal changes nothing: the state is that after the move before it.
function momentBefore(refusal) { return Math.max(0, refusal.move - 1); }

function refusalText(refusals) {
  return refusals.map((each) => `Then ${bytes(each.nbytes)} of ${ownerText(each.owner) || "unknown"} were refused`
    + (each.limit ? ` by ${each.limit_name} of ${bytes(each.limit)}.` : ".")).join(" ");
}
