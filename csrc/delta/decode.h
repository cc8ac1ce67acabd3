/// One token: each head's state is read once for k^T S and q^T S, and written once while it is still in cache. On the
/// machines measured, asking ahead for the next head's state or the new one's lines made it slower.
#pragma once
#include "delta/forward.h"

namespace {

#if defined(__AVX512F__)
constexpr int DECODE_WIDTH = 8;
#else
constexpr int DECODE_WIDTH = 4;
#endif

/// The one token of a head, rows padded to whole vectors. Keys and queries come twice: as they are, and multiplied by the
/// decay, as they read the old state.
struct StepToken {
  int64_t dim, value_dim, groups, full;  // full: dim rounded up to 16
  const float *key, *faded_key, *decay;  // (full)
  const float* faded_query;              // (groups, full)
  const float* own;                      // (groups): q . k
  const float* value;                    // (value_dim, padded)
  float beta;
  float* out;  // (groups, ld)
  int64_t ld;
};

/// VL columns, or the first `left` of them and then 0.
template <bool FULL>
INLINE vec load_columns(const float* at, int64_t left) {
  return FULL ? load(at) : load_some(at, left);
}

/// Columns [j, j + W VL) of a head: out, and fresh (D, M) = diag(decay) old + k u^T. old may be `fresh`.
template <int W, bool FULL>
INLINE void decode_columns(const StepToken& s, int64_t j, const float* old, float* fresh) {
  const int64_t M = s.value_dim;
  vec u[W] = {};
  for (int64_t g = 0; g < s.groups; ++g) {
    vec read_k[W] = {}, read_q[W] = {};
    const float* q = s.faded_query + g * s.full;
    for (int64_t d = 0; d < s.dim; ++d) {
      const vec key = splat(s.faded_key[d]), query = splat(q[d]);
      UNROLL(8)
      for (int w = 0; w < W; ++w) {
        const vec x = load_columns<FULL>(old + d * M + j + w * VL, M - j - w * VL);
        read_k[w] += x * key;
        read_q[w] += x * query;
      }
    }
    UNROLL(8)
    for (int w = 0; w < W; ++w) {
      if (g == 0) u[w] = (load(s.value + j + w * VL) - read_k[w]) * s.beta;
      store(s.out + g * s.ld + j + w * VL, read_q[w] + u[w] * s.own[g]);
    }
  }
  for (int64_t d = 0; d < s.dim; ++d) {
    const vec key = splat(s.key[d]), decay = splat(s.decay[d]);
    UNROLL(8)
    for (int w = 0; w < W; ++w) {
      const int64_t at = d * M + j + w * VL, left = M - j - w * VL;
      const vec x = load_columns<FULL>(old + at, left) * decay + u[w] * key;
      FULL ? store(fresh + at, x) : store_some(fresh + at, x, left);
    }
  }
}

/// The one token of `count` state heads, counted over the batch.
void decode(const DeltaCall& c, int64_t first, int64_t count) {
  const int64_t D = c.dim, M = c.value_dim, full = round_up(D, 16), ld = round_up(M, 16) + 16;
  const int64_t groups = imax(1, c.query_heads / c.heads);
  float* space = scratch((4 + groups) * full + (groups + 1) * ld + 2 * groups + 256);
  float *key = carve(space, full), *faded_key = carve(space, full), *decay = carve(space, full),
        *query = carve(space, full);
  float *faded_query = carve(space, groups * full), *value = carve(space, ld), *out = carve(space, groups * ld);
  float* own = carve(space, groups);
  float inverse[1];
  for (int64_t head = first; head < first + count; ++head) {
    const Place at(c, {head / c.heads, 0, head % c.heads, 0, M});
    const uint8_t* mask = at.mask(0);
    const bool counts = !mask || *mask;
    load_chunk(c.dtype, at.key(0), 0, D, 1, 1, mask, 1.0f, c.normalize ? inverse : nullptr, key, full);
    load_chunk(c.dtype, at.value(0), 0, M, 1, 1, mask, 1.0f, nullptr, value, ld);
    const float* g = at.log_decay(0);
    const vec same = exp_decay(splat(g && counts && !c.channels ? *g : 0.0f));
    for (int64_t d = 0; d < full; d += VL) {
      const bool own_decay = c.channels && counts && d < D;
      store(decay + d, own_decay ? exp_decay(load_some(g + d, D - d)) : same);
      store(faded_key + d, load(key + d) * load(decay + d));
    }
    for (int64_t i = 0; i < groups; ++i) {
      load_chunk(c.dtype, at.query(i, 0), 0, D, 1, 1, nullptr, c.scale, c.normalize ? inverse : nullptr, query, full);
      own[i] = dot(query, key, full);
      for (int64_t d = 0; d < full; d += VL) store(faded_query + i * full + d, load(query + d) * load(decay + d));
    }
    const float beta = counts ? *at.beta(0) : 0;
    const StepToken token{D, M, groups, full, key, faded_key, decay, faded_query, own, value, beta, out, ld};
    float* const fresh = c.state_new + at.state_at();
    if (!c.state) memset(fresh, 0, size_t(D * M) * 4);
    const float* const old = c.state ? c.state + at.state_at() : fresh;
    int64_t j = 0;
    for (; j + DECODE_WIDTH * VL <= M; j += DECODE_WIDTH * VL) decode_columns<DECODE_WIDTH, true>(token, j, old, fresh);
    for (; j < M; j += VL) decode_columns<1, false>(token, j, old, fresh);
    for (int64_t i = 0; i < groups; ++i) store_rows(c.dtype, out + i * ld, ld, 1, M, at.out(i, 0), 0);
  }
}

}  // namespace
