// ---- a lane for each stream --------------------------------------------------------------------

const MAX_LANES = 24;
const LANE_HEIGHT = 48;

function lanesChart(app) {
  const shown = busiestStreams(app.run);
  let lanes = { rows: [], peaks: [] };
  const chart = windowChart(app, "lanes", {
    height: shown.length * LANE_HEIGHT + 44,
    scales: { y: { range: () => [0, shown.length] } },
    axes: [vertical(app, {
      splits: () => shown.map((_, lane) => shown.length - lane - 0.5),
      values: (u) => shown.map((stream) => `${fit(u.ctx, app.run.facts.streams[stream])}\n≤ ${bytes(lanes.peaks[stream])}`),
      grid: { show: false },
    })],
    series: [{ show: false, label: "Stream" }],
    cursor: { y: false, points: { show: false } },
    hooks: { draw: [(u) => drawLanes(app, u, shown, lanes)] },
    data: [[0, 1], [null, null]],
  });
  if (shown.length < app.run.streams) {
    element("lanes-panel").querySelector(".hint").append(` The busiest ${shown.length} of ${app.run.streams}.`);
  }
  return {
    chart,
    update() {
      lanes = app.run.streamColumns(app.run.facts.moment ? app.stop : app.first, app.stop, Math.max(1, chart.over.clientWidth), app.view);
      chart.setData([[app.view.x0, app.view.x1], [null, null]]);
      element("lanes").setAttribute("aria-label", `Live bytes of ${plural(shown.length, "stream")}, ${app.windowText()}`);
    },
  };
}

// A stream's name as far as it has room on the left.
function fit(ctx, text) {
  ctx.font = FONT;
  let letters = text.length;
  while (letters > 1 && ctx.measureText(clip(text, letters)).width > AXIS_WIDTH - 12) letters--;
  return clip(text, letters);
}

function clip(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function busiestStreams(run) {
  const sums = new Float64Array(run.streams);
  for (let b = 0; b < run.blocks; b++) sums[run.stream[b]] += run.size[b];
  const order = Array.from(sums.keys()).sort((a, b) => sums[b] - sums[a]).slice(0, MAX_LANES);
  return order.sort((a, b) => a - b);
}

function drawLanes(app, u, shown, { rows, peaks }) {
  const { ctx, bbox } = u;
  const tall = bbox.height / shown.length;
  ctx.save();
  shown.forEach((stream, lane) => {
    const floor = bbox.top + tall * (lane + 1), room = tall - 6 * devicePixelRatio;
    ctx.fillStyle = app.theme.color("grid");
    ctx.fillRect(bbox.left, floor - 1, bbox.width, 1);
    ctx.fillStyle = app.theme.hue(stream % HUES.light.length);
    ctx.globalAlpha = 0.72;
    ctx.beginPath();
    ctx.moveTo(bbox.left, floor - 1);
    rows[stream]?.forEach((value, column, { length: columns }) => {
      const y = floor - 1 - (peaks[stream] ? (value / peaks[stream]) * room : 0);
      ctx.lineTo(bbox.left + (column / columns) * bbox.width, y);
      ctx.lineTo(bbox.left + ((column + 1) / columns) * bbox.width, y);
    });
    ctx.lineTo(bbox.left + bbox.width, floor - 1);
    ctx.fill();
    ctx.globalAlpha = 1;
  });
  ctx.restore();
}
