// One token of near/far attention inside a block: nothing is merged, and everything it sees is read where it lies.
#pragma once
#include "walk.h"

namespace {

// Keys beside values, E numbers apart.
struct Stretch {
  const float *at, *bias;  // bias: null for 0
  int64_t n;
};

// x.k of every token, in units of log2; whole vectors, NEVER behind the last.
void stretch_logits(const NearFarCall& c, const Stretch& s, const float* x, float* to) {
  const int64_t D = c.dim, E = D + c.value_dim, full = D / VL * VL;
  for (int64_t i = 0; i < s.n; i += VL) {
    vec dots[VL];
    UNROLL(16)
    for (int k = 0; k < VL; ++k) {
      const float* row = s.at + imin(i + k, s.n - 1) * E;
      vec a = {};
      for (int64_t d = 0; d < full; d += VL) a += load(row + d) * load(x + d);
      if (full < D) a += load_some(row + full, D - full) * load(x + full);
      dots[k] = a;
    }
    vec l = reduce<false>(dots);
    if (s.bias) l += vmax(load_some(s.bias + i, s.n - i) * LOG2E_F, splat(NEVER));
    if (i + VL > s.n) l = lanes() < splat(float(s.n - i)) ? l : splat(NEVER);
    store(to + i, l);
  }
}

// Columns [j, j + W VL) of the weighted values.
template <int W>
INLINE void stretch_values(const NearFarCall& c, const Stretch& s, const float* weight, int64_t j, vec (&acc)[W]) {
  const int64_t E = c.dim + c.value_dim, left = c.value_dim - j;
  const float* row = s.at + c.dim + j;
  for (int64_t i = 0; i < s.n; ++i, row += E) {
    UNROLL(4)
    for (int w = 0; w < W; ++w) acc[w] += (W == 1 ? load_some(row, left) : load(row + w * VL)) * weight[i];
  }
}

template <int W>
INLINE void weigh(const NearFarCall& c, const Stretch* parts, const float* weights, float factor, int64_t j, float* out,
                  vec& odd) {
  vec acc[W] = {};
  for (int p = 0; p < 3; ++p) {
    stretch_values<W>(c, parts[p], weights, j, acc);
    weights += round_up(parts[p].n, VL);
  }
  UNROLL(4)
  for (int w = 0; w < W; ++w) {
    acc[w] *= factor;
    odd += acc[w] * 0.0f;
    store_some(out + j + w * VL, acc[w], c.value_dim - j - w * VL);
  }
}

// The block's samples with this token's, if it is one, and their sums, if it ends the block.
void step_statistics(const NearFarCall& c, int64_t head, int64_t position, float* space) {
  const int64_t D = c.dim, groups = c.heads / c.kv_heads, samples = c.block / c.stride, rows = groups * samples;
  const int64_t b = head / c.kv_heads, kv = head % c.kv_heads, sample = position % c.block / c.stride;
  float *row = take(space, wide(D)), *queries = c.queries_new + head * rows * (D + 1);
  copy_row(queries, c.queries + head * rows * (D + 1), rows * (D + 1));
  for (int64_t g = 0; g < groups && position % c.stride == 0; ++g) {
    widen_row(c.dtype, c.query, b * c.query_stride[0] + (kv * groups + g) * c.query_stride[1], D, c.root, row);
    copy_row(queries + (g * samples + sample) * (D + 1), row, D);
    queries[(g * samples + sample) * (D + 1) + D] = 1;
  }
  if (!c.moments_new) return;
  const int64_t size = (D + 1) * (D + 1);
  if (position % c.block != c.block - 1) return copy_row(c.moments_new + head * size, c.moments + head * size, size);
  const Statistics s(D, rows, space);
  for (int64_t i = 0; i < rows; ++i) copy_row(s.samples + i * s.ld, queries + i * (D + 1), D + 1);
  for (int64_t i = 0; i <= D; ++i) copy_row(s.moments + i * s.ld, c.moments + head * size + i * (D + 1), D + 1);
  s.finish_block();
  for (int64_t i = 0; i <= D; ++i) copy_row(c.moments_new + head * size + i * (D + 1), s.moments + i * s.ld, D + 1);
}

// The token's own place is the last of near_new, whose others are in place already.
int32_t step(const NearFarCall& c, int64_t head) {
  const int64_t D = c.dim, M = c.value_dim, E = D + M, b = head / c.kv_heads, kv = head % c.kv_heads;
  const int64_t groups = c.heads / c.kv_heads, position = c.seen[b] + c.steps, start = position - position % c.block;
  const int64_t low = imax(imax(start - c.window, c.merged[b]), imin(start, c.sinks));
  const int64_t first = c.first_slot[kv], last = kv + 1 < c.kv_heads ? c.first_slot[kv + 1] : c.slots;
  const int64_t columns = round_up(c.sinks, VL) + round_up(last - first, VL) + round_up(position - low + 1, VL);
  float* near = c.near_new + b * c.near_new_stride[0] + kv * c.near_new_stride[1];
  float* entry = near + (c.held_new - 1) * E;
  const int64_t statistics = c.moments_new ? Statistics::floats(D, groups * (c.block / c.stride)) : 0;
  float* space = scratch(3 * wide(D) + wide(M) + columns + 2 * VL + statistics + 128);
  float *x = take(space, wide(D)), *token = take(space, imax(wide(D), wide(M)));
  float* weights = take(space, columns + 2 * VL);
  widen_row(c.dtype, c.key, b * c.key_stride[0] + kv * c.key_stride[1], D, c.root, token);
  copy_row(entry, token, D);
  widen_row(c.dtype, c.value, b * c.value_stride[0] + kv * c.value_stride[1], M, 1, token);
  copy_row(entry + D, token, M);
  const Stretch parts[3] = {{c.sink + head * c.sinks * E, nullptr, imin(c.sinks, start)},
                            {c.slot + (b * c.slots + first) * E, c.bias + b * c.slots + first, last - first},
                            {entry - (position - low) * E, nullptr, position - low + 1}};
  vec odd = {};
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t head_out = b * c.heads + kv * groups + g;
    widen_row(c.dtype, c.query, b * c.query_stride[0] + (kv * groups + g) * c.query_stride[1], D, c.root * LOG2E_F, x);
    float* at = weights;
    for (const Stretch& s : parts) {
      stretch_logits(c, s, x, at);
      at += round_up(s.n, VL);
    }
    const float factor = soften(weights, at - weights);
    float* out = c.out + head_out * M;
    int64_t j = 0;
    for (; j + NR * VL <= M; j += NR * VL) weigh<NR>(c, parts, weights, factor, j, out, odd);
    for (; j < M; j += VL) weigh<1>(c, parts, weights, factor, j, out, odd);
  }
  if (c.queries_new) step_statistics(c, head, position, space);
  return sum(odd) == 0 ? OK : NOT_FINITE;
}

}  // namespace
