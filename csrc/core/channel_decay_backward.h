/// The backward pass of channel_decay.h's scores, for pairs j < i; what a token's own score (i = j) gives does not decay
/// and is the caller's.
#pragma once
#include "core/channel_decay.h"

namespace {

// C = (C o before + A B) o factor, `before` by columns; factor null: ones.
struct FadeRows {
  float* c;
  int64_t ldc;
  const float *before, *factor;
  INLINE vec start(int64_t i, int64_t j) const { return load(c + i * ldc + j) * load(before + j); }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      const int64_t at = i * ldc + j + w * VL;
      store(c + at, factor ? acc[w] * load(factor + at) : acc[w]);
    }
  }
};

/// Columns [d, d + W VL) of the pairs of key j with the tokens i > j of its block.
template <int LEFTS, int W>
INLINE void pairs_backward(const ChannelDecay& c, int64_t first, int64_t j, int64_t d, const float* key,
                           const float* const (&left)[LEFTS], const float* const (&grad)[LEFTS], int64_t ld_score,
                           float* const (&grad_left)[LEFTS], float* grad_key) {
  vec p[W], k[W], acc[W] = {};
  UNROLL(4)
  for (int w = 0; w < W; ++w) p[w] = splat(1.0f), k[w] = load(key + (first + j) * c.ld + d + w * VL);
  for (int64_t i = j + 1; i < DECAY_BLOCK; ++i) {
    const int64_t at = (first + i) * c.ld + d;
    vec g[LEFTS];
    for (int l = 0; l < LEFTS; ++l) g[l] = splat(grad[l][(first + i) * ld_score + first + j]);
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      p[w] *= load(c.a + at + w * VL);
      const vec t = p[w] * k[w];
      vec s = {};
      UNROLL(2)
      for (int l = 0; l < LEFTS; ++l) {
        store(grad_left[l] + at + w * VL, load(grad_left[l] + at + w * VL) + g[l] * t);
        s += g[l] * load(left[l] + at + w * VL);
      }
      acc[w] += p[w] * s;
    }
  }
  UNROLL(4)
  for (int w = 0; w < W; ++w) {
    float* const to = grad_key + (first + j) * c.ld + d + w * VL;
    store(to, load(to) + acc[w]);
  }
}

INLINE int64_t channel_backward_floats(int64_t n, int64_t ld) { return (n + 2 * DECAY_BLOCK) * ld; }

/// grad_score_l (n, n), 0 for j >= i, is the gradient of score_l of left_l (n, dim) with key (n, dim).
/// grad_left_l (n, dim): comes in as the gradient of rows left_l exp(G) (zeros, where nothing else was made of them), goes
/// out as the gradient of left_l. grad_key (n, dim) is overwritten with what the scores give. work:
/// channel_backward_floats.
template <int LEFTS>
void channel_scores_backward(const ChannelDecay& c, const float* key, const float* const (&left)[LEFTS],
                             const float* const (&grad)[LEFTS], int64_t ld_score, float* const (&grad_left)[LEFTS],
                             float* grad_key, float* work) {
  float* const faded = work;              // (n, ld): k_j exp(boundary - G_j)
  float* const rows = work + c.n * c.ld;  // (16 LEFTS, ld)
  const int64_t blocks = c.n / DECAY_BLOCK;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = b * DECAY_BLOCK, at = first * c.ld;
    for (int l = 0; l < LEFTS; ++l) {
      const Operand o{grad[l] + first * ld_score, ld_score, 1, faded, c.ld, first};
      gemm(DECAY_BLOCK, c.dim, &o, 1, FadeRows{grad_left[l] + at, c.ld, c.before + b * c.ld, c.from_start + at});
    }
    for (int64_t j = 0; j < first + DECAY_BLOCK; ++j) {
      for (int64_t d = 0; d < c.dim; d += VL) {
        const int64_t to = j * c.ld + d;
        const vec older = load(faded + to) * load(c.block + b * c.ld + d), own = load(key + to) * load(c.to_end + to);
        store(faded + to, j < first ? older : own);
      }
    }
  }
  memset(grad_key, 0, size_t(c.n * c.ld) * 4);
  for (int64_t b = blocks - 1; b >= 0; --b) {
    const int64_t first = b * DECAY_BLOCK;
    for (int64_t t = first; t < first + DECAY_BLOCK; ++t) {
      for (int64_t d = 0; d < c.dim; d += VL) {
        const int64_t at = t * c.ld + d;
        store(grad_key + at, load(grad_key + at) * load(c.to_end + at));
        for (int l = 0; l < LEFTS; ++l) {
          store(rows + (l * DECAY_BLOCK + t - first) * c.ld + d, load(left[l] + at) * load(c.from_start + at));
        }
      }
    }
    if (b == 0) break;
    Operand o[LEFTS];
    for (int l = 0; l < LEFTS; ++l) {
      o[l] = {grad[l] + first * ld_score, 1, ld_score, rows + l * DECAY_BLOCK * c.ld, c.ld, DECAY_BLOCK};
    }
    gemm(first, c.dim, o, LEFTS, FadeRows{grad_key, c.ld, c.block + b * c.ld, nullptr});
  }
  for (int64_t t = 0; t < c.n; ++t) {
    const int64_t first = t / DECAY_BLOCK * DECAY_BLOCK, j = t - first;
    int64_t d = 0;
    for (; d + 4 * VL <= c.dim; d += 4 * VL) {
      pairs_backward<LEFTS, 4>(c, first, j, d, key, left, grad, ld_score, grad_left, grad_key);
    }
    for (; d < c.dim; d += VL) {
      pairs_backward<LEFTS, 1>(c, first, j, d, key, left, grad, ld_score, grad_left, grad_key);
    }
  }
}

}  // namespace
