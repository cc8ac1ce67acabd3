/// One chunk of up to 64 tokens of one head: its rows as padded float32, and its decays.
#pragma once
#include "core/channel_decay.h"
#include "core/load_rows.h"
#include "delta/abi.h"

namespace {

constexpr int64_t BLOCK = 16;             // of the triangular solve, and what chunks are padded to
constexpr int64_t LD_SCORE = CHUNK + 16;  // distance of rows of a C x C matrix

/// Loads n rows of `dim` numbers as float32 into `to`, `ld` apart, multiplied by `scale`; with `inverse`, which gets
/// 1 / sqrt(|x|^2 + 1e-6), also by that. Columns up to the next multiple of 16, hidden rows and rows n .. padded are 0.
void load_chunk(int32_t dtype, const void* base, int64_t stride, int64_t dim, int64_t n, int64_t padded,
                const uint8_t* mask, float scale, float* inverse, float* to, int64_t ld) {
  const int64_t full = round_up(dim, 16);
  for (int64_t i = 0; i < padded; ++i) {
    float* const row = to + i * ld;
    if (i >= n || (mask && !mask[i])) {
      memset(row, 0, size_t(full) * 4);
      if (inverse) inverse[i] = 0;
      continue;
    }
    if (dtype == FLOAT32) {
      memcpy(row, static_cast<const float*>(base) + i * stride, size_t(dim) * 4);
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(base) + i * stride;
      if (dtype == FLOAT16) {
        for (int64_t d = 0; d < dim; ++d) row[d] = half_to_float(from[d]);
      } else {
        for (int64_t d = 0; d < dim; ++d) row[d] = bfloat16_to_float(from[d]);
      }
    }
    for (int64_t d = dim; d < full; ++d) row[d] = 0;
    float factor = scale;
    if (inverse) {
      vec squares = {};
      for (int64_t d = 0; d < full; d += VL) squares += load(row + d) * load(row + d);
      inverse[i] = 1.0f / __builtin_sqrtf(sum(squares) + 1e-6f);
      factor *= inverse[i];
    }
    if (factor != 1.0f) {
      for (int64_t d = 0; d < full; d += VL) store(row + d, load(row + d) * factor);
    }
  }
}

/// Decays of one head, the same for all channels: with G_i the sum of log decays up to and with token i,
struct HeadDecay {
  float from_start[CHUNK];        // exp(G_i)
  float to_end[CHUNK];            // exp(G_last - G_i)
  float high[CHUNK], low[CHUNK];  // G_i in two parts: differences of sums of any size are exact
  float total;                    // exp(G_last)
};

/// Running sums of log_decay (n), padded with 0, and their exponentials from the start and to the end of the chunk.
void load_head_decay(const float* log_decay, int64_t stride, int64_t n, int64_t padded, const uint8_t* mask, HeadDecay& d) {
  double sums[CHUNK], sum = 0;
  for (int64_t i = 0; i < padded; ++i) {
    if (log_decay && i < n && (!mask || mask[i])) sum += double(log_decay[i * stride]);
    sums[i] = sum;
    d.high[i] = float(sum), d.low[i] = float(sum - double(d.high[i]));
    d.from_start[i] = d.high[i];
  }
  for (int64_t i = 0; i < padded; ++i) d.to_end[i] = float(sum - sums[i]);
  for (int64_t i = 0; i < padded; i += VL) {
    store(d.from_start + i, exp_decay(load(d.from_start + i)));
    store(d.to_end + i, exp_decay(load(d.to_end + i)));
  }
  d.total = d.from_start[padded - 1];
}

/// L (padded, padded) = exp(G_i - G_j) for j <= i; 0 right of that inside the last vector of a row.
void pair_decays(const HeadDecay& d, int64_t padded, float* L) {
  const vec lane = lanes();
  for (int64_t i = 0; i < padded; ++i) {
    for (int64_t j = 0; j <= i; j += VL) {
      const vec x = (d.high[i] - load(d.high + j)) + (d.low[i] - load(d.low + j));
      const vec y = exp_decay(x > 0.0f ? vec{} : x);
      store(L + i * LD_SCORE + j, lane <= float(i - j) ? y : vec{});
    }
  }
}

/// a . b over `full` numbers, a multiple of 16.
INLINE float dot(const float* a, const float* b, int64_t full) {
  vec s = {};
  for (int64_t d = 0; d < full; d += VL) s += load(a + d) * load(b + d);
  return sum(s);
}

/// x_i *= factor_i for rows of `full` numbers.
void scale_rows(float* x, int64_t ld, int64_t n, int64_t full, const float* factor) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = 0; d < full; d += VL) store(x + i * ld + d, load(x + i * ld + d) * factor[i]);
  }
}

// Scores o L for j <= i - strict, 0 right of that; L null: ones.
struct DecayedScores {
  float* c;
  const float* L;
  int64_t strict;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      const int64_t at = j + w * VL;
      const vec x = L && at <= i ? acc[w] * load(L + i * LD_SCORE + at) : acc[w];
      store(c + i * LD_SCORE + at, lanes() <= float(i - strict - at) ? x : vec{});
    }
  }
};

// C = diag(factor) A B; factor null: ones.
struct StoreRows {
  float* c;
  int64_t ldc;
  const float* factor;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    const float f = factor ? factor[i] : 1.0f;
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(c + i * ldc + j + w * VL, acc[w] * f);
  }
};

// C = given - diag(factor) A B, rows of both `ld` apart; factor null: ones.
struct Residual {
  const float* given;
  float* c;
  int64_t ld;
  const float* factor;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    const float f = factor ? factor[i] : 1.0f;
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      const int64_t at = i * ld + j + w * VL;
      store(c + at, load(given + at) - acc[w] * f);
    }
  }
};

// C = diag(factor) C + A B; factor null: ones.
struct DecayAdd {
  float* c;
  int64_t ldc;
  const float* factor;
  INLINE vec start(int64_t i, int64_t j) const {
    const vec x = load(c + i * ldc + j);
    return factor ? x * factor[i] : x;
  }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(c + i * ldc + j + w * VL, acc[w]);
  }
};

}  // namespace
