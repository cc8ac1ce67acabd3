/// Near/far attention over new tokens of one kv head, block by block at absolute positions. The torch engine has the same
/// algorithm.
#pragma once
#include <initializer_list>
#include <optional>

#include "nearfar/merge_record.h"
#include "nearfar/prefill_shape.h"

namespace {

/// What is left of the attention received, after each further block.
constexpr float DECAY = 0.95f;

/// The prefill of one kv head.
class Prefill {
 public:
  Prefill(const NearFarCall& call, int64_t kv_head, const PrefillShape& sizes, float* at)
      : c(call),
        head(kv_head),
        shape(sizes),
        order(visible_tokens(call, sizes.b, at)),
        window(call, sizes.capacity, sizes.block_start(call) - call.window - call.block,
               carve(at, sizes.window_floats(call))),
        queries(call.dim, sizes.groups * sizes.samples, carve(at, sizes.moments_floats(call))),
        work(call.block, call.dim, call.value_dim, round_up(sizes.far, VL), call.window + call.block,
             carve(at, sizes.attend_floats(call))),
        sampled(sizes.groups * sizes.samples, call.dim, 1, round_up(sizes.far, VL), call.window + call.block,
                carve(at, sizes.sampled_floats(call))),
        slots(carve_slots(call, sizes.far, at)),
        spare(carve_slots(call, sizes.far, at)),
        far(carve_far(at)),
        near_received(carve(at, 2 * (call.window + call.block))),
        merging(sizes.budget + call.block, sizes.merge_candidates(call), call.dim, call.value_dim,
                carve(at, sizes.merge_floats(call))) {
    if (sizes.recall.on()) recall.emplace(call, sizes.b, sizes.kv, sizes.recall, at);
  }

  /// Processes all new tokens. Returns flags.
  int32_t run() {
    load_state();
    int32_t flags = OK;
    bool changed = true;
    const int64_t merged = c.merged[shape.b];
    for (int64_t start = shape.block_start(c); start < shape.end; start += c.block) {
      const int64_t first = imax(start, shape.seen), last = imin(start + c.block, shape.end);
      if (start + c.block > window.base + window.rows) window.keep(start - c.window - c.block, c.window + c.block);
      const bool entering = start > c.entered[shape.b] && shape.budget > 0;
      if (entering) {
        if (changed || !c.out) update_far_field(start - c.block);
        changed = false;
        observe(start - c.block);
      }
      if (start >= shape.seen) queries.clear_samples();
      load_tokens(first, last);
      const int64_t leaving = imax(imax(start - c.window - c.block, merged), c.sinks);
      changed = evict(leaving, start - c.window) || changed || start < c.sinks + c.block;
      if (entering) memmove(near_received, near_received + 2 * c.block, size_t(2 * c.window) * 4);
      if (c.out) {
        if (changed) update_far_field(start);
        changed = false;
        flags |= write_outputs(imax(imax(start - c.window, merged), imin(start, c.sinks)), first, last);
      }
      if (last == start + c.block) queries.finish_block();
    }
    store_state();
    return flags;
  }

 private:
  const NearFarCall& c;
  const int64_t head;
  const PrefillShape shape;
  const int64_t* order;  // the call's tokens that are visible, or null for all
  Window window;
  QueryMoments queries;
  AttendScratch work, sampled;  // of a block's queries, and of its sampled ones
  Slots slots, spare;           // the sinks lie before the slots, in the same rows
  FarField far;
  float* near_received;  // (window + block, 2): of the tokens from a window before the last block that was entered on
  MergeScratch merging;
  std::optional<RecallBlock> recall;

  /// The far field's buffers.
  FarField carve_far(float*& at) const {
    float* key_t = carve(at, round_up(c.dim, VL) * shape.far_stride);
    return {c.sinks, 0, key_t, carve(at, shape.far_stride), nullptr, shape.far_stride};
  }

  /// The index in the call of the token at a position.
  INLINE int64_t token(int64_t position) const { return order ? order[position - shape.seen] : position - shape.seen; }

  /// to (row_stride(D)) = the query at a position times `factor`.
  void load_query(int64_t group, int64_t position, float factor, float* to) const {
    const int64_t query_head = shape.kv * shape.groups + group;
    const void* query = token_ptr(c.dtype, c.query, c.query_stride, shape.b, query_head, token(position));
    load_row(c.dtype, query, c.dim, factor, to);
  }

  /// Row i of the slots; sinks have i < 0.
  float* key_of(const Slots& s, int64_t i) const { return s.key + i * row_stride(c.dim); }
  float* value_of(const Slots& s, int64_t i) const { return s.value + i * row_stride(c.value_dim); }

  /// Copies the token at a position to its sink.
  void set_sink(int64_t position) const {
    for (const Slots& s : {slots, spare}) {
      copy_row(key_of(s, position - c.sinks), window.key_at(position), row_stride(c.dim));
      copy_row(value_of(s, position - c.sinks), window.value_at(position), row_stride(c.value_dim));
    }
  }

  /// Loads the incoming state.
  void load_state() {
    const int64_t b = shape.b, kv = shape.kv;
    const StoredEntries sinks = sinks_of(c, c.sink, head), stored = slots_of(c, c.slot);
    for (int64_t i = 0; i < c.sinks; ++i) {
      for (const Slots& s : {slots, spare}) sinks.load(i, key_of(s, i - c.sinks), value_of(s, i - c.sinks));
    }
    const int64_t first = c.first_slot[kv], last = kv + 1 < c.kv_heads ? c.first_slot[kv + 1] : c.slots;
    int64_t* place = merging.place;  // the index of each slot without the empty ones
    for (int64_t i = b * c.slots + first; i < b * c.slots + last; ++i) {
      *place++ = slots.n;
      if (c.bias[i] == -__builtin_inff()) continue;
      stored.load(i, key_of(slots, slots.n), value_of(slots, slots.n));
      slots.received[slots.n] = c.received[2 * i], slots.queries[slots.n] = c.received[2 * i + 1];
      slots.bias[slots.n++] = c.bias[i];
    }
    copy_row(near_received, c.near_received + head * c.window * 2, c.window * 2);
    load_near(near_of(c, c.near, c.near_stride, head));
    queries.load_moments(c.moments + head * 2 * (c.dim + 1));
    load_samples(c.query_samples + head * queries.rows * (c.dim + 1));
    if (recall) recall->load_state(merging.place, shape.budget > 0);
  }

  /// Loads the near tokens (near_tokens, E); positions before the first become 0.
  void load_near(const StoredEntries& near) const {
    for (int64_t p = window.base; p < shape.seen; ++p) {
      const int64_t i = p - (shape.seen - c.near_tokens);
      if (p >= 0 && i >= 0) {
        near.load(i, window.key_at(p), window.value_at(p));
      } else {
        clear_rows(c, window.key_at(p), window.value_at(p));
      }
    }
    if (shape.seen > window.base) window.transpose_keys(window.base, shape.seen - window.base);
  }

  /// Loads the samples (groups, samples, D + 1) that earlier calls took in this block.
  void load_samples(const float* from) const {
    const bool whole = shape.seen == shape.end || shape.seen % c.block == 0;
    const int64_t taken = whole ? shape.samples : (shape.seen % c.block + c.stride - 1) / c.stride;
    for (int64_t g = 0; g < shape.groups; ++g) {
      for (int64_t i = g * shape.samples; i < g * shape.samples + taken; ++i) {
        copy_row(queries.samples + i * queries.ld, from + i * (c.dim + 1), c.dim + 1);
      }
    }
  }

  /// Appends the tokens at the positions [first, last) of one block to the window, and samples their queries.
  void load_tokens(int64_t first, int64_t last) const {
    for (int64_t p = first; p < last; ++p) {
      load_token(c, head, token(p), window.key_at(p), window.value_at(p));
      if (p < c.sinks) set_sink(p);
      if (!c.query || p % c.stride) continue;
      for (int64_t g = 0; g < shape.groups; ++g) {
        float* row = queries.samples + (g * shape.samples + p % c.block / c.stride) * queries.ld;
        load_query(g, p, c.sqrt_scale, row);
        row[c.dim] = 1;
      }
    }
    window.transpose_keys(first, last - first);
  }

  /// Adds the attention that the sampled queries of the block at `own` paid to slots and near tokens. The far field is what
  /// they saw.
  void observe(int64_t own) const {
    const int64_t rows = queries.rows, seen = c.window + c.block, far_columns = round_up(c.sinks + slots.n, VL);
    const int64_t first = imax(imax(imin(own, c.sinks), c.merged[shape.b]) - own + c.window, 0);
    const int64_t ld = row_stride(c.dim), columns = far_columns + seen;
    for (int64_t i = 0; i < rows; ++i) {
      copy_row(sampled.query + i * ld, queries.samples + i * queries.ld, ld);
      for (int64_t d = c.dim; d < ld; ++d) sampled.query[i * ld + d] = 0;
      scale_row(sampled.query + i * ld, LOG2E_F, round_up(c.dim, VL));
    }
    const Operand to_far{sampled.query, ld, 1, far.key_t, far.ld, c.dim};
    const Operand to_near{sampled.query, ld, 1, window.key_t + own - c.window - window.base, window.ld(), c.dim};
    far_logits(to_far, far, scores_of(c, 0), rows, far_columns, sampled);
    gemm(rows, round_up(seen, VL), &to_near, 1, Store<false>{sampled.logits + far_columns, sampled.ld});
    memset(near_received + 2 * c.window, 0, size_t(2 * c.block) * 4);
    for (int64_t j = 0; j < 2 * seen; ++j) near_received[j] *= DECAY;
    float total = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const float weight = queries.samples[i * queries.ld + c.dim];
      const int64_t end = c.window + i % shape.samples * c.stride + 1;
      const int64_t position = own + i % shape.samples * c.stride;
      const Scores scores = scores_of(c, shape.kv * shape.groups + i / shape.samples);
      float *row = sampled.logits + i * sampled.ld, *near = row + far_columns;
      near_logits(scores, position, own - c.window, seen, near);
      if (scores.band) add_band(scores, position, 0, c.sinks, row);
      for (int64_t j = 0; j < imin(first, end - 1); ++j) near[j] = MASKED_LOGIT;
      for (int64_t j = end; j < seen; ++j) near[j] = MASKED_LOGIT;
      scale_row(row, softmax(row, columns, sampled.top + i) * weight, round_up(columns, VL));
      if (i > 0) add_row(sampled.logits, row, 1, round_up(columns, VL));
      for (int64_t j = first; j < end; ++j) near_received[2 * j + 1] += weight;
      total += weight;
    }
    for (int64_t j = 0; j < seen; ++j) near_received[2 * j] += sampled.logits[far_columns + j];
    for (int64_t j = 0; j < slots.n; ++j) {
      slots.received[j] = slots.received[j] * DECAY + sampled.logits[c.sinks + j];
      slots.queries[j] = slots.queries[j] * DECAY + total;
    }
  }

  /// Turns the keys [first, last), which leave the window, into slots, and merges slots where there are too many. Returns
  /// whether the slots changed.
  bool evict(int64_t first, int64_t last) {
    if (recall && first < last) recall->add_tokens(window, first, last, slots.n);
    if (shape.budget == 0 || first >= last) return false;
    copy_row(key_of(slots, slots.n), window.key_at(first), (last - first) * row_stride(c.dim));
    copy_row(value_of(slots, slots.n), window.value_at(first), (last - first) * row_stride(c.value_dim));
    for (int64_t p = first; p < last; ++p) {
      const float* received = near_received + 2 * (p - last + c.block);
      slots.received[slots.n] = received[0], slots.queries[slots.n] = received[1];
      slots.bias[slots.n++] = 0;
    }
    if (slots.n <= shape.budget) return true;
    queries.update_metric();
    const Metric metric{c.dim, c.value_dim, c.alpha, queries.anchor, queries.deviation, c.logit_cap, c.entry_dtype};
    merge_slots(metric, slots, shape.budget, shape.budget + c.block, merging, spare);
    if (recall) recall->follow_merge(metric, slots.n, spare, merging);
    if (c.merges) record_merge(c, head, (last + c.window - shape.block_start(c)) / c.block, slots.n, metric, merging);
    const Slots merged = spare;
    spare = slots, slots = merged;
    return true;
  }

  /// Updates the transposed keys and biases of the far field. Sinks are visible to blocks that start behind them.
  void update_far_field(int64_t start) {
    set_far_field(c, slots, start, far);
    far.value = value_of(slots, -c.sinks);
  }

  /// Writes the outputs of the queries at [first, last), which see the near keys from `low` on. Returns flags.
  int32_t write_outputs(int64_t low, int64_t first, int64_t last) {
    const int64_t n = last - first;
    int32_t flags = OK;
    for (int64_t g = 0; g < shape.groups; ++g) {
      for (int64_t i = 0; i < n; ++i) {
        load_query(g, first + i, c.sqrt_scale * LOG2E_F, work.query + i * row_stride(c.dim));
      }
      flags |= attend(window, far, scores_of(c, shape.kv * shape.groups + g), low, first, n, work);
      if (recall) recall->take(g, n, far, work);
      for (int64_t i = 0; i < n && !recall; ++i) write_row(g, first + i, work.rows + i * row_stride(c.value_dim));
    }
    if (!recall) return flags;
    flags |= recall->correct(n, c.logit_cap * LOG2E_F);
    for (int64_t i = 0; i < shape.groups * n; ++i) write_row(i / n, first + i % n, recall->output(i % n, i / n));
    return flags;
  }

  /// Writes the output (row_stride(M)) of a query.
  void write_row(int64_t group, int64_t position, const float* row) const {
    const int64_t query_head = shape.b * c.heads + shape.kv * shape.groups + group;
    copy_row(c.out + (query_head * c.tokens + token(position)) * c.value_dim, row, c.value_dim);
  }

  /// Writes the outgoing state.
  void store_state() const {
    const int64_t D = c.dim, b = shape.b, kv = shape.kv;
    const StoredEntries sinks = sinks_of(c, c.sink_new, head), stored = slots_of(c, c.slot_new);
    for (int64_t i = 0; i < c.sinks; ++i) sinks.store(i, key_of(slots, i - c.sinks), value_of(slots, i - c.sinks));
    const StoredEntries near = near_of(c, c.near_new, c.near_new_stride, head);
    for (int64_t i = 0; i < c.near_tokens_new; ++i) {
      const int64_t p = shape.end - c.near_tokens_new + i;
      if (p < window.base) {
        near.clear(i);
      } else {
        near.store(i, window.key_at(p), window.value_at(p));
      }
    }
    const int64_t first = c.first_slot_new[kv], last = kv + 1 < c.kv_heads ? c.first_slot_new[kv + 1] : c.slots_new;
    for (int64_t i = 0; i < last - first; ++i) {
      const int64_t at = b * c.slots_new + first + i;
      c.bias_new[at] = i < slots.n ? slots.bias[i] : -__builtin_inff();
      c.received_new[2 * at] = i < slots.n ? slots.received[i] : 0;
      c.received_new[2 * at + 1] = i < slots.n ? slots.queries[i] : 0;
      if (i < slots.n) {
        stored.store(at, key_of(slots, i), value_of(slots, i));
      } else {
        stored.clear(at);
      }
    }
    copy_row(c.near_received_new + head * c.window * 2, near_received, c.window * 2);
    queries.store_moments(c.moments_new + head * 2 * (D + 1));
    unpad_rows(queries.samples, queries.ld, queries.rows, D + 1, c.query_samples_new + head * queries.rows * (D + 1));
  }
};

/// New tokens of one kv head, from the incoming to the outgoing state. Returns flags.
int32_t prefill(const NearFarCall& c, int64_t head) {
  const PrefillShape shape(c, head);
  return Prefill(c, head, shape, scratch(shape.floats(c))).run();
}

}  // namespace
