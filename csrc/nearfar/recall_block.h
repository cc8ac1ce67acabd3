/// Recall in a prefill: the far tokens of one head, which grow block by block, and the queries of a block.
#pragma once
#include "nearfar/recall.h"

namespace {

/// Epilogue: to (m, ld) = score of a query with a block's bounds, relative to the query's denominator. A B is the product
/// with the mean; `to` holds the product of squares with the variance.
struct BoundScores {
  float* to;
  int64_t ld;
  float cap;
  const float* log_z;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      float* at = to + i * ld + j + w * VL;
      const vec score = acc[w] + sqrtv(load(at)) * DEVIATIONS;
      store(at, (cap > 0 ? capped(score, cap) : score) - log_z[i]);
    }
  }
};

/// The sizes of recall for one head.
struct RecallShape {
  int64_t dim, value_dim, block, groups, slots;
  int64_t recall;  // blocks for each token; 0 for no recall
  int64_t cells;   // after the call
  int64_t units;   // blocks of far tokens, after the call

  RecallShape(const NearFarCall& c, int64_t kv, int64_t budget)
      : dim(c.dim), value_dim(c.value_dim), block(c.block), groups(c.heads / c.kv_heads), slots(budget + c.block) {
    recall = c.far ? c.far->recall[kv] : 0;
    cells = recall ? c.far->cells_new : 0;
    units = recall ? cells / c.far->unit : 0;
    recall = imin(recall, units);
  }
  bool on() const { return units > 0; }
  int64_t pass() const { return Correction::pass(block, groups, recall); }
  int64_t panels() const;
  int64_t columns() const;
  int64_t floats() const;
};

/// Recall of one head.
class RecallBlock {
 public:
  static constexpr int64_t PANEL = 64;  // blocks whose bounds lie together, as columns

  RecallBlock(const NearFarCall& call, int64_t batch, int64_t kv, const RecallShape& sizes, float* at)
      : c(call),
        shape(sizes),
        cache(call, batch, kv),
        rows(sizes.units, call.dim, call.value_dim, at),
        attended(sizes.groups * sizes.block, call.dim, call.value_dim, sizes.slots, at),
        correction(sizes.pass(), sizes.groups, sizes.recall, sizes.units, at) {
    const int64_t queries = shape.groups * shape.block, head = batch * c.far->heads + c.far->row[kv];
    slot = c.far->slot_new + head * shape.cells, log_share = c.far->log_share_new + head * shape.cells;
    mean = carve(at, shape.panels() * PANEL * round_up(c.dim, VL));
    var = carve(at, shape.panels() * PANEL * round_up(c.dim, VL));
    squares = carve(at, queries * row_stride(c.dim)), products = carve(at, queries * PANEL);
    scores = carve(at, shape.block * shape.columns());
    space = carve(at, FarCache::floats(c.dim, c.value_dim));
    change = carve(at, shape.slots), members = reinterpret_cast<int32_t*>(carve(at, shape.slots));
    absent = carve(at, shape.columns()), loaded = reinterpret_cast<uint8_t*>(carve(at, shape.columns() / 4));
    shares = carve(at, shape.units * UNIT), places = reinterpret_cast<int32_t*>(carve(at, shape.units * UNIT));
  }

  /// Loads the far tokens of the incoming state. place: the index in work space of each slot of the state.
  void load_state(const int64_t* place, bool slots) {
    for (int64_t i = 0; i < shape.cells; ++i) {
      const bool held = i < cache.cells && cache.log_share[i] > -__builtin_inff();
      slot[i] = !held ? 0 : slots ? place[cache.slot[i]] : cache.slot[i];
      log_share[i] = held ? cache.log_share[i] : -__builtin_inff();
    }
    memset(loaded, 0, size_t(shape.columns()));
    for (int64_t i = 0; i < shape.columns(); ++i) absent[i] = -__builtin_inff();
    memset(mean, 0, size_t(shape.panels() * PANEL * round_up(c.dim, VL)) * 4);
    memset(var, 0, size_t(shape.panels() * PANEL * round_up(c.dim, VL)) * 4);
    for (int64_t i = 0; i < cache.cells / cache.unit; ++i) {
      if (cache.alive(log_share, i)) add_bounds(i);
    }
  }

  /// Adds the tokens at the positions [first, last), which end a block of merging and became slots from `first_slot` on.
  void add_tokens(const Window& window, int64_t first, int64_t last, int64_t first_slot) {
    const int64_t unit = cache.unit, begin = last - c.block;
    for (int64_t p = begin; p < last; p += unit) {
      const int64_t missing = imax(0, first - p), block = (p + c.far->shift) / unit;
      if (missing >= unit) continue;
      cache.store_block(block, window.key_at(p), window.value_at(p), missing, space);
      for (int64_t i = missing; i < unit; ++i) {
        slot[block * unit + i] = first_slot + p + i - (shape.slots > c.block ? first : begin);
        log_share[block * unit + i] = 0;
      }
      loaded[block] = 0;
      add_bounds(block);
    }
  }

  /// Follows the slots through a merge of n slots: s.place has their new indices, s.weight their weights before.
  void follow_merge(const Metric& m, int64_t n, const Slots& to, const MergeScratch& s) {
    changed = true;
    for (int64_t t = 0; t < to.n; ++t) members[t] = 0;
    for (int64_t i = 0; i < n; ++i) ++members[s.place[i]];
    for (int64_t i = 0; i < n; ++i) {
      const int64_t t = s.place[i];
      const float* key = to.key + t * row_stride(m.dim);
      change[i] = members[t] == 1 ? 0 : s.weight[i] - to.bias[t] - m.score(dot(key, m.anchor, m.dim));
    }
    for (int64_t i = 0; i < units * cache.unit; ++i) log_share[i] += change[slot[i]], slot[i] = s.place[slot[i]];
    for (int64_t i = 0; i < units * cache.unit; ++i) slot[i] = log_share[i] > -__builtin_inff() ? slot[i] : 0;
  }

  /// Takes over n queries of group g that attended to everything else: s.rows and what led to them.
  void take(int64_t g, int64_t n, const FarField& far, const AttendScratch& s) {
    const int64_t ld = row_stride(c.dim), lv = row_stride(c.value_dim);
    attended.slots = far.slots;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = i * shape.groups + g;
      copy_row(attended.query + row * ld, s.query + i * ld, ld), copy_row(attended.out + row * lv, s.rows + i * lv, lv);
      attended.take(row, s.logits + i * s.ld + far.sinks, s.factor[i], s.top[i]);
    }
  }

  /// Corrects the outputs of n tokens. Returns flags.
  int32_t correct(int64_t n, float cap) {
    const bool all = living <= shape.recall;
    update_shares();
    if (!all) score_blocks(n, cap);
    for (int64_t first = 0; first < n; first += shape.pass()) {
      const int64_t tokens = imin(shape.pass(), n - first);
      for (int64_t i = 0; i < tokens; ++i) {
        int32_t* choices = correction.choices(i);
        int64_t count = 0;
        if (all) {
          count = choose_all(choices);
        } else {
          count = select_largest(scores + (first + i) * shape.columns(), round_up(units, VL), shape.recall, choices);
        }
        for (int64_t k = 0; k < count; ++k) load_block(choices[k]);
        correction.choice_count(i) = int32_t(count);
      }
      correction.run(rows, units, tokens, attended, first * shape.groups, cap, shares, places);
    }
    return check_rows(attended.out, shape.groups * n, c.value_dim);
  }

  /// The corrected output (row_stride(M)) of query g of token i.
  const float* output(int64_t i, int64_t g) const {
    return attended.out + (i * shape.groups + g) * row_stride(c.value_dim);
  }

 private:
  const NearFarCall& c;
  const RecallShape shape;
  const FarCache cache;
  const FarRows rows;  // by block; those that were needed
  Attended attended;
  const Correction correction;
  int64_t* slot;              // (cells), in the outgoing state
  float* log_share;           // (cells), in the outgoing state
  float *mean, *var;          // (panels, D, PANEL): bounds as columns
  float *squares, *products;  // (groups n, row_stride(D)): of the queries; (groups n, PANEL)
  float* scores;              // (block, columns)
  float *space, *change;
  int32_t* members;
  uint8_t* loaded;                // (units): whether a block is in `rows`
  float *absent, *shares;         // (columns): 0, or -inf for a block without a token; (units, UNIT): see far_shares
  int32_t* places;                // (units, UNIT)
  int64_t units = 0, living = 0;  // blocks so far, and how many of them have a token
  bool changed = true;            // whether shares and places are out of date

  /// Enters a block, whose bounds are stored, among those that are chosen from.
  void add_bounds(int64_t block) {
    float* row = space;
    float *m = carve(row, row_stride(c.dim)), *v = carve(row, row_stride(c.dim));
    cache.load_bounds(block, m, v);
    const int64_t at = block / PANEL * PANEL * round_up(c.dim, VL) + block % PANEL;
    for (int64_t d = 0; d < c.dim; ++d) mean[at + d * PANEL] = m[d], var[at + d * PANEL] = v[d];
    living += absent[block] != 0;
    absent[block] = 0;
    units = imax(units, block + 1);
    changed = true;
  }

  void load_block(int64_t block) const {
    if (loaded[block]) return;
    cache.load_block(block, rows, block, space);
    loaded[block] = 1;
  }

  /// scores (n, columns): of all blocks for each token, by the query that would gain most.
  void score_blocks(int64_t n, float cap) const {
    const int64_t ld = row_stride(c.dim), m = shape.groups * n;
    for (int64_t j = 0; j < m * ld; j += VL) store(squares + j, load(attended.query + j) * load(attended.query + j));
    for (int64_t first = 0; first < units; first += PANEL) {
      const int64_t width = imin(PANEL, round_up(units - first, VL)), at = first * round_up(c.dim, VL);
      const Operand to_var{squares, ld, 1, var + at, PANEL, c.dim}, to_mean{attended.query, ld, 1, mean + at, PANEL, c.dim};
      gemm(m, width, &to_var, 1, Store<false>{products, PANEL});
      gemm(m, width, &to_mean, 1, BoundScores{products, PANEL, cap, attended.log_z});
      for (int64_t i = 0; i < n; ++i) {
        float* row = scores + i * shape.columns() + first;
        for (int64_t j = 0; j < width; j += VL) {
          const float* own = products + i * shape.groups * PANEL + j;
          vec best = load(own);
          for (int64_t g = 1; g < shape.groups; ++g) best = vmax(load(own + g * PANEL), best);
          store(row + j, best + load(absent + first + j));
        }
      }
    }
  }

  /// Brings `shares` and `places` up to date.
  void update_shares() {
    const int64_t unit = cache.unit;
    for (int64_t i = 0; changed && i < units; ++i) {
      far_shares(log_share + i * unit, slot + i * unit, unit, shares + i * UNIT, places + i * UNIT);
    }
    changed = false;
  }

  /// to: all blocks that have a token; returns how many these are.
  int64_t choose_all(int32_t* to) const {
    int64_t count = 0;
    for (int64_t i = 0; i < units; ++i) {
      if (absent[i] == 0) to[count++] = int32_t(i);
    }
    return count;
  }
};

inline int64_t RecallShape::panels() const { return (units + RecallBlock::PANEL - 1) / RecallBlock::PANEL; }
inline int64_t RecallShape::columns() const { return panels() * RecallBlock::PANEL; }
inline int64_t RecallShape::floats() const {
  if (!on()) return 0;
  const int64_t queries = groups * block, bounds = 2 * columns() * round_up(dim, VL);
  return FarRows::floats(units, dim, value_dim) + Attended::floats(queries, dim, value_dim, slots) +
         Correction::floats(pass(), groups, recall, units) + FarCache::floats(dim, value_dim) + bounds +
         queries * (row_stride(dim) + RecallBlock::PANEL) + block * columns() + 2 * slots + 2 * columns() +
         2 * units * UNIT + 1024;
}

}  // namespace
