// ---- how many blocks of which size -------------------------------------------------------------

const WHOLE = Array.from({ length: 48 }, (_, n) => [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3));

function sizesChart(app) {
  const place = element("sizes");
  const measure = () => (app.view.measure === "bytes" ? "Bytes allocated" : "Allocations");
  const chart = new uPlot({
    width: Math.max(240, place.clientWidth),
    height: 250,
    padding: [8, MARGIN, 0, 0],
    scales: {
      x: { time: false, range: (_, least, most) => [least - 0.6, most + 0.6] },
      y: { range: (_, least, most) => [0, Math.max(1, (most ?? 1) * 1.08)] },
    },
    series: [{}, {
      fill: () => app.theme.color("accent"),
      paths: uPlot.paths.bars({ size: [0.82, 60], radius: 0.08 }),
      points: { show: false },
    }],
    legend: { show: false },
    hooks: { setCursor: [(u) => showValues(u.cursor.idx)] },
    axes: [
      { ...horizontal(app), space: 58, grid: { show: false }, incrs: [1, 2, 3, 4, 5, 8], values: (_, bins) => bins.map((bin) => (Number.isInteger(bin) && bin >= 0 ? bytes(2 ** bin) : "")) },
      vertical(app, { size: 74, incrs: WHOLE, values: (_, splits) => splits.map((value) => sizeText(app, value)) }),
    ],
    cursor: { drag: { x: false, y: false }, y: false, points: { show: false } },
    data: [[], []],
  }, [[], []], place);
  function showValues(at) {
    const bin = at == null ? null : chart.data[0][at];
    legend("sizes-legend", [
      ["From", bin == null ? "" : binName(bin)],
      [measure(), bin == null ? "" : sizeText(app, chart.data[1][at]), "accent"],
    ]);
  }
  chart.over.addEventListener("click", () => {
    const bin = chart.data[0][chart.cursor.idx];
    if (bin != null) app.filter({ least: 2 ** bin, most: 2 ** (bin + 1) });
  });

  return {
    chart,
    update() {
      const { counts, sums } = app.run.histogram(app.first, app.stop);
      const shown = app.view.measure === "bytes" ? sums : counts;
      let first = Math.max(0, counts.findIndex(Boolean)), last = Math.max(0, counts.findLastIndex(Boolean));
      if (first === last) [first, last] = [Math.max(0, first - 1), last + 1]; // a bar among others
      const bins = Array.from({ length: last - first + 1 }, (_, i) => first + i);
      const values = bins.map((bin) => shown[bin] ?? 0);
      chart.setData([bins, values]);
      showValues(chart.cursor.idx);
      const most = bins[values.indexOf(Math.max(...values))];
      place.setAttribute("aria-label", `${measure()} by size: most from ${binName(most)}`);
    },
  };
}

function binName(bin) {
  return `${bytes(2 ** bin)} to ${bytes(2 ** (bin + 1))}`;
}

function sizeText(app, value) {
  return app.view.measure === "bytes" ? bytes(value) : value >= 1e6 ? `${+(value / 1e6).toFixed(2)} M` : count(value);
}
