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

function nothing(columns, text) {
  const row = make("tr", {}, make("td", { className: "empty", colSpan: columns }, text));
  return make("tbody", {}, row);
}

function bar(parts, most) {
  const place = make("div", {});
  place.style.cssText = "background:none;white-space:nowrap";
  for (const [value, className] of parts.filter(([value]) => value)) {
    const piece = make("div", { className });
    piece.style.width = `${most ? (100 * value) / most : 0}%`;
    place.append(piece);
  }
  return make("td", { className: "bar" }, place);
}

function policiesTable(app) {
  const { policies, figures } = app.run.facts;
  const most = Math.max(1, ...policies.map((each) => each.peak_reserved_bytes));
  const rows = policies.map((each, number) => {
    const chosen = make("input", { type: "radio", name: "policy", checked: number === app.view.policy });
    chosen.addEventListener("change", () => app.choosePolicy(number));
    const name = make("label", { className: "name", title: each.name }, chosen, " ", make("span", {}, ...words(each.name)));
    const live = Math.min(figures.peak_live_bytes, each.peak_reserved_bytes);
    const row = make("tr", { className: number === app.view.policy ? "chosen" : "" },
      make("th", { scope: "row" }, name),
      bar([[live, "part"], [each.peak_reserved_bytes - live, "over"]], most),
      cell(bytes(each.peak_reserved_bytes)),
      cell(each.fragmentation.toFixed(3)),
      cell(each.how, "words"));
    return row;
  });
  element("policies").replaceChildren(head("Policy", "", "Reserved", "/ live", ""), make("tbody", {}, ...rows));
}

// The groups in the part shown, by their bytes at its highest point.
function groupsTable(app) {
  const { survey, groups, other } = app;
  const found = app.groupsHere();
  const shown = app.allGroups ? found.slice(0, MAX_ROWS) : found.slice(0, FEW);
  const most = Math.max(1, ...shown.map((g) => survey.atPeak[g]));
  const rows = shown.map((g) => {
    const name = groups.names[g];
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = app.theme.hue(groups.colour[g]);
    const pick = make("button", { type: "button", title: `Show only ${name}` }, ...words(ownerText(name)));
    pick.addEventListener("click", () => app.filterGroup(g));
    return make("tr", {},
      make("th", { scope: "row" }, make("span", { className: "name" }, swatch, pick)),
      bar([[survey.atPeak[g], ""]], most),
      cell(bytes(survey.atPeak[g])),
      ...(other ? compareCells(app, name, survey.atPeak[g])
        : app.run.facts.moment ? [cell(count(survey.allocated[g]))]
        : [cell(bytes(survey.most[g])), cell(count(survey.allocated[g])), cell(survey.atEnd[g] ? bytes(survey.atEnd[g]) : "–")]));
  });
  const columns = other ? ["Compared", "Difference"] : app.run.facts.moment ? ["Blocks"] : ["At most", "Allocations", "Live at the end"];
  const body = rows.length ? make("tbody", {}, ...rows) : nothing(6, "No block is live here.");
  const all = found.length > MAX_ROWS ? `Show the first ${MAX_ROWS}` : `Show all ${count(found.length)}`;
  if (found.length > FEW) body.append(more(app, 6, "allGroups", all, groupsTable));
  element("groups").replaceChildren(head(groups.head, "", app.run.facts.moment ? "Live" : "At the peak", ...columns), body);
  element("groups-title").textContent = groups.title;
  element("groups-hint").textContent = other
    ? `By their live bytes at the highest point shown, compared with those of ${other.facts.label} at its highest point.`
    : "By their live bytes at the highest point shown. Click a name to show only it."
      + (groups.by !== "owner" || app.run.facts.ownersNamed ? ""
        : " The file has no owners, so blocks are grouped by size: a line of a program usually allocates one size.");
}

// The bytes of the group of the same name in the other run, and the difference here.
function compareCells(app, name, here) {
  const there = app.otherBytes.get(name) ?? 0;
  const more = here - there;
  return [cell(bytes(there)), cell(more ? `${more > 0 ? "+" : ""}${bytes(more)}` : "same", more > 0 ? "more" : more < 0 ? "less" : "")];
}

function wordsCell(name) {
  return make("td", { className: "words" }, make("span", { className: "name", title: name }, ...words(ownerText(name))));
}

// A row with the button that shows all rows of a table, or few again.
function more(app, columns, flag, all, redraw) {
  const button = make("button", { type: "button" }, app[flag] ? "Show fewer" : all);
  button.addEventListener("click", () => {
    app[flag] = !app[flag];
    redraw(app);
  });
  return make("tr", {}, make("td", { colSpan: columns, className: "words" }, button));
}

function blockButton(app, b) {
  const button = make("button", { type: "button", title: "Show this block and its stack" }, bytes(app.run.size[b]));
  button.addEventListener("click", () => app.selectBlock(b));
  return button;
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
  const shown = app.allLeaks ? found.slice(0, MAX_ROWS) : found.slice(0, FEW);
  const rows = shown.map((b) => make("tr", {},
    make("th", { scope: "row" }, make("span", { className: "name" }, blockButton(app, b))),
    ...(named ? [wordsCell(run.facts.owners[run.owner[b]])] : []),
    wordsCell(run.facts.streams[run.stream[b]]),
    cell(run.address(b)),
    cell(app.moveText(run.begin[b]))));
  const body = rows.length ? make("tbody", {}, ...rows) : nothing(5, "No block was left.");
  const all = found.length > MAX_ROWS ? `Show the largest ${MAX_ROWS}` : `Show all ${found.length}`;
  if (found.length > FEW) body.append(more(app, 5, "allLeaks", all, leaksTable));
  const columns = head("Size", ...(named ? ["<Owner"] : []), "<Stream", "Address", "Allocated");
  element("leaks").replaceChildren(columns, body);
}
