// ---- the page: its state and its controls ------------------------------------------------------

class App {
  constructor(run) {
    this.run = run;
    this.view = { axis: "time", policy: 0, colour: "owner", measure: "count", ...NO_FILTER };
    this.theme = new Theme(() => this.later());
    this.rankOwners();
    this.fillChoices();
    this.startAxis();
    this.showAll();
    this.charts = [timelineChart, mapChart, lanesChart, sizesChart].map((chart) => chart(this));
    this.listen();
    showFigures(this);
    showNotes(this);
    this.draw();
  }

  // -- changes of the view

  later() {
    if (this.waiting || !this.charts) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    const { run, view } = this;
    this.first = run.moveAt(view.x0, view.axis);
    this.stop = run.moveAt(view.x1, view.axis);
    this.survey = run.survey(this.first, this.stop);
    for (const chart of this.charts) chart.update();
    policiesTable(this);
    ownersTable(this);
    leaksTable(this);
    const part = this.run.isFiltered ? ` of ${plural(run.facts.kept, "block")}` : "";
    element("shown").textContent = `${count(this.survey.blocks)}${part || ` block${this.survey.blocks === 1 ? "" : "s"}`} · `
      + `${this.windowText()} · live at most ${bytes(this.survey.peakBytes)}`;
  }

  show(x0, x1) {
    const [first, last] = this.run.extent(this.view.axis);
    const least = this.view.axis === "event" ? 1 : Math.max(1e-6, (last - first) * 1e-7);
    const width = Math.min(Math.max(x1 - x0, least), last - first);
    this.view.x0 = Math.max(first, Math.min(x0, last - width));
    this.view.x1 = this.view.x0 + width;
    this.later();
  }

  showAll() {
    [this.view.x0, this.view.x1] = this.run.extent(this.view.axis);
    this.charts?.[1].showAll();
    this.later();
  }

  zoom(factor, at = (this.view.x0 + this.view.x1) / 2) {
    const { x0, x1 } = this.view;
    this.show(at - (at - x0) * factor, at + (x1 - at) * factor);
  }

  move(share) {
    const { x0, x1 } = this.view;
    this.show(x0 + share * (x1 - x0), x1 + share * (x1 - x0));
  }

  // A log without times is shown by its events.
  startAxis() {
    const [first, last] = this.run.extent("time");
    if (last - first > 1.5e-6) return;
    this.view.axis = "event";
    document.querySelector("input[name=axis][value=event]").checked = true;
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

  filter(change) {
    this.choose(change);
    this.run.select(this.view);
    for (const name in NO_FILTER) element(name).value = this.view[name];
  }

  reset() {
    this.filter(NO_FILTER);
    this.showAll();
  }

  // -- owners

  // The owners with the most bytes at the peak of the run have colours, whatever part is shown.
  rankOwners() {
    const { atPeak, most } = this.run.survey(0, this.run.moves);
    const order = Array.from(atPeak.keys()).sort((a, b) => atPeak[b] - atPeak[a] || most[b] - most[a]);
    this.topOwners = order;
    this.ownerRanks = {};
    order.slice(0, HUES.light.length).forEach((owner, rank) => { this.ownerRanks[owner] = rank; });
  }

  ownersHere() {
    const { atPeak, most, allocated } = this.survey;
    return Array.from(atPeak.keys()).filter((o) => most[o] || allocated[o])
      .sort((a, b) => atPeak[b] - atPeak[a] || most[b] - most[a]);
  }

  ownerName(owner) { return this.run.facts.owners[owner]; }

  // -- texts

  whereText(x) {
    if (x == null) return "–";
    if (this.view.axis === "event") return `event ${count(x)}`;
    return seconds(x, Math.max(1e-6, (this.view.x1 - this.view.x0) / 1000), this.view.x1);
  }

  moveText(move) {
    if (this.view.axis === "event") return `event ${count(move)}`;
    return seconds(this.run.x(move, "time"), 1e-4, this.run.extent("time")[1]);
  }

  windowText() { return `${this.whereText(this.view.x0)} to ${this.whereText(this.view.x1)}`; }

  // -- the page's controls

  fillChoices() {
    const { facts } = this.run;
    const owners = this.topOwners.slice(0, 500).map((owner) => [owner, facts.owners[owner]]);
    choices("owner", [[-1, `all ${facts.owners.length}`], ...owners]);
    choices("stream", [[-1, `all ${facts.streams.length}`], ...facts.streams.map((name, i) => [i, name])]);
    const powers = Array.from({ length: 41 }, (_, i) => 2 ** i).slice(6);
    choices("least", [[0, "any"], ...powers.map((size) => [size, bytes(size)])]);
    choices("most", [[Infinity, "any"], ...powers.map((size) => [size, bytes(size)])]);
  }

  listen() {
    const on = (event, target, action) => target.addEventListener(event, action);
    for (const name in NO_FILTER) on("change", element(name), ({ target }) => this.filter({ [name]: Number(target.value) }));
    for (const name of ["colour", "measure"]) on("change", element(name), ({ target }) => this.choose({ [name]: target.value }));
    for (const input of document.getElementsByName("theme")) on("change", input, () => this.theme.choose(input.value));
    for (const input of document.getElementsByName("axis")) on("change", input, () => this.chooseAxis(input.value));
    on("submit", element("filters"), (event) => event.preventDefault());
    on("click", element("reset"), () => this.reset());
    on("click", element("zoom-in"), () => this.zoom(0.5));
    on("click", element("zoom-out"), () => this.zoom(2));
    new ResizeObserver(() => this.resize()).observe(element("timeline"));
  }

  resize() {
    for (const { chart } of this.charts) {
      const width = chart.root.parentElement.clientWidth;
      if (Math.abs(width - chart.width) > 1) chart.setSize({ width, height: chart.height });
    }
  }
}

function choices(id, pairs) {
  element(id).replaceChildren(...pairs.map(([value, name]) => make("option", { value }, clip(name, 60))));
}

function showFigures(app) {
  const { figures, policies } = app.run.facts;
  const first = policies[0];
  const entries = [
    ["Peak live", bytes(figures.peak_live_bytes), `${count(figures.peak_live_bytes)} bytes`],
    ["Peak reserved", bytes(first.peak_reserved_bytes), `${first.name}, ${first.how}`],
    ["Reserved / live", first.fragmentation.toFixed(3), "1 means no fragmentation"],
    ["Allocations", count(figures.allocations), `${count(figures.events)} events, ${plural(figures.streams, "stream")}`],
    [app.run.facts.moment ? "Live blocks" : "Never freed", bytes(figures.never_freed_bytes), plural(figures.never_freed_blocks, "block")],
  ];
  if (figures.failed_allocs) entries.push(["Refused", count(figures.failed_allocs), "out of memory", "alarm"]);
  element("figures").replaceChildren(...entries.map(([name, value, note, className = ""]) =>
    make("div", { className }, make("dt", {}, name), make("dd", {}, value, make("small", {}, note)))));
}

function showNotes(app) {
  const { facts } = app.run;
  const source = [facts.meta.source, facts.meta.memory ?? facts.meta.gpu].filter(Boolean).join(", ");
  element("subtitle").textContent = [source, plural(facts.figures.events, "event"), seconds(app.run.extent("time")[1] - app.run.extent("time")[0])].filter(Boolean).join(" · ");
  element("placed").textContent = {
    recorded: "Each block at its address. Drag to zoom, also upwards; wide gaps between addresses are closed, at the dashed lines.",
    replayed: "The file has no addresses; these are from a replay with gpumem's movable pages. Drag to zoom, also upwards.",
    unknown: "The file has no addresses.",
  }[facts.placed];
  element("owners-hint").textContent = facts.ownersNamed
    ? "Ordered by their live bytes at the highest point shown."
    : "The file has no owners, so blocks are grouped by size: a line of a program usually allocates one size.";
  element("policies-note").textContent = "Replayed: measured on an arena of the host device. Modelled: computed by the rules of PyTorch's allocator and of the driver, without memory limits.";
  element("notice").textContent = facts.notice;
  element("notice").hidden = !facts.notice;
  if (facts.moment) showMoment();
  element("notes").textContent = "Live bytes are requested bytes. Fragmented bytes are reserved but not live."
    + (facts.kept < facts.blocks ? ` Of ${count(facts.blocks)} blocks the ${count(facts.kept)} largest are shown one by one; the others are only in the sums.` : "");
}

// Other texts for a snapshot, which shows one moment.
function showMoment() {
  element("leaks-title").textContent = "Live blocks";
  element("placed").textContent = "Each block at its address, from when it was allocated. Drag to zoom, also upwards; wide gaps between addresses are closed, at the dashed lines.";
  element("policies-note").textContent = `For the live blocks alone, allocated in the order of their age. ${element("policies-note").textContent}`;
}

async function start() {
  const facts = JSON.parse(element("facts").textContent);
  const columns = await unpackColumns(facts.columns);
  const curves = await Promise.all(facts.policies.map(({ at, held }) => unpackColumns({ at, held })));
  facts.columns = null;
  new App(new Run(facts, columns, curves));
  document.documentElement.dataset.state = "ready";
}

start().catch((error) => {
  element("trouble").textContent = `This page could not be drawn: ${error.message}`;
  element("trouble").hidden = false;
  document.documentElement.dataset.state = "failed";
  console.error(error);
});
