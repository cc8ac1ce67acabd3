// The delta rule: S <- exp(g) S;  S <- S + beta k (v - k^T S)^T;  out = q^T S / sqrt(D). Queries and keys have length 1.

/** Rows of x (n, dim) divided by sqrt(|x|^2 + 1e-6), as linattn.delta_rule(normalize_qk=True) does. */
export function unitRows(x, n, dim) {
  const out = new Float64Array(n * dim);
  for (let i = 0; i < n; i++) {
    let square = 1e-6;
    for (let c = 0; c < dim; c++) square += x[i * dim + c] ** 2;
    const factor = 1 / Math.sqrt(square);
    for (let c = 0; c < dim; c++) out[i * dim + c] = x[i * dim + c] * factor;
  }
  return out;
}

/** One step of the rule on S (dim, width): returns { predicted, written }, k^T S before and what was added along k. */
export function deltaStep(S, key, value, width, beta, decay) {
  const dim = key.length;
  const predicted = new Float64Array(width);
  const keep = Math.exp(decay || 0);
  for (let a = 0; a < dim; a++) {
    for (let c = 0, at = a * width; c < width; c++, at++) {
      S[at] *= keep;
      predicted[c] += key[a] * S[at];
    }
  }
  const written = new Float64Array(width);
  for (let c = 0; c < width; c++) written[c] = beta * (value[c] - predicted[c]);
  for (let a = 0; a < dim; a++) {
    for (let c = 0, at = a * width; c < width; c++, at++) S[at] += key[a] * written[c];
  }
  return { predicted, written };
}

/** What the state returns for a query: q^T S / sqrt(dim). */
export function deltaRead(S, query, width, out) {
  const dim = query.length;
  const scale = 1 / Math.sqrt(dim);
  out.fill(0);
  for (let a = 0; a < dim; a++) {
    for (let c = 0, at = a * width; c < width; c++, at++) out[c] += query[a] * scale * S[at];
  }
  return out;
}

/** Implied weights: the outputs if every token's value is its own unit vector. */
export function* deltaRows({ q, k, n, dim }, { beta, decay }, emit) {
  const queries = unitRows(q, n, dim);
  const keys = unitRows(k, n, dim);
  const S = new Float64Array(dim * n); // only columns up to the current token are not 0
  const row = new Float64Array(n);
  const predicted = new Float64Array(n);
  const keep = Math.exp(decay || 0);
  const scale = 1 / Math.sqrt(dim);
  for (let i = 0; i < n; i++) {
    predicted.fill(0, 0, i);
    for (let a = 0; a < dim; a++) {
      const weight = keys[i * dim + a];
      for (let j = 0, at = a * n; j < i; j++, at++) {
        S[at] *= keep;
        predicted[j] += weight * S[at];
      }
    }
    row.fill(0, 0, i + 1);
    for (let a = 0; a < dim; a++) {
      const weight = keys[i * dim + a] * beta;
      const read = queries[i * dim + a] * scale;
      let at = a * n;
      for (let j = 0; j < i; j++, at++) {
        S[at] -= weight * predicted[j];
        row[j] += read * S[at];
      }
      S[at] += weight;
      row[i] += read * S[at];
    }
    emit(i, row, 1);
    yield;
  }
}
