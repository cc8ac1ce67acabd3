// States that can be moved to any token: sums S and Z, the delta rule's S, and near/far's slots.
import { softmax } from "./attention.js";
import { deltaRead, deltaStep, unitRows } from "./delta.js";
import { featureMap } from "./kernels.js";
import { nearFarRows } from "./nearfar.js";

const row = (x, i, width) => x.subarray(i * width, (i + 1) * width);

/** S (count, width) and Z (count), both times exp(-level): the level keeps exponentials in range. */
export class SumsState {
  constructor(data, settings) {
    this.data = data;
    this.decay = settings.causal ? settings.decay || 0 : 0;
    this.map = featureMap(settings, data.dim);
    this.key = new Float64Array(this.map.count);
    this.query = new Float64Array(this.map.count);
    this.reset();
  }

  reset() {
    this.at = -1;
    this.level = -Infinity;
    this.S = new Float64Array(this.map.count * this.data.width);
    this.Z = new Float64Array(this.map.count);
  }

  /** Adds tokens until `token` is in, from the start if it lies behind. */
  goTo(token) {
    if (token < this.at) this.reset();
    while (this.at < token) this.step();
    const { data, map, S, Z, query } = this;
    map.row(data.q, token, query);
    const numerator = new Float64Array(data.width);
    let denominator = 0;
    for (let a = 0; a < map.count; a++) {
      denominator += query[a] * Z[a];
      for (let c = 0, at = a * data.width; c < data.width; c++) numerator[c] += query[a] * S[at++];
    }
    const out = numerator.map((x) => x / denominator);
    return { S, Z, level: this.level, key: this.key, query, value: row(data.v, token, data.width), numerator, denominator, out };
  }

  step() {
    const { data, map, key, S, Z } = this;
    const token = ++this.at;
    const logWeight = map.row(data.k, token, key);
    const kept = this.level + this.decay;
    const level = Math.max(kept, logWeight);
    const keep = kept === -Infinity ? 0 : Math.exp(kept - level);
    const weight = Math.exp(logWeight - level);
    const value = row(data.v, token, data.width);
    for (let a = 0; a < map.count; a++) {
      key[a] *= weight;
      Z[a] = Z[a] * keep + key[a];
      for (let c = 0, at = a * data.width; c < data.width; c++, at++) S[at] = S[at] * keep + key[a] * value[c];
    }
    this.level = level;
  }
}

/** The delta rule's S (dim, width). */
export class DeltaState {
  constructor(data, settings) {
    this.data = data;
    this.settings = settings;
    this.q = unitRows(data.q, data.n, data.dim);
    this.k = unitRows(data.k, data.n, data.dim);
    this.reset();
  }

  reset() {
    this.at = -1;
    this.S = new Float64Array(this.data.dim * this.data.width);
  }

  goTo(token) {
    if (token < this.at) this.reset();
    const { data, S } = this;
    const { beta, decay } = this.settings;
    while (this.at < token) {
      const t = ++this.at;
      this.last = deltaStep(S, row(this.k, t, data.dim), row(data.v, t, data.width), data.width, beta, decay);
    }
    const query = row(this.q, token, data.dim);
    const out = deltaRead(S, query, data.width, new Float64Array(data.width));
    return { S, key: row(this.k, token, data.dim), query, value: row(data.v, token, data.width), ...this.last, out };
  }
}

/** Near/far's slots, as they were when the block of a token was entered. */
export class SlotsState {
  constructor(data, settings) {
    this.data = data;
    this.settings = settings;
    this.blocks = [];
    this.rows = [];
    const rows = nearFarRows(data, settings, () => {}, (block) => this.blocks.push(block));
    while (!rows.next().done);
  }

  /** { block, weights of sinks, slots and near tokens for this token's query, in one softmax }. */
  goTo(token) {
    const { data, blocks, settings } = this;
    const block = blocks[Math.floor(token / settings.block)];
    const { dim } = data;
    const scale = 1 / Math.sqrt(dim);
    const query = row(data.q, token, dim);
    const exact = (j) => row(data.k, j, dim).reduce((sum, x, c) => sum + x * query[c], 0) * scale;
    const root = dim ** -0.25;
    const pooled = (slot) => slot.key.reduce((sum, x, c) => sum + x * query[c] * root, 0) + slot.bias;
    const near = [];
    for (let j = block.near; j <= token; j++) near.push(j);
    const sinks = Array.from({ length: block.sinks }, (_, j) => j);
    const logits = [...sinks.map(exact), ...block.slots.map(pooled), ...near.map(exact)];
    const weights = Float64Array.from(logits);
    softmax(weights, weights.length);
    const end = sinks.length + block.slots.length;
    return {
      block,
      sinks: weights.slice(0, sinks.length),
      slots: weights.slice(sinks.length, end),
      near: weights.slice(end),
      logits: logits.slice(sinks.length, end),
    };
  }
}
