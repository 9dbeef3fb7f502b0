// ---- bytes over time ---------------------------------------------------------------------------
// Live bytes are stacked by group, so that the highest point shows its parts.

function timelineChart(app) {
  const line = (color, more = {}) => ({
    stroke: () => app.theme.color(color),
    paths: uPlot.paths.stepped({ align: 1 }),
    points: { show: false },
    width: 1.5,
    ...more,
  });
  let shown = null; // the sampled moves and the live bytes of each colour at them
  const chart = windowChart(app, "timeline", {
    height: 320,
    above: bandsOf(app.run) * BAND_HEIGHT,
    scales: { y: { range: (u, least, most) => [0, Math.max(1, (most ?? 1) * 1.06)] } },
    axes: [vertical(app, byteAxis)],
    series: [line("reserved"), line("live"), line("selected", { width: 2 }), line("other", { width: 2, dash: [5, 4] })],
    bands: [{ series: [1, 2], fill: () => app.theme.color("idle-fill") }],
    hooks: {
      drawAxes: [(u) => { drawStack(app, u, shown); drawSteps(app, u); drawPhases(app, u); }],
      setCursor: [(u) => { showValues(u.cursor.idx); point(u.cursor); }],
    },
    data: [[], [], [], [], []],
  });
  chart.over.addEventListener("click", (event) => {
    const x = chart.posToVal(event.clientX - chart.over.getBoundingClientRect().left, "x");
    if (!chart.dragged) app.goTo(app.run.moveBehind(x, app.view.axis));
  });

  chart.over.addEventListener("mouseleave", hideTip);

  // The groups at the pointer, as they lie on each other; that under it stands out.
  function point({ left, top }) {
    if (!chart.over.matches(":hover")) return;
    const x = chart.posToVal(left, "x"), y = chart.posToVal(top, "y");
    const at = shown.x.findLastIndex((begins) => begins <= x);
    let sum = 0, inOthers = false;
    const rows = shown.colours.flatMap((column, c) => {
      if (at < 0 || !column[at]) return [];
      sum += column[at];
      const isHere = y < sum && y >= sum - column[at];
      inOthers = isHere && c === HUES.light.length;
      return [[make("span", { className: isHere ? "here" : "" }, swatch(app.theme.hue(c)), app.groups.colourName(c)), bytes(column[at])]];
    });
    if (!rows.length) return hideTip();
    const phase = phasesAt(app.run, app.run.moveBehind(x, app.view.axis));
    const near = app.run.facts.refusals.filter((each) => Math.abs(chart.valToPos(app.run.x(momentBefore(each), app.view.axis), "x") - left) < 6);
    const { left: begin, top: upper } = chart.over.getBoundingClientRect();
    showTip(begin + left, upper + top, make("b", {}, `${bytes(sum)} live at ${app.whereText(x)}${phase && `, in ${phase}`}`), definitions(rows.reverse()),
      ...(inOthers ? [make("small", {}, "The largest of the others"), definitions(othersAt(app, app.run.moveBehind(x, app.view.axis)))] : []),
      ...(near.length ? [make("small", { className: "alarm" }, refusalText(near))] : []));
  }

  // The names of the lines, with their values at the cursor: each line has its last value until its next.
  function showValues(at) {
    const { run, other } = app;
    const last = (column) => column.findLast((value, place) => place <= at && value != null);
    const [x, held, live, selected, others] = at == null ? [] : chart.data.map(last);
    legend("timeline-legend", [
      ["At", at == null ? "" : app.whereText(x)],
      ["Reserved", bytes(held), "reserved"],
      ["Live", bytes(live), "live"],
      ["Reserved, idle", bytes(held == null ? held : Math.max(0, held - live)), "idle"],
      ...(run.isFiltered ? [["Live, as filtered", bytes(selected), "selected"]] : []),
      ...(other ? [[`Live, ${other.facts.label}`, bytes(others), "other"]] : []),
    ]);
  }

  return {
    chart,
    update() {
      const { run, other, view } = app;
      const held = run.heldBy(view.policy);
      const columns = chart.over.clientWidth || 1000;
      const moves = run.facts.moment && run.moves ? [run.moves - 1]
        : run.sample(app.first, app.stop, columns, { ...view, held });
      const x = moves.map((i) => (run.facts.moment ? view.x0 : Math.max(view.x0, run.x(i, view.axis))));
      keepLast(x, moves, Math.min(view.x1, run.extent(view.axis)[1]));
      shown = { x, colours: run.byColour(moves, app.groups) };
      const main = [held, run.all, run.isFiltered ? run.live : null].map((values) =>
        moves.map((i) => (values ? values[i] : null)));
      chart.setData(other ? uPlot.join([[x, ...main], otherLine(other, view, columns, app.shift())]) : [x, ...main, x.map(() => null)]);
      showValues(chart.cursor.idx);
      let most = 0;
      for (const i of moves) most = Math.max(most, held[i]);
      element("timeline").setAttribute("aria-label", `Bytes over time, ${app.windowText()}: live at most `
        + `${bytes(app.survey.peakBytes)}, reserved at most ${bytes(most)} by ${run.facts.policies[view.policy].name}`);
    },
  };
}

// The largest groups without a colour of their own after a move.
function othersAt({ run, groups }, move) {
  const sums = new Map();
  for (const b of run.liveAt(move)) {
    const group = groups.of[b];
    if (groups.colour[group] === HUES.light.length) sums.set(group, (sums.get(group) ?? 0) + run.size[b]);
  }
  const largest = Array.from(sums).sort((a, b) => b[1] - a[1]).slice(0, 5);
  return largest.map(([group, sum]) => [ownerText(groups.names[group]), bytes(sum)]);
}

// The live bytes of the run that is compared, in the same window; it begins `shift` seconds later.
function otherLine(run, view, columns, shift) {
  const x0 = view.x0 - shift, x1 = view.x1 - shift;
  const first = run.moveAt(x0, view.axis), stop = run.moveAt(x1, view.axis);
  const moves = run.sample(first, stop, columns, { ...view, x0, x1, held: run.all });
  const x = moves.map((i) => Math.max(x0, run.x(i, view.axis)) + shift);
  keepLast(x, moves, Math.min(x1, run.extent(view.axis)[1]) + shift);
  return [x, moves.map((i) => run.all[i])];
}

// The last value holds up to the end.
function keepLast(x, moves, end) {
  if (moves.length && x[x.length - 1] < end) { x.push(end); moves.push(moves[moves.length - 1]); }
}

// Areas on top of each other: from the sum of all colours down, each over the one above it.
function drawStack(app, u, shown) {
  if (!shown || !shown.x.length) return;
  const { ctx, bbox } = u;
  const x = shown.x.map((value) => u.valToPos(value, "x", true));
  const floor = u.valToPos(0, "y", true);
  const sums = new Float64Array(x.length);
  const edges = shown.colours.map((column) => Float64Array.from(column, (value, at) => (sums[at] += value)));
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (let c = edges.length - 1; c >= 0; c--) {
    if (!shown.colours[c].some((value) => value > 0)) continue;
    ctx.fillStyle = app.theme.hue(c);
    ctx.beginPath();
    ctx.moveTo(x[0], floor);
    let y = floor;
    for (let i = 0; i < x.length; i++) {
      ctx.lineTo(x[i], y);
      y = u.valToPos(edges[c][i], "y", true);
      ctx.lineTo(x[i], y);
    }
    ctx.lineTo(x[x.length - 1], floor);
    ctx.fill();
  }
  ctx.restore();
}

// Steps of the program as faint lines, failed allocations as marks at the top.
function drawSteps(app, u) {
  const { run, view } = app;
  const { ctx, bbox } = u;
  const inside = (move) => move >= app.first && move <= app.stop;
  const at = (move) => Math.round(u.valToPos(run.x(move, view.axis), "x", true)) + 0.5;
  ctx.save();
  ctx.strokeStyle = app.theme.color("edge");
  ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
  const steps = run.facts.steps.filter(inside);
  if (steps.length < 150) for (const move of steps) {
    ctx.beginPath();
    ctx.moveTo(at(move), bbox.top);
    ctx.lineTo(at(move), bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.fillStyle = app.theme.color("alarm");
  const w = 5 * devicePixelRatio;
  for (const move of run.facts.refusals.map(momentBefore)) if (inside(move)) {
    ctx.beginPath();
    ctx.moveTo(at(move) - w, bbox.top);
    ctx.lineTo(at(move) + w, bbox.top);
    ctx.lineTo(at(move), bbox.top + 1.8 * w);
    ctx.fill();
  }
  ctx.restore();
}
