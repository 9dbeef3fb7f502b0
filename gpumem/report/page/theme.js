// ---- light and dark ----------------------------------------------------------------------------

// Ten colours that differ in hue and in lightness, so that they differ for most eyes.
const HUES = {
  light: ["#2f6fd0", "#e07b16", "#1f9e77", "#c2418f", "#7a5cc7", "#a8891a", "#16899e", "#c8452f", "#5f7f2e", "#8a5a44"],
  dark: ["#6ea8ff", "#ffa657", "#43d0a1", "#f082c2", "#b39bff", "#dcc04e", "#4cc9de", "#ff8674", "#a7cc6b", "#cf9f86"],
};

class Theme {
  constructor(changed) {
    this.system = matchMedia("(prefers-color-scheme: dark)");
    this.chosen = "auto";
    this.changed = changed;
    this.system.addEventListener("change", () => this.choose(this.chosen));
    this.#apply();
  }

  choose(name) {
    this.chosen = name;
    this.#apply();
    this.changed();
  }

  #apply() {
    const dark = this.chosen === "dark" || (this.chosen === "auto" && this.system.matches);
    this.name = dark ? "dark" : "light";
    document.documentElement.dataset.theme = this.name;
    this.style = getComputedStyle(document.documentElement);
  }

  color(name) {
    return this.style.getPropertyValue(`--${name}`).trim();
  }

  hue(rank) {
    return rank >= 0 && rank < HUES.light.length ? HUES[this.name][rank] : this.color("rest");
  }

  // A hue on which text is readable.
  tint(rank) {
    const ground = parts(this.color("panel"));
    return `rgb(${parts(this.hue(rank)).map((part, at) => Math.round(0.28 * part + 0.72 * ground[at]))})`;
  }
}

function parts(color) {
  return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
}

// A colour as the bytes of an ImageData's pixel, in this machine's order.
function pixel(color) {
  return new Uint32Array(new Uint8Array([...parts(color), 255]).buffer)[0];
}
