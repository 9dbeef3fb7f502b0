// ---- groups of blocks --------------------------------------------------------------------------
// All charts and tables group blocks alike: by owner, stack, stream or size. The groups with the most
// bytes at the highest point of the run have colours of their own, whatever part is shown.

const SIZE_CLASSES = [[4096, "below 4 KiB"], [65536, "4 to 64 KiB"], [1 << 20, "64 KiB to 1 MiB"],
  [8 << 20, "1 to 8 MiB"], [64 << 20, "8 to 64 MiB"], [512 << 20, "64 to 512 MiB"], [Infinity, "512 MiB and more"]];

const GROUPINGS = {
  owner: { title: "Owners", head: "Owner", make: (run) => [run.owner, run.facts.owners] },
  stack: { title: "Stacks", head: "Stack", make: (run) => [run.stack, stackNames(run)] },
  stream: { title: "Streams", head: "Stream", make: (run) => [run.stream, run.facts.streams] },
  size: { title: "Sizes", head: "Size", make: (run) => [run.size.map(sizeClass), SIZE_CLASSES.map(([, name]) => name)] },
};

class Groups {
  constructor(run, by) {
    const { title, head, make: made } = GROUPINGS[by];
    [this.of, this.names] = made(run);
    this.by = by;
    this.title = title;
    this.head = by === "owner" && !run.facts.ownersNamed ? "Blocks of" : head;
    this.count = this.names.length;
    this.colour = new Uint8Array(this.count).fill(HUES.light.length);
    const { passes, live, isFiltered } = run;
    run.select(NO_FILTER);
    const { atPeak, most } = run.survey(0, run.moves, this);
    Object.assign(run, { passes, live, isFiltered });
    this.ordered = by === "size" ? Array.from(this.names.keys())
      : Array.from(this.names.keys()).sort((a, b) => atPeak[b] - atPeak[a] || most[b] - most[a]);
    this.ordered.slice(0, HUES.light.length).forEach((group, rank) => { this.colour[group] = rank; });
  }
}

function sizeClass(size) {
  return SIZE_CLASSES.findIndex(([below]) => size < below);
}

// A stack by its innermost lines of Python outside of libraries: where it allocates, and for whom.
function stackNames(run) {
  const names = ["no stack"];
  for (let stack = 1; stack <= run.stackSizes.length; stack++) {
    const frames = run.frames(stack);
    const lines = frames.filter(([file, line]) => line && file.endsWith(".py"));
    const own = lines.filter(([file]) => !/\/(torch|site-packages|gpumem)\//.test(file));
    const chosen = [own, lines, frames].find((each) => each.length) ?? [];
    names.push(chosen.slice(0, 3).map(([file, line, name], at) =>
      at ? shortName(name) : `${shortName(name)} (${baseName(file)}:${line})`).join(" ← "));
  }
  return names;
}

function shortName(name) {
  return name.replace(/^.*<locals>\./, "");
}

function baseName(file) {
  return file.slice(file.lastIndexOf("/") + 1);
}
