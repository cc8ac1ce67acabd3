/// Which slots of the far field are merged into which: the least important ones, cheapest pairs first.
#pragma once
#include "core/gemm.h"
#include "core/load_rows.h"
#include "core/row_ops.h"
#include "nearfar/abi.h"

namespace {

/// Slots considered for removal: at least this many, or twice as many as must be removed.
constexpr int64_t CANDIDATES = 128;
/// Heads with at least this many slots search for single keys: an even weight is added to all slots, in units of the mean,
/// and more of them are considered, because most have about the same weight then.
constexpr int64_t SEARCHED = 256, SEARCHED_CANDIDATES = 256;
constexpr float EVEN_WEIGHT = 4;
constexpr float LOG2E_F = 1.44269504f;

/// The least importance of a slot, relative to the largest; also keeps divisors positive.
constexpr float TINY = 1e-30f;

/// n slots: key (n, row_stride(D)), value (n, row_stride(M)), both padded with 0, bias (n), and the attention that each
/// received from how many queries (n); `received` is null if that is not known.
struct Slots {
  float *key, *value, *bias, *received, *queries;
  int64_t n;
};

/// The sizes of a merge, and the statistics of the queries so far.
struct Metric {
  int64_t dim, value_dim;
  float alpha;
  const float* anchor;     // (row_stride(D)) mean, padded with 0
  const float* deviation;  // (row_stride(D)) standard deviation, padded with 0
  float cap;               // of the scores; 0 for none
  int64_t entry_dtype;     // to which merged slots are rounded

  /// The score of a slot for the anchor, from its product with it.
  INLINE float score(float product) const { return cap > 0 ? cap * __builtin_tanhf(product / cap) : product; }
};

/// Work space of a merge of up to n slots with up to c candidates. Rank 0 is the most important slot.
struct MergeScratch {
  float* centred;                          // (n, row_stride(D)): key - mean, times the deviation of the queries
  float *sorted_key, *sorted_value;        // (n, row_stride(D)), (n, row_stride(M)): centred, by rank
  float *key_t, *value_t;                  // (D, feature_stride(n)), (M, feature_stride(n)): the same as columns
  float* products;                         // (c, feature_stride(n)): value . value
  float *partial, *index;                  // (n, VL)
  float *mean, *mean_value;                // (row_stride(D)), (row_stride(M))
  float *weight, *importance;              // (n): bias + anchor . key; log of the expected attention times distance
  float *key_size, *value_size, *inverse;  // (n), by rank: squared lengths; exp(-alpha importance)
  float *top, *total, *share;              // (n)
  uint64_t *order, *spare;                 // (n): importance and slot, ascending
  int64_t *root, *place;                   // (n): the rank a rank is merged into; the new index of a slot
  int64_t columns;                         // floats between two rows of the transposed matrices and of `products`

  /// The slots considered for removal when n have to become `size`.
  static int64_t candidates(int64_t n, int64_t size) {
    return imin(n, imax(2 * (n - size), size >= SEARCHED ? SEARCHED_CANDIDATES : CANDIDATES));
  }

  /// Floats of work space.
  static int64_t floats(int64_t n, int64_t c, int64_t dim, int64_t value_dim) {
    const int64_t m = round_up(n, 16) + 16, rows = 2 * row_stride(dim) + row_stride(value_dim);
    const int64_t tables = round_up(dim, VL) + round_up(value_dim, VL) + c + 16;
    return m * rows + tables * feature_stride(m) + 2 * m * VL + row_stride(dim) + row_stride(value_dim) + 16 * m + 1024;
  }

  MergeScratch(int64_t n, int64_t c, int64_t dim, int64_t value_dim, float* at) {
    const int64_t m = round_up(n, 16) + 16;
    columns = feature_stride(m);
    centred = carve(at, m * row_stride(dim)), sorted_key = carve(at, m * row_stride(dim));
    sorted_value = carve(at, m * row_stride(value_dim));
    key_t = carve(at, round_up(dim, VL) * columns), value_t = carve(at, round_up(value_dim, VL) * columns);
    products = carve(at, (c + 16) * columns);
    partial = carve(at, m * VL), index = carve(at, m * VL);
    mean = carve(at, row_stride(dim)), mean_value = carve(at, row_stride(value_dim));
    float** const numbers[] = {&weight, &importance, &key_size, &value_size, &inverse, &top, &total, &share};
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

/// Epilogue: for each candidate, the more important slot into which merging it costs least. Row i is rank offset + i.
/// Products are those of keys; those of values are in a table.
struct CheapestMerge {
  const float *key_size, *value_size, *inverse;
  const float* products;  // (candidates, columns)
  int64_t columns;
  float unit;           // 1 / the mean squared distance of two values
  float *best, *index;  // (candidates, VL)
  int64_t offset;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    const int64_t row = offset + i;
    const vec own = splat(key_size[row]), own_value = splat(value_size[row]), rate = splat(inverse[row]);
    vec low = j ? load(best + i * VL) : splat(__builtin_inff()), at = j ? load(index + i * VL) : vec{};
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      const int64_t column = j + w * VL;
      const vec key = vmax(own + load(key_size + column) - 2 * acc[w], vec{});
      const vec value = vmax(own_value + load(value_size + column) - 2 * load(products + i * columns + column), vec{});
      vec cost = key * (value * unit + 1.0f) / (rate + load(inverse + column));
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

/// to (row_stride): the weighted mean of n rows; weights null for equal ones.
void mean_row(const float* rows, int64_t ld, int64_t n, int64_t width, const float* weights, float* to) {
  float total = 0;
  for (int64_t i = 0; i < n; ++i) total += weights ? weights[i] : 1;
  for (int64_t d = 0; d < round_up(width, VL); d += VL) {
    vec sum = {};
    for (int64_t i = 0; i < n; ++i) sum += load(rows + i * ld + d) * (weights ? weights[i] : 1.0f);
    store(to + d, sum / fmax2(total, TINY));
  }
}

/// s.centred and s.weight of all slots; s.importance: log E_q[exp(q.k)] of Gaussian queries, up to a constant.
void expect_attention(const Metric& m, const Slots& from, const MergeScratch& s) {
  const int64_t n = from.n, ld = row_stride(m.dim), full = round_up(m.dim, VL);
  mean_row(from.key, ld, n, m.dim, nullptr, s.mean);
  for (int64_t i = 0; i < n; ++i) {
    vec tilt = {}, spread = {};
    for (int64_t d = 0; d < full; d += VL) {
      const vec k = load(from.key + i * ld + d), way = (k - load(s.mean + d)) * load(m.deviation + d);
      tilt += k * load(m.anchor + d);
      spread += way * way;
      store(s.centred + i * ld + d, way);
    }
    s.weight[i] = m.score(sum(tilt)) + from.bias[i];
    s.importance[i] = s.weight[i] + sum(spread) / 2;
  }
}

/// weight (n) += EVEN_WEIGHT times their mean. Returns what was added.
float add_even_weight(float* weight, int64_t n) {
  float mean = 0;
  for (int64_t i = 0; i < n; ++i) mean += weight[i] / float(n);
  for (int64_t i = 0; i < n; ++i) weight[i] += EVEN_WEIGHT * mean;
  return EVEN_WEIGHT * mean;
}

/// Importance of all slots, which are to become `size`, and their order in s.order.
void rank_slots(const Metric& m, const Slots& from, int64_t size, const MergeScratch& s) {
  const int64_t n = from.n, lv = row_stride(m.value_dim);
  expect_attention(m, from, s);
  float* expected = s.share;  // the attention per query
  float high = s.importance[0], total = 0, known = 0;
  for (int64_t i = 1; i < n; ++i) high = fmax2(high, s.importance[i]);
  for (int64_t i = 0; i < n; ++i) total += expected[i] = exp2s((s.importance[i] - high) * LOG2E_F);
  for (int64_t i = 0; i < n && from.received; ++i) known += from.received[i] / fmax2(from.queries[i], 1e-6f);
  for (int64_t i = 0; i < n; ++i) {
    expected[i] /= total;
    if (known > 0) expected[i] = expected[i] * known + from.received[i] / fmax2(from.queries[i], 1e-6f);
  }
  mean_row(from.value, lv, n, m.value_dim, expected, s.mean_value);
  float most = TINY;
  for (int64_t i = 0; i < n; ++i) {
    vec distance = {};
    for (int64_t d = 0; d < round_up(m.value_dim, VL); d += VL) {
      const vec way = load(from.value + i * lv + d) - load(s.mean_value + d);
      distance += way * way;
    }
    expected[i] *= __builtin_sqrtf(sum(distance));
    most = fmax2(most, expected[i]);
  }
  if (from.received && size >= SEARCHED) most += add_even_weight(expected, n);
  for (int64_t i = 0; i < n; ++i) {
    s.importance[i] = __builtin_logf(fmax2(expected[i] / most, TINY));
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
void plan_merge(const Metric& m, const Slots& from, int64_t candidates, int64_t removed, const MergeScratch& s) {
  const int64_t n = from.n, ld = row_stride(m.dim), lv = row_stride(m.value_dim), offset = n - candidates;
  const float top = s.importance[slot_of_rank(s, n, 0)];
  mean_row(from.value, lv, n, m.value_dim, nullptr, s.mean_value);
  float scatter = 0;
  for (int64_t r = 0; r < n; ++r) {
    const int64_t i = slot_of_rank(s, n, r);
    float *key = s.sorted_key + r * ld, *value = s.sorted_value + r * lv;
    copy_row(key, s.centred + i * ld, ld), copy_row(value, from.value + i * lv, lv);
    add_row(value, s.mean_value, -1, round_up(m.value_dim, VL));
    s.key_size[r] = dot(key, key, m.dim), s.value_size[r] = dot(value, value, m.value_dim);
    s.inverse[r] = m.alpha * (top - s.importance[i]);
    scatter += s.value_size[r];
  }
  for (int64_t r = n; r < round_up(n, VL); ++r) s.key_size[r] = s.value_size[r] = s.inverse[r] = 0;
  for (int64_t r = 0; r < n; r += VL) {
    const vec x = load(s.inverse + r);
    store(s.inverse + r, exp2v((x < 46.0f ? x : splat(46.0f)) * LOG2E_F));
  }
  transpose(s.sorted_key, ld, n, m.dim, s.key_t, s.columns);
  transpose(s.sorted_value, lv, n, m.value_dim, s.value_t, s.columns);
  const Operand keys{s.sorted_key + offset * ld, ld, 1, s.key_t, s.columns, m.dim};
  const Operand values{s.sorted_value + offset * lv, lv, 1, s.value_t, s.columns, m.value_dim};
  gemm(candidates, round_up(n, VL), &values, 1, Store<false>{s.products, s.columns}, nullptr, true, offset);
  const float unit = 0.5f / fmax2(scatter / float(n), TINY);
  const CheapestMerge cheapest{s.key_size, s.value_size, s.inverse, s.products, s.columns,
                               unit,       s.partial,    s.index,   offset};
  gemm(candidates, round_up(n, VL), &keys, 1, cheapest, nullptr, true, offset);
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

}  // namespace
