// ---- the state at one moment -------------------------------------------------------------------
// All addresses from left to right in a few rows, as lines of a text. A moment is the state after a
// move; without a choice it is the highest point that is shown.

const ROW_HEIGHT = 26;
const ROW_GAP = 5;

function momentView(app) {
  const place = element("strip"), canvas = place.querySelector("canvas");
  const slider = element("moment-slider");
  slider.addEventListener("input", () => app.goTo(Number(slider.value)));
  const on = (id, action) => element(id).addEventListener("click", action);
  on("moment-first", () => app.goTo(app.first));
  on("moment-before", () => app.goTo(app.moment - 1));
  on("moment-after", () => app.goTo(app.moment + 1));
  on("moment-last", () => app.goTo(app.stop - 1));
  on("moment-peak", () => app.choose({ at: -1 }));
  place.addEventListener("mousemove", (event) => showBlockTip(app, under(event), event.clientX, event.clientY));
  place.addEventListener("mouseleave", hideTip);
  place.addEventListener("click", (event) => app.selectBlock(under(event)));
  place.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const live = app.run.liveAt(app.moment), at = live.indexOf(app.view.block);
    if (live.length) app.selectBlock(live[Math.max(0, Math.min(live.length - 1, at < 0 ? 0 : at + step))]);
  });

  function under(event) {
    const { left, top, width } = canvas.getBoundingClientRect();
    const { rows, perRow } = layout(width);
    const row = Math.floor((event.clientY - top) / (ROW_HEIGHT + ROW_GAP));
    if (row < 0 || row >= rows || (event.clientY - top) % (ROW_HEIGHT + ROW_GAP) > ROW_HEIGHT) return -1;
    return app.run.blockAt(app.moment, (row + (event.clientX - left) / width) * perRow);
  }

  function layout(width) {
    const rows = width < 600 ? 10 : 6;
    return { rows, perRow: app.run.top / rows };
  }

  function paintStrip() {
    const { run, theme, groups, moment } = app;
    const width = Math.max(200, place.clientWidth), { rows, perRow } = layout(width);
    const height = rows * (ROW_HEIGHT + ROW_GAP) - ROW_GAP;
    canvas.style.height = `${height}px`;
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    const ctx = canvas.getContext("2d");
    ctx.scale(devicePixelRatio, devicePixelRatio);
    // The parts of a range of addresses, one in each row that it touches.
    const parts = (offset, size, draw) => {
      for (let row = Math.floor(offset / perRow); row < rows && row * perRow < offset + size; row++) {
        const x = Math.max(0, offset / perRow - row) * width, end = Math.min(1, (offset + size) / perRow - row) * width;
        draw(x, row * (ROW_HEIGHT + ROW_GAP), Math.max(1, end - x));
      }
    };
    ctx.fillStyle = theme.color("grid");
    for (let row = 0; row < rows; row++) ctx.fillRect(0, row * (ROW_HEIGHT + ROW_GAP) + ROW_HEIGHT - 1, width, 1);
    const segments = run.segmentsAt(moment);
    ctx.fillStyle = theme.color("idle");
    for (const s of segments) parts(run.segmentOffset[s], run.segmentSize[s], (x, y, wide) => ctx.fillRect(x, y, wide, ROW_HEIGHT));
    const fill = (b) => parts(run.offset[b], run.size[b], (x, y, wide) => ctx.fillRect(x, y, wide > 3 ? wide - 1 : wide, ROW_HEIGHT));
    ctx.fillStyle = theme.color("hidden");
    run.liveAt(moment, 0).forEach(fill);
    const live = run.liveAt(moment);
    for (const b of live) {
      ctx.fillStyle = theme.hue(groups.colour[groups.of[b]]);
      fill(b);
    }
    ctx.fillStyle = theme.color("ink");
    if (segments.length * 3 < width * rows / 4) for (const s of segments) {
      parts(run.segmentOffset[s], 0.001, (x, y) => ctx.fillRect(x, y, 1, ROW_HEIGHT));
    }
    if (app.view.block >= 0 && run.isLive(app.view.block, moment)) {
      ctx.strokeStyle = theme.color("ink");
      ctx.lineWidth = 2;
      parts(run.offset[app.view.block], run.size[app.view.block], (x, y, wide) => ctx.strokeRect(x + 1, y + 1, Math.max(2, wide - 2), ROW_HEIGHT - 2));
    }
    return live;
  }

  return {
    update() {
      const { run, moment, view } = app;
      for (const each of [slider, element("moment-steps"), element("block-moment")]) each.hidden = run.facts.moment;
      slider.min = app.first;
      slider.max = Math.max(app.first, app.stop - 1);
      slider.value = moment;
      slider.setAttribute("aria-valuetext", momentText(app));
      element("moment-peak").disabled = view.at < 0;
      element("moment-before").disabled = moment <= 0;
      element("moment-after").disabled = moment >= run.moves - 1;
      element("moment-text").textContent = momentText(app);
      const live = paintStrip();
      const held = run.heldBy(view.policy)[moment] ?? 0, used = run.all[moment] ?? 0;
      const here = run.isFiltered ? run.live[moment] ?? 0 : used;
      legend("moment-legend", [
        [run.isFiltered ? "Live, as filtered" : "Live", bytes(here)],
        ["Blocks", count(live.length)],
        ...(run.isFiltered ? [["Live, left out by the filters", bytes(used - here), "hidden"]] : []),
        ["Reserved", bytes(held)],
        ["Reserved, idle", bytes(Math.max(0, held - used)), "idle"],
      ]);
      place.setAttribute("aria-label", `Addresses at one moment: ${plural(live.length, "live block")} of ${bytes(here)}`);
      showKey(app, live);
    },
  };
}

// The last event, and its time.
function momentText(app) {
  const { run, moment } = app;
  if (!run.moves) return "Nothing happened.";
  if (run.facts.moment) return "The blocks that are live in the snapshot.";
  const b = run.block[moment];
  const phase = phasesAt(run, moment);
  const refused = refusalText(run.facts.refusals.filter((each) => momentBefore(each) === moment));
  const when = seconds(run.x(moment, "time"), 1e-4, run.extent("time")[1]);
  const owner = run.facts.ownersNamed ? ` of ${ownerText(run.facts.owners[run.owner[b]])}` : "";
  return `${app.view.at < 0 ? "The highest point: e" : "E"}vent ${count(moment + 1)} of ${count(run.moves)}, at ${when}: `
    + `${run.isAlloc[moment] ? "allocated" : "freed"} ${bytes(run.size[b])}${owner}${phase && `, in ${phase}`}${refused && `. ${refused}`}`;
}

// The colours, with the bytes of each group at the moment.
function showKey(app, live) {
  const { run, groups, survey, theme } = app;
  const most = HUES.light.length;
  const sums = new Float64Array(most + 1);
  for (const b of live) sums[groups.colour[groups.of[b]]] += run.size[b];
  if (!run.isFiltered && run.rest.length) sums[most] += run.rest[app.moment];
  const lives = (group) => survey.most[group] > 0;
  const entries = groups.ordered.slice(0, most).filter(lives).map((group) => [groups.colour[group], groups.names[group]]);
  if (sums[most] || groups.ordered.slice(most).some(lives)) entries.push([most, "others"]);
  legend("key", entries.map(([rank, name]) => [name, sums[rank] && bytes(sums[rank]), theme.hue(rank)]));
}
