// ---- addresses over time -----------------------------------------------------------------------
// Each block is a rectangle, drawn as pixels of one image. Blocks do not overlap, so the time is that
// of one pass over blocks and pixels, however many blocks there are.

function mapChart(app) {
  const image = document.createElement("canvas");
  let heights = null; // [from, to) of the addresses shown; null: all
  const chart = windowChart(app, "map", {
    height: 380,
    scales: { y: { range: () => heights ?? [0, app.run.top] } },
    axes: [vertical(app, { ...byteAxis, grid: { show: false } })],
    series: [{ show: false, label: "Address" }],
    legend: { show: false },
    cursor: { drag: { x: true, y: true, uni: 30, setScale: false }, points: { show: false } },
    hooks: {
      draw: [(u) => paint(app, u, image)],
      setCursor: [(u) => point(app, u)],
      dragged: (u, top, tall) => {
        if (tall < 8 || tall > u.over.clientHeight - 2) return;
        heights = [u.posToVal(top + tall, "y"), u.posToVal(top, "y")];
      },
    },
    data: [[0, 1], [null, null]],
  });
  chart.over.addEventListener("mouseleave", () => { element("tip").hidden = true; });

  return {
    chart,
    update() {
      chart.setData([[app.view.x0, app.view.x1], [null, null]]);
      element("map").setAttribute("aria-label", `Addresses of ${plural(app.survey.blocks, "block")} over time, `
        + app.windowText());
      showKey(app);
    },
    showAll() { heights = null; },
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
  // Blocks thinner than a pixel come first, so that they do not hide the others.
  for (const thick of [false, true]) for (let b = 0; b < run.blocks; b++) {
    if (!run.passes[b] || run.begin[b] >= app.stop || run.end[b] < app.first) continue;
    if (run.size[b] * scaleY >= 1 !== thick) continue;
    const bottom = height - (run.offset[b] - y0) * scaleY;
    const upper = Math.max(0, Math.round(bottom - run.size[b] * scaleY));
    if (bottom <= 0 || upper >= height) continue;
    const from = Math.max(0, Math.round((run.x(run.begin[b], view.axis) - view.x0) * scaleX));
    const ends = run.end[b] === NEVER ? width : Math.round((run.x(run.end[b], view.axis) - view.x0) * scaleX);
    const to = Math.min(width, Math.max(ends, from + 1));
    let lower = Math.min(height, Math.max(Math.round(bottom), upper + 1));
    if (lower - upper > 4) lower--; // a line between neighbours
    const color = colors(b);
    const stop = to - from > 4 && to < width ? to - 1 : to;
    for (let y = upper; y < lower; y++) pixels.fill(color, y * width + from, y * width + stop);
  }
  context.putImageData(picture, 0, 0);
  u.ctx.drawImage(image, left, top);
  drawRanges(app, u);
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

// A block's colour as a pixel: by owner, stream or size.
function blockColors(app) {
  const { run, theme } = app;
  const hues = Array.from({ length: HUES.light.length + 1 }, (_, rank) => pixel(theme.hue(rank)));
  const other = hues.length - 1;
  if (app.view.colour === "stream") return (b) => hues[Math.min(run.stream[b], other)];
  if (app.view.colour === "size") return (b) => hues[sizeRank(run.size[b])];
  return (b) => hues[app.ownerRanks[run.owner[b]] ?? other];
}

const SIZE_CLASSES = [[4096, "below 4 KiB"], [65536, "4 to 64 KiB"], [1 << 20, "64 KiB to 1 MiB"],
  [8 << 20, "1 to 8 MiB"], [64 << 20, "8 to 64 MiB"], [512 << 20, "64 to 512 MiB"], [Infinity, "512 MiB and more"]];

function sizeRank(size) {
  return SIZE_CLASSES.findIndex(([below]) => size < below);
}

function showKey(app) {
  const { run, theme } = app;
  const most = HUES.light.length;
  let names;
  if (app.view.colour === "size") names = SIZE_CLASSES.map(([, name], rank) => [rank, name]);
  else if (app.view.colour === "stream") names = run.facts.streams.slice(0, most).map((name, rank) => [rank, name]);
  else names = app.topOwners.slice(0, most).map((owner, rank) => [rank, app.ownerName(owner)]);
  const total = { stream: run.streams, owner: run.owners, size: 0 }[app.view.colour];
  if (total > names.length) names.push([-1, "others"]);
  element("key").replaceChildren(...names.map(([rank, name]) => {
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = theme.hue(rank);
    return make("li", { title: name }, swatch, name);
  }));
}

// Describe the block under the pointer.
function point(app, u) {
  const tip = element("tip"), { run, view } = app;
  const { left, top } = u.cursor;
  const b = left < 0 || top < 0 || !u.over.matches(":hover") ? -1
    : run.blockAt(Math.max(0, run.moveAt(u.posToVal(left, "x"), view.axis) - 1), u.posToVal(top, "y"));
  tip.hidden = b < 0;
  if (b < 0) return;
  const never = run.end[b] === NEVER;
  const rows = {
    Owner: app.ownerName(run.owner[b]),
    Stream: run.facts.streams[run.stream[b]],
    Address: run.address(b),
    Allocated: app.moveText(run.begin[b]),
    Freed: never ? "never" : `${app.moveText(run.end[b])}, after ${seconds((run.time[run.end[b]] - run.time[run.begin[b]]) / 1e6)}`,
  };
  tip.replaceChildren(make("b", {}, `${bytes(run.size[b])} (${count(run.size[b])} bytes)`), make("dl", {},
    ...Object.entries(rows).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
  const at = u.over.getBoundingClientRect();
  const right = at.left + left + 18 + tip.offsetWidth > innerWidth;
  tip.style.left = `${Math.max(4, at.left + left + (right ? -18 - tip.offsetWidth : 18))}px`;
  tip.style.top = `${Math.min(innerHeight - tip.offsetHeight - 4, at.top + top + 18)}px`;
}
