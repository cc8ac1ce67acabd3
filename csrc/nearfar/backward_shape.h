/// Sizes and work space of the gradient of a near/far prefill of one kv head.
#pragma once
#include "nearfar/attend_backward.h"
#include "nearfar/merge_backward.h"
#include "nearfar/prefill_shape.h"

namespace {

/// Rows of work space from the gradient (E) of an entry, padded with 0; 0 if it is null.
inline void unpack_grad(const NearFarCall& c, const float* grad, float* key, float* value) {
  if (!grad) return clear_rows(c, key, value);
  load_row(FLOAT32, grad, c.dim, 1, key);
  load_row(FLOAT32, grad + c.dim, c.value_dim, 1, value);
}

/// The gradient (E) of an entry from rows of work space.
inline void pack_grad(const NearFarCall& c, float* grad, const float* key, const float* value) {
  copy_row(grad, key, c.dim);
  copy_row(grad + c.dim, value, c.value_dim);
}

/// The sizes of a backward pass.
struct BackwardShape {
  PrefillShape of;
  int64_t blocks;           // that the new tokens of this sequence touch
  int64_t segment;          // blocks of a segment: about as many as there are segments
  int64_t segments;         // at least 1
  int64_t rows;             // tokens that a segment sees
  int64_t slots;            // most slots before a merge
  int64_t ld, lv;           // floats between two keys, and between two values
  int64_t near_ld, logits;  // floats between rows of the window's columns, and between rows of logits

  BackwardShape(const NearFarCall& c, int64_t head) : of(c, head), ld(row_stride(c.dim)), lv(row_stride(c.value_dim)) {
    blocks = (of.end - of.block_start(c) + c.block - 1) / c.block;
    segment = 1;
    while (segment * segment < blocks) ++segment;
    segments = imax(1, (blocks + segment - 1) / segment);
    rows = c.window + (1 + segment) * c.block;
    slots = of.budget + c.block;
    near_ld = feature_stride(rows) + 16;
    logits = AttendScratch::width(round_up(of.far, VL), c.window + c.block);
  }

  /// Floats of `count` slots.
  int64_t slots_floats(int64_t count) const { return count * (ld + lv + 1) + 48; }
  int64_t window_floats(const NearFarCall& c) const { return Window::floats(c.dim, c.value_dim, rows); }
  int64_t back_floats(const NearFarCall& c) const {
    return AttendBackwardScratch::floats(c.block, c.dim, logits, c.logit_cap > 0);
  }
  /// Floats of the whole work space.
  int64_t floats(const NearFarCall& c) const {
    const int64_t columns = (round_up(c.dim, VL) + round_up(c.value_dim, VL) + 1) * of.far_stride;
    const int64_t kept = (segment + 1) * slots_floats(of.far) + segments * slots_floats(of.budget);
    const int64_t counts = 2 * (segment + 1 + segments), tokens = 2 * c.tokens + rows * (ld + lv);
    return tokens + window_floats(c) + round_up(c.value_dim, VL) * near_ld + of.attend_floats(c) + back_floats(c) +
           columns + kept + counts + 2 * slots_floats(slots + VL) + c.sinks * (ld + lv) +
           RecordedMerge::floats(slots, c.dim) + 512;
  }
};

}  // namespace
