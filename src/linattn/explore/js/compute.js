// Exact and implied attention with all measures, as a generator so that a caller can pause or stop it.
import { Fidelity, exactRows, impliedRows, mix } from "./attention.js";

const ROWS = 1024; // rows of which linattn.measure.fidelity takes the L1 distance

/**
 * Returns { exact, implied: Float32Array (n, n), outExact, outImplied: Float64Array (n, width), report, baseline, rowErrors }.
 * data: { q, k, v, n, dim, width }.
 */
export function* computeSteps(data, settings) {
  const { n, v, width } = data;
  const causal = settings.causal;
  const exact = new Float64Array(n * n);
  const outExact = new Float64Array(n * width);
  const outImplied = new Float64Array(n * width);
  const at = (x, i, size) => x.subarray(i * size, (i + 1) * size);
  yield* exactRows(data, causal, (i, row) => {
    exact.set(row, i * n);
    mix(row, causal ? i + 1 : n, v, width, at(outExact, i, width));
  });
  const implied = new Float32Array(n * n);
  const kernel = new Fidelity();
  const plain = new Fidelity();
  const rowErrors = new Float64Array(n);
  const sum = new Float64Array(width);
  if (!causal) for (let j = 0; j < n; j++) for (let c = 0; c < width; c++) sum[c] += v[j * width + c];
  yield* impliedRows(data, settings, (i, row, denominator) => {
    const seen = causal ? i + 1 : n;
    implied.set(row, i * n);
    const out = mix(row, seen, v, width, at(outImplied, i, width));
    const exactOut = at(outExact, i, width);
    const exactRow = at(exact, i, n);
    const last = i >= n - ROWS;
    kernel.add(out, exactOut, row, exactRow, { seen, denominator, last });
    let error = 0;
    let size = 0;
    for (let c = 0; c < width; c++) {
      error += (out[c] - exactOut[c]) ** 2;
      size += exactOut[c] ** 2;
      if (causal) sum[c] += v[i * width + c];
    }
    rowErrors[i] = Math.sqrt(error / Math.max(size, 1e-300));
    const mean = sum.map((x) => x / seen);
    const even = new Float64Array(seen).fill(1 / seen);
    plain.add(mean, exactOut, even, exactRow, { seen, denominator: 1, last });
  });
  return {
    exact: Float32Array.from(exact),
    implied,
    outExact,
    outImplied,
    rowErrors,
    report: kernel.result(),
    baseline: plain.result(),
  };
}

/** All at once, for small inputs and tests. */
export function compute(data, settings) {
  const steps = computeSteps(data, settings);
  for (;;) {
    const { done, value } = steps.next();
    if (done) return value;
  }
}
