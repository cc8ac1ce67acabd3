// Near/far attention of one head: the rule of linattn.NearFar, with a record of which tokens every slot stands for.

const CANDIDATES = 128;
const RIDGE = 1e-4;
const LEAST_VARIANCE = 1e-12;
const LARGEST_LOG_WEIGHT = 46;
const TINY = 1e-30;
const DECAY = 0.95; // of the attention that was received, for each further block
const ALPHA = 1;

/**
 * A slot: its pooled key and value, its bias (0 for a single token), its tokens with the share that each has of it, and the
 * attention that it received from how many queries.
 */
const single = (key, value, token, received) => ({ key, value, bias: 0, tokens: [token], shares: [1], received });
const empty = (dim, width) => ({
  key: new Float64Array(dim), value: new Float64Array(width), bias: -Infinity, tokens: [], shares: [], received: [0, 0],
});

function dotOf(a, b) {
  let sum = 0;
  for (let c = 0; c < a.length; c++) sum += a[c] * b[c];
  return sum;
}

function squaredDistance(a, b) {
  let sum = 0;
  for (let c = 0; c < a.length; c++) sum += (a[c] - b[c]) ** 2;
  return sum;
}

/** Mean (the anchor) and variances (the metric) of the sampled queries. */
class QueryStatistics {
  constructor(dim) {
    this.dim = dim;
    this.count = 0;
    this.sum = new Float64Array(dim);
    this.square = new Float64Array(dim);
  }

  add(x) {
    this.count++;
    for (let a = 0; a < this.dim; a++) {
      this.sum[a] += x[a];
      this.square[a] += x[a] * x[a];
    }
  }

  anchorAndMetric() {
    const n = Math.max(this.count, 1);
    const anchor = this.sum.map((x) => x / n);
    const metric = this.square.map((x, a) => Math.max(0, x / n - anchor[a] ** 2));
    const mean = metric.reduce((a, b) => a + b, 0) / this.dim;
    const ridge = this.count > 0 ? RIDGE * Math.max(mean, LEAST_VARIANCE) : 1;
    return { anchor, metric: metric.map((x) => x + ridge) };
  }
}

/** The mean of the vectors `of` live slots. */
function meanOf(slots, of) {
  const mean = new Float64Array(slots[0][of].length);
  const live = Math.max(1, slots.filter((s) => s.bias > -Infinity).length);
  for (const slot of slots) for (let c = 0; c < mean.length; c++) mean[c] += slot[of][c] / live;
  return mean;
}

/** Slots in the order of rising importance: the weight that is expected of each, times the distance of its value from the mean. */
function rank(slots, { anchor, metric }) {
  const mean = meanOf(slots, "key");
  const found = slots.map((slot) => {
    const logWeight = slot.bias + dotOf(slot.key, anchor);
    let spread = 0;
    for (let c = 0; c < mean.length; c++) spread += metric[c] * (slot.key[c] - mean[c]) ** 2;
    return { slot, logWeight, expected: logWeight + spread / 2, rate: slot.received[0] / Math.max(slot.received[1], 1e-6) };
  });
  const top = found.reduce((most, f) => Math.max(most, f.expected), -Infinity);
  for (const one of found) one.expected = Math.exp(one.expected - top);
  const sum = found.reduce((total, f) => total + f.expected, 0);
  const rates = found.reduce((total, f) => total + f.rate, 0);
  for (const one of found) one.expected = rates > 0 ? one.rate + (one.expected / sum) * rates : one.expected / sum;
  const value = new Float64Array(slots[0].value.length);
  const weights = Math.max(TINY, found.reduce((total, f) => total + f.expected, 0));
  for (const one of found) for (let c = 0; c < value.length; c++) value[c] += (one.expected * one.slot.value[c]) / weights;
  for (const one of found) one.weight = one.expected * Math.sqrt(squaredDistance(one.slot.value, value));
  const largest = Math.max(TINY, found.reduce((most, f) => Math.max(most, f.weight), 0));
  for (const one of found) {
    one.importance = one.slot.bias > -Infinity ? Math.log(Math.max(TINY, one.weight / largest)) : -Infinity;
  }
  return found.sort((a, b) => (a.importance === b.importance ? 0 : a.importance - b.importance));
}

/** Merges slots into `size`, the cheapest pairs first. Returns the new slots and the merges as [from, into] tokens. */
export function merge(slots, size, statistics) {
  const ranked = rank(slots, statistics);
  const { into, kept } = choosePairs(ranked, size, statistics.metric);
  const groups = new Map(kept.map((index) => [index, [index]]));
  const merges = [];
  for (const [from, target] of into) {
    let root = target;
    while (into.has(root)) root = into.get(root);
    groups.get(root).push(from);
    if (ranked[from].slot.bias > -Infinity) merges.push([ranked[from].slot.tokens, ranked[root].slot.tokens]);
  }
  const pooled = kept.map((index) => pool(groups.get(index).map((i) => ranked[i]), statistics.anchor));
  return { slots: pooled, merges };
}

/** Which slots (by rank) are merged into which, and which are kept. */
function choosePairs(ranked, size, metric) {
  const n = ranked.length;
  const candidates = Math.min(n, Math.max(2 * (n - size), CANDIDATES));
  const top = ranked[n - 1].importance;
  const inverse = ranked.map((r) => {
    const gap = ALPHA * (top - r.importance);
    return Math.exp(Math.min(Number.isNaN(gap) ? 0 : gap, LARGEST_LOG_WEIGHT));
  });
  const root = metric.map(Math.sqrt);
  const keys = ranked.map((r) => r.slot.key.map((x, c) => x * root[c]));
  const live = ranked.filter((r) => r.slot.bias > -Infinity);
  const mean = meanOf(ranked.map((r) => r.slot), "value");
  const scatter = live.reduce((sum, r) => sum + squaredDistance(r.slot.value, mean), 0) / Math.max(1, live.length);
  const found = [];
  for (let i = 0; i < candidates; i++) {
    let cost = Infinity;
    let target = n - 1;
    for (let j = i + 1; j < n; j++) {
      const apart = 1 + squaredDistance(ranked[i].slot.value, ranked[j].slot.value) / (2 * Math.max(scatter, TINY));
      const one = (squaredDistance(keys[i], keys[j]) * apart) / (inverse[i] + inverse[j]);
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
  const value = new Float64Array(filled[0].slot.value.length);
  const tokens = [];
  const shares = [];
  const received = [0, 0];
  filled.forEach(({ slot }, i) => {
    const share = weights[i] / total;
    for (let c = 0; c < key.length; c++) key[c] += share * slot.key[c];
    for (let c = 0; c < value.length; c++) value[c] += share * slot.value[c];
    received[0] += slot.received[0];
    received[1] = Math.max(received[1], slot.received[1]);
    slot.tokens.forEach((token, at) => {
      tokens.push(token);
      shares.push(slot.shares[at] * share);
    });
  });
  return { key, value, bias: Math.log(total) + top - dotOf(key, anchor), tokens, shares, received };
}

/** What the slots and the tokens of the window received: every sampled query of a finished block pays its weights. */
class Received {
  constructor(n) {
    this.tokens = Array.from({ length: n }, () => [0, 0]);
  }

  /** rows: weights [sinks and near tokens by position, slots] of the samples of the block that began at `start`. */
  observe(samples, slots, { near, first, end }) {
    for (let p = Math.max(0, first); p < end; p++) {
      this.tokens[p] = this.tokens[p].map((x) => DECAY * x);
      if (p < near) continue;
      for (const { token, row } of samples) {
        if (p > token) continue;
        this.tokens[p][0] += row[p];
        this.tokens[p][1]++;
      }
    }
    slots.forEach((slot, s) => {
      const live = slot.bias > -Infinity;
      const paid = samples.reduce((sum, { far }) => sum + far[s], 0);
      slot.received = [DECAY * slot.received[0] + paid, DECAY * slot.received[1] + (live ? samples.length : 0)];
    });
  }
}

/**
 * Implied weights of causal near/far attention for the values v: what is merged depends on them too. onBlock, if given, gets
 * the state as each block of tokens is entered: { start, sinks, near, slots, merges } with `near` the first exact token.
 */
export function* nearFarRows({ q, k, v, n, dim, width }, { window, slots: budget, sinks, block }, emit, onBlock) {
  const root = dim ** -0.25;
  const x = Float64Array.from(q, (value) => value * root);
  const y = Float64Array.from(k, (value) => value * root);
  const statistics = new QueryStatistics(dim);
  const received = new Received(n);
  const stride = block % 4 === 0 ? 4 : 1;
  const row = new Float64Array(n);
  let slots = [];
  for (let start = 0; start < n; start += block) {
    let merges = [];
    const first = start - window - block;
    if (budget > 0 && start - window > sinks) {
      for (let p = first; p < start - window; p++) {
        const fresh = p >= sinks;
        const own = fresh ? [y.slice(p * dim, (p + 1) * dim), v.slice(p * width, (p + 1) * width), p, received.tokens[p]] : null;
        slots.push(fresh ? single(...own) : empty(dim, width));
      }
      if (slots.length > budget) {
        while (slots.length < budget + block) slots.push(empty(dim, width));
        ({ slots, merges } = merge(slots, budget, statistics.anchorAndMetric()));
      }
    }
    const seenSinks = Math.min(start, sinks);
    const near = Math.max(seenSinks, start - window);
    if (onBlock) onBlock({ start, sinks: seenSinks, near, slots: slots.filter((s) => s.bias > -Infinity), merges });
    const end = Math.min(start + block, n);
    const samples = [];
    for (let i = start; i < end; i++) {
      const far = blockRow(row, x.subarray(i * dim, (i + 1) * dim), y, i, { slots, seenSinks, near });
      if ((i - start) % stride === 0) samples.push({ token: i, row: row.slice(), far });
      emit(i, row, 1);
      yield;
    }
    for (const { token } of samples) statistics.add(x.subarray(token * dim, (token + 1) * dim));
    slots = slots.map((slot) => ({ ...slot })); // what the page was shown stays as it was
    received.observe(samples, slots, { near, first: start - window, end });
  }
}

/** One softmax over sinks, slots and near tokens; the weight of a slot goes to its tokens by their shares. Returns the slots'. */
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
    far[at] = Math.exp(value - top);
    total += far[at];
    slots[at].tokens.forEach((token, m) => (row[token] = far[at] * slots[at].shares[m]));
  });
  for (let j = 0; j <= i; j++) row[j] /= total;
  return far.map((weight) => weight / total);
}
