/// Recall: each token attends exactly to the most promising blocks of far tokens, whose keys leave the slots that they were
/// merged into. It corrects an output that was computed without it. nearfar/recall.py has the rule and its derivation.
#pragma once
#include "nearfar/far_cache.h"
#include "nearfar/scores.h"
#include "nearfar/window.h"

namespace {

constexpr float DEVIATIONS = 2;  // above the mean, at which the best key of a block is expected

/// Blocks that a token recalls: their numbers, and where they are in work space.
struct Chosen {
  int64_t *block, *place;
  int64_t n;
};

/// The order of floats as that of integers, and back.
INLINE ivec ordered(vec x) {
  const ivec bits = (ivec)x;
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

/// How many of x (n, whole vectors) are at least `least`.
inline int64_t count_from(const int32_t* x, int64_t n, int32_t least) {
  ivec total = {};
  for (int64_t j = 0; j < n; j += VL) {
    ivec y;
    memcpy(&y, x + j, sizeof y);
    total -= y >= least;
  }
  int64_t count = 0;
  for (int i = 0; i < VL; ++i) count += total[i];
  return count;
}

/// to: the indices of the `most` largest of scores (n); the rest of the last vector must be -inf or less than all others.
/// The scores become integers of the same order. Returns how many there are.
inline int64_t select_largest(float* scores, int64_t n, int64_t most, int64_t* to) {
  int32_t* x = reinterpret_cast<int32_t*>(scores);
  ivec low_lanes = ordered(load(scores)), high_lanes = low_lanes;
  for (int64_t j = 0; j < n; j += VL) {
    const ivec y = ordered(load(scores + j));
    memcpy(x + j, &y, sizeof y);
    low_lanes = y < low_lanes ? y : low_lanes, high_lanes = y > high_lanes ? y : high_lanes;
  }
  int64_t low = low_lanes[0], high = high_lanes[0];
  for (int i = 1; i < VL; ++i) low = imin(low, low_lanes[i]), high = imax(high, high_lanes[i]);
  // At least `most` are >= low, and fewer are >= high + 1.
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2, count = count_from(x, n, int32_t(middle));
    if (count >= most) low = middle;
    if (count < most) high = middle - 1;
    if (count == most) break;
  }
  const int64_t ties = most - (low < INT32_MAX ? count_from(x, n, int32_t(low + 1)) : 0);
  int64_t count = 0;
  for (int64_t j = 0, equal = 0; j < n; ++j) {
    to[count] = j;
    count += x[j] > low || (x[j] == low && equal++ < ties);
  }
  return count;
}

/// The logits of one token's queries with the keys of chosen blocks. Blocks have UNIT columns, so a vector holds DIMS
/// coordinates of a whole block, or a part of one coordinate.
struct TokenLogits {
  static constexpr int DIMS = VL > UNIT ? VL / UNIT : 1, PARTS = VL < UNIT ? UNIT / VL : 1;

  /// Floats of a query with every coordinate UNIT times.
  static int64_t spread_floats(int64_t dim) { return round_up(round_up(dim, DIMS) * UNIT, 16); }

  /// to: a query (row_stride(D)) with every coordinate UNIT times.
  static void spread(const float* x, int64_t dim, float* to) {
    for (int64_t d = 0; d < round_up(dim, DIMS); ++d) {
      for (int64_t u = 0; u < UNIT; ++u) to[d * UNIT + u] = x[d];
    }
  }

  /// to (R, ld): products of R spread queries with the keys of B blocks, UNIT of each.
  template <int R, int B>
  INLINE static void products(const FarRows& rows, const int64_t* place, const float* x, float* to, int64_t ld) {
    vec acc[R][B][PARTS] = {};
    const float* keys[B];
    for (int b = 0; b < B; ++b) keys[b] = rows.keys(place[b]);
    const int64_t size = spread_floats(rows.dim), end = round_up(rows.dim, DIMS) * UNIT;
    for (int64_t t = 0; t < end; t += DIMS * UNIT) {
      UNROLL(2)
      for (int p = 0; p < PARTS; ++p) {
        UNROLL(4)
        for (int b = 0; b < B; ++b) {
          const vec key = load(keys[b] + t + p * VL);
          UNROLL(4)
          for (int r = 0; r < R; ++r) acc[r][b][p] += key * load(x + r * size + t + p * VL);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) fold(acc[r][b], to + r * ld + b * UNIT);
    }
  }

  /// to (UNIT): the sums over the coordinates of a vector.
  INLINE static void fold(const vec (&acc)[PARTS], float* to) {
    if constexpr (DIMS == 1) {
      for (int p = 0; p < PARTS; ++p) store(to + p * VL, acc[p]);
    } else {
      float all[VL];
      store(all, acc[0]);
      for (int u = 0; u < UNIT; ++u) to[u] = all[u];
      for (int d = 1; d < DIMS; ++d) {
        for (int u = 0; u < UNIT; ++u) to[u] += all[d * UNIT + u];
      }
    }
  }
};

/// to (R, ld): products of R spread queries with all chosen keys, UNIT of each block.
template <int R>
void chosen_products(const FarRows& rows, const Chosen& chosen, const float* x, float* to, int64_t ld) {
  constexpr int TOGETHER = TokenLogits::PARTS > 1 ? 2 : 4;
  int64_t k = 0;
  for (; k + TOGETHER <= chosen.n; k += TOGETHER) {
    TokenLogits::products<R, TOGETHER>(rows, chosen.place + k, x, to + k * UNIT, ld);
  }
  for (; k < chosen.n; ++k) TokenLogits::products<R, 1>(rows, chosen.place + k, x, to + k * UNIT, ld);
}

/// W vectors from column j on of R outputs: row r becomes (row * rest[r] + sum of the chosen values, weighted) / total[r].
/// weights (R, ld); rows[r] are the outputs.
template <int R, int W>
INLINE void add_chosen_values(const FarRows& far, const Chosen& chosen, const float* weights, int64_t ld, const float* rest,
                              const float* total, int64_t j, float* const* rows) {
  const int64_t lv = row_stride(far.value_dim);
  vec acc[R][W];
  for (int r = 0; r < R; ++r) {
    for (int w = 0; w < W; ++w) acc[r][w] = load(rows[r] + j + w * VL) * rest[r];
  }
  for (int64_t k = 0; k < chosen.n; ++k) {
    const float *value = far.values(chosen.place[k]) + j, *weight = weights + k * UNIT;
    UNROLL(2)
    for (int64_t u = 0; u < UNIT; ++u) {
      vec v[W];
      UNROLL(4)
      for (int w = 0; w < W; ++w) v[w] = load(value + u * lv + w * VL);
      UNROLL(4)
      for (int r = 0; r < R; ++r) {
        UNROLL(4)
        for (int w = 0; w < W; ++w) acc[r][w] += v[w] * weight[r * ld + u];
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int w = 0; w < W; ++w) store(rows[r] + j + w * VL, acc[r][w] / total[r]);
  }
}

/// What one query brings along: its output so far (row_stride(M)), the log2 of its denominator, and the share of it that
/// each slot has (slots), or null if there are no slots.
struct Attended {
  float* row;
  float log_z;
  const float* slot_weight;
};

/// Corrects the outputs of the queries of one token.
class Corrector {
 public:
  static constexpr int TOGETHER = 3;  // queries whose sums fit into registers

  static int64_t floats(int64_t groups, int64_t blocks, int64_t dim) {
    return groups * TokenLogits::spread_floats(dim) + (TOGETHER + 2) * round_up(blocks * UNIT, 16) + 64;
  }
  Corrector(int64_t groups, int64_t blocks, int64_t dim, float*& at) : ld(round_up(blocks * UNIT, 16)) {
    x = carve(at, groups * TokenLogits::spread_floats(dim)), weights = carve(at, TOGETHER * ld);
    share = carve(at, ld), slot = reinterpret_cast<int32_t*>(carve(at, ld));
  }

  /// Loads what is known of the chosen tokens: their slots, and their shares of them; -1 for an empty cell.
  void load_shares(const Chosen& chosen, int64_t unit, const int64_t* slots, const float* log_shares) const {
    for (int64_t k = 0; k < chosen.n; ++k) {
      const int64_t first = chosen.block[k] * unit;
      for (int64_t u = 0; u < UNIT; ++u) {
        share[k * UNIT + u] = u < unit ? log_shares[first + u] * LOG2E_F : -__builtin_inff();
        slot[k * UNIT + u] = u < unit ? int32_t(slots[first + u]) : 0;
      }
    }
    for (int64_t j = 0; j < chosen.n * UNIT; j += VL) {
      const vec y = load(share + j);
      store(share + j, y > -__builtin_inff() ? exp2v(vmax(y, splat(-150.0f))) : splat(-1.0f));
    }
  }

  /// Corrects the outputs of `groups` queries (groups, ld_query) in units of log2.
  void correct(const FarRows& far, const Chosen& chosen, const float* query, int64_t ld_query, int64_t groups, float cap,
               const Attended* attended) const {
    if (chosen.n == 0) return;
    for (int64_t g = 0; g < groups; ++g) TokenLogits::spread(query + g * ld_query, far.dim, spread_query(far, g));
    int64_t g = 0;
    for (; g + 3 <= groups; g += 3) correct_some<3>(far, chosen, g, cap, attended + g);
    if (groups - g == 2) correct_some<2>(far, chosen, g, cap, attended + g);
    if (groups - g == 1) correct_some<1>(far, chosen, g, cap, attended + g);
  }

 private:
  float *x, *weights, *share;
  int32_t* slot;
  int64_t ld;

  float* spread_query(const FarRows& far, int64_t g) const { return x + g * TokenLogits::spread_floats(far.dim); }

  /// Turns products row (n) into what the recalled tokens add to the sums, relative to 2^top of the denominator so far.
  /// rest: 2^-top. Returns the sum of the row.
  float gains(float* row, int64_t n, float cap, const Attended& query, float& rest) const {
    vec high = {};
    for (int64_t j = 0; j < n; j += VL) {
      vec l = load(row + j);
      if (cap > 0) l = capped(l, cap);
      l = load(share + j) >= 0.0f ? l - query.log_z : splat(MASKED_LOGIT);
      high = vmax(l, high);
      store(row + j, l);
    }
    const float top = max_lane(high);
    rest = exp2s(-top);
    vec total = {};
    for (int64_t j = 0; j < n; j += VL) {
      vec gain = exp2v(load(row + j) - top);
      if (query.slot_weight) {
        vec pooled;
        for (int i = 0; i < VL; ++i) pooled[i] = query.slot_weight[slot[j + i]];
        gain -= vmax(load(share + j), vec{}) * pooled * rest;
      }
      store(row + j, gain);
      total += gain;
    }
    return sum(total);
  }

  template <int R>
  void correct_some(const FarRows& far, const Chosen& chosen, int64_t g, float cap, const Attended* attended) const {
    const int64_t n = chosen.n * UNIT, whole = round_up(n, VL);
    chosen_products<R>(far, chosen, spread_query(far, g), weights, ld);
    float rest[R], total[R];
    float* rows[R];
    for (int r = 0; r < R; ++r) {
      for (int64_t j = n; j < whole; ++j) share[j] = -1, slot[j] = 0, weights[r * ld + j] = 0;
      total[r] = gains(weights + r * ld, n, cap, attended[r], rest[r]);
      total[r] += rest[r];
      rows[r] = attended[r].row;
    }
    int64_t j = 0;
    for (; j + NR * VL <= round_up(far.value_dim, VL); j += NR * VL) {
      add_chosen_values<R, NR>(far, chosen, weights, ld, rest, total, j, rows);
    }
    for (; j < far.value_dim; j += VL) add_chosen_values<R, 1>(far, chosen, weights, ld, rest, total, j, rows);
  }
};

}  // namespace
