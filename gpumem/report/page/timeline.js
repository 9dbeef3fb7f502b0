// ---- bytes over time ---------------------------------------------------------------------------

function timelineChart(app) {
  const size = (_, value) => (value == null ? "–" : bytes(value));
  const line = (label, color, more = {}) => ({
    label,
    value: size,
    stroke: () => app.theme.color(color),
    paths: uPlot.paths.stepped({ align: 1 }),
    points: { show: false },
    width: 1.5,
    ...more,
  });
  const chart = windowChart(app, "timeline", {
    height: 300,
    scales: { y: { range: (u, least, most) => [0, Math.max(1, (most ?? 1) * 1.06)] } },
    axes: [vertical(app, byteAxis)],
    series: [
      line("Reserved", "reserved"),
      line("Live", "live", { fill: () => app.theme.color("live-fill") }),
      line("Fragmented", "fragmented", { width: 1, alpha: 0.7 }),
      line("Live, as filtered", "selected", { width: 2, show: false }),
    ],
    bands: [{ series: [1, 2], fill: () => app.theme.color("fragmented-fill") }],
    hooks: { drawAxes: [(u) => drawMarks(app, u)] },
    data: [[], [], [], [], []],
  });

  return {
    chart,
    update() {
      const { run, view } = app;
      const held = run.heldBy(view.policy);
      const moves = run.sample(app.first, app.stop, chart.over.clientWidth || 1000, { ...view, held });
      const x = moves.map((i) => Math.max(view.x0, run.x(i, view.axis)));
      const last = moves[moves.length - 1];
      if (moves.length && x[x.length - 1] < view.x1) { x.push(view.x1); moves.push(last); }
      chart.setData([
        x,
        moves.map((i) => held[i]),
        moves.map((i) => run.all[i]),
        moves.map((i) => Math.max(0, held[i] - run.all[i])),
        run.isFiltered ? moves.map((i) => run.live[i]) : moves.map(() => null),
      ]);
      if (chart.series[4].show !== run.isFiltered) chart.setSeries(4, { show: run.isFiltered });
      let most = 0;
      for (const i of moves) most = Math.max(most, held[i]);
      element("timeline").setAttribute("aria-label", `Bytes over time, ${app.windowText()}: live at most `
        + `${bytes(app.survey.peakBytes)}, reserved at most ${bytes(most)} by ${run.facts.policies[view.policy].name}`);
    },
  };
}

// Steps of the program as faint lines, failed allocations as marks at the top.
function drawMarks(app, u) {
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
  for (const [move] of run.facts.failures) if (inside(move)) {
    ctx.beginPath();
    ctx.moveTo(at(move) - w, bbox.top);
    ctx.lineTo(at(move) + w, bbox.top);
    ctx.lineTo(at(move), bbox.top + 1.8 * w);
    ctx.fill();
  }
  ctx.restore();
}
