// ---- how many blocks of which size -------------------------------------------------------------

function sizesChart(app) {
  const place = element("sizes");
  let first = 0, values = [];
  const chart = new uPlot({
    width: Math.max(280, place.clientWidth),
    height: 250,
    padding: [8, MARGIN, 0, 0],
    scales: {
      x: { time: false, range: (_, least, most) => [least - 0.6, most + 0.6] },
      y: { range: (_, least, most) => [0, Math.max(1, (most ?? 1) * 1.08)] },
    },
    series: [{ label: "From", value: (_, bin) => (bin == null ? "–" : binName(bin)) }, {
      label: "Allocations",
      value: (_, value) => (value == null ? "–" : sizeText(app, value)),
      fill: () => app.theme.color("live"),
      paths: uPlot.paths.bars({ size: [0.82, 60], radius: 0.08 }),
      points: { show: false },
    }],
    axes: [
      { ...horizontal(app), space: 58, grid: { show: false }, incrs: [1, 2, 3, 4, 5, 8], values: (_, bins) => bins.map((bin) => (Number.isInteger(bin) && bin >= 0 ? bytes(2 ** bin) : "")) },
      vertical(app, { size: 74, values: (_, splits) => splits.map((value) => sizeText(app, value)) }),
    ],
    cursor: { drag: { x: false, y: false }, y: false, points: { show: false } },
    data: [[], []],
  }, [[], []], place);
  chart.over.addEventListener("click", () => {
    const bin = chart.data[0][chart.cursor.idx];
    if (bin != null) app.filter({ least: 2 ** bin, most: 2 ** (bin + 1) });
  });

  return {
    chart,
    update() {
      const { counts, sums } = app.run.histogram(app.first, app.stop);
      const shown = app.view.measure === "bytes" ? sums : counts;
      let last = counts.length - 1;
      first = 0;
      while (first < last && !counts[first]) first++;
      while (last > first && !counts[last]) last--;
      const bins = Array.from({ length: last - first + 1 }, (_, i) => first + i);
      values = bins.map((bin) => shown[bin]);
      chart.series[1].label = app.view.measure === "bytes" ? "Bytes allocated" : "Allocations";
      const head = place.querySelector(".u-legend .u-series:nth-child(2) .u-label");
      if (head) head.textContent = chart.series[1].label;
      chart.setData([bins, values]);
      const most = bins[values.indexOf(Math.max(...values))];
      place.setAttribute("aria-label", `${chart.series[1].label} by size: most from ${binName(most)}`);
    },
  };
}

function binName(bin) {
  return `${bytes(2 ** bin)} to ${bytes(2 ** (bin + 1))}`;
}

function sizeText(app, value) {
  return app.view.measure === "bytes" ? bytes(value) : value >= 1e6 ? `${+(value / 1e6).toFixed(2)} M` : count(value);
}
