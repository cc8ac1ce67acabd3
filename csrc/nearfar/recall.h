/// Recall: each token attends exactly to the most promising blocks of far tokens, whose keys leave the slots that they were
/// merged into. It corrects an output that was computed without it. nearfar/recall.py has the rule and its derivation.
#pragma once
#include "nearfar/far_cache.h"
#include "nearfar/recall_select.h"
#include "nearfar/scores.h"
#include "nearfar/window.h"

namespace {

constexpr float DEVIATIONS = 2;             // above the mean, at which the best key of a block is expected
constexpr float LEAST_WEIGHT = -9.965784f;  // log2(1e-3), constants.py: what one key of a recalled block has of a row

/// The numbers of `from` at VL indices. One by one: an instruction for it is slower on many CPUs.
INLINE vec gather(const float* from, const int32_t* index) {
  vec x;
  UNROLL(16)
  for (int i = 0; i < VL; ++i) x[i] = from[index[i]];
  return x;
}

/// The tokens of a block, for one coordinate.
typedef float unit_vec __attribute__((vector_size(UNIT * 4)));
typedef float unaligned_unit_vec __attribute__((vector_size(UNIT * 4), aligned(4), may_alias));

/// shares, slots (UNIT): the shares that the tokens of a block have of their slots, -1 for an empty cell, and the slots.
inline void far_shares(const float* log_share, const int64_t* slot, int64_t unit, float* shares, int32_t* slots) {
  for (int64_t u = 0; u < UNIT; ++u) {
    shares[u] = u < unit ? log_share[u] * LOG2E_F : -__builtin_inff();
    slots[u] = u < unit ? int32_t(slot[u]) : 0;
  }
  for (int64_t u = 0; u < UNIT; u += VL) {
    const vec y = load_some(shares + u, UNIT - u);
    store_some(shares + u, y > -__builtin_inff() ? exp2v(vmax(y, splat(-150.0f))) : splat(-1.0f), UNIT - u);
  }
}

/// What the queries of n tokens bring along; row i * groups + g is that of query g of token i.
struct Attended {
  float *query, *out;  // (rows, row_stride(D)) in units of log2, (rows, row_stride(M)): the outputs so far
  float* log_z;        // (rows): log2 of the denominators
  float* slot_weight;  // (rows, slot_stride): the share of the denominator that each slot has
  int64_t slot_stride;
  int64_t slots;

  static int64_t floats(int64_t rows, int64_t dim, int64_t value_dim, int64_t slots) {
    return rows * (row_stride(dim) + row_stride(value_dim) + feature_stride(slots) + 1) + 64;
  }
  Attended(int64_t rows, int64_t dim, int64_t value_dim, int64_t most_slots, float*& at)
      : slot_stride(feature_stride(most_slots)), slots(0) {
    query = carve(at, rows * row_stride(dim)), out = carve(at, rows * row_stride(value_dim));
    log_z = carve(at, rows), slot_weight = carve(at, rows * slot_stride);
  }

  /// Takes over a query whose weights of slots are `factor` times these; top: the logit that has the weight 1.
  void take(int64_t row, const float* weights, float factor, float top) const {
    copy_row(slot_weight + row * slot_stride, weights, slots);
    scale_row(slot_weight + row * slot_stride, factor, slots);
    log_z[row] = top - __builtin_log2f(factor);
  }
};

/// to[t] (R, ld_to): products of the keys of a block with R queries of each of T tokens, x[t] (R, ld).
template <int T, int R>
void block_products(const float* keys, const float* const* x, int64_t ld, int64_t dim, float* const* to, int64_t ld_to) {
  constexpr int STEPS = T * R < 4   ? 4
                        : T * R < 8 ? 2
                                    : 1;  // coordinates that are summed apart: few sums would wait for each other
  unit_vec acc[STEPS][T][R] = {};
  const float* query[T];
  for (int t = 0; t < T; ++t) query[t] = x[t];
  for (int64_t d = 0; d < dim; d += STEPS) {
    UNROLL(4)
    for (int s = 0; s < STEPS; ++s) {
      const unit_vec key = *reinterpret_cast<const unaligned_unit_vec*>(keys + (d + s) * UNIT);
      UNROLL(4)
      for (int t = 0; t < T; ++t) {
        UNROLL(3)
        for (int r = 0; r < R; ++r) acc[s][t][r] += key * query[t][r * ld + d + s];
      }
    }
  }
  for (int t = 0; t < T; ++t) {
    for (int r = 0; r < R; ++r) {
      for (int s = 1; s < STEPS; ++s) acc[0][t][r] += acc[s][t][r];
      *reinterpret_cast<unaligned_unit_vec*>(to[t] + r * ld_to) = acc[0][t][r];
    }
  }
}

/// Adds the values (UNIT, row_stride(M)) of a block to W vectors from column j on of R outputs (R, ld_to), weighted (R,
/// ld).
template <int R, int W>
INLINE void add_block_values(const float* values, int64_t lv, const float* weight, int64_t ld, int64_t j, float* to,
                             int64_t ld_to) {
  vec acc[R][W];
  for (int r = 0; r < R; ++r) {
    for (int w = 0; w < W; ++w) acc[r][w] = load(to + r * ld_to + j + w * VL);
  }
  UNROLL(2)
  for (int64_t u = 0; u < UNIT; ++u) {
    vec v[W];
    UNROLL(4)
    for (int w = 0; w < W; ++w) v[w] = load(values + u * lv + j + w * VL);
    UNROLL(3)
    for (int r = 0; r < R; ++r) {
      UNROLL(4)
      for (int w = 0; w < W; ++w) acc[r][w] += v[w] * weight[r * ld + u];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int w = 0; w < W; ++w) store(to + r * ld_to + j + w * VL, acc[r][w]);
  }
}

/// Corrects the outputs of some tokens. Each chose blocks; the work goes block by block, so that what several tokens chose
/// is read once.
class Correction {
 public:
  /// Tokens of a pass, so that their logits stay in cache.
  static int64_t pass(int64_t tokens, int64_t groups, int64_t most) {
    return imax(1, imin(tokens, 131072 / (groups * most * UNIT)));
  }

  /// Floats of work space for passes of so many tokens.
  static int64_t floats(int64_t tokens, int64_t groups, int64_t most, int64_t places) {
    const int64_t pairs = tokens * most;
    return tokens * groups * round_up(most * UNIT, 16) + 2 * round_up(most * UNIT, 16) + tokens * (most + VL) + tokens +
           places + 1 + 2 * pairs + 128;
  }

  /// tokens: of a pass. most: blocks that each chooses. places: of the blocks that they choose together.
  Correction(int64_t tokens, int64_t query_groups, int64_t most_blocks, int64_t places, float*& at)
      : groups(query_groups), most(most_blocks), ld(round_up(most_blocks * UNIT, 16)) {
    weights = carve(at, tokens * groups * ld), share = carve(at, ld), slot = reinterpret_cast<int32_t*>(carve(at, ld));
    chosen = reinterpret_cast<int32_t*>(carve(at, tokens * (most + VL)));
    count = reinterpret_cast<int32_t*>(carve(at, tokens)), first = reinterpret_cast<int32_t*>(carve(at, places + 1));
    token = reinterpret_cast<int32_t*>(carve(at, tokens * most)),
    rank = reinterpret_cast<int32_t*>(carve(at, tokens * most));
  }

  /// Where the blocks that token i chose are to be written, and how many they are.
  int32_t* choices(int64_t i) const { return chosen + i * (most + VL); }
  int32_t& choice_count(int64_t i) const { return count[i]; }

  /// Corrects the outputs of n tokens, whose queries begin at `row`. far: keys and values by place, which are asked for in
  /// turn. shares, slots: (places, UNIT), see far_shares. least: log2 of the weight that one key of a block must have.
  template <class Far>
  void run(const Far& far, int64_t places, int64_t n, const Attended& a, int64_t row, float cap, float least,
           const float* shares, const int32_t* slots) const {
    sort_by_place(places, n);
    for (int64_t p = 0; p < places; ++p) {
      const float* keys = far.keys(p);
      if (p + 1 < places) far.prefetch_keys(p + 1);
      multiply_keys(keys, far.dim, p, a.query + row * row_stride(far.dim));
    }
    for (int64_t i = 0; i < n; ++i) {
      keep_heavy(i, a.log_z + row + i * groups, cap, least, shares, slots);
      for (int64_t g = 0; g < groups && count[i]; ++g)
        weigh(a, far.value_dim, row + i * groups + g, weights_of(i) + g * ld, count[i]);
    }
    sort_by_place(places, n);
    for (int64_t p = 0; p < places; ++p) {
      if (first[p] == first[p + 1]) continue;
      const float* values = far.values(p);
      if (p + 1 < places && first[p + 1] < first[p + 2]) far.prefetch_values(p + 1);
      add_values(values, far.value_dim, p, a.out + row * row_stride(far.value_dim));
    }
  }

 private:
  const int64_t groups, most, ld;
  float *weights, *share;          // (tokens, groups, ld): of each recalled token; (ld)
  int32_t *slot, *chosen, *count;  // (ld), (tokens, most), (tokens)
  int32_t *first, *token,
      *rank;  // by place: where its pairs begin; by pair: the token, and the place's number among its own

  float* weights_of(int64_t i) const { return weights + i * groups * ld; }

  /// The pairs of tokens and blocks, by block.
  void sort_by_place(int64_t places, int64_t n) const {
    memset(first, 0, size_t(places + 1) * 4);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t k = 0; k < count[i]; ++k) ++first[choices(i)[k]];
    }
    for (int64_t p = 0; p < places; ++p) first[p + 1] += first[p];  // where each ends
    for (int64_t i = n - 1; i >= 0; --i) {
      for (int64_t k = 0; k < count[i]; ++k) {
        const int32_t at = --first[choices(i)[k]];  // in the end, where it begins
        token[at] = int32_t(i), rank[at] = int32_t(k);
      }
    }
  }

  /// Products of a block's keys with the queries of all tokens that chose it.
  void multiply_keys(const float* keys, int64_t dim, int64_t place, const float* query) const {
    const int64_t last = first[place + 1];
    int64_t at = first[place];
    for (; at + 4 <= last; at += 4) multiply_some<4>(keys, dim, at, query);
    if (at + 2 <= last) multiply_some<2>(keys, dim, at, query), at += 2;
    for (; at < last; ++at) multiply_some<1>(keys, dim, at, query);
  }

  /// Logits of the keys (UNIT, D) of a block for the T tokens from `at` on, in the rows of their weights.
  template <int T>
  void multiply_some(const float* keys, int64_t dim, int64_t at, const float* query) const {
    const int64_t lq = row_stride(dim);
    const float* x[T];
    float* to[T];
    int64_t g = 0;
    const auto aim = [&](int64_t group) {
      for (int t = 0; t < T; ++t) {
        x[t] = query + (token[at + t] * groups + group) * lq;
        to[t] = weights_of(token[at + t]) + group * ld + rank[at + t] * UNIT;
      }
    };
    for (; g + 3 <= groups; g += 3) aim(g), block_products<T, 3>(keys, x, lq, dim, to, ld);
    if (groups - g == 2) aim(g), block_products<T, 2>(keys, x, lq, dim, to, ld);
    if (groups - g == 1) aim(g), block_products<T, 1>(keys, x, lq, dim, to, ld);
  }

  /// Turns the products of token i into logits relative to the denominators log_z (groups), and keeps the blocks that have
  /// a key with a weight of 2^least for one of the queries.
  void keep_heavy(int64_t i, const float* log_z, float cap, float least, const float* shares, const int32_t* slots) const {
    float* rows = weights_of(i);
    for (int64_t g = 0; cap > 0 && g < groups; ++g) {
      for (float* at = rows + g * ld; at < rows + g * ld + count[i] * UNIT; at += VL) store(at, capped(load(at), cap));
    }
    int32_t *own = choices(i), kept = 0;
    for (int64_t k = 0; k < count[i]; ++k) {
      const unit_vec held = *reinterpret_cast<const unaligned_unit_vec*>(shares + own[k] * UNIT);
      unit_vec high = unit_vec{} + MASKED_LOGIT;
      for (int64_t g = 0; g < groups; ++g) {
        unaligned_unit_vec* row = reinterpret_cast<unaligned_unit_vec*>(rows + g * ld);
        const unit_vec logit = held >= 0.0f ? row[k] - log_z[g] : unit_vec{} + MASKED_LOGIT;
        high = logit > high ? logit : high;
        row[kept] = logit;
      }
      memcpy(share + kept * UNIT, &held, UNIT * 4);
      memcpy(slot + kept * UNIT, slots + own[k] * UNIT, UNIT * 4);
      own[kept] = own[k];
      bool heavy = false;
      for (int64_t u = 0; u < UNIT; ++u) heavy |= high[u] >= least;
      kept += heavy;
    }
    count[i] = kept;
    for (int64_t j = kept * UNIT; j < round_up(kept * UNIT, VL); ++j) {
      share[j] = -1, slot[j] = 0;
      for (int64_t g = 0; g < groups; ++g) rows[g * ld + j] = MASKED_LOGIT;
    }
  }

  /// Turns the logits row (blocks, UNIT) of a query into the weights of the recalled tokens' values, and scales its output.
  void weigh(const Attended& a, int64_t value_dim, int64_t query, float* row, int64_t blocks) const {
    const int64_t n = round_up(blocks * UNIT, VL);
    const float* slot_weight = a.slot_weight + query * a.slot_stride;
    vec high = {};
    for (int64_t j = 0; j < n; j += VL) high = vmax(load(row + j), high);
    const float top = max_lane(high), rest = exp2s(-top);  // relative to 2^top of the denominator
    vec total = {};
    for (int64_t j = 0; j < n; j += VL) {
      vec gain = exp2v(load(row + j) - top);
      if (a.slots > 0) gain -= vmax(load(share + j), vec{}) * gather(slot_weight, slot + j) * rest;
      store(row + j, gain);
      total += gain;
    }
    const float factor = 1 / (rest + sum(total));
    scale_row(row, factor, n);
    scale_row(a.out + query * row_stride(value_dim), rest * factor, round_up(value_dim, VL));
  }

  /// Adds the values of a block to the outputs of all tokens that chose it.
  void add_values(const float* values, int64_t value_dim, int64_t place, float* out) const {
    for (int64_t at = first[place]; at < first[place + 1]; ++at) {
      const float* weight = weights_of(token[at]) + rank[at] * UNIT;
      float* rows = out + token[at] * groups * row_stride(value_dim);
      int64_t g = 0;
      for (; g + 3 <= groups; g += 3) add_some<3>(values, value_dim, weight, g, rows);
      if (groups - g == 2) add_some<2>(values, value_dim, weight, g, rows);
      if (groups - g == 1) add_some<1>(values, value_dim, weight, g, rows);
    }
  }

  /// rows (R, row_stride(M)), from query head g on, += weight (R, UNIT) values (UNIT, M).
  template <int R>
  void add_some(const float* values, int64_t value_dim, const float* weight, int64_t g, float* rows) const {
    const int64_t lv = row_stride(value_dim), width = round_up(value_dim, VL);
    int64_t j = 0;
    for (; j + NR * VL <= width; j += NR * VL) {
      add_block_values<R, NR>(values, lv, weight + g * ld, ld, j, rows + g * lv, lv);
    }
    for (; j < width; j += VL) add_block_values<R, 1>(values, lv, weight + g * ld, ld, j, rows + g * lv, lv);
  }
};

}  // namespace
