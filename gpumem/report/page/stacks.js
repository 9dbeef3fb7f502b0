// ---- frames and stacks -------------------------------------------------------------------------

// A frame with its names: `title` differs from that of all others, `label` lacks the folders of its file.
function frameOf([file, line, name]) {
  const short = name.replace(/^.*<locals>\./, "");
  return {
    file, line, name, short,
    title: line ? `${name} (${file}:${line})` : file ? `${name} (${file})` : name,
    label: line ? `${short} (${file.slice(file.lastIndexOf("/") + 1)}:${line})` : short,
  };
}

// A stack by its innermost lines of the program: where it allocates, and for whom.
function stackName(frames) {
  return frames.slice(0, 3).map(({ short, label }, at) => (at ? short : label)).join(" ← ") || "no stack";
}

// The stacks of a column, from 1: views of the numbers of their frames. 0 is no stack.
function stacksOf(sizes, numbers) {
  let at = 0;
  return [[], ...Array.from(sizes, (size) => numbers.subarray(at, (at += size)))];
}
