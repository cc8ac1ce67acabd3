// Feature maps: what sim(q, k) = phi(q) . phi(k) is made of. Each is the linattn.kernels class of the same name.
import { draw } from "./random.js";

/** Which controls each kernel uses, and how it is introduced. */
export const KERNELS = {
  positive: {
    label: "positive (FAVOR+)",
    uses: ["features", "seed", "decay"],
    about: "Random features exp(w·x − |x|²/2): unbiased for softmax's exp(q·k/√D), and never negative.",
  },
  trig: {
    label: "trig (unit length)",
    uses: ["features", "seed", "decay"],
    about: "Sines and cosines of random projections, of queries and keys brought to length 1. Weights can be negative.",
  },
  "trig-raw": {
    label: "trig (raw)",
    uses: ["features", "seed", "decay"],
    about: "The same without bringing to length 1. About half of the denominators come out negative: for study only.",
  },
  elu: { label: "elu + 1", uses: ["decay"], about: "φ(x) = elu(x) + 1, coordinate by coordinate. For models trained with it." },
  relu: { label: "relu", uses: ["decay"], about: "φ(x) = max(x, 0), coordinate by coordinate." },
  polynomial: {
    label: "polynomial (q·k + 1)²",
    uses: ["decay"],
    about: "All products of two coordinates, cross terms included: 1 + D + D(D+1)/2 features, exactly.",
  },
  taylor: {
    label: "Taylor, order 2",
    uses: ["decay"],
    about: "1 + s + s²/2 with s = q·k/√D, exactly. Close to exp(s) while s is small.",
  },
  nearfar: {
    label: "near/far",
    uses: ["window", "slots", "sinks", "block"],
    about: "Softmax over the last tokens and the first few exactly, and over slots that stand for all others.",
  },
  delta: {
    label: "delta rule",
    uses: ["beta", "decay"],
    about: "A state that corrects itself: it writes only what it does not yet return for the key. Its weights are signed and not normalised.",
  },
};

/** Whether a kernel is made of features, with sums S and Z as its state. */
export const hasFeatures = (name) => name !== "nearfar" && name !== "delta";

/** Rows start + [0, dim) of x times a factor. */
function scaledRow(x, row, dim, factor, out) {
  let square = 0;
  for (let j = 0; j < dim; j++) {
    const value = x[row * dim + j] * factor;
    out[j] = value;
    square += value * value;
  }
  return square;
}

/**
 * The feature map of a kernel for tokens of `dim` coordinates.
 *
 * Returns { count, row(x, index, out) }: `row` writes phi of token `index` of x (tokens, dim) to out (count) and returns the
 * logarithm of the factor that was taken out of it, so that exponentials stay in range.
 */
export function featureMap({ kernel, features, seed }, dim) {
  const token = new Float64Array(dim);
  const root = dim ** -0.25; // of the factor 1/sqrt(dim) of q.k
  if (kernel === "positive") {
    const w = draw(features, dim, seed, true);
    const row = (x, index, out) => {
      const square = scaledRow(x, index, dim, root, token);
      const top = project(w, token, out);
      for (let i = 0; i < features; i++) out[i] = Math.exp(out[i] - top);
      return top - square / 2 - Math.log(features) / 2;
    };
    return { count: features, row };
  }
  if (kernel === "trig" || kernel === "trig-raw") return trig(kernel, features, draw(features, dim, seed, false), dim);
  if (kernel === "polynomial") return quadratic(dim, 1, [1, Math.SQRT2, Math.SQRT2]);
  if (kernel === "taylor") return quadratic(dim, root, [1, 1, 1]);
  const phi = { elu: (x) => (x > 0 ? x + 1 : Math.exp(x)), relu: (x) => Math.max(x, 0) }[kernel];
  const row = (x, index, out) => {
    for (let j = 0; j < dim; j++) out[j] = phi(x[index * dim + j]);
    return 0;
  };
  return { count: dim, row };
}

/** out = w token, and the largest of it. */
function project(w, token, out) {
  const dim = token.length;
  let top = -Infinity;
  for (let i = 0, at = 0; at < w.length; i++) {
    let dot = 0;
    for (let j = 0; j < dim; j++) dot += w[at++] * token[j];
    out[i] = dot;
    if (dot > top) top = dot;
  }
  return top;
}

function trig(kernel, frequencies, w, dim) {
  const token = new Float64Array(dim);
  const angles = new Float64Array(frequencies);
  const size = 1 / Math.sqrt(frequencies);
  const row = (x, index, out) => {
    let factor = dim ** -0.25;
    if (kernel === "trig") {
      let square = 0;
      for (let j = 0; j < dim; j++) square += x[index * dim + j] ** 2;
      factor = 1 / Math.max(Math.sqrt(square), 1e-12);
    }
    const square = scaledRow(x, index, dim, factor, token);
    project(w, token, angles);
    for (let i = 0; i < frequencies; i++) {
      out[i] = Math.sin(angles[i]) * size;
      out[frequencies + i] = Math.cos(angles[i]) * size;
    }
    return square / 2;
  };
  return { count: 2 * frequencies, row };
}

/**
 * 1, x_i and x_i x_j (i <= j), so that phi(x) . phi(y) = a + b x.y + c (x.y)^2. factors: the roots of a, b and of 2 c for
 * the polynomial, and of 2 c for Taylor (c = 1/2).
 */
function quadratic(dim, root, [constant, linear, cross]) {
  const token = new Float64Array(dim);
  const count = 1 + dim + (dim * (dim + 1)) / 2;
  const row = (x, index, out) => {
    scaledRow(x, index, dim, root, token);
    out[0] = constant;
    let at = 1;
    for (let i = 0; i < dim; i++) out[at++] = linear * token[i];
    for (let i = 0; i < dim; i++) {
      out[at++] = (cross / Math.SQRT2) * token[i] * token[i];
      for (let j = i + 1; j < dim; j++) out[at++] = cross * token[i] * token[j];
    }
    return 0;
  };
  return { count, row };
}
