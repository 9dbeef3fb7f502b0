// ---- frames and stacks -------------------------------------------------------------------------

const LIBRARIES = /\/(torch|site-packages|dist-packages|gpumem|python3[.\d]*)\//;

// A frame with its names: `title` differs from that of all others, `label` lacks the folders of its file.
function frameOf([file, line, name]) {
  const short = name.replace(/^.*<locals>\./, "");
  const isPython = line > 0 && file.endsWith(".py");
  return {
    file, line, name, short, isPython, isOwn: isPython && !LIBRARIES.test(file),
    title: line ? `${name} (${file}:${line})` : `${name} (${file})`,
    label: line ? `${short} (${file.slice(file.lastIndexOf("/") + 1)}:${line})` : short,
  };
}

// The lines of Python outside of libraries in a stack, the innermost first; if there are none, all
// lines of Python, else all frames.
function programLines(run, stack) {
  const frames = run.frames(stack);
  const lines = frames.filter(({ isPython }) => isPython), own = lines.filter(({ isOwn }) => isOwn);
  return [own, lines, frames].find((each) => each.length) ?? [];
}

// A stack by its innermost lines of the program: where it allocates, and for whom.
function stackNames(run) {
  const names = ["no stack"];
  for (let stack = 1; stack <= run.stackSizes.length; stack++) {
    names.push(programLines(run, stack).slice(0, 3).map(({ short, label }, at) => (at ? short : label)).join(" ← "));
  }
  return names;
}
