// ---- stacks of the live blocks at the moment ---------------------------------------------------
// The outermost frame is at the top. A bar is as wide as the bytes of the blocks below its frame, and has
// the colour of the group with most of them.

const BAR_HEIGHT = 22;
const MIN_BAR = 4; // pixels; narrower bars are left out

const FEW_LEAVES = 2; // if the program has at most 2 stacks, frames of libraries are shown, too

function leavesOf({ children }) {
  return Array.from(children.values()).reduce((sum, child) => sum + leavesOf(child), 0) || 1;
}

function flameView(app) {
  const place = element("flame"), all = element("flame-all");
  let known = null; // the run for which frames of libraries were switched on or off
  let widened = []; // titles of the frames down to the one that has the whole width
  let nodes = []; // of the bars, in their order
  let least = 0; // of the width, of a bar that is drawn
  const nodeOf = (event) => nodes[event.target.closest("button")?.dataset.node];
  all.addEventListener("change", () => app.later(app.drawMoment));
  place.addEventListener("click", (event) => {
    widened = [];
    for (let node = nodeOf(event); node?.caller; node = node.caller) widened.unshift(node.title);
    app.later(app.drawMoment);
  });
  place.addEventListener("keydown", (event) => {
    const next = { ArrowRight: "nextSibling", ArrowDown: "nextSibling", ArrowLeft: "previousSibling", ArrowUp: "previousSibling" }[event.key];
    if (!next) return;
    event.preventDefault();
    event.target[next]?.focus();
  });
  place.addEventListener("mouseleave", hideTip);
  place.addEventListener("mousemove", (event) => {
    const node = nodeOf(event);
    if (!node) return hideTip();
    showTip(event.clientX, event.clientY, make("b", {}, node.title || "All live blocks"), definitions([
      ["Live", `${bytes(node.bytes)}, ${(100 * node.bytes / nodes[0].bytes).toFixed(1)} %`], ["Allocated here", bytes(node.own)]]));
  });

  // Draw a node and those below it; return the last row.
  function draw(node, left, width, row, onPath) {
    const bar = make("button", { type: "button", tabIndex: nodes.length ? -1 : 0 }, `${node.label}  ${bytes(node.bytes)}`);
    bar.dataset.node = nodes.push(node) - 1;
    const tint = app.theme.tint(node.colours ? node.colours.indexOf(Math.max(...node.colours)) : -1);
    bar.style.cssText = `left:${100 * left}%;width:${100 * width}%;top:${row * BAR_HEIGHT}px;background:${tint}`;
    place.append(bar);
    const next = onPath && node.children.get(widened[row]);
    if (next) return draw(next, left, width, row + 1, true);
    let last = row;
    for (const child of Array.from(node.children.values()).sort((a, b) => b.bytes - a.bytes)) {
      const share = (width * child.bytes) / node.bytes;
      if (share >= least) last = Math.max(last, draw(child, left, share, row + 1, false));
      left += share;
    }
    return last;
  }

  return {
    update() {
      const { run, moment, groups } = app;
      element("flame-panel").hidden = !run.stackSizes.length;
      if (!run.stackSizes.length) return;
      const hadFocus = place.contains(document.activeElement);
      place.replaceChildren();
      nodes = [];
      least = MIN_BAR / Math.max(1, place.clientWidth);
      const colourOf = (b) => groups.colour[groups.of[b]], live = run.liveAt(moment);
      const treeOf = (frames) => callTree(run, live, { all: frames, colourOf });
      // Where a framework has the loop, one line of the program has all of the memory.
      if (known !== run) all.checked = leavesOf(treeOf(false)) <= FEW_LEAVES;
      known = run;
      const rows = draw(treeOf(all.checked), 0, 1, 0, true);
      place.style.height = `${(rows + 1) * BAR_HEIGHT}px`;
      if (hadFocus) place.children[Math.min(widened.length, nodes.length - 1)].focus();
    },
  };
}
