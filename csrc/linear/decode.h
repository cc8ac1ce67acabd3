/// Decoding, one token per call: one pass over the state of a kv head updates it and reads it.
#pragma once
#include "linear/causal_forward.h"

namespace {

constexpr int64_t MAX_HEADS = 16;  // kv heads whose features are computed together

/// What decode_columns works on, for one kv head and one of its query heads.
struct DecodeRow {
  const float *S, *phi_k, *v, *phi_q;
  float* S_new;
  float rescale;        // of the old state
  float inverse;        // 1 / denominator
  float* out;           // (M)
  bool update;          // S_new is computed, by the first query head of a group; else it is only read
  const float* random;  // (r) for add_rounded, or null: to nearest
};

/// a + term, rounded up or down by chance (`random` in (-1/2, 1/2), see round_sum), so that tokens are not lost in the
/// large sums of a long stream. The noise is in units of the last place of a, which total has unless the term is as large.
INLINE vec add_rounded(vec a, vec term, vec random) { return a + (term + last_place(a, term) * random); }

/// Columns [j, j + W VL) of S: S_new = S rescale + phi_k v'; out = inverse phi_q S_new.
template <int W, bool FULL>
INLINE void decode_columns(const LinearCall& c, int64_t j, const DecodeRow& row) {
  const int64_t M = c.value_dim;
  const DecodeRow r = row;  // a local copy, which no store can alias
  vec acc[W] = {}, value[W];
  UNROLL(4)
  for (int w = 0; w < W; ++w) value[w] = FULL ? load(r.v + j + w * VL) : load_some(r.v + j + w * VL, M - j - w * VL);
  for (int64_t i = 0; i < c.features; ++i) {
    const float weight = r.phi_k[i], read = r.phi_q[i];
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      const int64_t at = i * M + j + w * VL, left = FULL ? VL : M - j - w * VL;
      vec s;
      if (r.update) {
        const vec old = load_some(r.S + at, left) * r.rescale;
        s = r.random ? add_rounded(old, value[w] * weight, splat(r.random[i])) : old + value[w] * weight;
        store_some(r.S_new + at, s, left);
      } else {
        s = load_some(r.S_new + at, left);
      }
      acc[w] += s * read;
    }
  }
  UNROLL(4)
  for (int w = 0; w < W; ++w) store_some(r.out + j + w * VL, acc[w] * r.inverse, M - j - w * VL);
}

/// The one key of each of several kv heads: unlike in a KeyBlock, each has a state, and so a scale, of its own.
struct DecodeKeys {
  double log2_scale[MAX_HEADS];  // of the state after the token
  float rescale[MAX_HEADS];      // the factor of the old state
};

/// s.phi (n, feature_stride(r)): features of the keys of n kv heads, each weighted relative to the scale of its state.
DecodeKeys decode_keys(const LinearCall& c, int64_t head, int64_t n, const KeyScratch& s) {
  const int64_t b = head / c.kv_heads;
  uint8_t masks[MAX_HEADS];
  memset(masks, c.mask ? c.mask[b] : 1, sizeof masks);
  const void* first = token_ptr(c.dtype, c.key, c.key_stride, b, head % c.kv_heads, 0);
  const Rows x = load_rows(c.dtype, first, c.key_stride[1], c.dim, n, c.mask ? masks : nullptr, false, s.x);
  if (c.norm_coef != 0) squared_norms(x, n, c.dim, s.row_max);
  key_log2_weights(c, head, n, s.row_max, masks, OWN_DECAY, s.weight);
  DecodeKeys k;
  double before[MAX_HEADS], raised[MAX_HEADS] = {};
  bool scaled[MAX_HEADS], counts[MAX_HEADS];  // counts: the key is visible, and its log-weight is not -inf
  for (int64_t i = 0; i < n; ++i) {
    counts[i] = s.weight[i] > EMPTY;
    before[i] = log2_from_natural(c.log_scale[head + i]);
    scaled[i] = c.scaled || (c.mask && before[i] != EMPTY && before[i] != 0);  // see keeps_scale
    k.log2_scale[i] = !scaled[i] ? 0 : before[i] == EMPTY && counts[i] ? __builtin_floor(s.weight[i]) : before[i];
    double gap = s.weight[i] - k.log2_scale[i];
    if (scaled[i] && counts[i] && gap > 16) {  // in whole bits, before float32 rounds what is left of a strong decay
      raised[i] = __builtin_floor(gap);
      gap -= raised[i];
    }
    s.offset[i] = counts[i] ? fmax2(float(gap), MASKED) : MASKED;
  }
  apply_feature_map(c, x, n, s.offset, s.phi, s.row_max, s.work);
  // The scale is kept in float32 between tokens: decay must not take it far from 0, where it would be rounded coarsely.
  const float most = c.log_decay ? 1 : MAX_LOG2;
  bool again = false;
  for (int64_t i = 0; i < n; ++i) {
    const bool low = before[i] == EMPTY && s.row_max[i] < MIN_LOG2;
    if (!scaled[i] || !counts[i] || !finite(s.row_max[i]) || !(s.row_max[i] > most || low)) continue;
    const double more = __builtin_floor(s.row_max[i]);
    raised[i] += more;
    s.offset[i] -= float(more);
    again = true;
  }
  if (again) apply_feature_map(c, x, n, s.offset, s.phi, s.row_max, s.work);
  for (int64_t i = 0; i < n; ++i) {
    k.rescale[i] = before[i] == EMPTY ? 0 : exp2_exact(scaled[i] ? -raised[i] : before[i]);
    if (scaled[i]) k.log2_scale[i] += raised[i] + (c.log_decay ? LOG2E * c.log_decay[head + i] : 0);
  }
  return k;
}

/// z and Z_new (r): the old Z rescaled, plus phi_k. random: (r) for add_rounded, or null. z is padded with zeros.
void decode_denominator(int64_t r, const float* Z, float rescale, const float* phi_k, const float* random, float* z,
                        float* Z_new) {
  for (int64_t j = 0; j < r; j += VL) {
    const vec old = load_some(Z + j, r - j) * rescale, term = load_some(phi_k + j, r - j);
    const vec sum = random ? add_rounded(old, term, load_some(random + j, r - j)) : old + term;
    store_some(Z_new + j, sum, r - j);
    store_some(z + j, sum, r - j);
  }
  memset(z + r, 0, size_t(feature_stride(r) - r) * 4);
}

/// The noise (r) by which the state of a head is rounded after `tokens` tokens, or null for few tokens. `noise` holds that
/// of the heads before: after as many tokens it is the same.
const float* decode_noise(int64_t tokens, int64_t r, int64_t& noise_of, float* noise) {
  if (tokens < LONG_STREAM) return nullptr;
  if (noise_of != tokens) {
    for (int64_t j = 0; j < r; ++j) noise[j] = dither(uint64_t(tokens), j);
    noise_of = tokens;
  }
  return noise;
}

/// One kv head: its new state, and the outputs of its query heads. phi_k (r), phi_q (groups, feature_stride(r)); random as
/// decode_noise returns it; z (feature_stride(r)) and v (row_stride(M)) are work space. Returns flags.
int32_t decode_head(const LinearCall& c, int64_t head, float rescale, const float* phi_k, const float* phi_q,
                    const float* random, float* z, float* v) {
  const int64_t b = head / c.kv_heads, kv = head % c.kv_heads, groups = c.heads / c.kv_heads;
  const int64_t r = c.features, ld = feature_stride(r), M = c.value_dim;
  const uint8_t* mask = c.mask ? c.mask + b : nullptr;
  const void* value = token_ptr(c.dtype, c.value, c.value_stride, b, kv, 0);
  decode_denominator(r, c.Z + head * r, rescale, phi_k, random, z, c.Z_new + head * r);
  c.tokens_new[head] = c.tokens[head] + (!mask || *mask);
  c.guarded_new[head] = c.guarded[head];
  DecodeRow row{c.S + head * r * M,
                phi_k,
                load_rows(c.dtype, value, 0, M, 1, mask, false, v).at,
                nullptr,
                c.S_new + head * r * M,
                rescale,
                0,
                nullptr,
                true,
                random};
  int32_t flags = OK;
  for (int64_t g = 0; g < groups; ++g) {
    row.phi_q = phi_q + g * ld, row.update = g == 0;
    row.inverse = dot(row.phi_q, z, r);
    c.guarded_new[head] += invert_denominators(c, &row.inverse, 1, c.tokens_new[head] ? 0 : 1, flags);
    row.out = c.out + (b * c.heads + kv * groups + g) * M;
    int64_t j = 0;
    for (; j + NR * VL <= M; j += NR * VL) decode_columns<NR, true>(c, j, row);
    for (; j < M; j += VL) decode_columns<1, false>(c, j, row);
    for (int64_t m = 0; m < M; ++m) flags |= finite(row.out[m]) ? OK : NOT_FINITE;
  }
  return flags;
}

/// One token for the n kv heads from `head` on, all of one batch entry. Returns flags.
int32_t decode(const LinearCall& c, int64_t head, int64_t n) {
  const int64_t b = head / c.kv_heads, groups = c.heads / c.kv_heads, ld = feature_stride(c.features);
  float* space = scratch((n * (1 + groups) + 2) * ld + key_floats(c, n) + query_floats(c, n * groups) + 256);
  float* phi_k = carve(space, n * ld);
  float* phi_q = carve(space, n * groups * ld);
  float* z = carve(space, ld);
  float* noise = carve(space, ld);
  const KeyScratch keys = key_scratch(c, n, carve(space, key_floats(c, n)), phi_k);
  const DecodeKeys k = decode_keys(c, head, n, keys);
  QueryScratch queries = query_scratch(c, n * groups, space);
  const void* query = token_ptr(c.dtype, c.query, c.query_stride, b, (head % c.kv_heads) * groups, 0);
  query_features(c, query, c.query_stride[1], n * groups, queries, phi_q, nullptr, nullptr);
  int32_t flags = OK;
  int64_t noise_of = -1;
  for (int64_t i = 0; i < n; ++i) {
    const float* random = decode_noise(c.tokens[head + i], c.features, noise_of, noise);
    c.log_scale_new[head + i] = natural_from_log2(k.log2_scale[i]);
    flags |= decode_head(c, head + i, k.rescale[i], phi_k + i * ld, phi_q + i * groups * ld, random, z, keys.v);
  }
  return flags;
}

}  // namespace
