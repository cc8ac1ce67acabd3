/// One token: the state is read once and written once, and each new row of it is used for the output at once.
#pragma once
#include "decay/forward.h"

namespace {

constexpr int DECODE_WORDS = VL >= 16 ? 8 : 4;  // vectors of a row at a time: with their sums they stay in registers

/// Columns [j, j + W VL) of one head: S_new = factor_d S + k_d v^T, out = scale q S_new. With `update` false S_new is only
/// read. factor: (D), or one number where `step` is 0.
template <int W, bool FULL>
INLINE void decode_columns(const DecayCall& c, int64_t j, const float* S, float* S_new, const float* factor, int64_t step,
                           const float* k, const float* v, const float* q, float* out, bool update) {
  const int64_t M = c.value_dim;
  vec acc[W], value[W];
  UNROLL(8)
  for (int w = 0; w < W; ++w) acc[w] = vec{}, value[w] = load_some(v + j + w * VL, FULL ? VL : M - j - w * VL);
  for (int64_t d = 0; d < c.dim; ++d) {
    const vec f = splat(factor[d * step]), weight = splat(k[d]), read = splat(q[d]);
    UNROLL(8)
    for (int w = 0; w < W; ++w) {
      const int64_t at = d * M + j + w * VL, left = FULL ? VL : M - j - w * VL;
      vec s = load_some((update ? S : S_new) + at, left);
      if (update) {
        s = s * f + value[w] * weight;
        store_some(S_new + at, s, left);
      }
      acc[w] += s * read;
    }
  }
  UNROLL(8)
  for (int w = 0; w < W; ++w) store_some(out + j + w * VL, acc[w] * c.scale, FULL ? VL : M - j - w * VL);
}

/// All columns of one output head.
template <bool UPDATE>
void decode_output(const DecayCall& c, const float* S, float* S_new, const float* factor, int64_t step, const float* k,
                   const float* v, const float* q, float* out) {
  int64_t j = 0;
  for (; j + DECODE_WORDS * VL <= c.value_dim; j += DECODE_WORDS * VL) {
    decode_columns<DECODE_WORDS, true>(c, j, S, S_new, factor, step, k, v, q, out, UPDATE);
  }
  for (; j + 4 * VL <= c.value_dim; j += 4 * VL) {
    decode_columns<4, true>(c, j, S, S_new, factor, step, k, v, q, out, UPDATE);
  }
  for (; j < c.value_dim; j += VL) decode_columns<1, false>(c, j, S, S_new, factor, step, k, v, q, out, UPDATE);
}

/// One token of one state head; c.state_new may be c.state.
int32_t decode(const DecayCall& c, int64_t batch, int64_t head) {
  const int64_t D = row_stride(c.dim), M = row_stride(c.value_dim), at = (batch * c.heads + head) * c.dim * c.value_dim;
  float* space = scratch(3 * D + 2 * M + 80);
  float* key = take_floats(space, D);
  float* query = take_floats(space, D);
  float* factor = take_floats(space, D);
  float* value = take_floats(space, M);
  float* out = take_floats(space, M);
  const Chunk x = chunk_at(c, batch, 0, 1);
  const float* k = chunk_rows(c, x, c.key, c.key_stride, key_head(c, head), c.dim, true, key).at;
  const float* v = chunk_rows(c, x, c.value, c.value_stride, head, c.value_dim, true, value).at;
  const int64_t factors = c.per_channel && c.log_decay ? c.dim : 1;
  const float* g = c.log_decay + (c.log_decay ? batch * c.decay_stride[0] + head * c.decay_stride[1] : 0);
  for (int64_t d = 0; d < factors; ++d) factor[d] = c.log_decay && !(x.mask && !*x.mask) ? g[d] : 0;
  for (int64_t d = 0; d < factors; d += VL) store(factor + d, exp_decay(load_some(factor + d, factors - d)));
  const float* S = c.state ? c.state + at : nullptr;
  if (!S) memset(c.state_new + at, 0, size_t(c.dim * c.value_dim) * 4), S = c.state_new + at;
  for (int64_t output = head * readers(c); output < (head + 1) * readers(c); ++output) {
    const float* q = chunk_rows(c, x, c.query, c.query_stride, query_head(c, output), c.dim, false, query).at;
    if (output == head * readers(c)) {
      decode_output<true>(c, S, c.state_new + at, factor, factors > 1, k, v, q, out);
    } else {
      decode_output<false>(c, S, c.state_new + at, factor, factors > 1, k, v, q, out);
    }
    write_rows(c, x, output, out, M);
  }
  return OK;
}

}  // namespace
