/// Recall in a decoding step: one token of one head, which reads the far tokens of the state in place.
#pragma once
#include "nearfar/recall.h"

namespace {

/// Recall for the queries of one token.
class RecallToken {
 public:
  /// Whether a kv head of a call recalls anything.
  static bool on(const NearFarCall& c, int64_t kv) { return c.far && c.far->recall[kv] > 0 && c.far->cells > 0; }

  /// Floats of work space. slots: of the head.
  static int64_t floats(const NearFarCall& c, int64_t kv, int64_t slots) {
    const int64_t groups = c.heads / c.kv_heads, units = c.far->cells / c.far->unit,
                  recall = imin(c.far->recall[kv], units);
    return FarRows::floats(recall, c.dim, c.value_dim) + Attended::floats(groups, c.dim, c.value_dim, slots) +
           Correction::floats(1, groups, recall, recall) + BestBlocks::floats(1, units, recall) +
           groups * row_stride(c.dim) + 2 * recall * UNIT + FarCache::floats(c.dim, c.value_dim) + 512;
  }

  RecallToken(const NearFarCall& c, int64_t b, int64_t kv, int64_t slots, float*& at)
      : cache(c, b, kv),
        groups(c.heads / c.kv_heads),
        units(c.far->cells / c.far->unit),
        recall(imin(c.far->recall[kv], units)),
        rows(recall, c.dim, c.value_dim, at),
        attended(groups, c.dim, c.value_dim, slots, at),
        correction(1, groups, recall, recall, at),
        best(1, units, recall, at) {
    attended.slots = slots;
    squares = carve(at, groups * row_stride(c.dim));
    shares = carve(at, recall * UNIT), places = reinterpret_cast<int32_t*>(carve(at, recall * UNIT));
    space = carve(at, FarCache::floats(c.dim, c.value_dim));
  }

  /// Where the output (row_stride(M)) of query g without recall is written, and that with it is found.
  float* output(int64_t g) const { return attended.out + g * row_stride(rows.value_dim); }

  /// Takes over query g (row_stride(D)), in units of log2. weights: of the slots, whose sum with all others is 1 / factor.
  void take(int64_t g, const float* x, const float* weights, float factor, float top) const {
    const int64_t ld = row_stride(rows.dim);
    copy_row(attended.query + g * ld, x, ld);
    for (int64_t d = 0; d < ld; d += VL) store(squares + g * ld + d, load(x + d) * load(x + d));
    attended.take(g, weights, factor, top);
  }

  /// Corrects the outputs of all queries.
  void correct(float cap) const {
    const int64_t living = find_living();
    const bool all = living <= recall;
    const int64_t n = imin(living, recall);
    if (!all) choose(cap);
    for (int64_t k = 0; k < n; ++k) {
      const int64_t first = best.chosen(0)[k] * cache.unit;
      far_shares(cache.log_share + first, cache.slot + first, cache.unit, shares + k * UNIT, places + k * UNIT);
      correction.choices(0)[k] = int32_t(k);
    }
    correction.choice_count(0) = int32_t(n);
    const Chosen far{*this, rows.dim, rows.value_dim};
    correction.run(far, n, 1, attended, 0, cap, all ? -__builtin_inff() : LEAST_WEIGHT, shares, places);
  }

 private:
  const FarCache cache;
  const int64_t groups, units, recall;
  const FarRows rows;  // of the chosen blocks
  Attended attended;
  const Correction correction;
  const BestBlocks best;
  float *squares, *shares, *space;  // (groups, row_stride(D)), (recall, UNIT)
  int32_t* places;                  // (recall, UNIT)

  /// What Correction reads: the chosen blocks by their number, unpacked when they are needed.
  struct Chosen {
    const RecallToken& token;
    int64_t dim, value_dim;
    /// The keys of chosen block k.
    const float* keys(int64_t k) const {
      token.cache.load_keys(token.best.chosen(0)[k], token.rows.keys(k), token.space);
      return token.rows.keys(k);
    }
    /// The values of chosen block k.
    const float* values(int64_t k) const {
      token.cache.load_values(token.best.chosen(0)[k], token.rows.values(k), token.space);
      return token.rows.values(k);
    }
    void prefetch_keys(int64_t) const {}
    void prefetch_values(int64_t) const {}
  };

  /// Finds the blocks that have a token; returns how many they are, or recall + 1 if there are more.
  int64_t find_living() const {
    int64_t living = 0;
    for (int64_t i = 0; i < units && living <= recall; ++i) {
      best.chosen(0)[living] = int32_t(i);
      living += cache.alive(cache.log_share, i);
    }
    return living;
  }

  /// Finds the best blocks.
  void choose(float cap) const {
    const int64_t piece = BestBlocks::piece(units, recall);
    for (int64_t first = 0; first < units; first += piece) {
      const int64_t last = imin(first + piece, units);
      for (int64_t i = first; i < last; i += VL) {
        float hidden[VL];  // 0, or -inf for a block without a token
        for (int64_t k = 0; k < VL; ++k) {
          hidden[k] = i + k < units && cache.alive(cache.log_share, i + k) ? 0 : -__builtin_inff();
        }
        store(best.row(0) + i - first, load(hidden) + score(i, cap));
      }
      best.take(0, first, round_up(last - first, VL), last == units);
    }
  }

  /// Scores of VL blocks from `first` on, by the query that would gain most.
  vec score(int64_t first, float cap) const {
    vec high = splat(-__builtin_inff());
    int64_t g = 0;
    for (; g + 3 <= groups; g += 3) score_some<3>(first, g, cap, high);
    for (; g < groups; ++g) score_some<1>(first, g, cap, high);
    return high;
  }

  /// high = the larger of it and the scores for the R queries from g on.
  template <int R>
  void score_some(int64_t first, int64_t g, float cap, vec& high) const {
    const int64_t ld = row_stride(rows.dim);
    vec products[2 * R][VL];
    cache.bound_products<R>(first, units, attended.query + g * ld, squares + g * ld, ld, products);
    for (int r = 0; r < R; ++r) {
      const vec s = reduce<false>(products[2 * r]) + sqrtv(reduce<false>(products[2 * r + 1])) * DEVIATIONS;
      high = vmax((cap > 0 ? capped(s, cap) : s) - attended.log_z[g + r], high);
    }
  }
};

}  // namespace
