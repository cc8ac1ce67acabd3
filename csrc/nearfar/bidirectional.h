/// Near/far attention without a causal mask: queries attend to the keys around their block exactly, and to slots for all
/// others. nearfar/bidirectional.py has the same algorithm.
#pragma once
#include "nearfar/bidirectional_merge.h"

namespace {

/// Logits row (far + n), in units of log2, become unnormalised weights. Returns 1 / their sum, in which the first `far`
/// count as far as `left` (far) says; far is a multiple of VL.
float softmax_of_shares(float* row, const float* left, int64_t far, int64_t n) {
  const int64_t full = far + n / VL * VL, end = far + n;
  const auto inside = lanes() < splat(float(end - full));
  vec high = inside ? load(row + full) : splat(MASKED_LOGIT), total = {};
  for (int64_t j = 0; j < full; j += VL) high = vmax(load(row + j), high);
  const vec m = splat(max_lane(high));
  for (int64_t j = 0; j < far; j += VL) {
    const vec e = exp2v(load(row + j) - m);
    store(row + j, e);
    total += e * load(left + j);
  }
  for (int64_t j = far; j < full; j += VL) {
    const vec e = exp2v(load(row + j) - m);
    store(row + j, e);
    total += e;
  }
  const vec e = inside ? exp2v(load(row + full) - m) : vec{};
  store(row + full, e);
  return 1 / sum(total + e);
}

/// The attention of consecutive blocks of queries of one kv head.
class BidirectionalBlocks {
 public:
  /// Work space.
  static int64_t floats(const BidirectionalCall& c, const BidirectionalShape& shape) {
    const int64_t far = round_up(shape.size, VL), near = near_keys(c);
    return Window::floats(c.dim, c.value_dim, capacity(c)) +
           AttendScratch::floats(block_rows(c), c.dim, c.value_dim, far, near) +
           (shape.size + 1) * row_stride(c.value_dim) + feature_stride(far) + 256;
  }
  BidirectionalBlocks(const BidirectionalCall& call, int64_t kv_head, const BidirectionalShape& shape,
                      const HeadSpace& shared, int64_t first, float* at)
      : c(call),
        b(kv_head / call.kv_heads),
        kv(kv_head % call.kv_heads),
        space(shared),
        rows(block_rows(call)),
        keys(call.same_tokens ? *shared.visible : 0),
        window(call.dim, call.value_dim, capacity(call), first_near(first),
               carve(at, Window::floats(call.dim, call.value_dim, capacity(call)))),
        loaded(window.base),
        work(rows, call.dim, call.value_dim, round_up(shape.size, VL), near_keys(call),
             carve(at, AttendScratch::floats(rows, call.dim, call.value_dim, round_up(shape.size, VL), near_keys(call)))),
        left(carve(at, feature_stride(round_up(shape.size, VL)))),
        far{0, *shared.slots, shared.key_t, shared.bias, at, shape.padded(shape.size)} {}

  /// Writes the outputs of one block; blocks must come in their order. Returns flags.
  int32_t attend(int64_t block) {
    const int64_t start = block * rows, n = imin(rows, c.queries - start), groups = c.heads / c.kv_heads;
    const int64_t low = first_near(block), high = imin(keys, start + c.block + c.window);
    load_window(low, high);
    take_near_keys(low, high);
    int32_t flags = OK;
    for (int64_t g = kv * groups; g < (kv + 1) * groups; ++g) {
      for (int64_t i = 0; i < n; ++i) {
        const void* query = token_ptr(c.dtype, c.query, c.query_stride, b, g, token(start + i));
        load_row(c.dtype, query, c.dim, c.sqrt_scale * LOG2E_F, work.query + i * row_stride(c.dim));
      }
      flags |= attend_rows(low, high - low, n);
      for (int64_t i = 0; i < n; ++i) {
        float* to = c.out + ((b * c.heads + g) * c.queries + token(start + i)) * c.value_dim;
        copy_row(to, work.rows + i * row_stride(c.value_dim), c.value_dim);
      }
    }
    return flags;
  }

 private:
  const BidirectionalCall& c;
  const int64_t b, kv;
  const HeadSpace space;
  const int64_t rows, keys;  // queries of a block; keys that have positions among the queries
  Window window;
  int64_t loaded;  // the position behind the last key in the window
  const AttendScratch work;
  float* const left;   // (slots): the share of a slot that is not near
  const FarField far;  // its values: of what is not near, times its share

  /// Keys around a block.
  static int64_t near_keys(const BidirectionalCall& c) { return c.same_tokens ? c.block + 2 * c.window : 0; }
  /// Tokens of the window's buffers.
  static int64_t capacity(const BidirectionalCall& c) {
    return c.same_tokens ? near_keys(c) + imin(SPARE_BLOCKS, block_count(c)) * c.block : 0;
  }

  /// The position of the first key that a block sees in its window.
  int64_t first_near(int64_t block) const { return imin(keys, imax(0, block * rows - c.window)); }

  /// The index in the call of the query at a position.
  INLINE int64_t token(int64_t position) const { return c.same_tokens ? space.order[position] : position; }

  /// Loads the keys up to `high`; those before `low` are no longer needed.
  void load_window(int64_t low, int64_t high) {
    if (high <= loaded) return;
    if (high > window.base + window.rows) window.keep(low, loaded - low);
    for (int64_t p = loaded; p < high; ++p) {
      const int64_t t = space.order[p];
      const void* key = token_ptr(c.dtype, c.key, c.key_stride, b, kv, t);
      load_row(c.dtype, key, c.dim, c.sqrt_scale, window.key_at(p));
      const void* value = token_ptr(c.dtype, c.value, c.value_stride, b, kv, t);
      load_row(c.dtype, value, c.value_dim, 1, window.value_at(p));
    }
    window.transpose_keys(loaded, high - loaded);
    loaded = high;
  }

  /// Takes the near keys [low, high) out of the slots.
  void take_near_keys(int64_t low, int64_t high) const {
    const int64_t lv = row_stride(c.value_dim);
    copy_row(far.value, space.value, far.slots * lv);
    for (int64_t i = 0; i < round_up(far.slots, VL); ++i) left[i] = i < far.slots ? 1 : 0;
    if (far.slots == 0) return;
    for (int64_t p = low; p < high; ++p) {
      const int64_t slot = space.slot[p];
      left[slot] -= space.share[p];
      add_row(far.value + slot * lv, window.value_at(p), -space.share[p], round_up(c.value_dim, VL));
    }
    for (int64_t i = 0; i < far.slots; ++i) left[i] = fmax2(left[i], 0);
  }

  /// work.rows (n, row_stride(M)): the attention of the queries work.query (n, row_stride(D)), in units of log2, over the
  /// slots and `near` keys from the position `low` on; 0 if there are none. Returns flags.
  int32_t attend_rows(int64_t low, int64_t near, int64_t n) const {
    const int64_t ld = row_stride(c.dim), lv = row_stride(c.value_dim), columns = round_up(far.slots, VL);
    if (columns + near == 0) return memset(work.rows, 0, size_t(n * lv) * 4), OK;
    float* logits = work.logits + columns;
    const Scores scores{c.logit_cap * LOG2E_F, nullptr, 0};
    far_logits({work.query, ld, 1, far.key_t, far.ld, c.dim}, far, scores, n, columns, work);
    const Operand to_near{work.query, ld, 1, window.key_t + low - window.base, window.ld(), c.dim};
    gemm(n, round_up(near, VL), &to_near, 1, Store<false>{logits, work.ld});
    for (int64_t i = 0; i < n; ++i) {
      if (scores.cap > 0) cap_row(logits + i * work.ld, near, scores.cap);
      work.factor[i] = softmax_of_shares(work.logits + i * work.ld, left, columns, near);
    }
    const Operand parts[2] = {{logits, work.ld, 1, window.value_at(low), lv, near},
                              {work.logits, work.ld, 1, far.value, lv, far.slots}};
    gemm(n, round_up(c.value_dim, VL), parts, 2, ScaleRows{work.rows, lv, work.factor});
    return check_rows(work.rows, n, c.value_dim);
  }
};

/// Attends for the blocks of one task of a kv head. Returns flags.
int32_t attend_blocks(const BidirectionalCall& c, const BidirectionalSpace& all, int64_t head, int64_t task) {
  const BidirectionalShape shape(c, head % c.kv_heads);
  const HeadSpace space(c, shape, all.at + head * all.floats);
  const int64_t first = task * all.blocks_per_task, last = imin(first + all.blocks_per_task, block_count(c));
  BidirectionalBlocks blocks(c, head, shape, space, first, scratch(BidirectionalBlocks::floats(c, shape)));
  int32_t flags = OK;
  for (int64_t block = first; block < last; ++block) flags |= blocks.attend(block);
  return flags;
}

}  // namespace
