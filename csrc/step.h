// One token: the sums of a kv head go from the old state to the new one in one pass, and are read on the way.
#pragma once
#include "forward.h"

namespace {

constexpr int64_t MOST_HEADS = 16;  // that take a step together

// Columns [j, j + W VL) of S: new = old factor + phi_k v; out += phi_q new.
template <int W, bool FULL>
INLINE void step_columns(const Call& c, int64_t j, const float* S, float* S_new, float factor, const float* phi_k,
                         const float* v, const float* phi_q, float inverse, float* out, bool add) {
  const int64_t M = c.value_dim;
  vec acc[W] = {}, value[W];
  UNROLL(4)
  for (int w = 0; w < W; ++w) value[w] = FULL ? load(v + j + w * VL) : load_some(v + j + w * VL, M - j - w * VL);
  for (int64_t i = 0; i < c.features; ++i) {
    const float weight = phi_k[i], read = phi_q[i];
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      const int64_t at = i * M + j + w * VL, left = FULL ? VL : M - j - w * VL;
      vec s;
      if (add) {
        s = load_some(S + at, left) * factor + value[w] * weight;
        store_some(S_new + at, s, left);
      } else {
        s = load_some(S_new + at, left);
      }
      acc[w] += s * read;
    }
  }
  UNROLL(4)
  for (int w = 0; w < W; ++w) store_some(out + j + w * VL, acc[w] * inverse, M - j - w * VL);
}

// Features of the one key of each of n heads, weighted against the level of its sums. `level` goes to the level after
// the token, `factor` to what the old sums are multiplied with.
struct StepKeys {
  double level[MOST_HEADS];
  float factor[MOST_HEADS];
  bool any[MOST_HEADS];
};

StepKeys step_keys(const Call& c, int64_t head, int64_t n, const KeySpace& s) {
  const int64_t b = head / c.kv_heads;
  uint8_t masks[MOST_HEADS];
  memset(masks, c.mask ? c.mask[b] : 1, sizeof masks);
  const void* first = token(c, c.key, c.key_stride, b, head % c.kv_heads, 0);
  const Rows x = rows(c, first, c.key_stride[1], c.dim, n, c.mask ? masks : nullptr, false, s.x);
  if (c.square != 0) square_sums(x, n, c.dim, s.tops);
  StepKeys k;
  double before[MOST_HEADS], raised[MOST_HEADS] = {};
  for (int64_t i = 0; i < n; ++i) {
    double w = c.constant + (c.square != 0 ? c.square * s.tops[i] : 0);
    if (c.log_decay) w -= LOG2E * c.log_decay[head + i];
    if (c.log_weight) w += LOG2E * c.log_weight[head + i];
    if (!masks[i]) w = EMPTY;
    k.any[i] = w > EMPTY;
    before[i] = read_level(c.scale[head + i]);
    k.level[i] = !c.scaled ? 0 : before[i] == EMPTY && k.any[i] ? __builtin_ceil(w) : before[i];
    s.offset[i] = k.any[i] ? fmax2(float(w - k.level[i]), HIDDEN) : HIDDEN;
  }
  features(c, x, n, s.offset, s.phi, s.tops, s.work);
  bool again = false;
  for (int64_t i = 0; i < n; ++i) {
    const bool low = before[i] == EMPTY && s.tops[i] < -HIGHEST;
    if (!c.scaled || !k.any[i] || !finite(s.tops[i]) || !(s.tops[i] > HIGHEST || low)) continue;
    raised[i] = __builtin_ceil(s.tops[i]);
    s.offset[i] -= float(raised[i]);
    again = true;
  }
  if (again) features(c, x, n, s.offset, s.phi, s.tops, s.work);
  for (int64_t i = 0; i < n; ++i) {
    k.factor[i] = before[i] == EMPTY ? 0 : exp2s(c.scaled ? float(-raised[i]) : float(before[i]));
    if (c.scaled) k.level[i] += raised[i] + (c.log_decay ? LOG2E * c.log_decay[head + i] : 0);
  }
  return k;
}

// n kv heads of one batch entry, whose features are made together.
int32_t step(const Call& c, int64_t head, int64_t n) {
  const int64_t b = head / c.kv_heads, groups = c.heads / c.kv_heads;
  const int64_t r = c.features, ld = lead(r), M = c.value_dim;
  float* space = scratch((n * (1 + groups) + 1) * ld + key_floats(c, n) + query_floats(c, n * groups) + 256);
  float* phi_k = take(space, n * ld);
  float* phi_q = take(space, n * groups * ld);
  float* z = take(space, ld);
  const KeySpace keys = key_space(c, n, take(space, key_floats(c, n)), phi_k);
  const StepKeys k = step_keys(c, head, n, keys);
  QuerySpace queries = query_space(c, n * groups, space);
  const int64_t first = (head % c.kv_heads) * groups;
  const void* query = token(c, c.query, c.query_stride, b, first, 0);
  take_queries(c, query, c.query_stride[1], n * groups, queries, phi_q, nullptr, nullptr);
  int32_t flags = OK;
  for (int64_t i = 0; i < n; ++i, ++head) {
    const float *Z = c.Z + head * r, *S = c.S + head * r * M;
    float *Z_new = c.Z_new + head * r, *S_new = c.S_new + head * r * M;
    const uint8_t* mask = c.mask ? c.mask + b : nullptr;
    const void* value = token(c, c.value, c.value_stride, b, head % c.kv_heads, 0);
    const Rows v = rows(c, value, 0, M, 1, mask, false, keys.v);
    for (int64_t j = 0; j < r; ++j) z[j] = Z_new[j] = Z[j] * k.factor[i] + phi_k[i * ld + j];
    memset(z + r, 0, size_t(ld - r) * 4);
    c.scale_new[head] = write_level(k.level[i]);
    c.tokens_new[head] = c.tokens[head] + k.any[i];
    c.guarded_new[head] = c.guarded[head];
    for (int64_t g = 0; g < groups; ++g) {
      const float* read = phi_q + (i * groups + g) * ld;
      float den = dot(read, z, r);
      c.guarded_new[head] += invert(&den, 1, c.tokens_new[head] ? 0 : 1, flags);
      float* out = c.out + (b * c.heads + first + i * groups + g) * M;
      int64_t j = 0;
      for (; j + NR * VL <= M; j += NR * VL) {
        step_columns<NR, true>(c, j, S, S_new, k.factor[i], phi_k + i * ld, v.at, read, den, out, g == 0);
      }
      for (; j < M; j += VL) {
        step_columns<1, false>(c, j, S, S_new, k.factor[i], phi_k + i * ld, v.at, read, den, out, g == 0);
      }
      for (int64_t m = 0; m < M; ++m) flags |= finite(out[m]) ? OK : NOT_FINITE;
    }
  }
  return flags;
}

}  // namespace
