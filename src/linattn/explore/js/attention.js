// Attention matrices: exact softmax, and what a kernel implies. All arithmetic is in double precision.
import { featureMap, hasFeatures } from "./kernels.js";
import { nearFarRows } from "./nearfar.js";
import { deltaRows } from "./delta.js";

/** Dot product of rows i of a and j of b, `dim` numbers each. */
export function dot(a, i, b, j, dim) {
  let sum = 0;
  for (let c = 0, x = i * dim, y = j * dim; c < dim; c++) sum += a[x++] * b[y++];
  return sum;
}

/** Softmax of the first n numbers in place. */
export function softmax(row, n) {
  let top = -Infinity;
  for (let j = 0; j < n; j++) if (row[j] > top) top = row[j];
  let total = 0;
  for (let j = 0; j < n; j++) total += row[j] = Math.exp(row[j] - top);
  for (let j = 0; j < n; j++) row[j] /= total;
}

/**
 * Yields after every row of exact attention. data: { q, k, n, dim }; emit(i, row) gets n numbers that it must copy.
 */
export function* exactRows({ q, k, n, dim }, causal, emit) {
  const row = new Float64Array(n);
  const scale = 1 / Math.sqrt(dim);
  for (let i = 0; i < n; i++) {
    const seen = causal ? i + 1 : n;
    row.fill(0);
    for (let j = 0; j < seen; j++) row[j] = dot(q, i, k, j, dim) * scale;
    softmax(row, seen);
    emit(i, row, 1);
    yield;
  }
}

/** As exactRows, for the kernel of the settings; emit's third argument is the denominator up to a positive factor. */
export function* impliedRows(data, settings, emit) {
  if (settings.kernel === "nearfar") {
    yield* nearFarRows(data, settings, emit);
  } else if (settings.kernel === "delta") {
    yield* deltaRows(data, settings, emit);
  } else {
    yield* featureRows(data, settings, emit);
  }
}

/** Features of all tokens of x (n, dim): { features (n, count), logWeight (n), count }. */
export function allFeatures(x, n, dim, settings) {
  const map = featureMap(settings, dim);
  const features = new Float64Array(n * map.count);
  const logWeight = new Float64Array(n);
  for (let i = 0; i < n; i++) {
    logWeight[i] = map.row(x, i, features.subarray(i * map.count, (i + 1) * map.count));
  }
  return { features, logWeight, count: map.count };
}

/** True if sim(q, k) has a short formula that equals the product of the features. */
const closed = (kernel) => kernel === "polynomial" || kernel === "taylor";

function* featureRows({ q, k, n, dim }, settings, emit) {
  const { kernel, causal } = settings;
  const decay = causal ? settings.decay || 0 : 0;
  const row = new Float64Array(n);
  const scale = 1 / Math.sqrt(dim);
  const made = closed(kernel) ? null : [allFeatures(q, n, dim, settings), allFeatures(k, n, dim, settings)];
  yield;
  for (let i = 0; i < n; i++) {
    const seen = causal ? i + 1 : n;
    row.fill(0);
    if (made) {
      const [queries, keys] = made;
      let top = -Infinity;
      for (let j = 0; j < seen; j++) top = Math.max(top, keys.logWeight[j] - decay * j);
      for (let j = 0; j < seen; j++) {
        const weight = Math.exp(keys.logWeight[j] - decay * j - top);
        row[j] = dot(queries.features, i, keys.features, j, queries.count) * weight;
      }
    } else {
      for (let j = 0; j < seen; j++) {
        const s = dot(q, i, k, j, dim);
        const sim = kernel === "taylor" ? 1 + s * scale + (s * scale) ** 2 / 2 : (s + 1) ** 2;
        row[j] = sim * Math.exp(decay * (i - j));
      }
    }
    let total = 0;
    for (let j = 0; j < seen; j++) total += row[j];
    if (Math.abs(total) > 1e-300) for (let j = 0; j < seen; j++) row[j] /= total;
    else row.fill(0);
    emit(i, row, total);
    yield;
  }
}

/** The output of one token: row (n) times values v (n, width). */
export function mix(row, seen, v, width, out) {
  out.fill(0);
  for (let j = 0; j < seen; j++) {
    const weight = row[j];
    if (weight !== 0) for (let c = 0, at = j * width; c < width; c++) out[c] += weight * v[at++];
  }
  return out;
}

/** Sums for linattn.measure.fidelity, row by row. */
export class Fidelity {
  constructor() {
    Object.assign(this, { error: 0, size: 0, l1: 0, bad: 0, nonpositive: 0, rows: 0, l1Rows: 0 });
  }

  /** out, exact: outputs of a token; row, exactRow: its weights, of which `seen` are not 0. */
  add(out, exact, row, exactRow, { seen, denominator, last }) {
    let error = 0;
    let size = 0;
    for (let c = 0; c < out.length; c++) {
      error += (out[c] - exact[c]) ** 2;
      size += exact[c] ** 2;
    }
    this.error += error;
    this.size += size;
    this.rows++;
    if (error > size) this.bad++;
    if (!last) return; // linattn compares the rows of the last 1024 queries
    let l1 = 0;
    for (let j = 0; j < seen; j++) l1 += Math.abs(row[j] - exactRow[j]);
    this.l1 += l1;
    this.l1Rows++;
    if (!(denominator > 0)) this.nonpositive++;
  }

  result() {
    return {
      relative_error: Math.sqrt(this.error) / Math.max(Math.sqrt(this.size), 1e-300),
      row_l1: this.l1 / this.l1Rows,
      bad_rows: this.bad / this.rows,
      nonpositive: this.nonpositive / this.l1Rows,
    };
  }
}

export { hasFeatures };
