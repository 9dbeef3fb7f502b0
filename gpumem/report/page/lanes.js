// ---- a lane for each stream --------------------------------------------------------------------

const MAX_LANES = 24;
const LANE_HEIGHT = 48;
const LABEL_HEIGHT = 18; // of the text above the highest point of a lane

function lanesChart(app) {
  const shown = busiestStreams(app.run);
  const chart = windowChart(app, "lanes", {
    height: shown.length * LANE_HEIGHT + 44,
    scales: { y: { range: () => [0, shown.length] } },
    axes: [vertical(app, {
      splits: () => shown.map((_, lane) => shown.length - lane - 0.5),
      values: () => shown.map((stream) => clip(app.run.facts.streams[stream], 14)),
      grid: { show: false },
    })],
    series: [{ show: false, label: "Stream" }],
    cursor: { y: false, points: { show: false } },
    hooks: { draw: [(u) => drawLanes(app, u, shown)] },
    data: [[0, 1], [null, null]],
  });
  if (shown.length < app.run.streams) {
    element("lanes-panel").querySelector(".hint").append(` The busiest ${shown.length} of ${app.run.streams}.`);
  }
  return {
    chart,
    update() {
      chart.setData([[app.view.x0, app.view.x1], [null, null]]);
      element("lanes").setAttribute("aria-label", `Live bytes of ${plural(shown.length, "stream")}, ${app.windowText()}`);
    },
  };
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

function drawLanes(app, u, shown) {
  const { ctx, bbox } = u;
  const columns = Math.max(1, Math.floor(bbox.width / devicePixelRatio));
  const { rows, peaks } = app.run.streamColumns(app.first, app.stop, columns, app.view);
  const tall = bbox.height / shown.length;
  ctx.save();
  ctx.font = `${12 * devicePixelRatio}px system-ui, "DejaVu Sans", sans-serif`;
  ctx.textAlign = "right";
  ctx.textBaseline = "top";
  shown.forEach((stream, lane) => {
    const floor = bbox.top + tall * (lane + 1), room = tall - LABEL_HEIGHT * devicePixelRatio;
    ctx.fillStyle = app.theme.color("grid");
    ctx.fillRect(bbox.left, floor - 1, bbox.width, 1);
    ctx.fillStyle = app.theme.hue(stream % HUES.light.length);
    ctx.globalAlpha = 0.72;
    ctx.beginPath();
    ctx.moveTo(bbox.left, floor - 1);
    rows[stream].forEach((value, column) => {
      const y = floor - 1 - (peaks[stream] ? (value / peaks[stream]) * room : 0);
      ctx.lineTo(bbox.left + (column / columns) * bbox.width, y);
      ctx.lineTo(bbox.left + ((column + 1) / columns) * bbox.width, y);
    });
    ctx.lineTo(bbox.left + bbox.width, floor - 1);
    ctx.fill();
    ctx.globalAlpha = 1;
    label(app, ctx, `at most ${bytes(peaks[stream])}`, bbox.left + bbox.width - 6, floor - tall + 3 * devicePixelRatio);
  });
  ctx.restore();
}

// Text with an outline, readable over a drawing.
function label(app, ctx, text, x, y) {
  ctx.lineWidth = 4 * devicePixelRatio;
  ctx.lineJoin = "round";
  ctx.strokeStyle = app.theme.color("panel");
  ctx.strokeText(text, x, y);
  ctx.fillStyle = app.theme.color("ink");
  ctx.fillText(text, x, y);
}
