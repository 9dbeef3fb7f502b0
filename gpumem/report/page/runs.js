// ---- all runs of the page: devices, processes, before and after --------------------------------

function runsTable(app) {
  const panel = element("runs-panel");
  panel.hidden = app.runs.length < 2;
  if (panel.hidden) return;
  const { name } = app.run.facts.policies[app.view.policy];
  const reserved = app.runs.map((run) => servedBy(run.facts, name)?.peak_reserved_bytes);
  const most = Math.max(1, ...app.runs.map((run, number) => reserved[number] ?? run.facts.figures.peak_live_bytes));
  const [first, last, areTogether] = app.common;
  const names = ["Run", "Compare", "<Live over time", "Peak live", "Peak reserved", "Live at the end"];
  fillTable("runs", names, app.runs, (run) => {
    const { figures, label, moment } = run.facts, number = app.runs.indexOf(run);
    const canvas = make("canvas", { width: 260 * devicePixelRatio, height: 30 * devicePixelRatio });
    sparkline(app, canvas, run, run.starts - first, last - first, most);
    return [
      choiceCell(label, "run", run === app.run, () => app.showRun(number)),
      make("td", { className: "tick" }, make("input", { type: "checkbox", checked: run === app.other, disabled: run === app.run,
        ariaLabel: `Compare with ${label}`, onchange: ({ target }) => app.compare(target.checked ? number : -1) })),
      make("td", { className: "spark" }, canvas),
      cell(bytes(figures.peak_live_bytes)), cell(bytes(reserved[number])),
      cell(moment ? "–" : bytes(figures.live_at_end_bytes)),
    ];
  }, { className: (run) => (run === app.run ? "chosen" : ""), few: app.runs.length });
  element("runs-sum").textContent = sumText(app.runs, first, areTogether);
}

// Runs begin where their clocks say, in seconds: those of one file always, files if all have clocks of one day and
// were not made one after the other. Else each file begins at 0.
function commonTime(runs, files) {
  const clock = ({ facts }) => (facts.meta.first_us ?? 0) / 1e6;
  const spans = new Map();
  for (const run of runs) {
    const [begin, end] = spans.get(run.facts.file) ?? [Infinity, 0];
    spans.set(run.facts.file, [Math.min(begin, clock(run)), Math.max(end, clock(run) + run.extent("time")[1])]);
  }
  const begins = Array.from(spans.values(), ([begin]) => begin), latest = Math.max(...begins);
  const areTogether = Math.min(...begins) > 1e9 && latest - Math.min(...begins) < 86400
    && (files < 2 || runs.some(({ facts }) => facts.meta.stopped_us) || Array.from(spans.values()).every(([, end]) => end >= latest));
  for (const run of runs) run.starts = clock(run) - (areTogether ? 0 : spans.get(run.facts.file)[0]);
  const first = Math.min(...runs.map((run) => run.starts));
  return [first, Math.max(...runs.map((run) => run.starts + run.extent("time")[1])), areTogether];
}

// Live bytes over the runs' common time, all at one scale.
function sparkline(app, canvas, run, shift, width, most) {
  const ctx = canvas.getContext("2d");
  const view = { x0: -shift, x1: width - shift, axis: "time", held: run.all };
  const across = (x) => ((x - view.x0) / (view.x1 - view.x0)) * canvas.width;
  const up = (value) => canvas.height - 1 - (value / most) * (canvas.height - 3);
  ctx.fillStyle = app.theme.color("live");
  ctx.globalAlpha = 0.75;
  ctx.beginPath();
  let y = up(0);
  for (const move of run.sample(0, run.moves, canvas.width, view)) {
    const x = across(run.x(move, "time"));
    ctx.lineTo(x, y);
    ctx.lineTo(x, (y = up(run.all[move])));
  }
  const end = across(run.extent("time")[1]);
  ctx.lineTo(end, y);
  ctx.lineTo(end, up(0));
  ctx.lineTo(across(0), up(0));
  ctx.fill();
}

// The maximum of bytes that all runs hold at one time, where their clocks can be compared. Blocks that are live
// at the end of a run count until its process has ended, if that is known, else on.
function sumText(runs, first, areTogether) {
  const hint = "Select a run to show it below; tick another one to compare it.";
  if (!areTogether || runs.some((run) => run.facts.moment)) return hint;
  const changes = runs.flatMap((run) => Array.from({ length: run.moves }, (_, i) =>
    [run.starts - first + run.time[i] / 1e6, run.all[i] - (i ? run.all[i - 1] : 0)]));
  for (const run of runs) {
    const stopped = run.facts.meta.stopped_us;
    if (stopped && run.moves) changes.push([stopped / 1e6 - first, -run.all[run.moves - 1]]);
  }
  changes.sort((a, b) => a[0] - b[0]);
  let now = 0, most = 0;
  for (const [, change] of changes) most = Math.max(most, (now += change));
  return `All runs together have at most ${bytes(most)} live at one time. ${hint}`;
}

// The call stacks, or owners, with more or fewer bytes at the peak of the second file, the largest changes first.
function changesTable(names, changes) {
  element("changes").hidden = !changes.length;
  const grown = ([, before, after]) => after - before;
  const largest = changes.toSorted((one, other) => Math.abs(grown(other)) - Math.abs(grown(one)));
  const heads = ["Stacks at the peaks", ...names.slice(0, 2).map((name) => clip(name, 20)), "Difference"];
  fillTable("changes", heads, largest, ([name, before, after]) => [
    make("th", { scope: "row", title: name }, ...words(ownerText(name))),
    cell(bytes(before)), cell(bytes(after)), differenceCell(after - before),
  ]);
}
