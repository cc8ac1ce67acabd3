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
    const int64_t each = 2 * row_stride(c.dim) + row_stride(c.value_dim) + feature_stride(slots) + 1;
    return FarRows::floats(recall, c.dim, c.value_dim) + Corrector::floats(groups, recall, c.dim) + groups * each +
           2 * VL * row_stride(c.dim) + round_up(units, VL) + 4 * (units + 1) + FarCache::floats(c.dim, c.value_dim) + 512;
  }

  RecallToken(const NearFarCall& c, int64_t b, int64_t kv, int64_t slots_of_head, float*& at)
      : cache(c, b, kv),
        groups(c.heads / c.kv_heads),
        units(c.far->cells / c.far->unit),
        recall(imin(c.far->recall[kv], units)),
        slots(slots_of_head),
        rows(recall, c.dim, c.value_dim, at),
        corrector(groups, recall, c.dim, at) {
    query = carve(at, groups * row_stride(c.dim)), squares = carve(at, groups * row_stride(c.dim));
    out = carve(at, groups * row_stride(c.value_dim)), slot_weight = carve(at, groups * feature_stride(slots));
    log_z = carve(at, groups), scores = carve(at, round_up(units, VL));
    mean = carve(at, VL * row_stride(c.dim)), var = carve(at, VL * row_stride(c.dim));
    chosen.block = reinterpret_cast<int64_t*>(carve(at, 2 * (units + 1)));
    chosen.place = reinterpret_cast<int64_t*>(carve(at, 2 * (units + 1)));
    space = carve(at, FarCache::floats(c.dim, c.value_dim));
  }

  /// Where the output (row_stride(M)) of query g without recall is written, and that with it is found.
  float* output(int64_t g) const { return out + g * row_stride(rows.value_dim); }

  /// Takes over query g (row_stride(D)), in units of log2. weights: of the slots, whose sum with all others is 1 / factor.
  void take(int64_t g, const float* x, const float* weights, float factor, float top) const {
    const int64_t ld = row_stride(rows.dim);
    float *own = query + g * ld, *weight = slot_weight + g * feature_stride(slots);
    copy_row(own, x, ld), copy_row(weight, weights, slots);
    scale_row(weight, factor, slots);
    for (int64_t d = 0; d < ld; d += VL) store(squares + g * ld + d, load(own + d) * load(own + d));
    log_z[g] = top - __builtin_log2f(factor);
  }

  /// Corrects the outputs of all queries.
  void correct(float cap) {
    choose(cap);
    for (int64_t k = 0; k < chosen.n; ++k) {
      chosen.place[k] = k;
      cache.load_block(chosen.block[k], rows, k, space);
    }
    corrector.load_shares(chosen, cache.unit, cache.slot, cache.log_share);
    Attended attended[64];
    for (int64_t g = 0; g < groups; ++g) {
      attended[g] = {output(g), log_z[g], slots > 0 ? slot_weight + g * feature_stride(slots) : nullptr};
    }
    corrector.correct(rows, chosen, query, row_stride(rows.dim), groups, cap, attended);
  }

 private:
  const FarCache cache;
  const int64_t groups, units, recall, slots;
  const FarRows rows;  // of the chosen blocks
  const Corrector corrector;
  float *query, *squares, *out, *slot_weight, *log_z;  // (groups, ..): row_stride(D), the same, row_stride(M), slots, 1
  float *scores, *mean, *var, *space;                  // (units), (VL, row_stride(D)) twice
  Chosen chosen;

  /// The blocks that the token recalls.
  void choose(float cap) {
    chosen.n = 0;
    for (int64_t i = 0; i < units; ++i) {
      const bool alive = cache.alive(cache.log_share, i);
      scores[i] = alive ? 0 : -__builtin_inff();
      chosen.block[chosen.n] = i;
      chosen.n += alive;
    }
    if (chosen.n <= recall) return;
    for (int64_t i = units; i < round_up(units, VL); ++i) scores[i] = -__builtin_inff();
    for (int64_t i = 0; i < units; i += VL) store(scores + i, load(scores + i) + score(i, cap));
    chosen.n = select_largest(scores, round_up(units, VL), recall, chosen.block);
  }

  /// Scores of VL blocks from `first` on, by the query that would gain most.
  vec score(int64_t first, float cap) const {
    const int64_t ld = row_stride(rows.dim);
    for (int64_t k = 0; k < VL; ++k) cache.load_bounds(imin(first + k, units - 1), mean + k * ld, var + k * ld);
    vec best = splat(-__builtin_inff());
    for (int64_t g = 0; g < groups; ++g) {
      const float *x = query + g * ld, *y = squares + g * ld;
      vec at[VL], spread[VL];
      for (int k = 0; k < VL; ++k) {
        vec a = {}, b = {};
        for (int64_t d = 0; d < rows.dim; d += VL) {
          a += load(mean + k * ld + d) * load(x + d);
          b += load(var + k * ld + d) * load(y + d);
        }
        at[k] = a, spread[k] = b;
      }
      const vec s = reduce<false>(at) + sqrtv(reduce<false>(spread)) * DEVIATIONS;
      best = vmax((cap > 0 ? capped(s, cap) : s) - log_z[g], best);
    }
    return best;
  }
};

}  // namespace
