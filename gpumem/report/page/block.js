// ---- one block: a few facts next to the pointer, all of them in a panel -----------------------

function blockFacts(app, b) {
  const { run } = app;
  const freed = run.end[b] === NEVER ? "no: live at the end"
    : `${app.moveText(run.end[b])}, after ${seconds((run.time[run.end[b]] - run.time[run.begin[b]]) / 1e6)}`;
  return [["Owner", ownerText(run.facts.owners[run.owner[b]])], ["Stream", run.facts.streams[run.stream[b]]],
    ["Address", run.address(b)], ["Allocated", app.moveText(run.begin[b])], ["Freed", freed]];
}

function blockTitle(app, b) {
  return `${bytes(app.run.size[b])} (${count(app.run.size[b])} bytes)`;
}

function definitions(pairs) {
  return make("dl", {}, ...pairs.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

// A few facts of a block next to the pointer.
function showBlockTip(app, b, x, y) {
  if (b < 0) return hideTip();
  showTip(x, y, make("b", {}, blockTitle(app, b)), definitions(blockFacts(app, b)),
    make("small", {}, app.run.stack[b] ? "Click for its stack." : "Click to keep it."));
}

function showTip(x, y, ...facts) {
  const tip = element("tip");
  tip.hidden = false;
  tip.replaceChildren(...facts);
  const right = x + 18 + tip.offsetWidth > innerWidth;
  tip.style.left = `${Math.max(4, x + (right ? -18 - tip.offsetWidth : 18))}px`;
  tip.style.top = `${Math.max(4, Math.min(innerHeight - tip.offsetHeight - 4, y + 18))}px`;
}

function hideTip() { element("tip").hidden = true; }

function frameLine({ file, line, name }) {
  return make("li", { className: line ? "" : "native" }, make("b", {}, name), " ", make("span", {}, line ? `${file}:${line}` : file));
}

// The selected block, with its stack, in a panel that stays until it is closed.
function showBlock(app) {
  const panel = element("block"), b = app.view.block, { run } = app;
  panel.hidden = b < 0;
  document.body.classList.toggle("has-block", b >= 0);
  if (b < 0) return;
  hideTip();
  element("block-title").textContent = blockTitle(app, b);
  element("block-facts").replaceChildren(...definitions(blockFacts(app, b)).children);
  const frames = run.frames(run.stack[b]);
  element("block-stack").replaceChildren(...frames.map(frameLine));
  element("block-without").hidden = frames.length > 0;
  element("block-of-stack").hidden = !frames.length;
}
