// ---- frames and stacks -------------------------------------------------------------------------

const LIBRARIES = /\/(torch|site-packages|dist-packages|gpumem|python3[.\d]*)\//;
const OPERATOR = /^(?:at::_ops|torch::autograd::generated)::(\w+)::(?:call|apply)\b/;

// A frame with its names: `title` differs from that of all others, `label` lacks the folders of its file.
function frameOf([file, line, name]) {
  const operator = line ? null : OPERATOR.exec(name), short = operator?.[1] ?? name.replace(/^.*<locals>\./, "");
  const isPython = line > 0 && /\.py$|^<(stdin|string|ipython)/.test(file);
  return {
    file, line, name, short, isPython, isOperator: Boolean(operator), isOwn: isPython && !LIBRARIES.test(file),
    title: line ? `${name} (${file}:${line})` : `${name} (${file})`,
    label: line ? `${short} (${file.slice(file.lastIndexOf("/") + 1)}:${line})` : short,
  };
}

// The lines of Python outside of libraries in a stack, the innermost first; if there are none, all
// lines of Python, else PyTorch's operators, else all frames.
function programLines(frames) {
  const lines = frames.filter(({ isPython }) => isPython), own = lines.filter(({ isOwn }) => isOwn);
  const operators = frames.filter(({ isOperator }) => isOperator);
  return [own, lines, operators].find((each) => each.length) ?? frames;
}

// A stack by its innermost lines of the program: where it allocates, and for whom.
function stackNames(run) {
  const names = ["no stack"];
  for (let stack = 1; stack <= run.stackSizes.length; stack++) {
    names.push(programLines(run.frames(stack)).slice(0, 3).map(({ short, label }, at) => (at ? short : label)).join(" ← "));
  }
  return names;
}
