/// Recall in a prefill: the far tokens of one head, which grow block by block, and the queries of a block.
#pragma once
#include "nearfar/recall.h"
#include "nearfar/recall_rows.h"

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
  int64_t choices() const { return imin(units, pass() * recall); }  // of the tokens of a pass together
  int64_t unpacked() const { return unpacked_blocks(units, dim, value_dim); }
  int64_t panels() const { return (unpacked() + BoundPanels::PANEL - 1) / BoundPanels::PANEL; }
  int64_t words() const { return (units + 63) / 64; }
  /// Floats of the whole work space.
  int64_t floats() const {
    if (!on()) return 0;
    const int64_t queries = groups * block;
    return UnpackedBlocks::floats(unpacked(), dim, value_dim) + BoundPanels::floats(panels(), dim) +
           Attended::floats(queries, dim, value_dim, slots) + Correction::floats(pass(), groups, recall, choices()) +
           BestBlocks::floats(block, units, recall) + FarCache::floats(dim, value_dim) +
           queries * (row_stride(dim) + BoundPanels::PANEL) + 2 * slots + (1 + 2 * UNIT) * choices() + 3 * words() + 1024;
  }
};

/// Recall of one head.
class RecallBlock {
 public:
  static constexpr int64_t PANEL = BoundPanels::PANEL;

  RecallBlock(const NearFarCall& call, int64_t batch, int64_t kv, const RecallShape& sizes, float* at)
      : c(call),
        shape(sizes),
        cache(call, batch, kv),
        unpacked(cache, sizes.unpacked(), at),
        bounds(cache, sizes.panels(), at),
        attended(sizes.groups * sizes.block, call.dim, call.value_dim, sizes.slots, at),
        correction(sizes.pass(), sizes.groups, sizes.recall, sizes.choices(), at),
        best(sizes.block, sizes.units, sizes.recall, at) {
    const int64_t queries = shape.groups * shape.block, head = batch * c.far->heads + c.far->row[kv];
    slot = c.far->slot_new + head * shape.cells, log_share = c.far->log_share_new + head * shape.cells;
    squares = carve(at, queries * row_stride(c.dim)), products = carve(at, queries * PANEL);
    space = carve(at, FarCache::floats(c.dim, c.value_dim));
    change = carve(at, shape.slots), members = reinterpret_cast<int32_t*>(carve(at, shape.slots));
    chosen = reinterpret_cast<int32_t*>(carve(at, shape.choices()));
    shares = carve(at, shape.choices() * UNIT), places = reinterpret_cast<int32_t*>(carve(at, shape.choices() * UNIT));
    marks = reinterpret_cast<uint64_t*>(carve(at, 2 * shape.words()));
    before = reinterpret_cast<int32_t*>(carve(at, shape.words()));
    memset(marks, 0, size_t(shape.words()) * 8);
  }

  /// Loads the far tokens of the incoming state. place: the index in work space of each slot of the state.
  void load_state(const int64_t* place, bool slots) {
    for (int64_t i = 0; i < shape.cells; ++i) {
      const bool held = i < cache.cells && cache.log_share[i] > -__builtin_inff();
      slot[i] = !held ? 0 : slots ? place[cache.slot[i]] : cache.slot[i];
      log_share[i] = held ? cache.log_share[i] : -__builtin_inff();
    }
    for (int64_t i = 0; i < cache.cells / cache.unit; ++i) {
      if (cache.alive(log_share, i)) add_block(i);
    }
  }

  /// Adds the tokens at the positions [first, last), which end a block of merging and became slots from `first_slot` on.
  void add_tokens(const Window& window, int64_t first, int64_t last, int64_t first_slot) {
    const int64_t unit = cache.unit, begin = last - c.block;
    for (int64_t p = begin; p < last; p += unit) {
      const int64_t missing = imax(0, first - p), block = (p + c.far->shift) / unit;
      if (missing >= unit) continue;
      cache.store_block(block, window.key_at(p), window.value_at(p), missing, space);
      living -= cache.alive(log_share, block);
      for (int64_t i = missing; i < unit; ++i) {
        slot[block * unit + i] = first_slot + p + i - (shape.slots > c.block ? first : begin);
        log_share[block * unit + i] = 0;
      }
      unpacked.forget(block);
      add_block(block);
    }
  }

  /// Follows the slots through a merge of n slots: s.place has their new indices, s.weight their weights before.
  void follow_merge(const Metric& m, int64_t n, const Slots& to, const MergeScratch& s) {
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
    if (!all) score_blocks(n, cap);
    for (int64_t first = 0; first < n; first += shape.pass()) {
      const int64_t tokens = imin(shape.pass(), n - first);
      for (int64_t i = 0; i < tokens; ++i) {
        correction.choice_count(i) = int32_t(all ? living : shape.recall);
        if (all) choose_all(correction.choices(i));
        if (!all) memcpy(correction.choices(i), best.chosen(first + i), size_t(shape.recall) * 4);
      }
      const int64_t count = number_choices(tokens);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t cell = chosen[k] * cache.unit;
        far_shares(log_share + cell, slot + cell, cache.unit, shares + k * UNIT, places + k * UNIT);
      }
      const Chosen far{unpacked, chosen, c.dim, c.value_dim};
      correction.run(far, count, tokens, attended, first * shape.groups, cap, all ? -__builtin_inff() : LEAST_WEIGHT,
                     shares, places);
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
  const UnpackedBlocks unpacked;
  const BoundPanels bounds;
  Attended attended;
  const Correction correction;
  const BestBlocks best;
  int64_t* slot;              // (cells), in the outgoing state
  float* log_share;           // (cells), in the outgoing state
  float *squares, *products;  // (groups n, row_stride(D)): of the queries; (groups n, PANEL)
  float *space, *change;
  int32_t *members, *chosen;      // (slots); (choices): the blocks that a pass needs, in ascending order
  float* shares;                  // (choices, UNIT): see far_shares
  int32_t* places;                // (choices, UNIT)
  uint64_t* marks;                // (words): a bit for each block that a pass needs
  int32_t* before;                // (words): how many it needs before these
  int64_t units = 0, living = 0;  // blocks so far, and how many of them have a token

  /// What Correction reads: the chosen blocks by their number.
  struct Chosen {
    const UnpackedBlocks& blocks;
    const int32_t* number;
    int64_t dim, value_dim;
    const float* keys(int64_t i) const { return blocks.keys(number[i]); }
    const float* values(int64_t i) const { return blocks.values(number[i]); }
    void prefetch_keys(int64_t i) const { blocks.prefetch_keys(number[i]); }
    void prefetch_values(int64_t i) const { blocks.prefetch_values(number[i]); }
  };

  /// Enters a block, which has a token and whose bounds are stored, among those that are chosen from.
  void add_block(int64_t block) {
    bounds.add(block);
    ++living;
    units = imax(units, block + 1);
  }

  /// Finds the best blocks for n tokens. A block's score for a token is that of the query that would gain most.
  void score_blocks(int64_t n, float cap) const {
    const int64_t ld = row_stride(c.dim), m = shape.groups * n, piece = BestBlocks::piece(shape.units, shape.recall);
    for (int64_t j = 0; j < m * ld; j += VL) store(squares + j, load(attended.query + j) * load(attended.query + j));
    for (int64_t first = 0; first < units; first += piece) {
      const int64_t last = imin(first + piece, units);
      for (int64_t at = first; at < last; at += PANEL) score_panel(n, at, at - first, cap);
      for (int64_t i = 0; i < n; ++i) best.take(i, first, round_up(last - first, VL), last == units);
    }
  }

  /// The scores of a panel of blocks from `first` on, at `column` of their piece.
  void score_panel(int64_t n, int64_t first, int64_t column, float cap) const {
    const int64_t ld = row_stride(c.dim), m = shape.groups * n, width = imin(PANEL, round_up(units - first, VL));
    const float *mean, *var;
    bounds.get(first, units, log_share, mean, var);
    float hidden[PANEL];  // 0, or -inf for a block without a token
    for (int64_t j = 0; j < width; ++j) {
      hidden[j] = first + j < units && cache.alive(log_share, first + j) ? 0 : -__builtin_inff();
    }
    const Operand to_var{squares, ld, 1, var, PANEL, c.dim}, to_mean{attended.query, ld, 1, mean, PANEL, c.dim};
    gemm(m, width, &to_var, 1, Store<false>{products, PANEL});
    gemm(m, width, &to_mean, 1, BoundScores{products, PANEL, cap, attended.log_z});
    for (int64_t i = 0; i < n; ++i) {
      float* row = best.row(i) + column;
      for (int64_t j = 0; j < width; j += VL) {
        const float* own = products + i * shape.groups * PANEL + j;
        vec score = load(own);
        for (int64_t g = 1; g < shape.groups; ++g) score = vmax(load(own + g * PANEL), score);
        store(row + j, score + load(hidden + j));
      }
    }
  }

  /// Numbers the blocks that n tokens chose, in ascending order, and turns the choices into these numbers. Returns how many
  /// blocks there are.
  int64_t number_choices(int64_t n) const {
    for (int64_t i = 0; i < n; ++i) {
      const int32_t* own = correction.choices(i);
      for (int64_t k = 0; k < correction.choice_count(i); ++k) marks[own[k] / 64] |= uint64_t(1) << own[k] % 64;
    }
    int32_t count = 0;
    for (int64_t w = 0; w < shape.words(); ++w) {
      before[w] = count;
      for (uint64_t left = marks[w]; left; left &= left - 1) chosen[count++] = int32_t(w * 64 + __builtin_ctzll(left));
    }
    for (int64_t i = 0; i < n; ++i) {
      int32_t* own = correction.choices(i);
      for (int64_t k = 0; k < correction.choice_count(i); ++k) {
        const uint64_t lower = marks[own[k] / 64] & ((uint64_t(1) << own[k] % 64) - 1);
        own[k] = before[own[k] / 64] + __builtin_popcountll(lower);
      }
    }
    memset(marks, 0, size_t(shape.words()) * 8);
    return count;
  }

  /// to: all blocks that have a token.
  void choose_all(int32_t* to) const {
    int64_t count = 0;
    for (int64_t i = 0; i < units; ++i) {
      if (cache.alive(log_share, i)) to[count++] = int32_t(i);
    }
  }
};

}  // namespace
