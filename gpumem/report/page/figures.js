// ---- figures and notes of the run that is shown -------------------------------------------------

function showFigures(app) {
  const { facts } = app.run;
  const { figures, policies } = facts;
  const first = policies[app.view.policy];
  const theirs = app.other?.facts;
  const served = theirs && servedBy(theirs, first.name);
  const empty = figures.allocations - facts.blocks;
  const entries = [
    [facts.moment ? "Live" : "Peak live", bytes(figures.peak_live_bytes), figures.lost_events ? "or more: events were lost" : peakText(facts), theirs && bytes(theirs.figures.peak_live_bytes)],
    [facts.moment ? "Reserved" : "Peak reserved", bytes(first.peak_reserved_bytes), first.how === "recorded" ? first.name : `${first.name}, ${first.how}`, theirs && bytes(served?.peak_reserved_bytes)],
    ["Reserved / live", first.fragmentation.toFixed(3), `${facts.moment ? "" : "at their peaks; "}1 is the minimum`, theirs && (served?.fragmentation.toFixed(3) ?? "–")],
    ...(facts.moment ? [] : [["Allocations", count(facts.blocks), `${plural(app.run.moves, "event")}, frees included${empty ? `; ${count(empty)} of 0 bytes left out` : ""}`, theirs && count(theirs.blocks)]]),
    [facts.moment ? "Live blocks" : "Live at the end", bytes(figures.live_at_end_bytes), plural(figures.live_at_end_blocks, "block"), theirs && bytes(theirs.figures.live_at_end_bytes)],
  ];
  if (figures.failed_allocs) entries.push(["Refused", count(figures.failed_allocs), "out of memory", theirs && count(theirs.figures.failed_allocs), "alarm"]);
  element("figures").replaceChildren(...entries.map(([name, value, note, there, className = ""]) =>
    make("div", { className }, make("dt", {}, name), make("dd", {}, value, make("small", {}, note),
      ...(there ? [make("small", { className: "there" }, `compared: ${there}`)] : [])))));
}

// The phase of the peak, and its largest categories.
function peakText({ figures, phases: { atPeak, categories } }) {
  const parts = categories.slice(0, 3).map(([name, nbytes]) => `${name} ${bytes(nbytes)}`);
  return [atPeak && `in ${atPeak}`, parts.join(", ")].filter(Boolean).join(": ") || `${count(figures.peak_live_bytes)} bytes`;
}

// The policy of a name; of another run it may be missing.
function servedBy(facts, name) {
  return facts.policies.find((each) => each.name === name);
}

function showNotes(app) {
  const { facts } = app.run;
  const [first, last] = app.run.extent("time");
  const duration = last - first > 1.5e-6 && !facts.moment ? seconds(last - first) : "";
  const kinds = { torch_snapshot: "PyTorch's snapshot", rmm_log: "RMM's log", gpumem: "recording" };
  const name = app.runs.length > 1 ? facts.label : "", memory = facts.meta.memory ?? facts.meta.gpu ?? "";
  const source = [kinds[facts.meta.source] ?? facts.meta.source, name.includes(memory) ? "" : memory].filter(Boolean).join(", ");
  element("subtitle").textContent = [name, source, duration, plural(facts.streams.length, "stream")].filter(Boolean).join(" · ");
  const shades = app.run.segments ? " Shaded: reserved and idle; light grey: left out by the filters; lines are the borders of segments." : "";
  element("placed").textContent = {
    recorded: `Each block at its address. Click one for its stack; drag to zoom, also upwards.${shades} Wide gaps between addresses are closed, at the dashed lines.`,
    replayed: `The file has no addresses; these are from a replay with gpumem's movable pages. Click a block for its facts; drag to zoom, also upwards.${shades}`,
    unknown: "The file has no addresses.",
  }[facts.placed];
  element("policies-note").textContent = "Replayed: measured on an arena of the host device. Modelled: computed by the rules of PyTorch's allocator and of the driver, without memory limits.";
  element("notice").textContent = facts.notice;
  element("notice").hidden = !facts.notice;
  element("leaks-title").textContent = facts.moment ? "Live blocks" : "Live at the end";
  if (facts.moment) {
    element("placed").textContent = `Each block at its address, from when it was allocated. Click one for its stack; drag to zoom, also upwards.${shades}`;
    element("policies-note").textContent = `For the live blocks alone, allocated in the order of their age. ${element("policies-note").textContent}`;
  }
  element("notes").textContent = "Live bytes are requested bytes. An event is an allocation or a free. Reserved, idle: reserved from the driver and not live."
    + (facts.kept < facts.blocks ? ` Of ${count(facts.blocks)} blocks the ${count(facts.kept)} largest are shown one by one; the others are only in the sums.` : "");
}
