// ---- tables ------------------------------------------------------------------------------------

const FEW = 10;
const MAX_ROWS = 500;

// Names of columns; those of words, which stand on the left, begin with "<".
function head(...names) {
  return make("thead", {}, make("tr", {}, ...names.map((name) =>
    make("th", { scope: "col", className: name[0] === "<" ? "words" : "" }, name.replace("<", "")))));
}

function cell(text, className = "") {
  return make("td", { className }, text);
}

// The cell with a row's name, which acts on a click.
function nameCell(text, title, onclick, color) {
  const name = make("button", { type: "button", title, onclick }, ...words(ownerText(text)));
  return make("th", { scope: "row" }, make("span", { className: "name" }, ...(color ? [swatch(color)] : []), name));
}

// The cell with the name of a row that can be chosen.
function choiceCell(text, name, checked, onchange) {
  const choice = make("input", { type: "radio", name, checked, onchange });
  return make("th", { scope: "row" }, make("label", { className: "name", title: text }, choice, " ", make("span", {}, ...words(text))));
}

const whole = new Set(); // ids of tables that show all rows

// Fill a table with the first of its rows, and a button that shows all, or few again.
function fillTable(id, names, items, cellsOf, { empty = "", className = () => "", few = FEW } = {}) {
  const shown = items.slice(0, whole.has(id) ? MAX_ROWS : few);
  const rows = shown.map((item) => make("tr", { className: className(item) }, ...cellsOf(item)));
  // Where a page is narrow, a row of some tables is a list of names and values.
  for (const { cells } of rows) for (const each of cells) each.dataset.name = names[each.cellIndex].replace("<", "");
  const last = (className, ...content) => rows.push(make("tr", {}, make("td", { className, colSpan: names.length }, ...content)));
  if (!items.length && empty) last("empty", empty);
  if (items.length > few) {
    const all = items.length > MAX_ROWS ? `Show the first ${MAX_ROWS}` : `Show all ${count(items.length)}`;
    const onclick = () => {
      whole[whole.has(id) ? "delete" : "add"](id);
      fillTable(id, names, items, cellsOf, { className });
    };
    last("words", make("button", { type: "button", onclick }, whole.has(id) ? "Show fewer" : all));
  }
  element(id).replaceChildren(...(rows.length ? [head(...names), make("tbody", {}, ...rows)] : []));
}

function bar(parts, most) {
  const pieces = parts.filter(([value]) => value)
    .map(([value, className]) => make("div", { className, style: `width:${(100 * value) / most}%` }));
  return make("td", { className: "bar" }, make("div", {}, ...pieces));
}

function policiesTable(app) {
  const { policies, figures } = app.run.facts;
  const most = Math.max(1, ...policies.map((each) => each.peak_reserved_bytes));
  const isChosen = (each) => policies.indexOf(each) === app.view.policy;
  const choose = (each) => {
    app.choose({ policy: policies.indexOf(each) });
    runsTable(app);
  };
  fillTable("policies", ["Policy", "", "Reserved", "/ live", ""], policies, (each) => {
    const live = Math.min(figures.peak_live_bytes, each.peak_reserved_bytes);
    return [
      choiceCell(each.name, "policy", isChosen(each), () => choose(each)),
      bar([[live, "part"], [each.peak_reserved_bytes - live, "over"]], most),
      cell(bytes(each.peak_reserved_bytes)),
      cell(each.fragmentation.toFixed(3)),
      cell(each.how, "words"),
    ];
  }, { className: (each) => (isChosen(each) ? "chosen" : "") });
}

// The groups in the part shown, by their bytes at its highest point.
function groupsTable(app) {
  const { survey, groups, other } = app, { moment } = app.run.facts;
  const { atPeak, most, allocated } = survey;
  const found = Array.from(atPeak.keys()).filter((g) => most[g] || allocated[g])
    .sort((a, b) => atPeak[b] - atPeak[a] || most[b] - most[a]);
  const alone = other ? namesAlone(app.otherBytes, found.map((g) => groups.names[g])) : [];
  const columns = other ? ["Compared", "Difference"] : moment ? ["Blocks"] : ["At most", "Allocations", "Live at the end"];
  fillTable("groups", [groups.head, "", moment ? "Live" : "At the peak", ...columns], [...found, ...alone], (g) => {
    if (typeof g === "string") return [make("th", { scope: "row" }, plainName(g)), bar([], 1), cell(bytes(0)), ...compareCells(app, g, 0)];
    const name = groups.names[g], times = cell(count(allocated[g]));
    return [
      nameCell(name, `Show only ${name}`, () => app.filterGroup(g), app.theme.hue(groups.colour[g])),
      bar([[atPeak[g], ""]], atPeak[found[0]]),
      cell(bytes(atPeak[g])),
      ...(other ? compareCells(app, name, atPeak[g]) : moment ? [times]
        : [cell(bytes(most[g])), times, cell(survey.atEnd[g] ? bytes(survey.atEnd[g]) : "–")]),
    ];
  }, { empty: "No block is live here." });
  element("groups-title").textContent = groups.title;
  element("groups-hint").textContent = other
    ? `By their live bytes at the highest point shown, compared with those of ${other.facts.label} at its highest point.`
    : "By their live bytes at the highest point shown. Click a name to show only it."
      + (groups.by !== "owner" || app.run.facts.ownersNamed ? ""
        : " The file has no owners, so blocks are grouped by size: a line of a program usually allocates one size.");
}

// The names of groups with bytes in the other run alone, the largest first.
function namesAlone(otherBytes, here) {
  const found = Array.from(otherBytes).filter(([name, there]) => there && !here.includes(name));
  return found.sort((a, b) => b[1] - a[1]).map(([name]) => name);
}

// The bytes of the group of the same name in the other run, and the difference here.
function compareCells(app, name, here) {
  const there = app.otherBytes.get(name) ?? 0;
  return [cell(bytes(there)), differenceCell(here - there)];
}

function differenceCell(more) {
  return cell(more ? `${more > 0 ? "+" : ""}${bytes(more)}` : "same", more > 0 ? "more" : more < 0 ? "less" : "");
}

// A name that no click acts on.
function plainName(name) {
  return make("span", { className: "name", title: name }, ...words(ownerText(name)));
}

function wordsCell(name) {
  return make("td", { className: "words" }, plainName(name));
}

function leaksTable(app) {
  const { run } = app;
  const named = run.facts.ownersNamed;
  const { found, sum } = run.liveAtEnd(app.stop);
  element("leaks-hint").textContent = found.length && run.facts.moment
    ? `${plural(found.length, "block")}, ${bytes(sum)} in all, that ${found.length === 1 ? "was" : "were"} allocated up to here.`
    : found.length
    ? `${plural(found.length, "block")}, ${bytes(sum)} in all, allocated up to here ${found.length === 1 ? "is" : "are"} still live at the end of the file.`
    : run.isFiltered ? "No block that the filters show is live at the end of the file."
    : "Everything that was allocated up to here was freed.";
  fillTable("leaks", ["Size", ...(named ? ["<Owner"] : []), "<Stream", "Address", "Allocated"], found, (b) => [
    nameCell(bytes(run.size[b]), "Show this block and its stack", () => app.selectBlock(b)),
    ...(named ? [wordsCell(run.facts.owners[run.owner[b]])] : []),
    wordsCell(run.facts.streams[run.stream[b]]),
    cell(run.address(b)),
    cell(app.moveText(run.begin[b])),
  ], { empty: "No block was left." });
}
