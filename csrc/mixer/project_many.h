/// A linear layer for many rows: bound by arithmetic. A block of the weights is transposed into panels, which stay in the
/// second-level cache while all rows are multiplied with them.
#pragma once
#include "core/gemm.h"
#include "mixer/abi.h"

namespace {

constexpr int64_t PANEL = NR * VL;      // columns of a panel (inputs, PANEL): the width of a register tile
constexpr int64_t BLOCK_INPUTS = 1024;  // at most, of a block of weights: with PROJECT_OUTPUTS, 768 KB
constexpr int64_t GROUP_ROWS = 24;      // rows that are in cache while the panels of a block pass
static_assert(PROJECT_OUTPUTS % PANEL == 0 && GROUP_ROWS % MR == 0, "whole panels and tiles");

/// to (k, PANEL): the weights of outputs [first, last) for the inputs [k0, k0 + k), transposed; columns beyond them are 0.
INLINE void pack_panel(const ProjectCall& c, int64_t first, int64_t last, int64_t k0, int64_t k, float* to) {
  const auto* weight = static_cast<const float*>(c.weight) + k0;
  for (int64_t o = first; o < first + PANEL; o += VL, to += VL) {
    const float* rows[VL];
    for (int64_t r = 0; r < VL; ++r) {
      const int64_t output = imin(o + r, last - 1);
      rows[r] = weight + (c.order ? c.order[output] : output) * c.inputs;
    }
    for (int64_t i = 0; i < k; i += VL) {
      vec x[VL];
      for (int64_t r = 0; r < VL; ++r) x[r] = o + r < last ? load_some(rows[r] + i, k - i) : vec{};
      for (int64_t r = 0; c.input_scale && r < VL; ++r) x[r] *= load_some(c.input_scale + k0 + i, k - i);
      transpose_tile(x);
      for (int64_t r = 0; r < imin(VL, k - i); ++r) store(to + (i + r) * PANEL, x[r]);
    }
  }
}

/// Epilogue: out = scale A B + bias, or out += scale A B; only `columns` columns are written.
struct StoreOutputs {
  float* out;
  int64_t ld, columns;
  const float *bias, *scale;  // of columns and of rows; or null
  bool add;
  INLINE vec start(int64_t i, int64_t j) const {
    __builtin_prefetch(out + i * ld + j, 1);  // in cache by the time the tile is done
    return vec{};
  }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    float* to = out + i * ld + j;
    if (scale) {
      UNROLL(4)
      for (int w = 0; w < W; ++w) acc[w] *= scale[i];
    }
    if (columns - j < W * VL) {
      vec copy[W];  // its address is taken: acc would leave its registers
      UNROLL(4)
      for (int w = 0; w < W; ++w) copy[w] = acc[w];
      return finish_some(to, j, copy, W);
    }
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      if (bias) acc[w] += load(bias + j + w * VL);
      store(to + w * VL, add ? load(to + w * VL) + acc[w] : acc[w]);
    }
  }
  /// The last columns of a row: acc (count vectors) from column j on.
  __attribute__((noinline)) void finish_some(float* to, int64_t j, const vec* acc, int count) const {
    for (int w = 0; w < count; ++w) {
      const int64_t left = columns - j - w * VL;
      vec x = acc[w];
      if (bias) x += load_some(bias + j + w * VL, left);
      if (add) x += load_some(to + w * VL, left);
      store_some(to + w * VL, x, left);
    }
  }
};

/// Outputs [first, last), at most PROJECT_OUTPUTS, of rows [begin, end).
void project_many(const ProjectCall& c, int64_t begin, int64_t end, int64_t first, int64_t last) {
  const int64_t blocks = imax((c.inputs + BLOCK_INPUTS - 1) / BLOCK_INPUTS, 1), outputs = last - first;
  float* panels = scratch(BLOCK_INPUTS * PROJECT_OUTPUTS);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t k0 = c.inputs * b / blocks, k = c.inputs * (b + 1) / blocks - k0;
    for (int64_t o = 0; o < outputs; o += PANEL) {
      pack_panel(c, first + o, last, k0, k, panels + o * k);
    }
    const float* bias = c.bias && b == 0 ? c.bias + first : nullptr;
    for (int64_t i = begin; i < end; i += GROUP_ROWS) {
      float* out = c.out + i * c.outputs + first;
      for (int64_t o = 0; o < outputs; o += PANEL) {
        const int64_t columns = imin(PANEL, outputs - o);
        const Operand product{c.x + i * c.x_stride + k0, c.x_stride, 1, panels + o * k, PANEL, k};
        const StoreOutputs to{
            out + o, c.outputs, columns, bias ? bias + o : nullptr, c.row_scale ? c.row_scale + i : nullptr, b > 0};
        gemm(imin(GROUP_ROWS, end - i), round_up(columns, VL), &product, 1, to);
      }
    }
  }
}

}  // namespace
