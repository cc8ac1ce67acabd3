/// Sizes and shared work space of near/far attention without a causal mask. Instruction sets do not matter here.
#pragma once
#include "core/scratch.h"
#include "nearfar/abi.h"

namespace {

/// Keys among which pairs are searched: all pairs of a long sequence would be quadratic.
constexpr int64_t SEGMENT = 512;
/// Segments of this level are merged by tasks of their own, so that threads share a head.
constexpr int64_t TASK_LEVEL = 2;

/// How the keys of one kv head are merged. A segment of level 0 holds `segment` keys, one of level l the slots that two
/// segments of level l - 1 were merged into. The only segment of the top level holds what is left of all keys.
struct BidirectionalShape {
  int64_t size;     // slots in the end
  int64_t segment;  // slots of a segment, which are merged into half as many
  int64_t top;      // the top level
  int64_t parts;    // segments of TASK_LEVEL; 0 if this is not below the top

  BidirectionalShape(const BidirectionalCall& c, int64_t kv) : size(c.sizes[kv]), top(0), parts(0) {
    segment = 2 * (size > SEGMENT / 2 ? size : SEGMENT / 2);
    while (keys(top) < c.keys) ++top;
    if (size > 0 && top > TASK_LEVEL) parts = (c.keys + keys(TASK_LEVEL) - 1) / keys(TASK_LEVEL);
  }
  /// The keys that a segment of a level stands for.
  int64_t keys(int64_t level) const { return segment << level; }

  /// Floats of a row of n numbers.
  static int64_t padded(int64_t n) { return (n + 31) / 16 * 16; }
  /// Floats of the work space of a part.
  int64_t part_floats(const BidirectionalCall& c) const {
    return segment / 2 * (padded(c.dim) + padded(c.value_dim)) + padded(segment / 2) + 16;
  }
  /// Floats of the work space of the head.
  int64_t floats(const BidirectionalCall& c) const {
    const int64_t far = padded(c.dim + 16) * padded(size) + padded(size) + (size + 1) * padded(c.value_dim);
    return 64 + 2 * padded(c.dim) + 3 * padded(c.keys) + parts * part_floats(c) + far;
  }
};

/// What the tasks of one kv head share.
struct HeadSpace {
  int64_t *visible, *slots;   // (1): visible keys, and slots that are not empty
  float *anchor, *deviation;  // (row_stride(D)): of the queries, padded with 0
  int32_t* order;             // (S): tokens by position, visible ones first
  int32_t* slot;              // (S), by position: the slot that a key went into; -1 if it is hidden
  float* share;               // (S), by position: log-weight of a key for the mean query; in the end its share of its slot
  float* parts;               // (parts, part_floats)
  float *key_t, *bias, *value;  // the slots, as in FarField

  HeadSpace(const BidirectionalCall& c, const BidirectionalShape& shape, float* at) {
    visible = reinterpret_cast<int64_t*>(carve(at, 16)), slots = visible + 1;
    anchor = carve(at, shape.padded(c.dim)), deviation = carve(at, shape.padded(c.dim));
    order = reinterpret_cast<int32_t*>(carve(at, c.keys)), slot = reinterpret_cast<int32_t*>(carve(at, c.keys));
    share = carve(at, c.keys), parts = carve(at, shape.parts * shape.part_floats(c));
    key_t = carve(at, shape.padded(c.dim + 16) * shape.padded(shape.size)), bias = carve(at, shape.padded(shape.size));
    value = at;
  }
};

/// Queries of a block: the window is around it, if there is one.
inline int64_t block_rows(const BidirectionalCall& c) { return c.same_tokens ? c.block : 64; }
/// Blocks of a head's queries.
inline int64_t block_count(const BidirectionalCall& c) { return (c.queries + block_rows(c) - 1) / block_rows(c); }

}  // namespace
