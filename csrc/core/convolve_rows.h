/// A short causal convolution with silu of rows that are channels side by side, for layers that compute it while they read
/// their tokens.
#pragma once
#include "core/load_rows.h"
#include "scan/functions.h"

namespace {

/// weight: (width, .), rows `apart` apart; bias: of the same channels, or null; history: the width - 1 rows before row 0 of
/// the sequence, `apart` apart, or null: zeros.
struct RowFilter {
  int64_t width, apart;
  const float *weight, *bias, *history;
};

/// convolve_rows, below, with a filter of width W.
template <int W>
void convolve_rows(const RowFilter& f, const float* x, int64_t stride, int64_t t, int64_t dim, int64_t n, int64_t padded,
                   float* to, int64_t ld) {
  for (int64_t d = 0; d < dim; d += VL) {
    vec weight[W], window[W];
    const vec bias = f.bias ? load(f.bias + d) : vec{};
    UNROLL(8)
    for (int i = 0; i < W; ++i) weight[i] = load(f.weight + i * f.apart + d);
    UNROLL(8)
    for (int i = 1; i < W; ++i) {
      const int64_t row = t + i - W;
      window[i] = row >= 0 ? load(x + row * stride + d) : f.history ? load(f.history + (row + W - 1) * f.apart + d) : vec{};
    }
    const float* from = x + t * stride + d;
    UNROLL(4)
    for (int64_t i = 0; i < n; ++i, from += stride) {
      UNROLL(8)
      for (int k = 0; k + 1 < W; ++k) window[k] = window[k + 1];
      window[W - 1] = load(from);
      vec sum = bias;
      UNROLL(8)
      for (int k = 0; k < W; ++k) sum += weight[k] * window[k];
      store(to + i * ld + d, sum * sigmoid(sum));
    }
    for (int64_t i = n; i < padded; ++i) store(to + i * ld + d, vec{});
  }
}

/// to (padded, ld) <- silu of the convolution of `dim` channels, a multiple of 16, of the rows [t, t + n) of x, which
/// begins with row 0 of the sequence. Rows n .. padded become 0. The filter's width is 2, 3 or 4.
void convolve_rows(const RowFilter& f, const void* x, int64_t stride, int64_t t, int64_t dim, int64_t n, int64_t padded,
                   float* to, int64_t ld) {
  const auto* from = static_cast<const float*>(x);
  switch (f.width) {
    case 2: return convolve_rows<2>(f, from, stride, t, dim, n, padded, to, ld);
    case 3: return convolve_rows<3>(f, from, stride, t, dim, n, padded, to, ld);
    default: return convolve_rows<4>(f, from, stride, t, dim, n, padded, to, ld);
  }
}

}  // namespace
