// ---- numbers as text ---------------------------------------------------------------------------

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function bytes(value) {
  if (value == null || Number.isNaN(value)) return "–";
  let size = Math.abs(value), unit = 0;
  while (size >= 1023.95 && unit < UNITS.length - 1) { size /= 1024; unit++; }
  const digits = unit === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return `${value < 0 ? "−" : ""}${size.toFixed(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "")} ${UNITS[unit]}`;
}

function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

function plural(value, what) {
  return `${count(value)} ${what}${value === 1 ? "" : "s"}`;
}

// An owner, a function or a stack as it is shown, without the folders of its files.
function ownerText(owner) {
  return owner.replace(/\([^()]*\/([^/()]+)\)/g, "($1)");
}

// The same in a key: of a module or a phase, the last two names of the path to it.
function shortName(name) {
  const names = ownerText(name).split(" / ");
  return `${names.length > 2 ? "… / " : ""}${names.slice(-2).join(" / ")}`;
}

// Seconds in the unit that suits `scale` seconds, with the digits that steps of `step` seconds need.
function seconds(value, step = Math.abs(value) / 1000, scale = value) {
  const size = Math.abs(scale), [factor, unit] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(Math.max(step * factor, 1e-9)) - 1e-9)));
  return `${(value * factor).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
}

// Values along an axis of bytes: steps of 1, 2 or 5 times a power of 1024, or of 2.
function byteSplits(least, most, room) {
  const wanted = (most - least) / Math.max(2, room);
  let step = 1;
  while (step < wanted) step *= 2;
  const values = [];
  for (let v = Math.ceil(least / step) * step; v <= most; v += step) values.push(v);
  return values;
}
