// Where queries, keys and values come from: Gaussian vectors, a vector per letter, hand-made heads, heads of a model.
import { Generator } from "./random.js";
import { handmade, readLetters } from "./handmade.js";

export const SOURCES = {
  head: "a head of a pretrained model",
  letters: "one random vector per letter",
  gaussian: "Gaussian vectors",
  handmade: "a head set by hand",
};

/** The characters of a text, repeated or cut to n. */
export function characters(text, n) {
  const all = [...(text || " ")];
  return Array.from({ length: n }, (_, i) => all[i % all.length]);
}

/**
 * { q, k (n, dim), v (n, width), n, dim, width, tokens } before the norm is applied.
 *
 * heads: the heads of a model, see `readHeads`, or null.
 */
export function makeSource(settings, heads) {
  if (settings.source === "head" && heads) return ofHead(settings, heads);
  if (settings.source === "handmade") {
    return handmade(settings.design, readLetters(settings.design, settings.text));
  }
  const { n, dim, data } = settings;
  const tokens = characters(settings.text, n);
  const generator = new Generator(data);
  if (settings.source === "gaussian") {
    const all = generator.normal(3 * n * dim);
    const part = (i) => all.slice(i * n * dim, (i + 1) * n * dim);
    return { q: part(0), k: part(1), v: part(2), n, dim, width: dim, tokens };
  }
  const alphabet = [...new Set(tokens)].sort((a, b) => a.codePointAt(0) - b.codePointAt(0));
  const table = generator.normal(2 * alphabet.length * dim);
  const q = new Float64Array(n * dim);
  const v = new Float64Array(n * dim);
  tokens.forEach((token, i) => {
    const at = alphabet.indexOf(token) * dim;
    q.set(table.subarray(at, at + dim), i * dim);
    v.set(table.subarray(alphabet.length * dim + at, alphabet.length * dim + at + dim), i * dim);
  });
  return { q, k: q.slice(), v, n, dim, width: dim, tokens };
}

function ofHead({ layer, head, n }, heads) {
  const chosen = heads.layers[layer] || Object.values(heads.layers)[0];
  const h = Math.min(head, chosen.heads - 1);
  const kv = Math.floor((h * chosen.kvHeads) / chosen.heads);
  const total = heads.tokens.length;
  const count = Math.min(n, total);
  const rows = (x, index, width) => Float64Array.from(x.subarray(index * total * width, (index * total + count) * width));
  return {
    q: rows(chosen.q, h, heads.dim),
    k: rows(chosen.k, kv, heads.dim),
    v: rows(chosen.v, kv, heads.dim),
    n: count,
    dim: heads.dim,
    width: heads.dim,
    tokens: heads.tokens.slice(0, count),
  };
}

/** Heads as the command wrote them: base64 of float32 or float16 (heads, tokens, dim), by layer. */
export function readHeads(given) {
  if (!given) return null;
  const layers = {};
  for (const [layer, part] of Object.entries(given.layers)) {
    const [q, k, v] = [part.q, part.k, part.v].map((text) => decode(text, given.dtype));
    layers[layer] = { q, k, v, heads: part.heads, kvHeads: part.kv_heads, names: part.names };
  }
  return { ...given, layers };
}

function decode(text, dtype) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  if (dtype !== "float16") return new Float32Array(bytes.buffer);
  return Float32Array.from(new Uint16Array(bytes.buffer), halfToNumber);
}

function halfToNumber(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** The same with queries and keys times `norm`. */
export function withNorm(data, norm) {
  return { ...data, q: data.q.map((x) => x * norm), k: data.k.map((x) => x * norm) };
}
