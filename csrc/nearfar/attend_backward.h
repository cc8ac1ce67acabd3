/// The gradient of the attention of one block of queries, from weights that are computed again.
#pragma once
#include "nearfar/window.h"

namespace {

/// Epilogue: to (m, ld) = A B times `factor`, or += that.
template <bool ADD>
struct StoreScaled {
  float* to;
  int64_t ld;
  float factor;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    float* at = to + i * ld + j;
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(at + w * VL, ADD ? load(at + w * VL) + acc[w] * factor : acc[w] * factor);
  }
};

/// Rows of keys and values, or of their gradients: (n, row_stride(D)), (n, row_stride(M)).
struct Entries {
  float *key, *value;
};

/// What a block of n queries at the positions from `first` on sees, and the gradients of it.
struct SeenBlock {
  const Window& window;
  const FarField& far;
  const float *far_key, *far_value_t, *window_value_t;  // rows of sinks and slots; values as columns
  int64_t low, first, n;                                // near keys are visible from `low` on
  Entries grad_sinks, grad_slots, grad_near;            // grad_near: from `low` on
  float* grad_bias;                                     // (slots), in whole vectors

  INLINE int64_t before() const { return first - low; }
  INLINE int64_t far_columns() const { return round_up(far.sinks + far.slots, VL); }
  /// Columns that row i of the block sees.
  INLINE int64_t columns(int64_t i) const { return far_columns() + before() + i + 1; }
};

/// Work space of the gradient of a block, beside that of its attention.
struct AttendBackwardScratch {
  float *grad, *slope, *grad_query;  // (n, s.ld) both, (n, row_stride(D)); slope: null without a cap

  static int64_t floats(int64_t n, int64_t dim, int64_t ld, bool capped) {
    return n * ((capped ? 2 : 1) * ld + row_stride(dim)) + 64;
  }
  AttendBackwardScratch(int64_t n, int64_t dim, int64_t ld, bool capped, float* at) {
    grad = carve(at, n * ld), slope = capped ? carve(at, n * ld) : nullptr, grad_query = carve(at, n * row_stride(dim));
  }
};

/// to (n, ld): products of rows (n, row_stride(width)) with the columns far_t and near_t (width, .) that a block sees.
void multiply_seen(const SeenBlock& b, const float* rows, int64_t width, const float* far_t, const float* near_t, float* to,
                   int64_t ld) {
  const int64_t row = row_stride(width), far_columns = b.far_columns();
  const float* low = near_t + b.low - b.window.base;
  const Operand with_far{rows, row, 1, far_t, b.far.ld, width}, with_before{rows, row, 1, low, b.window.ld(), width};
  const Operand with_own{rows, row, 1, low + b.before(), b.window.ld(), width};
  gemm(b.n, far_columns, &with_far, 1, Store<false>{to, ld});
  gemm(b.n, round_up(b.before(), VL), &with_before, 1, Store<false>{to + far_columns, ld});
  gemm(b.n, round_up(b.n, VL), &with_own, 1, Store<false>{to + far_columns + b.before(), ld}, nullptr, true);
}

/// grad (n): the gradient of weights becomes that of logits, followed by at least VL zeros. weight (n): unnormalised;
/// `factor`: 1 / their sum, which `grad` has been multiplied with.
INLINE void softmax_backward(const float* weight, float factor, int64_t n, float* grad) {
  const int64_t full = n / VL * VL;
  const auto inside = lanes() < splat(float(n - full));
  vec total = inside ? load(weight + full) * load(grad + full) : vec{};
  for (int64_t j = 0; j < full; j += VL) total += load(weight + j) * load(grad + j);
  const vec mean = splat(sum(total) * factor);
  for (int64_t j = 0; j < full; j += VL) store(grad + j, load(weight + j) * (load(grad + j) - mean));
  store(grad + full, inside ? load(weight + full) * (load(grad + full) - mean) : vec{});
  store(grad + full + VL, vec{});
}

/// Adds the gradient of the logits row (n) of a query at `position` with the keys from `first` on to that of the band.
INLINE void add_band_grad(const Scores& s, int64_t position, int64_t first, int64_t n, const float* row, float* band) {
  const int64_t shift = s.reach - 1 - (position - first), last = imin(n, s.reach - shift);
  for (int64_t j = imax(0, -shift); j < last; ++j) band[j + shift] += row[j] / LOG2E_F;
}

/// row (n) *= the derivative of the cap at the scores (n), both in whole vectors and units of log2.
INLINE void cap_backward(float* row, const float* scores, int64_t n, float cap) {
  for (int64_t j = 0; j < n; j += VL) {
    const vec t = capped(load(scores + j), cap) / cap;
    store(row + j, load(row + j) * (1.0f - t * t));
  }
}

/// back.grad (n, s.ld): the gradient of all products of queries and keys, from s.rows, that of the outputs times s.factor.
/// Adds those of the biases; band: (reach) or null.
void logits_backward(const SeenBlock& b, const Scores& scores, const AttendScratch& s, const AttendBackwardScratch& back,
                     float* band) {
  const int64_t far_columns = b.far_columns();
  multiply_seen(b, s.rows, b.window.value_dim, b.far_value_t, b.window_value_t, back.grad, s.ld);
  if (back.slope) multiply_seen(b, s.query, b.window.dim, b.far.key_t, b.window.key_t, back.slope, s.ld);
  for (int64_t i = 0; i < b.n; ++i) {
    float* row = back.grad + i * s.ld;
    softmax_backward(s.logits + i * s.ld, s.factor[i], b.columns(i), row);
    add_row(b.grad_bias, row + b.far.sinks, 1, b.far.slots);
    if (band) {
      add_band_grad(scores, b.first + i, b.low, b.before() + i + 1, row + far_columns, band);
      add_band_grad(scores, b.first + i, 0, b.far.sinks, row, band);
    }
    if (back.slope) cap_backward(row, back.slope + i * s.ld, b.columns(i), scores.cap);
    if (back.slope) store(row + b.columns(i), vec{}), store(row + b.columns(i) + VL, vec{});
  }
}

/// Adds to the gradients of what a block saw, and computes back.grad_query: that of the scaled queries times `factor`.
/// s.query holds the queries in units of log2, s.rows (n, row_stride(M)) the gradient of the outputs.
void attend_backward(const SeenBlock& b, const Scores& scores, const AttendScratch& s, const AttendBackwardScratch& back,
                     float factor, float* band) {
  const int64_t D = b.window.dim, M = b.window.value_dim, ld = row_stride(D), lv = row_stride(M), n = b.n;
  const int64_t keys = round_up(D, VL), values = round_up(M, VL), before = b.before(), near = b.far_columns();
  attention_weights(b.window, b.far, scores, b.low, b.first, n, s);
  for (int64_t i = 0; i < n; ++i) scale_row(s.rows + i * lv, s.factor[i], values);
  logits_backward(b, scores, s, back, band);
  const Operand parts[3] = {{back.grad + near + before, s.ld, 1, b.window.key_at(b.first), ld, n, UP_TO_ROW},
                            {back.grad + near, s.ld, 1, b.window.key_at(b.low), ld, before},
                            {back.grad, s.ld, 1, b.far_key, ld, b.far.sinks + b.far.slots}};
  gemm(n, keys, parts, 3, StoreScaled<false>{back.grad_query, ld, factor});
  const struct {
    int64_t column, rows;
    KRange range;
    Entries grad;
  } seen[4] = {{0, b.far.sinks, ALL, b.grad_sinks},
               {b.far.sinks, b.far.slots, ALL, b.grad_slots},
               {near, before, ALL, b.grad_near},
               {near + before, n, FROM_ROW, {b.grad_near.key + before * ld, b.grad_near.value + before * lv}}};
  for (const auto& part : seen) {
    const Operand from_query{back.grad + part.column, 1, s.ld, s.query, ld, n, part.range};
    const Operand from_out{s.logits + part.column, 1, s.ld, s.rows, lv, n, part.range};
    gemm(part.rows, keys, &from_query, 1, StoreScaled<true>{part.grad.key, ld, 1 / LOG2E_F});
    gemm(part.rows, values, &from_out, 1, Store<true>{part.grad.value, lv});
  }
}

}  // namespace
