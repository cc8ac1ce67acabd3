// Colours of maps: lightness alone carries the value, blue for positive and orange for negative, on either background.

const RAMPS = {
  light: {
    zero: [255, 255, 255],
    up: [[214, 230, 247], [134, 182, 226], [49, 120, 190], [14, 66, 124], [5, 26, 56]],
    down: [[253, 224, 194], [245, 170, 98], [212, 105, 20], [140, 62, 4], [74, 30, 0]],
    ink: "#222",
    faint: "#6b7280",
    line: "#d5dae1",
    exact: "#0e427c",
    kernel: "#c2570c",
    selected: "#c2570c",
  },
  dark: {
    zero: [24, 27, 32],
    up: [[25, 52, 84], [36, 93, 155], [83, 153, 214], [160, 207, 243], [240, 248, 255]],
    down: [[74, 42, 12], [140, 77, 15], [214, 126, 40], [246, 184, 117], [255, 238, 217]],
    ink: "#e6e6e6",
    faint: "#9aa3af",
    line: "#3a3f47",
    exact: "#8cc4f5",
    kernel: "#f0a35e",
    selected: "#f0a35e",
  },
};

/** "light" or "dark", as the page is shown. */
export function theme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "light" || chosen === "dark") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

export const palette = () => RAMPS[theme()];

/** 256 colours of a ramp as bytes. */
function table(zero, stops) {
  const all = [zero, ...stops];
  const out = new Uint8Array(256 * 3);
  for (let i = 0; i < 256; i++) {
    const place = (i / 255) * (all.length - 1);
    const low = Math.min(all.length - 2, Math.floor(place));
    for (let c = 0; c < 3; c++) out[3 * i + c] = all[low][c] + (all[low + 1][c] - all[low][c]) * (place - low);
  }
  return out;
}

const cache = {};

/** Lookup tables { up, down } of the present theme. */
export function tables() {
  const name = theme();
  cache[name] ||= { up: table(RAMPS[name].zero, RAMPS[name].up), down: table(RAMPS[name].zero, RAMPS[name].down) };
  return cache[name];
}

/** How weights become colours: a share of the largest, its root, or its logarithm over four decades. */
export const SCALES = {
  linear: (x) => x,
  root: Math.sqrt,
  log: (x) => (x <= 1e-4 ? 0 : 1 + Math.log10(x) / 4),
};

const STEPS = 8192; // colours on either side of 0

/** Packed colours of the shares -1 to 1 of the largest value. */
function shades(scale) {
  const { up, down } = tables();
  const curve = SCALES[scale] || Math.sqrt;
  const out = new Uint32Array(2 * STEPS + 1);
  for (let i = -STEPS; i <= STEPS; i++) {
    const level = 3 * Math.round(255 * curve(Math.abs(i) / STEPS));
    const ramp = i < 0 ? down : up;
    out[i + STEPS] = 0xff000000 | (ramp[level + 2] << 16) | (ramp[level + 1] << 8) | ramp[level];
  }
  return out;
}

/** Colours the pixels of an image by `values`, less `minus` if given; top is the value of the last colour. */
export function paint(image, values, top, scale, minus = null) {
  const pixels = new Uint32Array(image.data.buffer);
  const table = shades(scale);
  const factor = STEPS / top;
  for (let at = 0; at < pixels.length; at++) {
    const x = (minus ? values[at] - minus[at] : values[at]) * factor;
    pixels[at] = table[x >= STEPS ? 2 * STEPS : x <= -STEPS ? 0 : (x + STEPS + 0.5) | 0];
  }
}

/** One colour for a share of the largest, in [-1, 1]. */
export function colour(share, scale = "root") {
  const { up, down } = tables();
  const level = 3 * Math.round(255 * (SCALES[scale] || Math.sqrt)(Math.min(1, Math.abs(share))));
  const ramp = share < 0 ? down : up;
  return { css: `rgb(${ramp[level]},${ramp[level + 1]},${ramp[level + 2]})`, level: level / 765 };
}

/** Draws a colour bar: from 0 up, or from the lowest through 0. */
export function drawRamp(canvas, signed, scale) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  const image = context.createImageData(width, height);
  const values = Float32Array.from({ length: width * height }, (_, at) => {
    const x = (at % width) / (width - 1);
    return signed ? 2 * x - 1 : x;
  });
  paint(image, values, 1, scale);
  context.putImageData(image, 0, 0);
}

/** A canvas fitted to its place on the screen: { context, width, height } in CSS pixels. */
export function fit(canvas, height) {
  const ratio = Math.min(2, devicePixelRatio || 1);
  const width = Math.max(1, canvas.clientWidth);
  const tall = height || Math.max(1, canvas.clientHeight);
  if (height) canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  return { context, width, height: tall };
}
