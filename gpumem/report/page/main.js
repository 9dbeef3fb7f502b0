// ---- the page: its state and its controls ------------------------------------------------------

const SHOW_ALL = { at: -1, block: -1, low: null, high: null };

class App {
  constructor(runs, shown, files) {
    this.runs = runs;
    this.first = this.stop = 0;
    this.common = commonTime(runs, files);
    this.theme = new Theme(() => { if (this.charts) runsTable(this); this.later(); });
    this.moments = momentView(this);
    this.flame = flameView(this);
    this.listen();
    this.open({ run: shown, ...readLink() });
  }

  // -- which runs are shown, and how

  // Show the state that a link describes; other choices are as on a fresh page.
  open(link) {
    this.run = this.runs[link.run] ?? this.runs[0];
    const has = (list, value) => value in list;
    this.usual = this.run.usual ??= usualGrouping(this.run);
    this.view = {
      axis: this.startAxis(link.axis), by: has(this.run.groupings, link.by) ? link.by : this.usual, measure: "count",
      policy: has(this.run.curves, link.policy) ? link.policy : 0,
      ...NO_FILTER, ...pick(link, Object.keys(NO_FILTER)),
      ...SHOW_ALL, ...pick(link, ["at", "low", "high"]),
      block: has(this.run.size, link.block) ? link.block : -1,
    };
    this.other = this.runs[link.with] === this.run ? null : this.runs[link.with] ?? null;
    this.build();
    const [first, last] = this.opening();
    this.show(link.from ?? first, link.to ?? last);
    this.draw();
  }

  // Make everything that depends on which run is shown.
  build() {
    for (const { chart } of this.charts ?? []) chart.destroy();
    this.regroup();
    this.fillChoices();
    this.run.select(this.view);
    [this.view.x0, this.view.x1] = this.extent();
    this.charts = [timelineChart, mapChart, lanesChart, sizesChart].map((chart) => chart(this));
    showNotes(this);
    refusedPanel(this);
    runsTable(this);
  }

  regroup() {
    this.groups = new Groups(this.run, this.view.by);
    this.otherGroups = this.other && new Groups(this.other, this.view.by, this.run);
  }

  // Another run, with the choices that mean the same in it.
  showRun(number) {
    const { axis, by } = this.view;
    this.open({ run: number, axis, by: by === this.usual ? "" : by });
  }

  compare(number) {
    this.other = this.runs[number] ?? null;
    this.regroup();
    runsTable(this);
    this.showAll(this.opening());
  }

  // -- changes of the view

  // Draw with the next frame: everything, or what depends on the moment and the selected block.
  later(draw = this.draw) {
    if (!this.charts) return;
    if (!this.waiting) requestAnimationFrame(() => {
      const drawn = this.waiting;
      this.waiting = null;
      drawn.call(this);
    });
    if (this.waiting !== this.draw) this.waiting = draw;
  }

  draw() {
    const { run, other, view } = this;
    // A moment has no history: its blocks are all live, whenever they were allocated.
    this.first = run.facts.moment ? 0 : run.moveAt(view.x0, view.axis);
    this.stop = run.facts.moment ? run.moves : run.moveAt(view.x1, view.axis);
    this.survey = run.survey(this.first, this.stop, this.groups);
    if (other) this.surveyOther();
    for (const chart of this.charts) chart.update();
    showFigures(this);
    phasesTable(this);
    policiesTable(this);
    groupsTable(this);
    leaksTable(this);
    const part = run.isFiltered ? ` of ${plural(run.facts.kept, "block")}` : "";
    element("shown").textContent = `${count(this.survey.blocks)}${part || ` block${this.survey.blocks === 1 ? "" : "s"}`} · `
      + `${this.windowText()} · live at most ${bytes(this.survey.peakBytes)}`;
    const [first] = this.extent();
    element("widen").hidden = view.x0 === first || view.x0 !== this.opening()[0];
    element("widen").textContent = `Show the ${seconds(view.x0 - first, 0.1)} before`;
    element("stacked").textContent = this.stackedText();
    const [by] = view.only.split(":");
    element("one-group").hidden = !run.groupings[by];
    element("one-group").textContent = `One ${run.groupings[by]?.head.toLowerCase()} ×`;
    this.drawMoment();
  }

  drawMoment() {
    const { run, view } = this;
    const at = run.facts.moment || view.at > run.moves - 1 ? run.moves - 1 : view.at;
    this.moment = Math.max(0, at < 0 ? this.survey.peak : at);
    for (const { chart, mark } of this.charts) {
      if (chart.marker) placeMarker(this, chart);
      mark?.();
    }
    this.moments.update();
    this.flame.update();
    showBlock(this);
    writeLink(this.link());
  }

  // The other run in the same window: its highest point, and the bytes of each group there.
  surveyOther() {
    const { other, otherGroups: groups, view } = this, shift = this.shift();
    other.select(NO_FILTER);
    const survey = other.survey(other.moveAt(view.x0 - shift, view.axis), other.moveAt(view.x1 - shift, view.axis), groups);
    this.otherBytes = new Map();
    groups.names.forEach((name, g) => this.otherBytes.set(name, (this.otherBytes.get(name) ?? 0) + survey.atPeak[g]));
  }

  link() {
    const { view, run, runs } = this;
    const [first, last] = this.opening();
    const changed = (name, usual) => (view[name] === usual ? null : view[name]);
    const state = { run: run === runs[0] && runs.length === 1 ? null : runs.indexOf(run) };
    state.with = this.other ? runs.indexOf(this.other) : null;
    state.axis = view.axis === this.startAxis() ? null : view.axis;
    state.by = changed("by", this.usual);
    if (view.x0 !== first || view.x1 !== last) Object.assign(state, { from: view.x0, to: view.x1 });
    state.policy = changed("policy", 0);
    for (const [name, usual] of Object.entries({ ...SHOW_ALL, ...NO_FILTER })) state[name] = changed(name, usual);
    return state;
  }

  // The first and the last place on the axis of all runs that are drawn.
  extent(axis = this.view.axis) {
    const [first, last] = this.run.extent(axis);
    const [begin, end] = this.other?.extent(axis) ?? [first, last], shift = this.shift(axis);
    return [Math.min(first, begin + shift), Math.max(last, end + shift)];
  }

  // Seconds from the beginning of the run to that of the other one, where their clocks can be compared.
  shift(axis = this.view.axis) {
    return this.other && axis === "time" ? this.other.starts - this.run.starts : 0;
  }

  // The window that a page opens with: without a long time at the beginning.
  opening() {
    const { run } = this, [first, last] = this.extent();
    const begin = run.x(run.opening ??= openingOf(run), this.view.axis);
    const early = begin - (last - begin) / 50;
    return early - first > (last - first) / 10 ? [early, last] : [first, last];
  }

  show(x0, x1) {
    const [first, last] = this.extent();
    const least = this.view.axis === "event" ? 1 : Math.max(1e-6, (last - first) * 1e-7);
    const end = Math.max(x1, x0 + least), shift = Math.max(first - x0, Math.min(0, last - end));
    this.view.x0 = Math.max(first, x0 + shift);
    this.view.x1 = Math.min(last, end + shift);
    this.later();
  }

  showAll(window = this.extent()) {
    const { block } = this.view;
    Object.assign(this.view, SHOW_ALL, { block });
    this.show(...window);
  }

  zoom(factor, at = (this.view.x0 + this.view.x1) / 2) {
    const { x0, x1 } = this.view;
    this.show(at - (at - x0) * factor, at + (x1 - at) * factor);
  }

  move(share) {
    const { x0, x1 } = this.view;
    this.show(x0 + share * (x1 - x0), x1 + share * (x1 - x0));
  }

  // Show the state after a move; the window follows.
  goTo(move) {
    const { run, view } = this;
    view.at = Math.max(0, Math.min(run.moves - 1, move));
    const x = run.x(view.at, view.axis);
    if (x < view.x0 || x > view.x1) this.show(x - (view.x1 - view.x0) / 2, x + (view.x1 - view.x0) / 2);
    else this.later(this.drawMoment);
  }

  // A log without times is shown by its events.
  startAxis(wanted) {
    const [first, last] = this.run.extent("time");
    const usual = last - first > 1.5e-6 ? "time" : "event";
    return ["time", "event"].includes(wanted) ? wanted : usual;
  }

  chooseAxis(axis) {
    const { first, stop } = this;
    this.view.axis = axis;
    this.show(this.run.x(first, axis), this.run.x(stop, axis));
  }

  choose(change) {
    Object.assign(this.view, change);
    this.later();
  }

  groupBy(by) {
    this.view.by = by;
    whole.delete("groups");
    this.regroup();
    this.later();
  }

  filter(change) {
    this.choose(change);
    this.run.select(this.view);
    this.showChoices();
  }

  // Show only one group.
  filterGroup(group) {
    const { by } = this.view;
    if (by === "owner" || by === "stream") return this.filter({ [by]: group });
    if (by !== "size") return this.filter({ only: `${by}:${group}` });
    const least = group ? SIZE_CLASSES[group - 1][0] : 0;
    return this.filter({ least, most: SIZE_CLASSES[group][0] });
  }

  reset() {
    this.filter(NO_FILTER);
    this.showAll();
    this.selectBlock(-1);
  }

  selectBlock(block) {
    this.view.block = block;
    this.later(this.drawMoment);
  }

  // -- texts

  stackedText() {
    const { by, head } = this.groups, text = `Live bytes, stacked by ${head.toLowerCase()}`;
    if (by !== this.usual || !this.run.facts.ownersNamed || this.owners.share >= EXPLAINED || ["rule", "category", "owner"].includes(by)) return `${text}.`;
    const share = Math.round(100 * this.owners.share);
    return `${text}, because the largest ${HUES.light.length} of ${count(this.owners.count)} owners have only ${share} % of the peak.`;
  }

  whereText(x) {
    if (x == null) return "–";
    if (this.view.axis === "event") return `event ${count(Math.floor(x))}`;
    return seconds(x, Math.max(1e-6, (this.view.x1 - this.view.x0) / 1000), this.view.x1);
  }

  moveText(move) {
    if (this.view.axis === "event") return `event ${count(move + 1)}`;
    return seconds(this.run.x(move, "time"), 1e-4, this.run.extent("time")[1]);
  }

  windowText() {
    if (this.view.axis === "event") return `events ${count(this.first + 1)} to ${count(Math.max(this.stop, this.first + 1))}`;
    return `${this.whereText(this.view.x0)} to ${this.whereText(this.view.x1)}`;
  }

  // -- the page's controls

  fillChoices() {
    const { facts } = this.run;
    this.owners = this.view.by === "owner" ? this.groups : new Groups(this.run, "owner");
    choices("owner", [[-1, `all ${count(facts.owners.length)}`], ...this.owners.ordered.slice(0, 500).map((owner) => [owner, ownerText(facts.owners[owner])])]);
    choices("stream", [[-1, `all ${facts.streams.length}`], ...facts.streams.map((name, i) => [i, name])]);
    const powers = Array.from({ length: 41 }, (_, i) => 2 ** i).slice(6);
    choices("least", [[0, "any"], ...powers.map((size) => [size, bytes(size)])]);
    choices("most", [[Infinity, "any"], ...powers.map((size) => [size, bytes(size)])]);
    element("by").replaceChildren(...Object.entries(GROUPINGS).map(([by, { head }]) =>
      make("option", { value: by, disabled: !(by in this.run.groupings) }, head.toLowerCase())));
    this.showChoices();
  }

  showChoices() {
    for (const name of ["owner", "stream", "least", "most", "find"]) element(name).value = this.view[name];
    for (const name of ["by", "measure"]) element(name).value = this.view[name];
    document.querySelector(`input[name=axis][value=${this.view.axis}]`).checked = true;
  }

  listen() {
    const on = (event, target, action) => target.addEventListener(event, action);
    for (const name of ["owner", "stream", "least", "most"]) on("change", element(name), ({ target }) => this.filter({ [name]: Number(target.value) }));
    on("input", element("find"), ({ target }) => this.filter({ find: target.value }));
    on("change", element("by"), ({ target }) => this.groupBy(target.value));
    on("change", element("measure"), ({ target }) => this.choose({ measure: target.value }));
    for (const input of document.getElementsByName("theme")) on("change", input, () => this.theme.choose(input.value));
    for (const input of document.getElementsByName("axis")) on("change", input, () => this.chooseAxis(input.value));
    on("submit", element("filters"), (event) => event.preventDefault());
    on("click", element("reset"), () => this.reset());
    on("click", element("widen"), () => this.show(this.extent()[0], this.view.x1));
    on("click", element("zoom-in"), () => this.zoom(0.5));
    on("click", element("zoom-out"), () => this.zoom(2));
    on("click", element("copy-link"), ({ target }) => copyLink(target));
    on("click", element("one-group"), () => this.filter({ only: "" }));
    on("click", element("block-close"), () => this.selectBlock(-1));
    on("click", element("block-of-owner"), () => this.filter({ owner: this.run.owner[this.view.block] }));
    on("click", element("block-of-stack"), () => this.filter({ only: `stack:${this.run.stack[this.view.block]}` }));
    on("click", element("block-moment"), () => this.goTo(this.run.begin[this.view.block]));
    on("keydown", document, (event) => { if (event.key === "Escape") this.selectBlock(-1); });
    on("hashchange", window, () => this.open({ run: this.runs.indexOf(this.run), ...readLink() }));
    new ResizeObserver(() => this.resize()).observe(element("timeline"));
  }

  resize() {
    for (const { chart } of this.charts ?? []) {
      const width = chart.root.parentElement.clientWidth;
      if (Math.abs(width - chart.width) > 1) chart.setSize({ width, height: chart.height });
    }
    this.later();
  }
}

// The first move of interest: that of the first phase, with a hundredth of the peak live, and after a pause of
// more than half of the time, if the peak and most moves follow it.
function openingOf(run) {
  const most = run.all.reduce((a, b) => Math.max(a, b), 0), half = (run.time[run.moves - 1] - run.time[0]) / 2;
  const [phase = []] = run.facts.phases.shown;
  const pause = run.all.findIndex((_, move) => run.time[move] - run.time[move - 1] > half);
  const isEarly = pause <= run.all.indexOf(most) && 2 * pause < run.moves;
  return Math.max(phase[1] ?? 0, run.all.findIndex((live) => live >= most / 100), isEarly ? pause : 0);
}

function pick(from, names) {
  return Object.fromEntries(names.filter((name) => name in from).map((name) => [name, from[name]]));
}

function choices(id, pairs) {
  element(id).replaceChildren(...pairs.map(([value, name]) => make("option", { value }, clip(name, 60))));
}

async function unpackRun(facts) {
  const columns = await unpackColumns(facts.columns);
  const curves = await Promise.all(facts.policies.map(({ at, held }) => unpackColumns({ at, held })));
  facts.columns = null;
  return new Run(facts, columns, curves);
}

async function start() {
  const { runs, shown, names = [], changes = [] } = JSON.parse(element("facts").textContent);
  changesTable(names, changes);
  new App(await Promise.all(runs.map(unpackRun)), shown, names.length);
  document.documentElement.dataset.state = "ready";
}

start().catch((error) => {
  element("trouble").textContent = `This page could not be drawn: ${error.message}`;
  element("trouble").hidden = false;
  document.documentElement.dataset.state = "failed";
  console.error(error);
});
