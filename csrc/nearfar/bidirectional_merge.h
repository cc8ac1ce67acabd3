/// All keys of a head in a bounded number of slots, for near/far attention without a causal mask. nearfar/bidirectional.py
/// has the same algorithm.
#pragma once
#include "nearfar/bidirectional_shape.h"
#include "nearfar/query_moments.h"
#include "nearfar/window.h"

namespace {

/// space.order and space.visible: the positions of tokens, visible ones first.
inline void order_tokens(const BidirectionalCall& c, int64_t b, const HeadSpace& space) {
  const uint8_t* mask = c.mask ? c.mask + b * c.keys : nullptr;
  int64_t n = 0;
  for (int64_t t = 0; t < c.keys; ++t) {
    if (!mask || mask[t]) space.order[n++] = int32_t(t);
  }
  *space.visible = n;
  for (int64_t t = 0; t < c.keys && n < c.keys; ++t) {
    if (!mask[t]) space.order[n++] = int32_t(t);
  }
}

/// The mean and the deviation of all queries of a kv head, and the order of its tokens. Returns flags.
int32_t read_queries(const BidirectionalCall& c, const BidirectionalSpace& all, int64_t head) {
  const int64_t b = head / c.kv_heads, kv = head % c.kv_heads, groups = c.heads / c.kv_heads, rows = 64;
  const BidirectionalShape shape(c, kv);
  const HeadSpace space(c, shape, all.at + head * all.floats);
  order_tokens(c, b, space);
  QueryMoments moments(c.dim, rows, scratch(QueryMoments::floats(c.dim, rows)));
  for (int64_t g = kv * groups; g < (kv + 1) * groups; ++g) {
    for (int64_t t = 0; t < c.queries; ++t) {
      float* row = moments.samples + t % rows * moments.ld;
      load_row(c.dtype, token_ptr(c.dtype, c.query, c.query_stride, b, g, t), c.dim, c.sqrt_scale, row);
      row[c.dim] = 1;
      if (t % rows < rows - 1 && t + 1 < c.queries) continue;
      moments.finish_block();
      moments.clear_samples();
    }
  }
  moments.update_metric();
  copy_row(space.anchor, moments.anchor, row_stride(c.dim));
  copy_row(space.deviation, moments.deviation, row_stride(c.dim));
  return OK;
}

/// The merging of one kv head's keys, or of a part of them.
class KeyMerge {
 public:
  /// Work space for segments up to `level`, and a spare one.
  static int64_t floats(const BidirectionalCall& c, const BidirectionalShape& s, int64_t level) {
    const int64_t rows = s.segment * (row_stride(c.dim) + row_stride(c.value_dim) + 1) + 64;
    return (level + 2) * rows + MergeScratch::floats(s.segment, s.segment, c.dim, c.value_dim);
  }
  KeyMerge(const BidirectionalCall& call, int64_t kv_head, const BidirectionalShape& sizes, const HeadSpace& shared,
           float* at)
      : c(call),
        b(kv_head / call.kv_heads),
        kv(kv_head % call.kv_heads),
        shape(sizes),
        space(shared),
        merging(sizes.segment, sizes.segment, call.dim, call.value_dim,
                carve(at, MergeScratch::floats(sizes.segment, sizes.segment, call.dim, call.value_dim))),
        levels(at) {
    metric.dim = c.dim, metric.value_dim = c.value_dim, metric.alpha = c.alpha, metric.cap = c.logit_cap;
    metric.anchor = space.anchor, metric.deviation = space.deviation;
  }

  /// Merges the keys of a part, and stores the slots.
  void merge_part(int64_t i) {
    Slots to = part(i);
    merge_segment(TASK_LEVEL, i, to);
    part_slots(i) = to.n;
  }

  /// Merges all keys, and stores the slots as a far field, and the share that each key has in its slot.
  void merge_all() {
    Slots slots = level_slots(shape.top), to = level_slots(shape.top + 1);
    fill_segment(shape.top, 0, slots);
    for (int64_t n = shape.top > 0 ? shape.segment : c.keys; n > shape.size;) {
      const int64_t left = imax(shape.size, (n + 1) / 2);
      to.n = 0;
      merge(slots, left, n, to, 0, c.keys);
      const Slots old = slots;
      slots = to, to = old, n = left;
    }
    store_slots(slots);
    set_shares(slots);
  }

 private:
  const BidirectionalCall& c;
  const int64_t b, kv;
  const BidirectionalShape shape;
  const HeadSpace space;
  const MergeScratch merging;
  float* const levels;
  Metric metric{};

  /// The buffer of the segments of a level; its slots start empty.
  Slots level_slots(int64_t level) const {
    const int64_t ld = row_stride(c.dim), lv = row_stride(c.value_dim);
    float* at = levels + level * (shape.segment * (ld + lv + 1) + 64);
    float *key = carve(at, shape.segment * ld), *value = carve(at, shape.segment * lv);
    return {key, value, at, nullptr, nullptr, 0};
  }
  /// The stored slots of a part.
  Slots part(int64_t i) const {
    float* at = space.parts + i * shape.part_floats(c) + 16;
    float* key = carve(at, shape.segment / 2 * row_stride(c.dim));
    float* value = carve(at, shape.segment / 2 * row_stride(c.value_dim));
    return {key, value, at, nullptr, nullptr, 0};
  }
  /// How many they are.
  int64_t& part_slots(int64_t i) const { return *reinterpret_cast<int64_t*>(space.parts + i * shape.part_floats(c)); }

  /// The slots behind those that `slots` has.
  Slots behind(const Slots& slots) const {
    return {slots.key + slots.n * row_stride(c.dim),
            slots.value + slots.n * row_stride(c.value_dim),
            slots.bias + slots.n,
            nullptr,
            nullptr,
            0};
  }
  /// to = from.
  void copy_slots(const Slots& from, Slots& to) const {
    copy_row(to.key, from.key, from.n * row_stride(c.dim));
    copy_row(to.value, from.value, from.n * row_stride(c.value_dim));
    copy_row(to.bias, from.bias, from.n);
    to.n = from.n;
  }

  /// Merges segment i of a level into half of its slots.
  void merge_segment(int64_t level, int64_t i, Slots& to) {
    Slots from = level_slots(level);
    fill_segment(level, i, from);
    merge(from, shape.segment / 2, shape.segment, to, i * shape.keys(level), (i + 1) * shape.keys(level));
  }

  /// Fills a segment with its keys, or with the slots of the two segments below it.
  void fill_segment(int64_t level, int64_t i, Slots& to) {
    if (level == 0) return load_keys(i * shape.segment, imin((i + 1) * shape.segment, c.keys), to);
    const int64_t keys = shape.keys(level - 1);
    for (int64_t below = 2 * i; below < 2 * i + 2 && below * keys < c.keys; ++below) {
      Slots next = behind(to);
      if (level - 1 == TASK_LEVEL && shape.parts > 0) {
        Slots stored = part(below);
        stored.n = part_slots(below);
        copy_slots(stored, next);
      } else {
        merge_segment(level - 1, below, next);
      }
      for (int64_t p = below * keys; p < imin((below + 1) * keys, c.keys); ++p) {
        if (space.slot[p] >= 0) space.slot[p] += int32_t(to.n);
      }
      to.n += next.n;
    }
  }

  /// Visible keys at the positions [first, last) as slots of their own.
  void load_keys(int64_t first, int64_t last, Slots& to) const {
    for (int64_t p = first; p < last; ++p) {
      const int64_t t = c.same_tokens ? space.order[p] : p;
      space.slot[p] = -1, space.share[p] = 0;
      if (c.mask && !c.mask[b * c.keys + t]) continue;
      float *key = to.key + to.n * row_stride(c.dim), *value = to.value + to.n * row_stride(c.value_dim);
      load_row(c.dtype, token_ptr(c.dtype, c.key, c.key_stride, b, kv, t), c.dim, c.sqrt_scale, key);
      load_row(c.dtype, token_ptr(c.dtype, c.value, c.value_stride, b, kv, t), c.value_dim, 1, value);
      space.share[p] = metric.score(dot(key, metric.anchor, c.dim));
      space.slot[p] = int32_t(to.n);
      to.bias[to.n++] = 0;
    }
  }

  /// Merges the slots `from`, `all` with empty ones, into at most `size`; they hold the keys at [first, last).
  void merge(const Slots& from, int64_t size, int64_t all, Slots& to, int64_t first, int64_t last) const {
    if (from.n <= size) return copy_slots(from, to);
    merge_slots(metric, from, size, all, merging, to);
    for (int64_t p = first; p < imin(last, c.keys); ++p) {
      if (space.slot[p] >= 0) space.slot[p] = int32_t(merging.place[space.slot[p]]);
    }
  }

  /// Writes the far field of the head.
  void store_slots(const Slots& slots) const {
    const int64_t n = slots.n, ld = shape.padded(shape.size);
    transpose(slots.key, row_stride(c.dim), n, c.dim, space.key_t, ld);
    for (int64_t i = 0; i < round_up(n, VL); ++i) space.bias[i] = i < n ? slots.bias[i] * LOG2E_F : MASKED_LOGIT;
    copy_row(space.value, slots.value, n * row_stride(c.value_dim));
    *space.slots = n;
  }

  /// Turns the log-weights of keys into their shares of their slots.
  void set_shares(const Slots& slots) const {
    float* weight = merging.weight;
    for (int64_t i = 0; i < slots.n; ++i) {
      weight[i] = slots.bias[i] + metric.score(dot(slots.key + i * row_stride(c.dim), metric.anchor, c.dim));
    }
    for (int64_t p = 0; p < c.keys; ++p) {
      if (space.slot[p] >= 0) space.share[p] = __builtin_expf(space.share[p] - weight[space.slot[p]]);
    }
  }
};

/// Merges the keys of one part of a kv head. Returns flags.
int32_t merge_part(const BidirectionalCall& c, const BidirectionalSpace& all, int64_t head, int64_t part) {
  const BidirectionalShape shape(c, head % c.kv_heads);
  if (part >= shape.parts) return OK;
  const HeadSpace space(c, shape, all.at + head * all.floats);
  KeyMerge(c, head, shape, space, scratch(KeyMerge::floats(c, shape, TASK_LEVEL))).merge_part(part);
  return OK;
}

/// Merges all keys of a kv head, those of parts from the slots that they left. Returns flags.
int32_t merge_keys(const BidirectionalCall& c, const BidirectionalSpace& all, int64_t head) {
  const BidirectionalShape shape(c, head % c.kv_heads);
  const HeadSpace space(c, shape, all.at + head * all.floats);
  *space.slots = 0;
  if (shape.size == 0) return OK;
  KeyMerge(c, head, shape, space, scratch(KeyMerge::floats(c, shape, shape.top))).merge_all();
  return OK;
}

}  // namespace
