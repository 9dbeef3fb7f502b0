// ---- groups of blocks --------------------------------------------------------------------------
// All charts and tables group blocks alike. The largest groups at the highest point of the
// run have colours of their own, whatever part is shown; the others share one.

const SIZE_CLASSES = [[4096, "below 4 KiB"], [65536, "4 to 64 KiB"], [1 << 20, "64 KiB to 1 MiB"],
  [8 << 20, "1 to 8 MiB"], [64 << 20, "8 to 64 MiB"], [512 << 20, "64 to 512 MiB"], [Infinity, "512 MiB and more"]];

// The list of groupings. `make` returns the group of each block, and the names of the groups; without it,
// the file brings them along, if it has them. A page opens with the first `usual` one in which the
// groups with colours have nine tenths of the peak, and no group alone has as much.
const GROUPINGS = {
  rule: { title: "Rules", head: "Rule", usual: true },
  category: { title: "Categories", head: "Category", rest: "other", usual: true },
  owner: { title: "Owners", head: "Owner", usual: true, make: (run) => [run.owner, run.facts.owners] },
  module: { title: "Modules", head: "Module", rest: "no module", usual: true },
  outer: { title: "Outer frames", head: "Outer frame", usual: true, make: byOuterFrame },
  phase: { title: "Phases", head: "Phase" },
  function: { title: "Functions", head: "Function", usual: true },
  file: { title: "Files", head: "File", usual: true },
  stack: { title: "Stacks", head: "Stack", make: (run) => [run.stack, run.stacks.map((_, stack) => stackName(run.frames(stack, false)))] },
  stream: { title: "Streams", head: "Stream", make: (run) => [run.stream, run.facts.streams] },
  size: { title: "Sizes", head: "Size", usual: true, make: (run) => [run.size.map(sizeClass), SIZE_CLASSES.map(([, name]) => name)] },
};
const EXPLAINED = 0.9;

// The groupings that a run has.
function groupingsOf(run) {
  const has = { outer: run.facts.ownersNamed || run.stackSizes.length, stack: run.stackSizes.length };
  const found = Object.entries(GROUPINGS).flatMap(([by, grouping]) => {
    if (grouping.make) return has[by] ?? true ? [[by, grouping]] : [];
    const make = ({ facts, blocks, ...columns }) => [columns[`by_${by}`] ?? new Uint8Array(blocks), facts.groupings[by] ?? ["–"]];
    return by in run.facts.groupings ? [[by, { ...grouping, make }]] : [];
  });
  return Object.fromEntries(found);
}

class Groups {
  // If `run` is only compared, `like` is the run that the page shows, so that both are divided alike.
  constructor(run, by, like = run) {
    const { title, head, make: made } = like.groupings[by];
    [this.of, this.names] = made(run, like);
    this.by = by;
    const isOfSizes = by === "owner" && !run.facts.ownersNamed;
    this.title = isOfSizes ? "Blocks by size" : title;
    this.head = isOfSizes ? "Size" : head;
    this.count = this.names.length;
    this.colour = new Uint8Array(this.count).fill(HUES.light.length);
    const { passes, live, isFiltered } = run;
    run.select(NO_FILTER);
    const { atPeak, most } = run.survey(0, run.moves, this);
    Object.assign(run, { passes, live, isFiltered });
    const byBytes = Array.from(this.names.keys()).sort((a, b) => atPeak[b] - atPeak[a] || most[b] - most[a]);
    this.ordered = by === "size" ? Array.from(this.names.keys()) : byBytes;
    this.ordered.slice(0, HUES.light.length).forEach((group, rank) => { this.colour[group] = rank; });
    this.colourName = (rank) => (rank < HUES.light.length ? shortName(this.names[this.ordered[rank]]) : "others");
    // The share of the peak that has colours, and names that say what it is.
    this.share = shareOfLargest(atPeak.map((sum, group) => (this.names[group] === like.groupings[by].rest ? 0 : sum)), atPeak);
    this.isLump = shareOfLargest(atPeak, atPeak, 1) > EXPLAINED;
  }
}

// The share of the largest sums, as many as there are colours, in all sums; 1 if these are 0.
function shareOfLargest(sums, all, most = HUES.light.length) {
  const total = (values) => values.reduce((sum, value) => sum + value, 0);
  const whole = total(all);
  return whole ? total(sums.toSorted().reverse().subarray(0, most)) / whole : 1;
}

// The grouping with which a page opens.
function usualGrouping(run) {
  if (run.groupings.rule) return "rule";
  let best = null, lump = null;
  for (const [by, { usual }] of Object.entries(run.groupings)) if (usual && !(lump && by === "size")) {
    const groups = new Groups(run, by);
    if (groups.share >= EXPLAINED && !groups.isLump) return by;
    if (groups.share >= EXPLAINED) lump ??= groups;
    if (!best || groups.share > best.share) best = groups;
  }
  return (lump ?? best).by;
}

function sizeClass(size) {
  return SIZE_CLASSES.findIndex(([below]) => size < below);
}
