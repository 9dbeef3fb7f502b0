// ---- the run: moves in order, blocks by number -------------------------------------------------
// A move allocates a block or frees one. Blocks are numbered by allocation.

const NEVER = 0xffffffff; // stands for the free of a block that was never freed

// `only` names a group, such as "function:3".
const NO_FILTER = { owner: -1, stream: -1, only: "", least: 0, most: Infinity, find: "" };

class Run {
  constructor(facts, { back, ...columns }, curves) {
    // A block has a size, a stream, an owner, an offset and a stack (from 1; 0: none); a move a time in µs
    // and a rest; a segment an offset, a size, and the moves that begin and end it; a stack its frames, and
    // those of the program.
    Object.assign(this, columns);
    this.facts = facts;
    this.moves = back.length;
    this.blocks = this.size.length;
    this.block = new Uint32Array(this.moves);
    this.isAlloc = new Uint8Array(this.moves);
    this.begin = new Uint32Array(this.blocks); // the moves that begin and end each block
    this.end = new Uint32Array(this.blocks).fill(NEVER);
    this.#link(back);
    this.curves = curves;
    this.held = curves.map(() => null);
    this.streams = facts.streams.length;
    this.segments = this.segmentSize.length;
    this.top = 1; // end of the drawn addresses
    for (let b = 0; b < this.blocks; b++) this.top = Math.max(this.top, this.offset[b] + this.size[b]);
    for (let s = 0; s < this.segments; s++) this.top = Math.max(this.top, this.segmentOffset[s] + this.segmentSize[s]);
    this.stacks = stacksOf(this.stackSizes, this.stackFrames);
    this.ownStacks = stacksOf(this.ownSizes, this.ownFrames);
    this.listed = facts.frames.map(frameOf);
    this.groupings = groupingsOf(this);
    this.select(NO_FILTER);
    this.all = this.live;
  }

  #link(back) {
    let next = 0;
    for (let i = 0; i < this.moves; i++) {
      if (back[i] === 0) {
        this.begin[next] = i;
        this.isAlloc[i] = 1;
        this.block[i] = next++;
      } else {
        this.block[i] = next - back[i];
        this.end[this.block[i]] = i;
      }
    }
  }

  // Select the blocks that pass a filter.
  select({ owner, stream, only, least, most, find }) {
    const found = find.trim() ? this.search(find.trim().toLowerCase()) : null;
    const [by, group] = only.split(":");
    const [groups] = this.groupings[by]?.make(this, this) ?? [];
    this.isFiltered = owner >= 0 || stream >= 0 || Boolean(groups) || least > 0 || most < Infinity || found !== null;
    const passes = (this.passes = new Uint8Array(this.blocks));
    for (let b = 0; b < this.blocks; b++) {
      const size = this.size[b];
      passes[b] = +((owner < 0 || this.owner[b] === owner) && (stream < 0 || this.stream[b] === stream)
        && (!groups || groups[b] === Number(group)) && size >= least && size < most && (!found || found(b)));
    }
    const live = (this.live = new Float64Array(this.moves));
    const rest = this.isFiltered ? [] : this.rest;
    for (let i = 0, sum = 0; i < this.moves; i++) {
      const b = this.block[i];
      if (passes[b]) sum += this.isAlloc[i] ? this.size[b] : -this.size[b];
      live[i] = sum + (rest.length ? rest[i] : 0);
    }
  }

  // Whether a block has a text in its owner, in a frame of its stack or in its stream's name. An
  // address finds the blocks that contain it.
  search(text) {
    const has = (name) => name.toLowerCase().includes(text);
    const owners = this.facts.owners.map(has), streams = this.facts.streams.map(has);
    const frames = this.listed.map(({ title }) => has(title));
    const stacks = this.stacks.map((numbers) => numbers.some((frame) => frames[frame]));
    const place = /^0x[0-9a-f]+$/.test(text) ? this.place(BigInt(text)) : -1;
    return (b) => owners[this.owner[b]] || streams[this.stream[b]] || stacks[this.stack[b]]
      || (place >= this.offset[b] && place < this.offset[b] + this.size[b]);
  }

  // The frames of a stack, the innermost first: all, or those of the program.
  frames(stack, all = true) {
    return Array.from((all ? this.stacks : this.ownStacks)[stack], (number) => this.listed[number]);
  }

  // Bytes held from the driver at each move, under one policy.
  heldBy(policy) {
    if (this.held[policy]) return this.held[policy];
    const { at, held } = this.curves[policy];
    const values = new Float64Array(this.moves);
    for (let i = 0, next = 0, now = 0; i < this.moves; i++) {
      while (next < at.length && at[next] <= i) now = held[next++];
      values[i] = now;
    }
    return (this.held[policy] = values);
  }

  // Where a move lies on the horizontal axis.
  x(move, axis) {
    if (axis === "event") return Math.min(move, this.moves) + 1; // counted from 1
    return this.time[Math.min(move, this.moves - 1)] / 1e6;
  }

  extent(axis) {
    if (!this.moves) return [0, 1];
    if (axis === "event") return [1, this.moves + 1];
    const first = this.time[0] / 1e6, last = Math.max(this.time[this.moves - 1], this.facts.endedUs) / 1e6;
    return last > first ? [first, last + (last - first) * 1e-6] : [first, first + 1e-6];
  }

  // The first move at or after a place on the axis.
  moveAt(x, axis) {
    if (axis === "event") return Math.max(0, Math.min(this.moves, Math.ceil(x - 1)));
    let low = 0, high = this.moves;
    const wanted = x * 1e6;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.time[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low;
  }

  // The last move at or before a place on the axis; the first one for places before it.
  moveBehind(x, axis) {
    const next = this.moveAt(x, axis);
    const isHere = next < this.moves && this.x(next, axis) <= x;
    return Math.max(0, isHere ? next : next - 1);
  }

  // A few moves for each column of a window, its extremes among them.
  sample(first, stop, columns, view) {
    const chosen = [];
    const held = view.held, live = this.live, all = this.all;
    const { x0, x1, axis } = view;
    let i = first;
    if (first > 0) chosen.push(first - 1);
    while (i < stop) {
      const column = Math.floor(((this.x(i, axis) - x0) / (x1 - x0)) * columns);
      const begin = i;
      let low = i, high = i, top = i, total = i;
      for (; i < stop && Math.floor(((this.x(i, axis) - x0) / (x1 - x0)) * columns) === column; i++) {
        if (live[i] < live[low]) low = i;
        if (live[i] > live[high]) high = i;
        if (held[i] > held[top]) top = i;
        if (all[i] > all[total]) total = i;
      }
      const few = [begin, low, high, top, total, i - 1].sort((a, b) => a - b);
      for (const move of few) if (chosen.length === 0 || chosen[chosen.length - 1] !== move) chosen.push(move);
    }
    return chosen;
  }

  // Count the blocks that live in a window; find its highest point, and the bytes of each group there.
  survey(first, stop, groups) {
    const live = this.live, group = groups.of;
    let peak = Math.max(0, first - 1);
    for (let i = first; i < stop; i++) if (live[i] > live[peak]) peak = i;
    const now = new Float64Array(groups.count), most = new Float64Array(groups.count);
    const atPeak = new Float64Array(groups.count), allocated = new Uint32Array(groups.count);
    const atEnd = new Float64Array(groups.count);
    let blocks = 0;
    for (let b = 0; b < this.blocks; b++) {
      if (!this.passes[b]) continue;
      const g = group[b];
      if (this.begin[b] < stop && this.end[b] >= first) blocks++;
      if (this.begin[b] < first && this.end[b] >= first) now[g] += this.size[b];
      if (this.isLive(b, peak)) atPeak[g] += this.size[b];
      if (this.begin[b] < stop && this.end[b] === NEVER) atEnd[g] += this.size[b];
    }
    most.set(now);
    for (let i = first; i < stop; i++) {
      const b = this.block[i];
      if (!this.passes[b]) continue;
      const g = group[b];
      if (!this.isAlloc[i]) { now[g] -= this.size[b]; continue; }
      now[g] += this.size[b];
      allocated[g]++;
      if (now[g] > most[g]) most[g] = now[g];
    }
    return { peak, peakBytes: stop ? live[peak] : 0, blocks, most, atPeak, allocated, atEnd };
  }

  // Live bytes of each colour at some moves, which rise: an array for each colour, the last of others.
  byColour(moves, groups) {
    const colours = HUES.light.length + 1;
    const now = new Float64Array(colours);
    const found = Array.from(now, () => new Float64Array(moves.length));
    const rest = this.isFiltered ? [] : this.rest;
    let i = 0;
    moves.forEach((move, at) => {
      for (; i <= move; i++) {
        const b = this.block[i];
        if (this.passes[b]) now[groups.colour[groups.of[b]]] += this.isAlloc[i] ? this.size[b] : -this.size[b];
      }
      for (let c = 0; c < colours; c++) found[c][at] = now[c];
      if (rest.length) found[colours - 1][at] += rest[move];
    });
    return found;
  }

  // -- one moment: the state after a move

  isLive(b, move) { return this.begin[b] <= move && this.end[b] > move; }

  // The live blocks that pass the filter, or those that it leaves out, in the order of their addresses.
  liveAt(move, passes = 1) {
    const found = [];
    for (let b = 0; b < this.blocks && this.begin[b] <= move; b++) if (this.passes[b] === passes && this.end[b] > move) found.push(b);
    return found.sort((a, b) => this.offset[a] - this.offset[b]);
  }

  segmentsAt(move) {
    const found = [];
    for (let s = 0; s < this.segments; s++) if (this.segmentBegin[s] <= move && this.segmentEnd[s] > move) found.push(s);
    return found;
  }

  // Allocations of each power of two in a window: how many, and of how many bytes.
  histogram(first, stop) {
    const counts = new Float64Array(54), sums = new Float64Array(54);
    for (let i = first; i < stop; i++) {
      const b = this.block[i];
      if (!this.isAlloc[i] || !this.passes[b]) continue;
      const bin = powerOf(this.size[b]);
      counts[bin]++;
      sums[bin] += this.size[b];
    }
    return { counts, sums };
  }

  // The peak of live bytes on each stream within each of `columns` columns of a window.
  streamColumns(first, stop, columns, view) {
    const now = new Float64Array(this.streams), peaks = new Float64Array(this.streams);
    const rows = Array.from(now, () => new Float64Array(columns));
    let column = 0;
    // A column begins with the bytes at the end of the one before it.
    const advance = (to) => {
      for (; column < to; column++) for (let s = 0; s < this.streams; s++) rows[s][column + 1] = now[s];
    };
    const apply = (i) => {
      const b = this.block[i], s = this.stream[b];
      if (this.passes[b]) now[s] += this.isAlloc[i] ? this.size[b] : -this.size[b];
      return s;
    };
    for (let i = 0; i < first; i++) apply(i);
    for (let s = 0; s < this.streams; s++) rows[s][0] = peaks[s] = now[s];
    for (let i = first; i < stop; i++) {
      const x = (this.x(i, view.axis) - view.x0) / (view.x1 - view.x0);
      advance(Math.max(0, Math.min(columns - 1, Math.floor(x * columns))));
      const s = apply(i);
      rows[s][column] = Math.max(rows[s][column], now[s]);
      peaks[s] = Math.max(peaks[s], now[s]);
    }
    advance(columns - 1);
    return { rows, peaks };
  }

  // The block that is drawn at a place, or -1.
  blockAt(move, offset) {
    for (let b = 0; b < this.blocks && this.begin[b] <= move; b++) {
      if (this.passes[b] && this.end[b] > move && this.offset[b] <= offset
        && offset < this.offset[b] + this.size[b]) return b;
    }
    return -1;
  }

  // Where an address is drawn, or -1.
  place(address) {
    for (const [base, place, extent] of this.facts.ranges) {
      const inside = address - BigInt(base);
      if (inside >= 0n && inside < BigInt(extent)) return place + Number(inside);
    }
    return -1;
  }

  // The address of a block as text; drawn offsets stand for the ranges that were used.
  address(b) {
    const [base, place] = this.facts.ranges.findLast(([, begins]) => begins <= this.offset[b]);
    return `0x${(BigInt(base) + BigInt(this.offset[b] - place)).toString(16)}`;
  }

  liveAtEnd(stop) {
    const found = [];
    let sum = 0;
    for (let b = 0; b < this.blocks && this.begin[b] < stop; b++) {
      if (this.passes[b] && this.end[b] === NEVER) { found.push(b); sum += this.size[b]; }
    }
    found.sort((a, b) => this.size[b] - this.size[a] || a - b);
    return { found, sum };
  }
}

function powerOf(size) {
  return Math.min(53, Math.floor(Math.log2(size)));
}
