/// Scores under a decay of each channel: score(i, j) = sum_d x_id k_jd exp(G_id - G_jd) for tokens j <= i of one chunk, G
/// the running sum of the log decays.
///
/// No exponent is ever positive, and no exp is taken of a pair: a chunk is cut into blocks of 16 tokens, and with the
/// decays a_t = exp(g_t) <= 1 every factor is a product of them. For tokens of different blocks it splits at the boundary
/// before the row's block: (x_i from_start_i) . (k_j to_end_j ..), a matrix product; pairs inside a block are gone through
/// one by one.
#pragma once
#include "core/exp.h"
#include "core/gemm.h"
#include "core/load_rows.h"

namespace {

constexpr int64_t DECAY_BLOCK = 16;

/// The factors of one chunk: n tokens (a multiple of 16) by `dim` channels (a multiple of 16), rows `ld` apart. Blocks
/// count from 0; the boundary before block b is the state that its first token finds.
struct ChannelDecay {
  int64_t n, dim, ld;
  float* a;           // (n, ld): exp(g_t), 1 where a token is masked or there is none
  float* from_start;  // (n, ld): product of a over the tokens of t's block up to and with t
  float* to_end;      // (n, ld): product of a over the tokens of t's block after t
  float* block;       // (n / 16, ld): product over a block
  float* before;      // (n / 16, ld): product over all blocks before b
  float* after;       // (n / 16, ld): product over all blocks after b
  float* total;       // (ld): exp of the chunk's sum, more exact than the product: what the state is multiplied with
};

INLINE int64_t channel_decay_floats(int64_t n, int64_t ld) { return (3 * n + 3 * (n / DECAY_BLOCK) + 1) * ld; }

/// The buffers of n tokens of `dim` channels in `space`, of channel_decay_floats(n, ld) floats.
INLINE ChannelDecay channel_decay_space(int64_t n, int64_t dim, int64_t ld, float* space) {
  const int64_t blocks = n / DECAY_BLOCK;
  float* const rest = space + 3 * n * ld;
  return {n,
          dim,
          ld,
          space,
          space + n * ld,
          space + 2 * n * ld,
          rest,
          rest + blocks * ld,
          rest + 2 * blocks * ld,
          rest + 3 * blocks * ld};
}

/// Fills in `a` and `total` from log decays (tokens, D), rows `stride` apart, of the chunk's first `tokens` tokens.
/// Tokens that the mask hides do not decay.
inline void load_channel_decay(const ChannelDecay& c, const float* log_decay, int64_t stride, int64_t D, int64_t tokens,
                               const uint8_t* mask) {
  for (int64_t d = 0; d < c.dim; d += VL) {
    vec sum = {};
    for (int64_t t = 0; t < c.n; ++t) {
      const bool counts = t < tokens && d < D && (!mask || mask[t]);
      const vec g = counts ? load_some(log_decay + t * stride + d, D - d) : vec{};
      sum += g;
      store(c.a + t * c.ld + d, exp_decay(g));
    }
    store(c.total + d, exp_decay(sum));
  }
}

/// Fills in the products of `a`.
inline void multiply_decays(const ChannelDecay& c) {
  const int64_t blocks = c.n / DECAY_BLOCK;
  for (int64_t d = 0; d < c.dim; d += VL) {
    vec before = splat(1.0f), after = splat(1.0f);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = b * DECAY_BLOCK * c.ld + d;
      vec p = splat(1.0f);
      for (int64_t t = 0; t < DECAY_BLOCK; ++t) {
        p *= load(c.a + first + t * c.ld);
        store(c.from_start + first + t * c.ld, p);
      }
      store(c.block + b * c.ld + d, p);
      store(c.before + b * c.ld + d, before);
      before *= p;
      p = splat(1.0f);
      for (int64_t t = DECAY_BLOCK - 1; t >= 0; --t) {
        store(c.to_end + first + t * c.ld, p);
        p *= load(c.a + first + t * c.ld);
      }
    }
    for (int64_t b = blocks - 1; b >= 0; --b) {
      store(c.after + b * c.ld + d, after);
      after *= load(c.block + b * c.ld + d);
    }
  }
}

/// to_i = x_i exp(G_i): the rows as they read the chunk's incoming state. May be in place.
inline void decay_from_start(const ChannelDecay& c, const float* x, float* to) {
  for (int64_t t = 0; t < c.n; ++t) {
    const float* before = c.before + t / DECAY_BLOCK * c.ld;
    for (int64_t d = 0; d < c.dim; d += VL) {
      store(to + t * c.ld + d, load(x + t * c.ld + d) * load(c.from_start + t * c.ld + d) * load(before + d));
    }
  }
}

/// to_j = k_j exp(G_end - G_j): the keys as the chunk's last state has them. May be in place.
inline void decay_to_end(const ChannelDecay& c, const float* k, float* to) {
  for (int64_t t = 0; t < c.n; ++t) {
    const float* after = c.after + t / DECAY_BLOCK * c.ld;
    for (int64_t d = 0; d < c.dim; d += VL) {
      store(to + t * c.ld + d, load(k + t * c.ld + d) * load(c.to_end + t * c.ld + d) * load(after + d));
    }
  }
}

// Rows of one block of one or two matrices, one below the other, go to the score matrices.
struct ScoreBlock {
  float* to[2];  // (16, ..) each
  int64_t ld;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    float* row = to[i / DECAY_BLOCK] + i % DECAY_BLOCK * ld + j;
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(row + w * VL, acc[w]);
  }
};
template <>
constexpr bool narrow<ScoreBlock> = true;

/// Columns [d, d + W VL) of the pairs of key j with the tokens i >= j of its block: sums[l][i] += x_i k_j a_(j+1) .. a_i.
template <int LEFTS, int W>
INLINE void score_pairs(const ChannelDecay& c, int64_t first, int64_t j, int64_t d, const float* key,
                        const float* const (&left)[LEFTS], vec (&sums)[LEFTS][DECAY_BLOCK]) {
  vec t[W];
  UNROLL(4)
  for (int w = 0; w < W; ++w) t[w] = load(key + (first + j) * c.ld + d + w * VL);
  for (int64_t i = j; i < DECAY_BLOCK; ++i) {
    const int64_t at = (first + i) * c.ld + d;
    if (i > j) {
      UNROLL(4)
      for (int w = 0; w < W; ++w) t[w] *= load(c.a + at + w * VL);
    }
    UNROLL(2)
    for (int l = 0; l < LEFTS; ++l) {
      vec s = sums[l][i];
      UNROLL(4)
      for (int w = 0; w < W; ++w) s += t[w] * load(left[l] + at + w * VL);
      sums[l][i] = s;
    }
  }
}

/// Scores inside the block that starts at token `first`, diagonal included, 0 right of it.
template <int LEFTS>
void score_diagonal(const ChannelDecay& c, int64_t first, const float* key, const float* const (&left)[LEFTS],
                    float* const (&score)[LEFTS], int64_t ld_score) {
  for (int64_t j = 0; j < DECAY_BLOCK; ++j) {
    vec sums[LEFTS][DECAY_BLOCK] = {};
    int64_t d = 0;
    for (; d + 4 * VL <= c.dim; d += 4 * VL) score_pairs<LEFTS, 4>(c, first, j, d, key, left, sums);
    for (; d < c.dim; d += VL) score_pairs<LEFTS, 1>(c, first, j, d, key, left, sums);
    for (int l = 0; l < LEFTS; ++l) {
      float column[DECAY_BLOCK];
      for (int64_t i = 0; i < DECAY_BLOCK; i += VL) {
        vec x[VL];
        for (int k = 0; k < VL; ++k) x[k] = sums[l][i + k];
        store(column + i, reduce<false>(x));
      }
      for (int64_t i = 0; i < DECAY_BLOCK; ++i) score[l][(first + i) * ld_score + first + j] = column[i];
    }
  }
}

INLINE int64_t channel_scores_floats(int64_t n, int64_t dim, int64_t ld) {
  return dim * (n + 16) + 2 * DECAY_BLOCK * ld + VL * ld;
}

/// score_l (n, n) = decayed products of left_l (n, dim) with key (n, dim) for j <= i; 0 for j > i inside a block of 16, and
/// untouched right of it. work: channel_scores_floats numbers.
template <int LEFTS>
void channel_scores(const ChannelDecay& c, const float* key, const float* const (&left)[LEFTS],
                    float* const (&score)[LEFTS], int64_t ld_score, float* work) {
  const int64_t ldt = c.n + 16;
  float* const turned = work;                              // (dim, ldt): k_j exp(boundary - G_j) by columns
  float* const rows = work + c.dim * ldt;                  // (16 LEFTS, ld)
  float* const faded = rows + LEFTS * DECAY_BLOCK * c.ld;  // (VL, ld): keys on their way to `turned`
  for (int64_t b = 0; b * DECAY_BLOCK < c.n; ++b) {
    const int64_t first = b * DECAY_BLOCK;
    score_diagonal<LEFTS>(c, first, key, left, score, ld_score);
    if (b > 0) {
      for (int l = 0; l < LEFTS; ++l) {
        for (int64_t t = 0; t < DECAY_BLOCK; ++t) {
          const int64_t from = (first + t) * c.ld, to = (l * DECAY_BLOCK + t) * c.ld;
          for (int64_t d = 0; d < c.dim; d += VL) {
            store(rows + to + d, load(left[l] + from + d) * load(c.from_start + from + d));
          }
        }
      }
      const ScoreBlock end{{score[0] + first * ld_score, score[LEFTS - 1] + first * ld_score}, ld_score};
      const Operand o{rows, c.ld, 1, turned, ldt, c.dim};
      gemm(LEFTS * DECAY_BLOCK, first, &o, 1, end);
    }
    if (first + DECAY_BLOCK == c.n) break;
    for (int64_t d = 0; d < c.dim; ++d) {
      const float factor = c.block[b * c.ld + d];
      for (int64_t j = 0; j < first; j += VL) store(turned + d * ldt + j, load(turned + d * ldt + j) * factor);
    }
    for (int64_t t = 0; t < DECAY_BLOCK; t += VL) {
      for (int64_t k = 0; k < VL; ++k) {
        const int64_t from = (first + t + k) * c.ld;
        for (int64_t d = 0; d < c.dim; d += VL) {
          store(faded + k * c.ld + d, load(key + from + d) * load(c.to_end + from + d));
        }
      }
      transpose(faded, c.ld, VL, c.dim, turned + first + t, ldt);
    }
  }
}

}  // namespace
