// ---- tables ------------------------------------------------------------------------------------

const FEW = 10;

function head(...names) {
  return make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name))));
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
  for (const [value, className] of parts) {
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
    chosen.addEventListener("change", () => app.choose({ policy: number }));
    const name = make("label", {}, chosen, " ", make("span", {}, each.name));
    const live = Math.min(figures.peak_live_bytes, each.peak_reserved_bytes);
    const row = make("tr", { className: number === app.view.policy ? "chosen" : "" },
      make("th", { scope: "row" }, name),
      bar([[live, "part"], [each.peak_reserved_bytes - live, "over"]], most),
      cell(bytes(each.peak_reserved_bytes)),
      cell(each.fragmentation.toFixed(3)),
      cell(each.how, "words"));
    name.style.color = "inherit";
    return row;
  });
  element("policies").replaceChildren(head("Policy", "", "Reserved", "/ live", ""), make("tbody", {}, ...rows));
}

function ownersTable(app) {
  const { survey, run } = app;
  const owners = app.ownersHere();
  const shown = app.allOwners ? owners : owners.slice(0, FEW);
  const most = Math.max(1, ...shown.map((o) => survey.atPeak[o]));
  const rows = shown.map((o) => {
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = app.theme.hue(app.ownerRanks[o] ?? -1);
    const pick = make("button", { type: "button", title: `Show only ${app.ownerName(o)}` }, app.ownerName(o));
    pick.addEventListener("click", () => app.filter({ owner: o }));
    return make("tr", {},
      make("th", { scope: "row" }, make("span", { className: "name" }, swatch, pick)),
      bar([[survey.atPeak[o], ""]], most),
      cell(bytes(survey.atPeak[o])),
      cell(bytes(survey.most[o])),
      cell(count(survey.allocated[o])),
      cell(survey.kept[o] ? bytes(survey.kept[o]) : "–"));
  });
  const body = rows.length ? make("tbody", {}, ...rows) : nothing(6, "Nothing lives here.");
  if (owners.length > FEW) body.append(more(app, 6, "allOwners", `Show all ${count(owners.length)}`, ownersTable));
  element("owners").replaceChildren(head(run.facts.ownersNamed ? "Owner" : "Blocks of", "", "At the peak", "At most", "Allocations", "Never freed"), body);
}

function ownerCell(app, owner) {
  const name = app.ownerName(owner);
  return make("td", { className: "words" }, make("span", { className: "name", title: name }, name));
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

function leaksTable(app) {
  const { run } = app;
  const named = run.facts.ownersNamed;
  const { found, sum } = run.neverFreed(app.stop);
  element("leaks-hint").textContent = found.length && run.facts.moment
    ? `${plural(found.length, "block")} of ${bytes(sum)} that ${found.length === 1 ? "was" : "were"} allocated up to here.`
    : found.length
    ? `${plural(found.length, "block")} of ${bytes(sum)} allocated up to here ${found.length === 1 ? "is" : "are"} still live at the end of the file.`
    : "Everything that was allocated up to here was freed.";
  const shown = app.allLeaks ? found.slice(0, 500) : found.slice(0, FEW);
  const rows = shown.map((b) => make("tr", {},
    make("th", { scope: "row" }, bytes(run.size[b])),
    ...(named ? [ownerCell(app, run.owner[b])] : []),
    cell(run.facts.streams[run.stream[b]], "words"),
    cell(run.address(b)),
    cell(app.moveText(run.begin[b]))));
  const body = rows.length ? make("tbody", {}, ...rows) : nothing(5, "No block was left.");
  const all = found.length > 500 ? "Show the largest 500" : `Show all ${found.length}`;
  if (found.length > FEW) body.append(more(app, 5, "allLeaks", all, leaksTable));
  const columns = head("Size", ...(named ? ["Owner"] : []), "Stream", "Address", "Allocated");
  element("leaks").replaceChildren(columns, body);
}
