// ---- shared by the charts ----------------------------------------------------------------------

const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const AXIS_WIDTH = 100; // pixels on the left, alike in all charts, so that they stand in line
const MARGIN = 14;

function element(id) {
  return document.getElementById(id);
}

// Names with their values, and with a swatch: the name of a line, or a colour.
function legend(id, entries) {
  element(id).replaceChildren(...entries.map(([name, value, color]) =>
    make("li", { title: name }, ...(color ? [swatch(color)] : []),
      make("span", { className: "clip" }, shortName(name)), make("b", {}, value || "–"))));
}

function swatch(color) {
  return make("span", /^\w+$/.test(color) ? { className: `swatch ${color}` } : { className: "swatch", style: `background:${color}` });
}

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// A text that wraps at its blanks, and within a word only at punctuation, as long as that is enough.
function words(text) {
  return text.split(" ").flatMap((word, at) => {
    const parts = word.split(/(?<=[/._:(])(?=.)/).flatMap((part, n) => (n ? [make("wbr"), part] : [part]));
    return [...(at ? [" "] : []), make("span", { className: "word" }, ...parts)];
  });
}

function axis(app, more) {
  const grid = { stroke: () => app.theme.color("grid"), width: 1 };
  return { stroke: () => app.theme.color("quiet"), grid, ticks: { ...grid, size: 5 }, font: FONT, ...more };
}

// The horizontal axis: seconds, or numbers of events.
function horizontal(app) {
  // The axis of events names whole numbers only.
  const named = (_, splits) => splits.map((value) => (app.view.axis === "time" || Number.isInteger(value) ? value : null));
  const made = axis(app, {
    space: 90,
    size: 34,
    filter: named,
    values: ({ width }, splits) => {
      const { x0, x1 } = app.view, pixels = (value) => ((x1 - value) / (x1 - x0)) * (width - AXIS_WIDTH) + MARGIN;
      const step = splits.length > 1 ? splits[1] - splits[0] : splits[0] / 1000;
      const isRound = Number(step.toPrecision(1)) === Number(step.toPrecision(3)); // 2.5 is not
      const text = (value) => (app.view.axis === "event" ? count(value) : seconds(value, isRound ? step : step / 10, x1));
      // A text that the right edge would cut is left out; a letter takes about 7 pixels.
      return splits.map((value) => (value === null || pixels(value) < 3.5 * text(value).length ? "" : text(value)));
    },
  });
  for (const part of [made.grid, made.ticks]) part.filter = named;
  return made;
}

function vertical(app, more) {
  return axis(app, { ticks: { show: false }, size: AXIS_WIDTH, gap: 8, ...more });
}

const byteAxis = {
  splits: (chart, _, least, most) => byteSplits(least, most, chart.height / 46),
  values: (_, splits) => splits.map(bytes),
};

// A chart over the common horizontal axis, with pixels `above` it; dragging selects the window.
function windowChart(app, id, { height, above = 0, scales, series, axes, hooks = {}, bands, cursor, data }) {
  const place = element(id);
  const chart = new uPlot({
    width: Math.max(240, place.clientWidth),
    height: height + above,
    padding: [8 + above, MARGIN, 0, 0],
    scales: { x: { time: false, range: () => [app.view.x0, app.view.x1] }, ...scales },
    series: [{}, ...series],
    axes: [horizontal(app), ...axes],
    bands,
    legend: { show: false },
    cursor: {
      drag: { x: true, y: false, setScale: false },
      sync: { key: "gpumem", scales: ["x", null] },
      points: { size: 7 },
      bind: { dblclick: () => () => app.showAll() },
      ...cursor,
    },
    hooks: {
      ...hooks,
      setSelect: [(u) => {
        const { left, width, top, height: tall } = u.select;
        u.dragged = width >= 4; // the click that follows is the end of a drag
        if (!u.dragged) return;
        const [x0, x1] = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        if (hooks.dragged) hooks.dragged(u, top, tall);
        app.show(x0, x1);
      }],
    },
  }, data, place);
  chart.marker = make("div", { className: "marker" });
  chart.over.append(chart.marker);
  chart.over.addEventListener("mousedown", () => { chart.dragged = false; });
  followKeys(app, place);
  followWheel(app, chart);
  return chart;
}

// The moment that is shown, as a line over a chart, which is not drawn again for it.
// The chart's own scales follow later than the view, so places come from the view.
function placeMarker(app, { marker }) {
  const x = app.run.x(app.moment, app.view.axis);
  marker.hidden = !app.run.moves || app.run.facts.moment || x < app.view.x0 || x > app.view.x1;
  marker.style.left = `${100 * shareOf(x, app.view.x0, app.view.x1)}%`;
}

function shareOf(value, from, to) {
  return Math.max(0, Math.min(1, (value - from) / (to - from)));
}

function followKeys(app, place) {
  place.addEventListener("keydown", (event) => {
    const actions = {
      ArrowLeft: () => app.move(-0.2), ArrowRight: () => app.move(0.2),
      "+": () => app.zoom(0.5), "=": () => app.zoom(0.5), "-": () => app.zoom(2), 0: () => app.showAll(),
      ",": () => app.goTo(app.moment - 1), ".": () => app.goTo(app.moment + 1),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
}

// The wheel zooms with Ctrl held; alone it scrolls the page, as everywhere.
function followWheel(app, chart) {
  chart.over.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const at = chart.posToVal(event.clientX - chart.over.getBoundingClientRect().left, "x");
    app.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 200))), at);
  }, { passive: false });
}
