// Near/far attention of one head: the rule of linattn.NearFar, with a record of which tokens every slot stands for.

const CANDIDATES = 128;
const RIDGE = 1e-4;
const LEAST_VARIANCE = 1e-12;
const LARGEST_LOG_WEIGHT = 46;
const ALPHA = 0.25;

/** A slot: its pooled key, its bias (0 for a single token), its tokens and the share that each has of it. */
const single = (key, token) => ({ key, bias: 0, tokens: [token], shares: [1] });
const empty = (dim) => ({ key: new Float64Array(dim), bias: -Infinity, tokens: [], shares: [] });

function dotOf(a, b) {
  let sum = 0;
  for (let c = 0; c < a.length; c++) sum += a[c] * b[c];
  return sum;
}

/** Mean (the anchor) and covariance (the metric, dim x dim) of the sampled queries. */
class QueryStatistics {
  constructor(dim) {
    this.dim = dim;
    this.count = 0;
    this.sum = new Float64Array(dim);
    this.square = new Float64Array(dim * dim);
  }

  add(x) {
    const { dim } = this;
    this.count++;
    for (let a = 0; a < dim; a++) {
      this.sum[a] += x[a];
      for (let b = 0; b < dim; b++) this.square[a * dim + b] += x[a] * x[b];
    }
  }

  anchorAndMetric() {
    const { dim } = this;
    const n = Math.max(this.count, 1);
    const anchor = this.sum.map((x) => x / n);
    const metric = this.square.map((x, at) => x / n - anchor[Math.floor(at / dim)] * anchor[at % dim]);
    let trace = 0;
    for (let a = 0; a < dim; a++) trace += metric[a * dim + a];
    const ridge = this.count > 0 ? RIDGE * Math.max(trace / dim, LEAST_VARIANCE) : 1;
    for (let a = 0; a < dim; a++) metric[a * dim + a] += ridge;
    return { anchor, metric };
  }
}

/** Merges slots into `size`, the cheapest pairs first. Returns the new slots and the merges as [from, into] tokens. */
export function merge(slots, size, { anchor, metric }) {
  const n = slots.length;
  const dim = anchor.length;
  const mean = new Float64Array(dim);
  const live = Math.max(1, slots.filter((s) => s.bias > -Infinity).length);
  for (const slot of slots) for (let c = 0; c < dim; c++) mean[c] += slot.key[c] / live;
  const ranked = slots.map((slot) => {
    const key = slot.key.map((x, c) => x - mean[c]);
    const projected = new Float64Array(dim);
    for (let a = 0; a < dim; a++) for (let b = 0; b < dim; b++) projected[b] += key[a] * metric[a * dim + b];
    const spread = dotOf(projected, key);
    const logWeight = slot.bias + dotOf(slot.key, anchor);
    return { slot, key, projected, spread, logWeight, importance: logWeight + spread / 2 };
  });
  ranked.sort((a, b) => (a.importance === b.importance ? 0 : a.importance - b.importance));
  const { into, kept } = choosePairs(ranked, size);
  const groups = new Map(kept.map((index) => [index, [index]]));
  const merges = [];
  for (const [from, target] of into) {
    let root = target;
    while (into.has(root)) root = into.get(root);
    groups.get(root).push(from);
    if (ranked[from].slot.bias > -Infinity) merges.push([ranked[from].slot.tokens, ranked[root].slot.tokens]);
  }
  return { slots: kept.map((index) => pool(groups.get(index).map((i) => ranked[i]), anchor)), merges };
}

/** Which slots (by rank) are merged into which, and which are kept. */
function choosePairs(ranked, size) {
  const n = ranked.length;
  const candidates = Math.min(n, Math.max(2 * (n - size), CANDIDATES));
  const top = ranked[n - 1].importance;
  const inverse = ranked.map((r) => {
    const gap = ALPHA * (top - r.importance);
    return Math.exp(Math.min(Number.isNaN(gap) ? 0 : gap, LARGEST_LOG_WEIGHT));
  });
  const found = [];
  for (let i = 0; i < candidates; i++) {
    let cost = Infinity;
    let target = n - 1;
    for (let j = i + 1; j < n; j++) {
      const distance = Math.max(0, ranked[i].spread + ranked[j].spread - 2 * dotOf(ranked[i].projected, ranked[j].key));
      const one = distance / (inverse[i] + inverse[j]);
      if (one < cost) [cost, target] = [one, j];
    }
    if (cost === Infinity) cost = Number.MAX_VALUE;
    if (ranked[i].importance === -Infinity) cost = -1;
    if (i === n - 1) cost = Infinity;
    found.push({ from: i, target, cost });
  }
  found.sort((a, b) => a.cost - b.cost);
  const into = new Map(found.slice(0, n - size).map((f) => [f.from, f.target]));
  const kept = [];
  for (let i = 0; i < n; i++) if (!into.has(i)) kept.push(i);
  return { into, kept };
}

/** One slot from several: means weighted by exp(log-weight). */
function pool(members, anchor) {
  const filled = members.filter((m) => m.slot.bias > -Infinity);
  if (filled.length <= 1) return (filled[0] || members[0]).slot;
  const top = Math.max(...filled.map((m) => m.logWeight));
  const weights = filled.map((m) => Math.exp(m.logWeight - top));
  const total = weights.reduce((a, b) => a + b, 0);
  const key = new Float64Array(anchor.length);
  const tokens = [];
  const shares = [];
  filled.forEach(({ slot }, i) => {
    const share = weights[i] / total;
    for (let c = 0; c < key.length; c++) key[c] += share * slot.key[c];
    slot.tokens.forEach((token, at) => {
      tokens.push(token);
      shares.push(slot.shares[at] * share);
    });
  });
  return { key, bias: Math.log(total) + top - dotOf(key, anchor), tokens, shares };
}

/**
 * Implied weights of causal near/far attention. onBlock, if given, gets the state as each block of tokens is entered:
 * { start, sinks, near, slots, merges } with `near` the first exact token.
 */
export function* nearFarRows({ q, k, n, dim }, { window, slots: budget, sinks, block }, emit, onBlock) {
  const root = dim ** -0.25;
  const x = Float64Array.from(q, (value) => value * root);
  const y = Float64Array.from(k, (value) => value * root);
  const statistics = new QueryStatistics(dim);
  const stride = block % 4 === 0 ? 4 : 1;
  const row = new Float64Array(n);
  let slots = [];
  for (let start = 0; start < n; start += block) {
    let merges = [];
    const first = start - window - block;
    if (budget > 0 && start - window > sinks) {
      for (let p = first; p < start - window; p++) {
        slots.push(p >= sinks ? single(y.slice(p * dim, (p + 1) * dim), p) : empty(dim));
      }
      if (slots.length > budget) {
        while (slots.length < budget + block) slots.push(empty(dim));
        ({ slots, merges } = merge(slots, budget, statistics.anchorAndMetric()));
      }
    }
    const seenSinks = Math.min(start, sinks);
    const near = Math.max(seenSinks, start - window);
    if (onBlock) onBlock({ start, sinks: seenSinks, near, slots: slots.filter((s) => s.bias > -Infinity), merges });
    const end = Math.min(start + block, n);
    for (let i = start; i < end; i++) {
      blockRow(row, x.subarray(i * dim, (i + 1) * dim), y, i, { slots, seenSinks, near });
      emit(i, row, 1);
      yield;
    }
    for (let i = start; i < end; i += stride) statistics.add(x.subarray(i * dim, (i + 1) * dim));
  }
}

/** One softmax over sinks, slots and near tokens; the weight of a slot goes to its tokens by their shares. */
function blockRow(row, query, y, i, { slots, seenSinks, near }) {
  const dim = query.length;
  const logit = (j) => dotOf(query, y.subarray(j * dim, (j + 1) * dim));
  row.fill(0);
  let top = -Infinity;
  for (let j = 0; j < seenSinks; j++) top = Math.max(top, (row[j] = logit(j)));
  for (let j = near; j <= i; j++) top = Math.max(top, (row[j] = logit(j)));
  const far = slots.map((slot) => dotOf(query, slot.key) + slot.bias);
  for (const value of far) top = Math.max(top, value);
  let total = 0;
  for (let j = 0; j < seenSinks; j++) total += row[j] = Math.exp(row[j] - top);
  for (let j = near; j <= i; j++) total += row[j] = Math.exp(row[j] - top);
  far.forEach((value, at) => {
    const weight = Math.exp(value - top);
    total += weight;
    slots[at].tokens.forEach((token, m) => (row[token] = weight * slots[at].shares[m]));
  });
  for (let j = 0; j <= i; j++) row[j] /= total;
}
