/// The gradient of a merge. Which slots are merged is fixed; a slot that is made of several is their weighted mean, and so
/// are key, value and bias functions of theirs (nearfar/merge.py has the formulas). Gradients pass straight through the
/// rounding of entries.
#pragma once
#include "nearfar/entries.h"
#include "nearfar/merge_record.h"

namespace {

/// A recorded merge of n slots into `size`, with what follows from the record. Slots here have neither attention received
/// nor numbers of queries.
class RecordedMerge {
 public:
  /// Floats of work space for merges of up to n slots.
  static int64_t floats(int64_t n, int64_t dim) { return 6 * (n + 16) + row_stride(dim) + 64; }

  RecordedMerge(const NearFarCall& call, int64_t most, float* at)
      : c(call),
        share(carve(at, most)),
        top(carve(at, most)),
        total(carve(at, most)),
        members(carve(at, most)),
        inner(carve(at, most)),
        along(carve(at, most)),
        anchor(carve(at, row_stride(call.dim))) {}

  /// Takes up the record of the merge of n slots into `size`.
  void read(const MergeRecord& record, int64_t n, int64_t size) {
    place = record.place;
    memset(anchor, 0, size_t(row_stride(c.dim)) * 4);
    copy_row(anchor, record.anchor, c.dim);
    for (int64_t t = 0; t < size; ++t) top[t] = -__builtin_inff(), total[t] = members[t] = 0;
    for (int64_t i = 0; i < n; ++i) top[to(i)] = fmax2(record.weight[i], top[to(i)]);
    for (int64_t i = 0; i < n; ++i) {
      share[i] = exp2s((record.weight[i] - top[to(i)]) * LOG2E_F);
      total[to(i)] += share[i];
      members[to(i)] += 1;
    }
    for (int64_t i = 0; i < n; ++i) share[i] /= total[to(i)];
  }

  /// The slots `made` of the slots `from`.
  void replay(const Slots& from, int64_t size, Slots& made) const {
    const int64_t ld = row_stride(c.dim), lv = row_stride(c.value_dim);
    memset(made.key, 0, size_t(size * ld) * 4), memset(made.value, 0, size_t(size * lv) * 4);
    for (int64_t i = 0; i < from.n; ++i) {
      const int64_t t = to(i);
      add_row(made.key + t * ld, from.key + i * ld, alone(t) ? 1 : share[i], round_up(c.dim, VL));
      add_row(made.value + t * lv, from.value + i * lv, alone(t) ? 1 : share[i], round_up(c.value_dim, VL));
      if (alone(t)) made.bias[t] = from.bias[i];
    }
    for (int64_t t = 0; t < size; ++t) {
      if (alone(t)) continue;
      round_entry(c, made.key + t * ld, made.value + t * lv);
      made.bias[t] = __builtin_logf(total[t]) + top[t] - score(product(made.key + t * ld));
    }
    made.n = size;
  }

  /// The gradient of the slots `from`, of that of the slots `made`, which is changed meanwhile.
  void backward(const Slots& from, const Slots& made, const Slots& grad_made, const Slots& grad_from) const {
    const int64_t ld = row_stride(c.dim), lv = row_stride(c.value_dim), keys = round_up(c.dim, VL);
    const int64_t values = round_up(c.value_dim, VL);
    for (int64_t t = 0; t < made.n; ++t) {
      if (alone(t)) continue;
      add_row(grad_made.key + t * ld, anchor, -grad_made.bias[t] * slope(product(made.key + t * ld)), keys);
      inner[t] = grad_made.bias[t];
    }
    for (int64_t i = 0; i < from.n; ++i) {
      const int64_t t = to(i);
      float *key = grad_from.key + i * ld, *value = grad_from.value + i * lv;
      copy_row(key, grad_made.key + t * ld, keys), copy_row(value, grad_made.value + t * lv, values);
      grad_from.bias[i] = grad_made.bias[t];
      if (alone(t)) continue;
      along[i] = dot(key, from.key + i * ld, c.dim) + dot(value, from.value + i * lv, c.value_dim);
      inner[t] -= share[i] * along[i];
    }
    for (int64_t i = 0; i < from.n; ++i) {
      const int64_t t = to(i);
      if (alone(t)) continue;
      float* key = grad_from.key + i * ld;
      const float weight = share[i] * (along[i] + inner[t]);
      scale_row(key, share[i], keys), scale_row(grad_from.value + i * lv, share[i], values);
      add_row(key, anchor, weight * slope(product(from.key + i * ld)), keys);
      grad_from.bias[i] = weight;
    }
  }

 private:
  const NearFarCall& c;
  const float* place = nullptr;
  float *share, *top, *total, *members;  // (n), (size): parts of the new slot, largest log-weight, sum, number of slots
  float *inner, *along;                  // (size), (n): work space
  float* anchor;                         // (row_stride(D)): the mean query

  INLINE int64_t to(int64_t i) const { return int64_t(place[i]); }
  INLINE bool alone(int64_t t) const { return members[t] == 1; }
  INLINE float product(const float* key) const { return dot(key, anchor, c.dim); }
  /// The score of a product with the anchor, and its derivative.
  INLINE float score(float x) const { return c.logit_cap > 0 ? c.logit_cap * __builtin_tanhf(x / c.logit_cap) : x; }
  /// The derivative of `score`.
  INLINE float slope(float x) const {
    if (c.logit_cap == 0) return 1;
    const float t = __builtin_tanhf(x / c.logit_cap);
    return 1 - t * t;
  }
};

}  // namespace
