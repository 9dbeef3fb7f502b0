// ---- addresses over time -----------------------------------------------------------------------
// Each block is a rectangle, drawn as pixels of one image. Blocks do not overlap, so the time is that
// of one pass over blocks and pixels, however many blocks there are.

function mapChart(app) {
  const image = document.createElement("canvas");
  const chart = windowChart(app, "map", {
    height: 380,
    scales: { y: { range: () => [app.view.low ?? 0, app.view.high ?? app.run.top] } },
    axes: [vertical(app, { ...byteAxis, grid: { show: false } })],
    series: [{ show: false, label: "Address" }],
    cursor: { drag: { x: true, y: true, uni: 30, setScale: false }, points: { show: false } },
    hooks: {
      draw: [(u) => paint(app, u, image)],
      setCursor: [(u) => point(app, u)],
      dragged: (u, top, tall) => {
        if (tall < 8 || tall > u.over.clientHeight - 2) return;
        app.choose({ low: Math.floor(u.posToVal(top + tall, "y")), high: Math.ceil(u.posToVal(top, "y")) });
      },
    },
    data: [[0, 1], [null, null]],
  });
  const frame = make("div", { className: "frame", hidden: true });
  chart.over.append(frame);
  chart.over.addEventListener("mouseleave", () => hideTip());
  chart.over.addEventListener("click", (event) => {
    if (chart.dragged) return;
    const { left, top } = chart.over.getBoundingClientRect();
    app.selectBlock(blockUnder(app, chart, event.clientX - left, event.clientY - top));
  });

  return {
    chart,
    mark() { frameBlock(app, frame); },
    update() {
      chart.setData([[app.view.x0, app.view.x1], [null, null]]);
      element("map").setAttribute("aria-label", `Addresses of ${plural(app.survey.blocks, "block")} over time, `
        + app.windowText());
    },
  };
}

function paint(app, u, image) {
  const { run, view } = app;
  const { left, top, width, height } = u.bbox;
  if (width < 1 || height < 1) return;
  image.width = width;
  image.height = height;
  const context = image.getContext("2d");
  const picture = context.createImageData(width, height);
  const pixels = new Uint32Array(picture.data.buffer);
  const colors = blockColors(app);
  const y0 = u.scales.y.min, scaleX = width / (view.x1 - view.x0), scaleY = height / (u.scales.y.max - y0);
  const across = (move) => Math.round((run.x(move, view.axis) - view.x0) * scaleX);
  const borders = fillSegments(app, pixels, { width, height, y0, scaleY, across });
  // Blocks thinner than a pixel come first, so that they do not hide the others; before them come all that
  // the filter leaves out.
  const hidden = pixel(app.theme.color("hidden"));
  const layers = run.isFiltered ? [[0, false], [0, true], [1, false], [1, true]] : [[1, false], [1, true]];
  for (const [passes, thick] of layers) for (let b = 0; b < run.blocks; b++) {
    if (run.passes[b] !== passes || run.begin[b] >= app.stop || run.end[b] < app.first) continue;
    if (run.size[b] * scaleY >= 1 !== thick) continue;
    const bottom = height - (run.offset[b] - y0) * scaleY;
    const upper = Math.max(0, Math.round(bottom - run.size[b] * scaleY));
    if (bottom <= 0 || upper >= height) continue;
    const from = Math.max(0, across(run.begin[b]));
    const ends = run.end[b] === NEVER ? width : across(run.end[b]);
    const to = Math.min(width, Math.max(ends, from + 1));
    let lower = Math.min(height, Math.max(Math.round(bottom), upper + 1));
    if (lower - upper > 4) lower--; // a line between neighbours
    const color = passes ? colors(b) : hidden;
    const stop = to - from > 4 && to < width ? to - 1 : to;
    for (let y = upper; y < lower; y++) pixels.fill(color, y * width + from, y * width + stop);
  }
  context.putImageData(picture, 0, 0);
  u.ctx.drawImage(image, left, top);
  outline(u.ctx, borders, left, top, app.theme.color("segment"));
  drawRanges(app, u);
}

// Fill reserved memory, over which blocks are drawn. Returns the borders of segments that are large enough.
function fillSegments(app, pixels, { width, height, y0, scaleY, across }) {
  const { run } = app;
  const idle = pixel(app.theme.color("idle"));
  const borders = [];
  for (let s = 0; s < run.segments; s++) {
    if (run.segmentBegin[s] >= app.stop || run.segmentEnd[s] <= app.first) continue;
    const lower = Math.min(height, Math.round(height - (run.segmentOffset[s] - y0) * scaleY));
    const upper = Math.max(0, Math.round(height - (run.segmentOffset[s] + run.segmentSize[s] - y0) * scaleY));
    const from = Math.max(0, across(run.segmentBegin[s]));
    const to = run.segmentEnd[s] >= run.moves ? width : Math.min(width, across(run.segmentEnd[s]));
    if (upper >= lower || from >= to) continue;
    for (let y = upper; y < lower; y++) pixels.fill(idle, y * width + from, y * width + to);
    if (lower - upper >= 8 && to - from >= 3) borders.push([from, upper, to - from, lower - upper]);
  }
  return borders.length <= MAX_BORDERS ? borders : [];
}

const MAX_BORDERS = 4000;

function outline(ctx, rectangles, left, top, color) {
  ctx.save();
  ctx.strokeStyle = color;
  ctx.lineWidth = 1;
  for (const [x, y, width, height] of rectangles) ctx.strokeRect(left + x + 0.5, top + y + 0.5, width - 1, height - 1);
  ctx.restore();
}

// A frame around the selected block, over the picture, which stays as it is.
function frameBlock(app, frame) {
  const { run, view } = app, b = view.block;
  const low = view.low ?? 0, high = view.high ?? run.top;
  const isShown = b >= 0 && run.begin[b] <= app.stop && run.end[b] >= app.first
    && run.offset[b] < high && run.offset[b] + run.size[b] > low;
  frame.hidden = !isShown;
  if (!isShown) return;
  const across = (move) => 100 * shareOf(run.x(move, view.axis), view.x0, view.x1);
  const up = (offset) => 100 * shareOf(offset, low, high);
  const left = across(run.begin[b]), right = run.end[b] === NEVER ? 100 : across(run.end[b]);
  Object.assign(frame.style, { left: `${left}%`, right: `${100 - right}%`,
    bottom: `${up(run.offset[b])}%`, top: `${100 - up(run.offset[b] + run.size[b])}%` });
}

// A line at each gap that is closed.
function drawRanges(app, u) {
  const ranges = app.run.facts.ranges;
  if (ranges.length < 2 || ranges.length > 64) return;
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = app.theme.color("quiet");
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const [, place] of ranges.slice(1)) {
    if (place <= u.scales.y.min || place >= u.scales.y.max) continue;
    const y = Math.round(u.valToPos(place, "y", true)) + 0.5;
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
  }
  ctx.restore();
}

// A block's colour as a pixel: that of its group.
function blockColors(app) {
  const { theme, groups } = app;
  const hues = Array.from({ length: HUES.light.length + 1 }, (_, rank) => pixel(theme.hue(rank)));
  return (b) => hues[groups.colour[groups.of[b]]];
}

function blockUnder(app, u, left, top) {
  const { run, view } = app;
  return run.blockAt(run.moveBehind(u.posToVal(left, "x"), view.axis), u.posToVal(top, "y"));
}

// Describe the block under the pointer.
function point(app, u) {
  const { left, top } = u.cursor;
  if (left < 0 || top < 0 || !u.over.matches(":hover")) return;
  const at = u.over.getBoundingClientRect();
  showBlockTip(app, blockUnder(app, u, left, top), at.left + left, at.top + top);
}
