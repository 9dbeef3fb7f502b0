// ---- the tree of calls -------------------------------------------------------------------------
// The root is outside of the program; each node is a frame, called by the one above it. Blocks without
// a stack are below the beginnings of their owner's name, such as "model." and "model.layer ".

// The tree above some blocks, with the bytes below each node, of each colour, too, if blocks have one.
function callTree(run, blocks, { all = false, colourOf, weigh = (b) => run.size[b] } = {}) {
  const root = treeNode({ title: "", label: "all" }, null);
  const ends = new Map(); // by stack or owner: the innermost nodes
  for (const b of blocks) {
    const key = pathKey(run, b), weight = weigh(b);
    if (!ends.has(key)) ends.set(key, descend(root, pathOf(run, b, all)));
    const end = ends.get(key);
    end.own += weight;
    if (colourOf) (end.colours ??= new Float64Array(HUES.light.length + 1))[colourOf(b)] += weight;
  }
  sumUp(root);
  return root;
}

function treeNode({ title, label }, caller) {
  return { title, label, caller, bytes: 0, own: 0, colours: null, children: new Map() };
}

function descend(node, path) {
  for (const frame of path) {
    if (!node.children.has(frame.title)) node.children.set(frame.title, treeNode(frame, node));
    node = node.children.get(frame.title);
  }
  return node;
}

function sumUp(node) {
  node.bytes = node.own;
  for (const child of node.children.values()) {
    sumUp(child);
    node.bytes += child.bytes;
    if (child.colours) node.colours = child.colours.map((value, colour) => value + (node.colours?.[colour] ?? 0));
  }
}

function pathKey(run, b) {
  return run.stack[b] || -1 - run.owner[b];
}

// The frames of a block's stack, the outermost first: those of the program, or all.
function pathOf(run, b, all) {
  const stack = run.stack[b];
  if (stack) return run.frames(stack, all).toReversed();
  const owner = run.facts.owners[run.owner[b]];
  const parts = /:\d+\)$/.test(owner) ? [owner] : owner.split(/(?<=[./])(?=.)|(?<=[^\d.,])(?=\d)/);
  return parts.map((_, at) => parts.slice(0, at + 1).join(""))
    .map((name) => ({ title: name, label: name === owner ? ownerText(name) : `${name}…` }));
}

// ---- groups by outer frame ---------------------------------------------------------------------

// Each block by the outermost frame that separates the largest parts of the peak.
function byOuterFrame(run, like) {
  const highest = like.all.reduce((best, live, at, all) => (live > all[best] ? at : best), 0);
  const tree = callTree(like, like.size.keys(), { weigh: (b) => (like.isLive(b, highest) ? like.size[b] : 0) });
  const nodes = Array.from(cutTree(tree).keys());
  const numbers = new Map(nodes.map((node, number) => [node, number]));
  const counts = new Map();
  for (const { label } of nodes) counts.set(label, (counts.get(label) ?? 0) + 1);
  const names = nodes.map(({ label, caller }) => (counts.get(label) > 1 && caller?.caller ? `${label} ← ${caller.label}` : label));
  const groups = new Map(); // by stack or owner
  const of = Uint32Array.from({ length: run.blocks }, (_, b) => {
    const key = pathKey(run, b);
    if (!groups.has(key)) groups.set(key, groupOf(pathOf(run, b, false), tree, numbers) ?? nodes.length);
    return groups.get(key);
  });
  return [of, [...names, "elsewhere"]];
}

const MIN_COLOURED = 0.97;

// Replace the largest nodes by those that they call, as long as the colours have most of the bytes.
function cutTree(root) {
  let cut = new Map([[root, root.bytes]]);
  const done = new Set();
  for (;;) {
    const largest = Array.from(cut).sort((a, b) => b[1] - a[1]).slice(0, HUES.light.length);
    const [node] = largest.find(([each]) => each.children.size && !done.has(each)) ?? [];
    if (!node) return cut;
    done.add(node);
    const finer = new Map(cut);
    finer.delete(node);
    if (node.own) finer.set(node, node.own);
    for (const child of node.children.values()) finer.set(child, child.bytes);
    const sums = Float64Array.from(finer.values());
    if (node === root || shareOfLargest(sums, sums) >= MIN_COLOURED) cut = finer;
  }
}

// The number of the innermost node of a path that has one.
function groupOf(path, tree, numbers) {
  let node = tree, found = numbers.get(tree);
  for (const { title } of path) {
    node = node.children.get(title);
    if (!node) break;
    found = numbers.get(node) ?? found;
  }
  return found;
}
