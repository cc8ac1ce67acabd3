/// Feature maps of a block of tokens: x (n, D) -> phi (n, feature_stride(r)), row i times 2^offset[i].
#pragma once
#include "core/gemm.h"
#include "core/load_rows.h"
#include "core/row_ops.h"
#include "linear/abi.h"

namespace {

constexpr float MASKED = -1e30f;  // the offset of a masked key: 2^MASKED = 0

/// z (VL) += term; the low-order part of z is `low` floats behind it, or 0: there is none.
INLINE void add_to_sum(float* z, int64_t low, vec term) {
  if (!low) return store(z, load(z) + term);
  vec total = load(z), rest = load(z + low);
  add_compensated(term, total, rest);
  store(z, total);
  store(z + low, rest);
}

/// W vectors of add_weighted_rows.
template <int W>
INLINE void add_weighted_columns(const float* phi, int64_t ld, int64_t n, const float* weight, float* z, int64_t low) {
  vec s[W] = {};
  for (int64_t i = 0; i < n; ++i) {
    const float by = weight ? weight[i] : 1;
    UNROLL(8)
    for (int w = 0; w < W; ++w) s[w] += load(phi + i * ld + w * VL) * by;
  }
  UNROLL(8)
  for (int w = 0; w < W; ++w) add_to_sum(z + w * VL, low, s[w]);
}

/// z (r) += sum over rows of weight_i phi_i, phi (n, ld); null weights count as 1. `low`: see add_to_sum.
void add_weighted_rows(const float* phi, int64_t ld, int64_t n, int64_t r, const float* weight, float* z, int64_t low = 0) {
  int64_t j = 0;
  for (; j + 8 * VL <= r; j += 8 * VL) add_weighted_columns<8>(phi + j, ld, n, weight, z + j, low);
  for (; j < r; j += VL) add_weighted_columns<1>(phi + j, ld, n, weight, z + j, low);
}

/// Rows of the projection.
INLINE int64_t projected(const LinearCall& c) { return c.feature_map == MAP_TRIG ? c.features / 2 : c.features; }

/// Floats of work space that apply_feature_map and feature_map_backward need for n rows.
INLINE int64_t feature_map_floats(const LinearCall& c, int64_t n) {
  return n * (feature_stride(projected(c)) + 2 * VL) + 2 * feature_stride(c.dim);
}

/// Statistics to compute while the features are in registers.
struct FeatureStats {
  Prefetcher* prefetcher = nullptr;
  const float* z = nullptr;  // (r): dots[i] = phi_i . z
  float* dots = nullptr;
  bool skip_max = false;         // the caller does not need the row maxima beside the dots
  float* feature_sum = nullptr;  // (r): sum of phi over the rows; no row maxima then
};

/// Which statistics an ExpRows computes.
enum ExpStats { ROW_MAX, DOTS_AND_ROW_MAX, DOTS, FEATURE_SUM };

/// Epilogue of EXP: phi = 2^acc, and statistics.
template <ExpStats STATS>
struct ExpRows {
  static constexpr bool WITH_MAX = STATS == ROW_MAX || STATS == DOTS_AND_ROW_MAX;
  static constexpr bool WITH_DOTS = STATS == DOTS || STATS == DOTS_AND_ROW_MAX;
  float* phi;
  int64_t ld;
  const float *offset, *bias;
  float* row_max;  // (n, VL): maxima of the exponents, lane by lane
  const float* z;
  float* dots;  // (n, VL): vectors whose lanes add up to the dots
  float* feature_sum;
  INLINE vec start(int64_t i, int64_t j) const { return bias ? splat(offset[i]) + load(bias + j) : splat(offset[i]); }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    if (WITH_MAX) {
      vec m = j ? load(row_max + i * VL) : acc[0];
      UNROLL(4)
      for (int w = 0; w < W; ++w) m = vmax(m, acc[w]);
      store(row_max + i * VL, m);
    }
    exp2_all(acc);
    vec d = {};
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      if (WITH_DOTS) d += acc[w] * load(z + j + w * VL);
      store(phi + i * ld + j + w * VL, acc[w]);
    }
    if (WITH_DOTS) store(dots + i * VL, j ? load(dots + i * VL) + d : d);
  }
  template <int R, int W>
  INLINE void after(int64_t i0, int64_t j, const vec (&acc)[R][W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      vec s = i0 ? load(feature_sum + j + w * VL) : vec{};
      UNROLL(8)
      for (int i = 0; i < R; ++i) s += acc[i][w];
      store(feature_sum + j + w * VL, s);
    }
  }
};

template <>
constexpr bool has_after<ExpRows<FEATURE_SUM>> = true;

/// Epilogue of EXP with a row for each feature and a column for each token.
struct ExpColumns {
  float* phi_t;  // (r, ld)
  int64_t ld;
  const float *offset, *bias;
  float* column_max;   // (columns): maximum of the exponents of each token
  float* partial_sum;  // (r, VL): vectors whose lanes add up to the sum of each feature
  INLINE vec start(int64_t i, int64_t j) const { return bias ? load(offset + j) + bias[i] : load(offset + j); }
  template <int R, int W>
  INLINE void before(int64_t i0, int64_t j, const vec (&acc)[R][W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      vec m = acc[0][w];
      UNROLL(8)
      for (int i = 1; i < R; ++i) m = vmax(m, acc[i][w]);
      store(column_max + j + w * VL, i0 ? vmax(load(column_max + j + w * VL), m) : m);
    }
  }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    exp2_all(acc);
    vec s = j ? load(partial_sum + i * VL) : vec{};
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      store(phi_t + i * ld + j + w * VL, acc[w]);
      s += acc[w];
    }
    store(partial_sum + i * VL, s);
  }
};

template <>
constexpr bool narrow<ExpColumns> = true;
template <>
constexpr bool has_before<ExpColumns> = true;

/// sin and cos with an error of about 1e-7 for |x| up to some thousands.
INLINE void sincos(vec x, vec& s, vec& c) {
  const vec t = x * 0.63661977f;
  const ivec n = __builtin_convertvector(t + (t > 0 ? splat(0.5f) : splat(-0.5f)), ivec);
  const vec q = __builtin_convertvector(n, vec);
  vec y = x - q * 1.5707855f;
  y = y - q * 1.0804334e-05f;
  y = y - q * 6.0770999e-11f;
  const vec z = y * y;
  const vec sine = y + y * z * (-1.6666654e-1f + z * (8.3321608e-3f + z * -1.9515296e-4f));
  const vec cosine = 1.0f - 0.5f * z + z * z * (4.1666645e-2f + z * (-1.3887316e-3f + z * 2.4433157e-5f));
  const ivec odd = (n & 1) != 0;
  const vec a = odd ? cosine : sine, b = odd ? sine : cosine;
  s = (n & 2) != 0 ? -a : a;
  c = ((n + 1) & 2) != 0 ? -b : b;
}

/// EXP: phi = 2^(x projection_t + bias + offset).
template <ExpStats STATS>
void exp_features(const LinearCall& c, Rows x, int64_t n, const float* offset, float* phi, float* row_max, float* work,
                  const FeatureStats& stats) {
  const int64_t ld = feature_stride(c.features), full = round_up(c.features, 16);
  const Operand o{x.at, x.ld, 1, c.projection_t, ld, c.dim};
  float* dots = work + n * VL;
  const ExpRows<STATS> end{phi, ld, offset, c.projection_bias, work, stats.z, dots, stats.feature_sum};
  gemm(n, full, &o, 1, end, stats.prefetcher);
  if (STATS == DOTS || STATS == DOTS_AND_ROW_MAX) reduce_rows<false>(dots, n, stats.dots);
  if (STATS == ROW_MAX || STATS == DOTS_AND_ROW_MAX) reduce_rows<true>(work, n, row_max);
}

/// TRIG: phi = sin and cos of x projection_t, times 2^offset input_scale.
void trig_features(const LinearCall& c, Rows x, int64_t n, const float* offset, float* phi, float* angles,
                   Prefetcher* prefetcher) {
  const int64_t ld = feature_stride(c.features), half = c.features / 2, la = feature_stride(half);
  const Operand o{x.at, x.ld, 1, c.projection_t, la, c.dim};
  gemm(n, round_up(half, 16), &o, 1, Store<false>{angles, la}, prefetcher);
  for (int64_t i = 0; i < n; ++i) {
    const float weight = exp2s(offset[i]) * c.input_scale;  // input_scale = sqrt(1 / frequencies)
    for (int64_t j = 0; j < half; j += VL) {
      vec s, k;
      sincos(load(angles + i * la + j), s, k);
      store_some(phi + i * ld + j, s * weight, half - j);
      store_some(phi + i * ld + half + j, k * weight, half - j);
    }
  }
}

/// QUADRATIC, one row: phi = weight [low[0], low[1] y, high[0] y_i^2 and high[1] y_i y_j for i < j], y = input_scale x; the
/// first two only where the map has them. padded (feature_stride(D)) is work space.
void quadratic_features(const LinearCall& c, const float* x, float weight, float* phi, float* padded) {
  const int64_t D = c.dim;
  for (int64_t d = 0; d < D; ++d) padded[d] = c.input_scale * x[d];
  memset(padded + D, 0, VL * 4);
  if (c.features > D * (D + 1) / 2) {
    *phi++ = c.quadratic_low[0] * weight;
    for (int64_t d = 0; d < D; d += VL) store(phi + d, load(padded + d) * (c.quadratic_low[1] * weight));
    phi += D;
  }
  for (int64_t i = 0; i < D; ++i) {
    const float factor = c.quadratic_high[1] * weight * padded[i];
    for (int64_t j = i; j < D; j += VL) store(phi + j - i, load(padded + j) * factor);
    phi[0] = c.quadratic_high[0] * weight * padded[i] * padded[i];
    phi += D - i;
  }
}

/// IDENTITY, ELU, RELU, one row: phi = weight f(input_scale x).
void elementwise_features(const LinearCall& c, const float* x, float weight, float* phi) {
  const int64_t r = c.features;
  for (int64_t d = 0; d < r; d += VL) {
    vec y = load_some(x + d, r - d) * c.input_scale;
    if (c.feature_map == MAP_ELU) y = y > 0 ? y + 1 : exp2v((y > 0 ? vec{} : y) * 1.44269504f);
    if (c.feature_map == MAP_RELU) y = y > 0 ? y : vec{} * y;  // keeps NaN
    store_some(phi + d, y * weight, r - d);
  }
}

/// phi (n, feature_stride(r)) of x (n, D). row_max (n): log2 of the largest feature of each row where the map is EXP and
/// `stats` does not skip it; offset[i] for other maps. work: feature_map_floats.
void apply_feature_map(const LinearCall& c, Rows x, int64_t n, const float* offset, float* phi, float* row_max, float* work,
                       const FeatureStats& stats = {}) {
  const int64_t r = c.features, ld = feature_stride(r), full = round_up(r, 16);
  if (c.feature_map == MAP_EXP) {
    if (stats.z && stats.skip_max) return exp_features<DOTS>(c, x, n, offset, phi, row_max, work, stats);
    if (stats.z) return exp_features<DOTS_AND_ROW_MAX>(c, x, n, offset, phi, row_max, work, stats);
    if (stats.feature_sum) return exp_features<FEATURE_SUM>(c, x, n, offset, phi, row_max, work, stats);
    return exp_features<ROW_MAX>(c, x, n, offset, phi, row_max, work, stats);
  }
  for (int64_t i = 0; i < n; ++i) row_max[i] = offset[i];
  if (c.feature_map == MAP_TRIG) {
    trig_features(c, x, n, offset, phi, work, stats.prefetcher);
  } else if (c.feature_map == MAP_QUADRATIC) {
    for (int64_t i = 0; i < n; ++i) quadratic_features(c, x.at + i * x.ld, exp2s(offset[i]), phi + i * ld, work);
  } else {
    for (int64_t i = 0; i < n; ++i) elementwise_features(c, x.at + i * x.ld, exp2s(offset[i]), phi + i * ld);
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = r; d < full; ++d) phi[i * ld + d] = 0;
    if (stats.z) stats.dots[i] = dot(phi + i * ld, stats.z, r);
  }
  if (stats.feature_sum) {
    memset(stats.feature_sum, 0, size_t(full) * 4);
    add_weighted_rows(phi, ld, n, r, nullptr, stats.feature_sum);
  }
}

}  // namespace
