/// Sizes and work space of a near/far prefill of one kv head; its backward pass needs the same.
#pragma once
#include "nearfar/entries.h"
#include "nearfar/query_moments.h"
#include "nearfar/recall_block.h"

namespace {

/// The sizes of a prefill. Positions count visible tokens.
struct PrefillShape {
  int64_t b, kv, groups;
  int64_t budget;      // most slots
  int64_t samples;     // sampled queries of a block, for each query head
  int64_t seen, end;   // positions of the new tokens: [seen, end)
  int64_t capacity;    // tokens of the window's buffers
  int64_t far;         // rows of sinks and slots, with room for a block
  int64_t far_stride;  // columns of the transposed far field
  RecallShape recall;

  PrefillShape(const NearFarCall& c, int64_t head)
      : b(head / c.kv_heads),
        kv(head % c.kv_heads),
        groups(c.heads / c.kv_heads),
        budget(c.budgets[kv]),
        samples((c.block + c.stride - 1) / c.stride),
        seen(c.seen[b]),
        end(seen + c.counts[b]),
        far(c.sinks + budget + c.block),
        far_stride(feature_stride(round_up(far, VL))),
        recall(c, kv, budget) {
    const int64_t blocks = imax(1, (end - block_start(c) + c.block - 1) / c.block);
    capacity = c.window + (1 + imin(SPARE_BLOCKS, blocks)) * c.block;
  }

  /// The position at which the first token's block starts.
  int64_t block_start(const NearFarCall& c) const { return seen - seen % c.block; }
  /// Floats of each part of the work space.
  int64_t window_floats(const NearFarCall& c) const { return Window::floats(c.dim, c.value_dim, capacity); }
  int64_t moments_floats(const NearFarCall& c) const { return QueryMoments::floats(c.dim, groups * samples); }
  int64_t attend_floats(const NearFarCall& c) const {
    return AttendScratch::floats(c.block, c.dim, c.value_dim, round_up(far, VL), c.window + c.block);
  }
  int64_t slots_floats(const NearFarCall& c) const { return far * (row_stride(c.dim) + row_stride(c.value_dim) + 3) + 128; }
  int64_t merge_candidates(const NearFarCall& c) const { return MergeScratch::candidates(budget + c.block, budget); }
  int64_t merge_floats(const NearFarCall& c) const {
    return MergeScratch::floats(budget + c.block, merge_candidates(c), c.dim, c.value_dim);
  }
  int64_t sampled_floats(const NearFarCall& c) const {
    return AttendScratch::floats(groups * samples, c.dim, 1, round_up(far, VL), c.window + c.block);
  }
  /// Floats of the whole work space.
  int64_t floats(const NearFarCall& c) const {
    return window_floats(c) + moments_floats(c) + attend_floats(c) + sampled_floats(c) + 2 * slots_floats(c) +
           (round_up(c.dim, VL) + 1) * far_stride + 2 * (c.window + c.block) + merge_floats(c) + 2 * c.tokens + 640 +
           recall.floats();
  }
};

/// `rows` slots in work space behind the sinks, which have the indices -sinks .. -1.
Slots carve_slots(const NearFarCall& c, int64_t rows, float*& at) {
  float* key = carve(at, rows * row_stride(c.dim));
  float* value = carve(at, rows * row_stride(c.value_dim));
  float *bias = carve(at, rows), *received = carve(at, rows);
  return {key + c.sinks * row_stride(c.dim), value + c.sinks * row_stride(c.value_dim), bias, received, carve(at, rows), 0};
}

/// The indices of the visible tokens of a batch entry, or null if all are visible.
int64_t* visible_tokens(const NearFarCall& c, int64_t b, float*& at) {
  if (!c.mask) return nullptr;
  int64_t* order = reinterpret_cast<int64_t*>(carve(at, 2 * c.tokens));
  for (int64_t t = 0, n = 0; t < c.tokens; ++t) {
    if (c.mask[b * c.tokens + t]) order[n++] = t;
  }
  return order;
}

}  // namespace
