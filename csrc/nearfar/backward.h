/// The gradient of a prefill, from its last block to its first. The slots that each block saw are made again from what the
/// merges decided: once through all blocks, with a checkpoint before each segment, and then segment by segment.
#pragma once
#include "nearfar/backward_shape.h"

namespace {

/// The backward pass of one kv head.
class Backward {
 public:
  Backward(const NearFarGrads& grads, int64_t kv_head, const BackwardShape& sizes, float* at)
      : g(grads),
        c(*grads.call),
        head(kv_head),
        size(sizes),
        shape(sizes.of),
        order(visible_tokens(c, shape.b, at)),
        window(c, sizes.rows, 0, carve(at, sizes.window_floats(c))),
        value_t(carve(at, round_up(c.value_dim, VL) * sizes.near_ld)),
        grad_near(carve_entries(sizes.rows, at)),
        work(c.block, c.dim, c.value_dim, round_up(shape.far, VL), c.window + c.block, carve(at, shape.attend_floats(c))),
        back(c.block, c.dim, sizes.logits, c.logit_cap > 0, carve(at, sizes.back_floats(c))),
        far{c.sinks,         0, carve(at, round_up(c.dim, VL) * shape.far_stride), carve(at, shape.far_stride), nullptr,
            shape.far_stride},
        far_value_t(carve(at, round_up(c.value_dim, VL) * shape.far_stride)),
        sets(carve(at, (sizes.segment + 1) * sizes.slots_floats(shape.far))),
        checkpoints(carve(at, sizes.segments * sizes.slots_floats(shape.budget))),
        set_slots(reinterpret_cast<int64_t*>(carve(at, 2 * (sizes.segment + 1)))),
        checkpoint_slots(reinterpret_cast<int64_t*>(carve(at, 2 * sizes.segments))),
        grad_slots(slots_at(carve(at, sizes.slots_floats(sizes.slots + VL)), sizes.slots + VL)),
        grad_spare(slots_at(carve(at, sizes.slots_floats(sizes.slots + VL)), sizes.slots + VL)),
        grad_sinks(carve_entries(c.sinks, at)),
        merging(c, sizes.slots, at) {}

  /// Writes all gradients. Returns flags.
  int32_t run() {
    load_state();
    for (int64_t i = 0; i < size.segments; ++i) {
      copy_slots(set(0), checkpoint(i)), checkpoint_slots[i] = set_slots[0];
      make_slots(i);
      if (i + 1 < size.segments) copy_slots(set(size.segment), set(0)), set_slots[0] = set_slots[size.segment];
    }
    load_grads();
    for (int64_t i = size.segments - 1; i >= 0; --i) {
      if (i + 1 < size.segments) {
        copy_slots(checkpoint(i), set(0)), set_slots[0] = checkpoint_slots[i];
        make_slots(i);
        carry_grads();
      }
      load_window(i);
      for (int64_t k = blocks_of(i) - 1; k >= 0; --k) {
        if (g.out) attend_block(i * size.segment + k, set(k + 1));
        leave_block(i * size.segment + k, set(k), set(k + 1));
      }
      store_tokens(i);
    }
    store_state();
    return OK;
  }

 private:
  const NearFarGrads& g;
  const NearFarCall& c;
  const int64_t head;
  const BackwardShape size;
  const PrefillShape& shape;
  const int64_t* order;  // the call's tokens that are visible, or null for all
  Window window;         // all tokens that a segment sees
  float* value_t;        // (M, window.ld()): their values as columns
  Entries grad_near;     // of the same tokens
  AttendScratch work;
  AttendBackwardScratch back;
  FarField far;
  float *far_value_t, *sets, *checkpoints;
  int64_t *set_slots, *checkpoint_slots;
  Slots grad_slots, grad_spare;  // of the slots that the current block saw
  Entries grad_sinks;
  RecordedMerge merging;

  /// `rows` keys and values in work space, which moves behind them.
  Entries carve_entries(int64_t rows, float*& at) const {
    float* key = carve(at, rows * size.ld);
    return {key, carve(at, rows * size.lv)};
  }
  /// `rows` slots, without what they received, at `at`.
  Slots slots_at(float* at, int64_t rows) const {
    const Entries e = carve_entries(rows, at);
    return {e.key, e.value, carve(at, rows), nullptr, nullptr, 0};
  }
  /// Set 0: the slots before the first block of the segment; set k + 1: those that its block k sees. The sinks lie before
  /// them, in the same rows, and the keys that become slots as the next block is entered behind them.
  Slots set(int64_t k) const {
    Slots s = slots_at(sets + k * size.slots_floats(shape.far), shape.far);
    s.key += c.sinks * size.ld, s.value += c.sinks * size.lv, s.n = set_slots[k];
    return s;
  }
  /// The slots before the first block of a segment.
  Slots checkpoint(int64_t i) const {
    Slots s = slots_at(checkpoints + i * size.slots_floats(shape.budget), shape.budget);
    s.n = checkpoint_slots[i];
    return s;
  }
  /// Copies keys, values and biases.
  void copy_slots(const Slots& from, const Slots& to) const {
    copy_row(to.key, from.key, from.n * size.ld), copy_row(to.value, from.value, from.n * size.lv);
    copy_row(to.bias, from.bias, from.n);
  }
  /// The blocks of a segment.
  INLINE int64_t blocks_of(int64_t segment) const { return imin(size.segment, size.blocks - segment * size.segment); }
  /// The position at which a block starts.
  INLINE int64_t start_of(int64_t block) const { return shape.block_start(c) + block * c.block; }
  /// The first of the keys that become slots as a block is entered, and their number.
  INLINE int64_t first_leaving(int64_t block) const {
    return imax(imax(start_of(block) - c.window - c.block, c.merged[shape.b]), c.sinks);
  }
  INLINE int64_t leaving(int64_t block) const {
    return shape.budget ? imax(0, start_of(block) - c.window - first_leaving(block)) : 0;
  }
  /// The index in the call of the token at a position, and in the incoming near field; negative if it is not there.
  INLINE int64_t token(int64_t position) const { return order ? order[position - shape.seen] : position - shape.seen; }
  INLINE int64_t near_index(int64_t position) const { return position < 0 ? -1 : position - (shape.seen - c.near_tokens); }
  /// Floats before the entries of this head in a tensor (B, slots of all heads, E) of an incoming or outgoing state.
  INLINE int64_t first_slot(const int64_t* first, int64_t all) const { return shape.b * all + first[shape.kv]; }

  /// Loads the scaled key and the value of the token at a position; 0 if there is none.
  void load_token(int64_t position, float* key, float* value) const {
    if (position < shape.seen) {
      const int64_t i = near_index(position);
      if (i < 0) return clear_rows(c, key, value);
      return near_of(c, c.near, c.near_stride, head).load(i, key, value);
    }
    ::load_token(c, head, token(position), key, value);
  }

  /// Loads the slots of the incoming state to set 0, and the sinks to all sets. Sinks that a block does not see yet are
  /// hidden by their biases.
  void load_state() const {
    const int64_t last = shape.kv + 1 < c.kv_heads ? c.first_slot[shape.kv + 1] : c.slots;
    const Slots first = set(0);
    set_slots[0] = 0;
    for (int64_t i = first_slot(c.first_slot, c.slots); i < shape.b * c.slots + last; ++i) {
      if (c.bias[i] == -__builtin_inff()) continue;
      slots_of(c, c.slot).load(i, first.key + set_slots[0] * size.ld, first.value + set_slots[0] * size.lv);
      first.bias[set_slots[0]++] = c.bias[i];
    }
    for (int64_t i = 0; i < c.sinks; ++i) {
      float *key = work.query, *value = work.rows;
      if (i >= shape.seen && i < shape.end) {
        load_token(i, key, value);
      } else {
        sinks_of(c, c.sink, head).load(i, key, value);
      }
      for (int64_t k = 0; k <= size.segment; ++k) {
        const Slots s = set(k);
        copy_row(s.key + (i - c.sinks) * size.ld, key, size.ld),
            copy_row(s.value + (i - c.sinks) * size.lv, value, size.lv);
      }
    }
  }

  /// Makes all sets of a segment from set 0.
  void make_slots(int64_t segment) {
    for (int64_t k = 0; k < blocks_of(segment); ++k) {
      const int64_t block = segment * size.segment + k, more = leaving(block);
      Slots before = set(k), after = set(k + 1);
      for (int64_t i = 0; i < more; ++i, ++before.n) {
        load_token(first_leaving(block) + i, before.key + before.n * size.ld, before.value + before.n * size.lv);
        before.bias[before.n] = 0;
      }
      if (before.n <= shape.budget) {
        copy_slots(before, after), set_slots[k + 1] = before.n;
      } else {
        merging.read(MergeRecord(c, head, block), before.n, shape.budget);
        merging.replay(before, shape.budget, after), set_slots[k + 1] = shape.budget;
      }
    }
  }

  /// Loads the gradients of the results: of the sinks, of the slots after the last block, and of the last tokens.
  void load_grads() const {
    const int64_t E = c.dim + c.value_dim, n = set_slots[imax(0, blocks_of(size.segments - 1))];
    for (int64_t i = 0; i < c.sinks; ++i) {
      const float* entry = g.sink_new ? g.sink_new + (head * c.sinks + i) * E : nullptr;
      unpack_grad(c, entry, grad_sinks.key + i * size.ld, grad_sinks.value + i * size.lv);
    }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = first_slot(c.first_slot_new, c.slots_new) + i;
      unpack_grad(c, g.slot_new ? g.slot_new + at * E : nullptr, grad_slots.key + i * size.ld,
                  grad_slots.value + i * size.lv);
      grad_slots.bias[i] = g.bias_new ? g.bias_new[at] : 0;
    }
    memset(grad_near.key, 0, size_t(size.rows * size.ld) * 4);
    memset(grad_near.value, 0, size_t(size.rows * size.lv) * 4);
    const int64_t base = base_of(size.segments - 1);
    for (int64_t i = 0; g.near_new && i < c.near_tokens_new; ++i) {
      const int64_t row = shape.end - c.near_tokens_new + i - base;
      const float* entry = g.near_new + (head * c.near_tokens_new + i) * E;
      if (row >= 0) unpack_grad(c, entry, grad_near.key + row * size.ld, grad_near.value + row * size.lv);
    }
  }

  /// The position of the first token that a segment sees or turns into a slot.
  INLINE int64_t base_of(int64_t segment) const { return start_of(segment * size.segment) - c.window - c.block; }

  /// From one segment to the one before: the gradients of the tokens that both see move to the end.
  void carry_grads() const {
    const int64_t shared = c.window + c.block, down = size.segment * c.block;
    memmove(grad_near.key + down * size.ld, grad_near.key, size_t(shared * size.ld) * 4);
    memmove(grad_near.value + down * size.lv, grad_near.value, size_t(shared * size.lv) * 4);
    memset(grad_near.key, 0, size_t(down * size.ld) * 4), memset(grad_near.value, 0, size_t(down * size.lv) * 4);
  }

  /// Loads the tokens of a segment.
  void load_window(int64_t segment) {
    window.base = base_of(segment);
    const int64_t end = imin(shape.end, start_of(segment * size.segment + blocks_of(segment))), n = end - window.base;
    for (int64_t p = window.base; p < end; ++p) load_token(p, window.key_at(p), window.value_at(p));
    window.transpose_keys(window.base, n);
    transpose(window.value, size.lv, n, c.value_dim, value_t, size.near_ld);
  }

  /// Adds the gradients through the attention of the queries of a block, which sees `slots`.
  void attend_block(int64_t block, const Slots& slots) {
    const int64_t start = start_of(block), first = imax(start, shape.seen), n = imin(start + c.block, shape.end) - first;
    const int64_t low = imax(imax(start - c.window, c.merged[shape.b]), imin(start, c.sinks)), M = c.value_dim;
    if (n <= 0) return;
    set_far_field(c, slots, start, far);
    const float* far_value = slots.value - c.sinks * size.lv;
    transpose(far_value, size.lv, c.sinks + slots.n, M, far_value_t, far.ld);
    const int64_t row = low - window.base;
    const SeenBlock seen{window,
                         far,
                         slots.key - c.sinks * size.ld,
                         far_value_t,
                         value_t,
                         low,
                         first,
                         n,
                         grad_sinks,
                         {grad_slots.key, grad_slots.value},
                         {grad_near.key + row * size.ld, grad_near.value + row * size.lv},
                         grad_slots.bias};
    for (int64_t group = 0; group < shape.groups; ++group) {
      const int64_t query_head = shape.kv * shape.groups + group, rows = (shape.b * c.heads + query_head) * c.tokens;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t t = token(first + i);
        const void* query = token_ptr(c.dtype, c.query, c.query_stride, shape.b, query_head, t);
        load_row(c.dtype, query, c.dim, c.sqrt_scale * LOG2E_F, work.query + i * size.ld);
        load_row(FLOAT32, g.out + (rows + t) * M, M, 1, work.rows + i * size.lv);
      }
      float* band = g.band ? g.band + (shape.b * c.heads + query_head) * c.reach : nullptr;
      attend_backward(seen, scores_of(c, query_head), work, back, c.sqrt_scale, band);
      for (int64_t i = 0; i < n; ++i) {
        copy_row(g.query + (rows + token(first + i)) * c.dim, back.grad_query + i * size.ld, c.dim);
      }
    }
  }

  /// From the gradients of the slots after a block was entered to those before, and of the keys that became slots.
  void leave_block(int64_t block, Slots before, const Slots& after) {
    const int64_t more = leaving(block), row = first_leaving(block) - window.base;
    if (more == 0) return;
    const int64_t kept = before.n;
    before.n += more;
    if (before.n > shape.budget) {
      merging.read(MergeRecord(c, head, block), before.n, shape.budget);
      merging.backward(before, after, grad_slots, grad_spare);
      const Slots made = grad_spare;
      grad_spare = grad_slots, grad_slots = made;
    }
    add_row(grad_near.key + row * size.ld, grad_slots.key + kept * size.ld, 1, more * size.ld);
    add_row(grad_near.value + row * size.lv, grad_slots.value + kept * size.lv, 1, more * size.lv);
  }

  /// Writes the gradients of the new tokens of a segment; those of sinks include what they got as sinks.
  void store_tokens(int64_t segment) const {
    const int64_t first = imax(start_of(segment * size.segment), shape.seen);
    const int64_t last = imin(start_of(segment * size.segment + blocks_of(segment)), shape.end);
    for (int64_t p = first; p < last; ++p) {
      float *key = grad_near.key + (p - window.base) * size.ld, *value = grad_near.value + (p - window.base) * size.lv;
      if (p < c.sinks) {
        add_row(key, grad_sinks.key + p * size.ld, 1, size.ld);
        add_row(value, grad_sinks.value + p * size.lv, 1, size.lv);
      }
      scale_row(key, c.sqrt_scale, size.ld);
      const int64_t row = (shape.b * c.kv_heads + shape.kv) * c.tokens + token(p);
      copy_row(g.key + row * c.dim, key, c.dim), copy_row(g.value + row * c.value_dim, value, c.value_dim);
    }
  }

  /// Writes the gradients of the incoming state.
  void store_state() const {
    const int64_t E = c.dim + c.value_dim, last = shape.kv + 1 < c.kv_heads ? c.first_slot[shape.kv + 1] : c.slots;
    for (int64_t i = 0; i < c.sinks; ++i) {
      if (i >= shape.seen && i < shape.end) continue;
      pack_grad(c, g.sink + (head * c.sinks + i) * E, grad_sinks.key + i * size.ld, grad_sinks.value + i * size.lv);
    }
    for (int64_t p = imax(window.base, shape.seen - c.near_tokens); p < shape.seen; ++p) {
      const int64_t i = near_index(p), row = p - window.base;
      if (i < 0) continue;
      pack_grad(c, g.near + (head * c.near_tokens + i) * E, grad_near.key + row * size.ld, grad_near.value + row * size.lv);
    }
    int64_t n = 0;
    for (int64_t i = first_slot(c.first_slot, c.slots); i < shape.b * c.slots + last; ++i) {
      if (c.bias[i] == -__builtin_inff()) continue;
      pack_grad(c, g.slot + i * E, grad_slots.key + n * size.ld, grad_slots.value + n * size.lv);
      g.bias[i] = grad_slots.bias[n++];
    }
  }
};

/// The gradients of one kv head. Returns flags.
int32_t backward(const NearFarGrads& g, int64_t head) {
  const BackwardShape shape(*g.call, head);
  return Backward(g, head, shape, scratch(shape.floats(*g.call))).run();
}

}  // namespace
