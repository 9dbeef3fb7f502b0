// ---- columns, as data.py writes them -----------------------------------------------------------

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f8: Float64Array };

async function unpackColumn(column) {
  const packed = Uint8Array.from(atob(column.data), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const stored = new ARRAYS[column.type](await new Response(stream).arrayBuffer());
  if (!column.rising && column.unit === 1) return stored;
  const values = new Float64Array(stored.length);
  let sum = 0;
  for (let i = 0; i < stored.length; i++) {
    const value = stored[i] * column.unit;
    values[i] = column.rising ? (sum += value) : value;
  }
  return values;
}

async function unpackColumns(columns) {
  const names = Object.keys(columns);
  const values = await Promise.all(names.map((name) => unpackColumn(columns[name])));
  return Object.fromEntries(names.map((name, i) => [name, values[i]]));
}
