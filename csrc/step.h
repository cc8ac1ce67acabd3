// One token: the sums of a kv head go from the old state to the new one in one pass, and are read on the way.
#pragma once
#include "forward.h"

namespace {

// Columns [j, j + W VL) of S: new = old factor + phi_k v; out += phi_q new.
template <int W>
INLINE void step_columns(const Call& c, int64_t j, const float* S, float* S_new, float factor, const float* phi_k,
                         const float* v, const float* phi_q, float inverse, float* out, bool add) {
  const int64_t M = c.value_dim;
  vec acc[W] = {}, value[W];
#pragma GCC unroll 4
  for (int w = 0; w < W; ++w) value[w] = load_some(v + j + w * VL, M - j - w * VL);
  for (int64_t i = 0; i < c.features; ++i) {
    const float weight = phi_k[i], read = phi_q[i];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      const int64_t at = i * M + j + w * VL, left = M - j - w * VL;
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
#pragma GCC unroll 4
  for (int w = 0; w < W; ++w) store_some(out + j + w * VL, acc[w] * inverse, M - j - w * VL);
}

int32_t step(const Call& c, int64_t head) {
  const int64_t b = head / c.kv_heads, groups = c.heads / c.kv_heads, first = (head % c.kv_heads) * groups;
  const int64_t r = c.features, ld = lead(r), M = c.value_dim;
  float* space = scratch(3 * ld + key_floats(c, 1) + query_floats(c, 1) + 256);
  float* phi_k = take(space, ld);
  float* phi_q = take(space, ld);
  float* z = take(space, ld);
  const KeySpace keys = key_space(c, 1, take(space, key_floats(c, 1)), phi_k);
  const QuerySpace queries = query_space(c, 1, space);
  const double before = read_level(c.scale[head]);
  double level = c.scaled ? before : 0;
  const Keys k = take_keys(c, head, 0, 1, Sums{&level, nullptr, nullptr, 0}, true, keys);
  const float factor = before == EMPTY ? 0 : k.lowered * (c.scaled ? 1 : exp2s(float(before)));
  const float *Z = c.Z + head * r, *S = c.S + head * r * M;
  float *Z_new = c.Z_new + head * r, *S_new = c.S_new + head * r * M;
  for (int64_t i = 0; i < r; ++i) z[i] = Z_new[i] = Z[i] * factor + phi_k[i];
  memset(z + r, 0, size_t(ld - r) * 4);
  c.scale_new[head] = write_level(c.scaled ? level + k.log2_decay : 0);
  c.tokens_new[head] = c.tokens[head] + k.any;
  c.guarded_new[head] = c.guarded[head];
  int32_t flags = OK;
  for (int64_t g = 0; g < groups; ++g) {
    float den;
    take_queries(c, b, first + g, 0, 1, queries, phi_q, z, &den);
    c.guarded_new[head] += invert(&den, 1, c.tokens_new[head] ? 0 : 1, flags);
    float* out = c.out + (b * c.heads + first + g) * M;
    int64_t j = 0;
    for (; j + NR * VL <= M; j += NR * VL) {
      step_columns<NR>(c, j, S, S_new, factor, phi_k, k.v.at, phi_q, den, out, g == 0);
    }
    for (; j < M; j += VL) step_columns<1>(c, j, S, S_new, factor, phi_k, k.v.at, phi_q, den, out, g == 0);
    for (int64_t m = 0; m < M; ++m) flags |= finite(out[m]) ? OK : NOT_FINITE;
  }
  return flags;
}

}  // namespace
