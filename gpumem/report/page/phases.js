// ---- phases of the program ---------------------------------------------------------------------
// They are bands above the bytes over time, the outer ones at the top, and rows of a table.

const BAND_HEIGHT = 16;
const MAX_BANDS = 3; // phases that lie deeper have no band

function bandsOf(run) {
  return Math.min(MAX_BANDS, 1 + Math.max(-1, ...run.facts.phases.shown.map(([, , , depth]) => depth)));
}

// The phases that are open at a move, the outer ones first.
function phasesAt(run, move) {
  return run.facts.phases.shown.filter(([, begin, end]) => begin <= move && move < end).map(([name]) => name).join(" / ");
}

function phaseColour(run) {
  const names = Array.from(new Set(run.facts.phases.shown.map(([name]) => name)));
  return (name) => names.indexOf(name) % HUES.light.length;
}

function drawPhases(app, u) {
  const { run, view, theme } = app, { ctx, bbox } = u;
  const rows = bandsOf(run), tall = BAND_HEIGHT * devicePixelRatio, colour = phaseColour(run);
  const drawn = new Float64Array(rows).fill(-1); // where the last band of each row ends
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, 0, bbox.width, bbox.top);
  ctx.clip();
  ctx.font = `${11 * devicePixelRatio}px system-ui, "DejaVu Sans", sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  for (const [name, begin, end, depth] of run.facts.phases.shown) {
    if (depth >= rows || end < app.first || begin > app.stop) continue;
    const [left, right] = [begin, end].map((move) => u.valToPos(run.x(move, view.axis), "x", true));
    if (right < drawn[depth] + 0.5) continue;
    drawn[depth] = right;
    const x = Math.max(left, bbox.left), wide = Math.max(1, Math.min(right, bbox.left + bbox.width) - x);
    const y = bbox.top - (rows - depth) * tall;
    ctx.fillStyle = theme.tint(colour(name));
    ctx.fillRect(x, y, wide > 4 ? wide - 1 : wide, tall - devicePixelRatio);
    if (ctx.measureText(name).width + 8 * devicePixelRatio > wide) continue;
    ctx.fillStyle = theme.color("ink");
    ctx.fillText(name, x + 4 * devicePixelRatio, y + tall / 2);
  }
  ctx.restore();
}

function phasesTable(app) {
  const { table } = app.run.facts.phases;
  element("phases-panel").hidden = !table.length;
  const most = Math.max(1, ...table.map(([, , peak]) => peak));
  const colour = phaseColour(app.run);
  fillTable("phases", ["Phase", "", "Peak", "Growth", "Times"], table, ([name, times, peak, at, growth]) => [
    nameCell(name, "Show the state at its peak", () => app.goTo(at), app.theme.tint(colour(name.split(" / ").at(-1)))),
    bar([[peak, ""]], most),
    cell(bytes(peak)),
    cell(growth ? `${growth > 0 ? "+" : ""}${bytes(growth)}` : "none"),
    cell(count(times)),
  ]);
}
