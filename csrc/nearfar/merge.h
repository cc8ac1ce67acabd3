/// The far field of near/far attention: merging slots. The torch engine has the same algorithm, with its derivation.
#pragma once
#include "core/gemm.h"
#include "core/load_rows.h"
#include "core/row_ops.h"
#include "nearfar/abi.h"

namespace {

/// Slots considered for removal: at least this many, or twice as many as must be removed.
constexpr int64_t CANDIDATES = 128;
constexpr float LOG2E_F = 1.44269504f;

/// n slots: key (n, row_stride(D)), value (n, row_stride(M)), both padded with 0, and bias (n).
struct Slots {
  float *key, *value, *bias;
  int64_t n;
};

/// The sizes of a merge, and the statistics of the queries so far.
struct Metric {
  int64_t dim, value_dim;
  float alpha;
  const float* anchor;  // (row_stride(D)) mean, padded with 0
  const float* matrix;  // (D, row_stride(D)) covariance, padded with 0
};

/// Work space of a merge of up to n slots. Rank 0 is the most important slot.
struct MergeScratch {
  float *centred, *projected;  // (n, row_stride(D)): key - mean, and that times the covariance
  float *sorted, *chosen;      // (n, row_stride(D)): centred by rank; projected, of the candidates
  float* sorted_t;             // (D, feature_stride(n))
  float *partial, *index;      // (n, VL)
  float* mean;                 // (row_stride(D))
  float *weight, *spread;      // (n): bias + anchor . key; squared length of `centred` under the covariance
  float* importance;           // (n): weight + spread / 2
  float *sorted_spread, *inverse, *top, *total, *share;  // (n)
  uint64_t *order, *spare;                               // (n): importance and slot, ascending
  int64_t *root, *place;                                 // (n): the rank a rank is merged into; the new index of a slot

  /// Floats of work space.
  static int64_t floats(int64_t n, int64_t dim) {
    const int64_t m = round_up(n, 16) + 16;
    return 4 * m * row_stride(dim) + round_up(dim, VL) * feature_stride(m) + 2 * m * VL + row_stride(dim) + 16 * m + 512;
  }

  MergeScratch(int64_t n, int64_t dim, float* at) {
    const int64_t m = round_up(n, 16) + 16;
    float** const rows[] = {&centred, &projected, &sorted, &chosen};
    float** const numbers[] = {&weight, &spread, &importance, &sorted_spread, &inverse, &top, &total, &share};
    for (float** p : rows) *p = carve(at, m * row_stride(dim));
    sorted_t = carve(at, round_up(dim, VL) * feature_stride(m));
    partial = carve(at, m * VL), index = carve(at, m * VL), mean = carve(at, row_stride(dim));
    for (float** p : numbers) *p = carve(at, m);
    order = reinterpret_cast<uint64_t*>(carve(at, 2 * m)), spare = reinterpret_cast<uint64_t*>(carve(at, 2 * m));
    root = reinterpret_cast<int64_t*>(carve(at, 2 * m)), place = reinterpret_cast<int64_t*>(carve(at, 2 * m));
  }
};

/// Stable radix sort of keys (n) by their upper 32 bits.
void sort_keys(uint64_t* keys, uint64_t* spare, int64_t n) {
  for (int shift = 32; shift < 64; shift += 8) {
    int64_t first[257] = {};
    for (int64_t i = 0; i < n; ++i) ++first[((keys[i] >> shift) & 255) + 1];
    for (int d = 0; d < 256; ++d) first[d + 1] += first[d];
    for (int64_t i = 0; i < n; ++i) spare[first[(keys[i] >> shift) & 255]++] = keys[i];
    uint64_t* other = keys;
    keys = spare, spare = other;
  }
}

/// A sort key with the order of x in its upper and `payload` in its lower 32 bits; NaN sorts first.
INLINE uint64_t sortable(float x, int64_t payload) {
  uint32_t bits;
  if (x != x) x = -__builtin_inff();
  memcpy(&bits, &x, 4);
  bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
  return uint64_t(bits) << 32 | uint64_t(payload);
}

/// Epilogue: to = (key - mean) covariance; partial gets vectors whose lanes add up to the squared length of each row.
struct ProjectKeys {
  float* to;
  const float* key;
  int64_t ld;
  float* partial;  // (n, VL)
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    vec s = j ? load(partial + i * VL) : vec{};
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      store(to + i * ld + j + w * VL, acc[w]);
      s += acc[w] * load(key + i * ld + j + w * VL);
    }
    store(partial + i * VL, s);
  }
};

/// Epilogue: for each candidate, the more important slot into which merging it costs least. Row i is rank offset + i.
struct CheapestMerge {
  const float *spread, *inverse;
  float *best, *index;  // (candidates, VL)
  int64_t offset;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    const int64_t row = offset + i;
    const vec own = splat(spread[row]), rate = splat(inverse[row]);
    vec low = j ? load(best + i * VL) : splat(__builtin_inff()), at = j ? load(index + i * VL) : vec{};
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      const int64_t column = j + w * VL;
      vec cost = vmax(own + load(spread + column) - 2 * acc[w], vec{}) / (rate + load(inverse + column));
      if (column + VL > row) cost = lanes() < splat(float(row - column)) ? cost : splat(__builtin_inff());
      const auto less = cost < low;
      low = less ? cost : low;
      at = less ? lanes() + float(column) : at;
    }
    store(best + i * VL, low);
    store(index + i * VL, at);
  }
};

/// to (n), at (n): the minimum of each of n vectors (n, VL) and its index (n, VL); the lowest index of equal ones.
void row_argmin(const float* vectors, const float* index, int64_t n, float* to, float* at) {
  for (int64_t i = 0; i < n; i += VL) {
    vec x[VL];
    for (int k = 0; k < VL; ++k) x[k] = -load(vectors + imin(i + k, n - 1) * VL);
    const vec low = -reduce<true>(x);
    for (int k = 0; k < VL; ++k) {
      const int64_t row = imin(i + k, n - 1) * VL;
      x[k] = load(vectors + row) == splat(low[k]) ? -load(index + row) : splat(-1e9f);
    }
    store_some(to + i, low, n - i);
    store_some(at + i, -reduce<true>(x), n - i);
  }
}

/// Importance of all slots, and their order in s.order.
void rank_slots(const Metric& m, const Slots& from, const MergeScratch& s) {
  const int64_t n = from.n, ld = row_stride(m.dim), full = round_up(m.dim, VL);
  for (int64_t d = 0; d < full; d += VL) {
    vec total = {};
    for (int64_t i = 0; i < n; ++i) total += load(from.key + i * ld + d);
    store(s.mean + d, total / float(n));
  }
  for (int64_t i = 0; i < n; ++i) {
    vec tilt = {};
    for (int64_t d = 0; d < full; d += VL) {
      const vec k = load(from.key + i * ld + d);
      tilt += k * load(m.anchor + d);
      store(s.centred + i * ld + d, k - load(s.mean + d));
    }
    store(s.partial + i * VL, tilt);
  }
  reduce_rows<false>(s.partial, n, s.weight);
  const Operand o{s.centred, ld, 1, m.matrix, ld, m.dim};
  gemm(n, full, &o, 1, ProjectKeys{s.projected, s.centred, ld, s.partial});
  reduce_rows<false>(s.partial, n, s.spread);
  for (int64_t i = 0; i < n; ++i) {
    s.weight[i] += from.bias[i];
    s.importance[i] = s.weight[i] + s.spread[i] / 2;
    s.order[i] = sortable(s.importance[i], i);
  }
  sort_keys(s.order, s.spare, n);
}

/// The slot at a rank.
INLINE int64_t slot_of_rank(const MergeScratch& s, int64_t n, int64_t rank) {
  return int64_t(s.order[n - 1 - rank] & 0xffffffff);
}

/// Chooses which `removed` of the `candidates` least important slots are merged, the cheapest first. s.root[rank] becomes
/// the rank of the slot it ends up in.
void plan_merge(const Metric& m, int64_t n, int64_t candidates, int64_t removed, const MergeScratch& s) {
  const int64_t ld = row_stride(m.dim), ldt = feature_stride(round_up(n, 16) + 16), offset = n - candidates;
  const float top = s.importance[slot_of_rank(s, n, 0)];
  for (int64_t r = 0; r < n; ++r) {
    const int64_t i = slot_of_rank(s, n, r);
    memcpy(s.sorted + r * ld, s.centred + i * ld, size_t(ld) * 4);
    if (r >= offset) memcpy(s.chosen + (r - offset) * ld, s.projected + i * ld, size_t(ld) * 4);
    s.sorted_spread[r] = s.spread[i];
    s.inverse[r] = m.alpha * (top - s.importance[i]);
  }
  for (int64_t r = n; r < round_up(n, VL); ++r) s.sorted_spread[r] = s.inverse[r] = 0;
  for (int64_t r = 0; r < n; r += VL) {
    const vec x = load(s.inverse + r);
    store(s.inverse + r, exp2v((x < 46.0f ? x : splat(46.0f)) * LOG2E_F));
  }
  transpose(s.sorted, ld, n, m.dim, s.sorted_t, ldt);
  const Operand o{s.chosen, ld, 1, s.sorted_t, ldt, m.dim};
  const CheapestMerge cheapest{s.sorted_spread, s.inverse, s.partial, s.index, offset};
  gemm(candidates, round_up(n, VL), &o, 1, cheapest, nullptr, true, offset);
  uint64_t* costs = s.spare;  // the order of slots stays in s.order
  float *cost = s.top, *into = s.share;
  row_argmin(s.partial, s.index, candidates, cost, into);
  for (int64_t i = candidates - 1; i >= 0; --i) {
    s.root[offset + i] = int64_t(into[i]);
    costs[candidates - 1 - i] = sortable(cost[i], i);
  }
  sort_keys(costs, reinterpret_cast<uint64_t*>(s.place), candidates);
  for (int64_t r = 0; r < n; ++r) s.total[r] = 0;
  for (int64_t i = 0; i < removed; ++i) s.total[offset + int64_t(costs[i] & 0xffffffff)] = 1;
  for (int64_t r = 0; r < n; ++r) s.root[r] = s.total[r] != 0 ? s.root[s.root[r]] : r;
}

/// Averages merged slots, weighted by their attention mass, and writes the rest to `to` in ascending importance. s.place
/// becomes the new index of each slot.
void pool_slots(const Metric& m, const Slots& from, const MergeScratch& s, Slots& to) {
  const int64_t n = from.n, ld = row_stride(m.dim), lv = row_stride(m.value_dim);
  const int64_t keys = round_up(m.dim, VL), values = round_up(m.value_dim, VL);
  float* receives = s.inverse;  // reused: whether others are merged into a slot
  float* own = s.spread;        // reused: the weight of the slots that stay
  int64_t count = 0;
  for (int64_t r = n - 1; r >= 0; --r) {
    if (s.root[r] != r) continue;
    const int64_t i = slot_of_rank(s, n, r);
    copy_row(to.key + count * ld, from.key + i * ld, ld);
    copy_row(to.value + count * lv, from.value + i * lv, lv);
    to.bias[count] = from.bias[i];
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
    to.bias[t] = __builtin_logf(s.total[t]) + s.top[t] - dot(to.key + t * ld, m.anchor, m.dim);
  }
}

/// Merges the live slots `from` into `size` slots `to`. `all`: the number of slots with empty ones, which are removed first
/// but count among the candidates.
void merge_slots(const Metric& m, const Slots& from, int64_t size, int64_t all, const MergeScratch& s, Slots& to) {
  const int64_t removed = from.n - size, wanted = imax(2 * (all - size), CANDIDATES);
  rank_slots(m, from, s);
  plan_merge(m, from.n, imin(all, wanted) - (all - from.n), removed, s);
  pool_slots(m, from, s, to);
}

/// One problem of a MergeCall.
int32_t merge(const MergeCall& c, int64_t problem) {
  const int64_t n = c.slots, D = c.dim, M = c.value_dim, E = D + M, ld = row_stride(D), lv = row_stride(M);
  float* space = scratch((n + c.size + 16) * (ld + lv + 1) + (D + 1) * ld + n + MergeScratch::floats(n, D) + 1024);
  Slots from{carve(space, n * ld), carve(space, n * lv), carve(space, n), 0};
  Slots to{carve(space, c.size * ld), carve(space, c.size * lv), carve(space, c.size), 0};
  float* anchor = carve(space, ld);
  float* matrix = carve(space, D * ld);
  float* origin = carve(space, n);  // which slot a live one was
  const MergeScratch s(n, D, space);
  memset(anchor, 0, size_t(ld) * 4), memset(matrix, 0, size_t(D * ld) * 4);
  copy_row(anchor, c.anchor + problem * D, D);
  for (int64_t d = 0; d < D; ++d) copy_row(matrix + d * ld, c.metric + (problem * D + d) * D, D);
  for (int64_t i = 0; i < n; ++i) {
    const float *entry = c.slot + (problem * n + i) * E, bias = c.bias[problem * n + i];
    if (bias == -__builtin_inff()) continue;
    memset(from.key + from.n * ld, 0, size_t(ld) * 4), memset(from.value + from.n * lv, 0, size_t(lv) * 4);
    copy_row(from.key + from.n * ld, entry, D), copy_row(from.value + from.n * lv, entry + D, M);
    from.bias[from.n] = bias;
    origin[from.n++] = float(i);
  }
  for (int64_t i = 0; i < n; ++i) c.place[problem * n + i] = 0;
  if (from.n > c.size) {
    merge_slots({D, M, c.alpha, anchor, matrix}, from, c.size, n, s, to);
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
