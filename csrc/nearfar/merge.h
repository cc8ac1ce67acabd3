/// The far field of near/far attention: merging slots. The torch engine has the same algorithm, with its derivation.
#pragma once
#include "nearfar/entry_codes.h"
#include "nearfar/merge_plan.h"

namespace {

/// Averages merged slots, weighted by their attention mass, and writes the rest to `to` in ascending importance. s.place
/// becomes the new index of each slot.
void pool_slots(const Metric& m, const Slots& from, const MergeScratch& s, Slots& to) {
  const int64_t n = from.n, ld = row_stride(m.dim), lv = row_stride(m.value_dim);
  const int64_t keys = round_up(m.dim, VL), values = round_up(m.value_dim, VL);
  float* receives = s.inverse;  // reused: whether others are merged into a slot
  float* own = s.key_size;      // reused: the weight of the slots that stay
  int64_t count = 0;
  for (int64_t r = n - 1; r >= 0; --r) {
    if (s.root[r] != r) continue;
    const int64_t i = slot_of_rank(s, n, r);
    copy_row(to.key + count * ld, from.key + i * ld, ld);
    copy_row(to.value + count * lv, from.value + i * lv, lv);
    to.bias[count] = from.bias[i];
    if (from.received) to.received[count] = from.received[i], to.queries[count] = from.queries[i];
    s.top[count] = own[count] = s.weight[i];
    receives[count] = 0;
    s.place[i] = count++;
  }
  to.n = count;
  for (int64_t r = 0; r < n; ++r) {
    if (s.root[r] == r) continue;
    const int64_t i = slot_of_rank(s, n, r), t = s.place[slot_of_rank(s, n, s.root[r])];
    s.place[i] = t;
    s.top[t] = fmax2(s.top[t], s.weight[i]);
    receives[t] = 1;
    if (!from.received) continue;
    to.received[t] += from.received[i];
    to.queries[t] = fmax2(to.queries[t], from.queries[i]);
  }
  for (int64_t t = 0; t < count; ++t) {
    if (receives[t] == 0) continue;
    s.total[t] = s.share[t] = exp2s((own[t] - s.top[t]) * LOG2E_F);
    scale_row(to.key + t * ld, s.share[t], keys);
    scale_row(to.value + t * lv, s.share[t], values);
  }
  for (int64_t r = 0; r < n; ++r) {
    if (s.root[r] == r) continue;
    const int64_t i = slot_of_rank(s, n, r), t = s.place[i];
    const float added = exp2s((s.weight[i] - s.top[t]) * LOG2E_F);
    add_row(to.key + t * ld, from.key + i * ld, added, keys);
    add_row(to.value + t * lv, from.value + i * lv, added, values);
    s.total[t] += added;
  }
  for (int64_t t = 0; t < count; ++t) {
    if (receives[t] == 0 || s.total[t] == s.share[t]) continue;
    scale_row(to.key + t * ld, 1 / s.total[t], keys);
    scale_row(to.value + t * lv, 1 / s.total[t], values);
    round_row(m.entry_dtype, to.key + t * ld, m.dim), round_row(m.entry_dtype, to.value + t * lv, m.value_dim);
    to.bias[t] = __builtin_logf(s.total[t]) + s.top[t] - m.score(dot(to.key + t * ld, m.anchor, m.dim));
  }
}

/// Merges the live slots `from` into `size` slots `to`. `all`: the number of slots with empty ones, which are removed first
/// but count among the candidates.
void merge_slots(const Metric& m, const Slots& from, int64_t size, int64_t all, const MergeScratch& s, Slots& to) {
  const int64_t removed = from.n - size, candidates = MergeScratch::candidates(all, size);
  rank_slots(m, from, size, s);
  plan_merge(m, from, candidates - (all - from.n), removed, s);
  pool_slots(m, from, s, to);
}

/// One problem of a MergeCall.
int32_t merge(const MergeCall& c, int64_t problem) {
  const int64_t n = c.slots, D = c.dim, M = c.value_dim, E = D + M, ld = row_stride(D), lv = row_stride(M);
  const int64_t candidates = MergeScratch::candidates(n, c.size);
  float* space =
      scratch((n + c.size + 16) * (ld + lv + 3) + 2 * ld + 3 * n + MergeScratch::floats(n, candidates, D, M) + 1024);
  Slots from{carve(space, n * ld), carve(space, n * lv), carve(space, n), carve(space, n), carve(space, n), 0};
  Slots to{carve(space, c.size * ld), carve(space, c.size * lv), carve(space, c.size),
           carve(space, c.size),      carve(space, c.size),      0};
  if (!c.rate) from.received = nullptr;
  float *anchor = carve(space, ld), *deviation = carve(space, ld);
  float* origin = carve(space, n);  // which slot a live one was
  const MergeScratch s(n, candidates, D, M, space);
  memset(anchor, 0, size_t(ld) * 4), memset(deviation, 0, size_t(ld) * 4);
  copy_row(anchor, c.anchor + problem * D, D);
  for (int64_t d = 0; d < D; ++d) deviation[d] = __builtin_sqrtf(c.metric[problem * D + d]);
  for (int64_t i = 0; i < n; ++i) {
    const float *entry = c.slot + (problem * n + i) * E, bias = c.bias[problem * n + i];
    if (bias == -__builtin_inff()) continue;
    memset(from.key + from.n * ld, 0, size_t(ld) * 4), memset(from.value + from.n * lv, 0, size_t(lv) * 4);
    copy_row(from.key + from.n * ld, entry, D), copy_row(from.value + from.n * lv, entry + D, M);
    from.bias[from.n] = bias, from.queries[from.n] = 1;
    if (c.rate) from.received[from.n] = c.rate[problem * n + i];
    origin[from.n++] = float(i);
  }
  for (int64_t i = 0; i < n; ++i) c.place[problem * n + i] = 0;
  if (from.n > c.size) {
    merge_slots({D, M, c.alpha, anchor, deviation, c.logit_cap, FLOAT32}, from, c.size, n, s, to);
  } else {
    to = from;
    for (int64_t i = 0; i < from.n; ++i) s.place[i] = i;
  }
  for (int64_t i = 0; i < from.n; ++i) c.place[problem * n + int64_t(origin[i])] = s.place[i];
  for (int64_t i = 0; i < c.size; ++i) {
    float* entry = c.slot_new + (problem * c.size + i) * E;
    c.bias_new[problem * c.size + i] = i < to.n ? to.bias[i] : -__builtin_inff();
    if (i < to.n) {
      copy_row(entry, to.key + i * ld, D), copy_row(entry + D, to.value + i * lv, M);
    } else {
      memset(entry, 0, size_t(E) * 4);
    }
  }
  return OK;
}

}  // namespace
