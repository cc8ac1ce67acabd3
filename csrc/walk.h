// Near/far attention over new tokens of one kv head, block by block at absolute positions. nearfar/causal.py has the
// same in torch.
#pragma once
#include "near.h"

namespace {

// Sums over the sampled queries: rows [x, 1] of the block at hand, and [x, 1]' [x, 1] of all finished blocks.
struct Statistics {
  int64_t dim, rows, ld;
  float *samples, *moments, *added, *anchor, *matrix;

  static int64_t floats(int64_t dim, int64_t rows) {
    return (rows + 2 * (dim + 1)) * lead(dim + 1) + (dim + 1) * wide(dim) + 128;
  }
  Statistics(int64_t dim, int64_t rows, float* at) : dim(dim), rows(rows), ld(lead(dim + 1)) {
    samples = take(at, rows * ld), moments = take(at, (dim + 1) * ld), added = take(at, (dim + 1) * ld);
    anchor = take(at, wide(dim)), matrix = take(at, dim * wide(dim));
    memset(samples, 0, size_t(rows * ld) * 4), memset(moments, 0, size_t((dim + 1) * ld) * 4);
  }

  // Adds the block's samples and starts the next one. Block by block, so that every split adds alike.
  void finish_block() const {
    const Operand o{samples, 1, ld, samples, ld, rows};
    product(dim + 1, round_up(dim + 1, VL), &o, 1, Store<false>{added, ld});
    for (int64_t i = 0; i <= dim; ++i) add_row(moments + i * ld, added + i * ld, 1, round_up(dim + 1, VL));
  }

  // Mean and covariance of the queries so far; the identity while there are none.
  void measure() const {
    const float count = moments[dim * ld + dim], share = 1 / fmax2(count, 1);
    const int64_t lw = wide(dim);
    memset(anchor, 0, size_t(lw) * 4);
    for (int64_t d = 0; d < dim; ++d) anchor[d] = moments[dim * ld + d] * share;
    float trace = 0;
    for (int64_t i = 0; i < dim; ++i) {
      float* row = matrix + i * lw;
      for (int64_t j = 0; j < lw; ++j) row[j] = j < dim ? moments[i * ld + j] * share - anchor[i] * anchor[j] : 0;
      trace += row[i];
    }
    const float ridge = count > 0 ? 1e-4f * fmax2(trace / float(dim), 1e-12f) : 1;
    for (int64_t i = 0; i < dim; ++i) matrix[i * lw + i] += ridge;
  }
};

// The walk of one head; positions count visible tokens.
struct Walk {
  const NearFarCall& c;
  int64_t head, b, kv, groups, size;
  int64_t seen, end, merged, samples;
  const int64_t* order;  // which of the call's tokens the visible ones are, or null for all
  History h;
  Statistics statistics;
  LookSpace space;
  Slots slots, spare;  // the sinks lie before the slots, in the same rows
  Far far;
  MergeSpace merging;
  int32_t flags = OK;

  INLINE int64_t token(int64_t position) const { return order ? order[position - seen] : position - seen; }

  const float* query_at(int64_t group, int64_t position, float factor, float* to) const {
    const int64_t* s = c.query_stride;
    widen_row(c.dtype, c.query, b * s[0] + (kv * groups + group) * s[1] + token(position) * s[2], c.dim, factor, to);
    return to;
  }

  void set_sink(int64_t position) const {
    const Slots both[2] = {slots, spare};
    for (const Slots& s : both) {
      copy_row(s.key + (position - c.sinks) * wide(c.dim), h.key_at(position), wide(c.dim));
      copy_row(s.value + (position - c.sinks) * wide(c.value_dim), h.value_at(position), wide(c.value_dim));
    }
  }

  void read_memory() {
    const int64_t D = c.dim, M = c.value_dim, E = D + M, ld = wide(D), lv = wide(M);
    const auto unpack = [&](const float* entry, float* key, float* value) {
      copy_row(key, entry, D), memset(key + D, 0, size_t(ld - D) * 4);
      copy_row(value, entry + D, M), memset(value + M, 0, size_t(lv - M) * 4);
    };
    const Slots both[2] = {slots, spare};
    for (int64_t i = 0; i < c.sinks; ++i) {
      const float* entry = c.sink + (head * c.sinks + i) * E;
      for (const Slots& s : both) unpack(entry, s.key + (i - c.sinks) * ld, s.value + (i - c.sinks) * lv);
    }
    const int64_t first = c.first_slot[kv], last = kv + 1 < c.kv_heads ? c.first_slot[kv + 1] : c.slots;
    for (int64_t i = b * c.slots + first; i < b * c.slots + last; ++i) {
      if (c.bias[i] == -__builtin_inff()) continue;
      unpack(c.slot + i * E, slots.key + slots.n * ld, slots.value + slots.n * lv);
      slots.bias[slots.n++] = c.bias[i];
    }
    const float* near = c.near + b * c.near_stride[0] + kv * c.near_stride[1];
    for (int64_t p = h.base; p < seen; ++p) {
      const int64_t i = p - (seen - c.held);
      if (p < 0 || i < 0) {
        memset(h.key_at(p), 0, size_t(ld) * 4), memset(h.value_at(p), 0, size_t(lv) * 4);
      } else {
        unpack(near + i * E, h.key_at(p), h.value_at(p));
      }
    }
    if (seen > h.base && c.out) h.turn(h.base, seen - h.base);
    const float* moments = c.moments + head * (D + 1) * (D + 1);
    for (int64_t i = 0; i <= D; ++i) copy_row(statistics.moments + i * statistics.ld, moments + i * (D + 1), D + 1);
    const float* queries = c.queries + head * groups * samples * (D + 1);
    // Samples of this block that were taken before.
    const int64_t early = seen == end ? samples : (seen % c.block + c.stride - 1) / c.stride;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t i = 0; i < early; ++i) {
        copy_row(statistics.samples + (g * samples + i) * statistics.ld, queries + (g * samples + i) * (D + 1), D + 1);
      }
    }
  }

  // Takes tokens in: the positions [first, last) of one block.
  void read_tokens(int64_t first, int64_t last) {
    const int64_t *sk = c.key_stride, *sv = c.value_stride;
    for (int64_t p = first; p < last; ++p) {
      const int64_t t = token(p);
      widen_row(c.dtype, c.key, b * sk[0] + kv * sk[1] + t * sk[2], c.dim, c.root, h.key_at(p));
      widen_row(c.dtype, c.value, b * sv[0] + kv * sv[1] + t * sv[2], c.value_dim, 1, h.value_at(p));
      if (p < c.sinks) set_sink(p);
      if (!c.query || p % c.stride) continue;
      for (int64_t g = 0; g < groups; ++g) {
        float* row = statistics.samples + (g * samples + p % c.block / c.stride) * statistics.ld;
        query_at(g, p, c.root, row);
        row[c.dim] = 1;
      }
    }
    if (c.out) h.turn(first, last - first);
  }

  // The keys [first, last) leave the window, as slots of their own while there is room.
  bool take_in(int64_t first, int64_t last) {
    if (size == 0 || first >= last) return false;
    copy_row(slots.key + slots.n * wide(c.dim), h.key_at(first), (last - first) * wide(c.dim));
    copy_row(slots.value + slots.n * wide(c.value_dim), h.value_at(first), (last - first) * wide(c.value_dim));
    for (int64_t p = first; p < last; ++p) slots.bias[slots.n++] = 0;
    if (slots.n <= size) return true;
    statistics.measure();
    const Metric metric{c.dim, c.value_dim, c.alpha, statistics.anchor, statistics.matrix};
    merge_slots(metric, slots, size, size + c.block, merging, spare);
    const Slots other = slots;
    slots = spare, spare = other;
    return true;
  }

  // Sinks count as such for blocks that begin behind them.
  void show_far(int64_t start) {
    const int64_t n = c.sinks + slots.n;
    transpose(slots.key - c.sinks * wide(c.dim), wide(c.dim), n, c.dim, far.turned, far.ld);
    far.n = slots.n;
    far.value = slots.value - c.sinks * wide(c.value_dim);
    for (int64_t i = 0; i < c.sinks; ++i) far.bias[i] = i < start ? 0 : NEVER;
    for (int64_t i = 0; i < slots.n; ++i) far.bias[c.sinks + i] = slots.bias[i] * LOG2E_F;
    for (int64_t i = n; i < round_up(n, VL); ++i) far.bias[i] = NEVER;
  }

  void attend(int64_t low, int64_t first, int64_t last) {
    const int64_t M = c.value_dim, n = last - first;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t i = 0; i < n; ++i) query_at(g, first + i, c.root * LOG2E_F, space.query + i * wide(c.dim));
      flags |= look(h, far, low, first, n, space);
      float* out = c.out + (b * c.heads + kv * groups + g) * c.tokens * M;
      for (int64_t i = 0; i < n; ++i) copy_row(out + token(first + i) * M, space.rows + i * wide(M), M);
    }
  }

  void run() {
    read_memory();
    bool changed = true;
    for (int64_t start = seen - seen % c.block; start < end; start += c.block) {
      const int64_t first = imax(start, seen), last = imin(start + c.block, end);
      if (start + c.block > h.base + h.rows) h.forget(start - c.window - c.block, c.window + c.block);
      if (start > seen) memset(statistics.samples, 0, size_t(statistics.rows * statistics.ld) * 4);
      read_tokens(first, last);
      const int64_t fresh = imax(imax(start - c.window - c.block, merged), c.sinks);
      changed = take_in(fresh, start - c.window) || changed || start < c.sinks + c.block;
      if (c.out) {
        if (changed) show_far(start);
        changed = false;
        attend(imax(imax(start - c.window, merged), imin(start, c.sinks)), first, last);
      }
      if (last == start + c.block) statistics.finish_block();
    }
    write_memory();
  }

  void write_memory() const {
    const int64_t D = c.dim, M = c.value_dim, E = D + M, ld = wide(D), lv = wide(M);
    const auto pack = [&](float* entry, const float* key, const float* value) {
      copy_row(entry, key, D), copy_row(entry + D, value, M);
    };
    for (int64_t i = 0; i < c.sinks; ++i) {
      pack(c.sink_new + (head * c.sinks + i) * E, slots.key + (i - c.sinks) * ld, slots.value + (i - c.sinks) * lv);
    }
    float* near = c.near_new + b * c.near_new_stride[0] + kv * c.near_new_stride[1];
    for (int64_t i = 0; i < c.held_new; ++i) {
      const int64_t p = end - c.held_new + i;
      if (p < h.base) {
        memset(near + i * E, 0, size_t(E) * 4);
      } else {
        pack(near + i * E, h.key_at(p), h.value_at(p));
      }
    }
    const int64_t first = c.first_slot_new[kv], last = kv + 1 < c.kv_heads ? c.first_slot_new[kv + 1] : c.slots_new;
    for (int64_t i = 0; i < last - first; ++i) {
      const int64_t at = b * c.slots_new + first + i;
      c.bias_new[at] = i < slots.n ? slots.bias[i] : -__builtin_inff();
      if (i < slots.n) {
        pack(c.slot_new + at * E, slots.key + i * ld, slots.value + i * lv);
      } else {
        memset(c.slot_new + at * E, 0, size_t(E) * 4);
      }
    }
    float* moments = c.moments_new + head * (D + 1) * (D + 1);
    for (int64_t i = 0; i <= D; ++i) copy_row(moments + i * (D + 1), statistics.moments + i * statistics.ld, D + 1);
    float* queries = c.queries_new + head * groups * samples * (D + 1);
    for (int64_t i = 0; i < statistics.rows; ++i) {
      copy_row(queries + i * (D + 1), statistics.samples + i * statistics.ld, D + 1);
    }
  }
};

int32_t walk(const NearFarCall& c, int64_t head) {
  const int64_t D = c.dim, M = c.value_dim, b = head / c.kv_heads, kv = head % c.kv_heads;
  const int64_t groups = c.heads / c.kv_heads;
  const int64_t size = c.budgets[kv], all = c.sinks + size + c.block, samples = (c.block + c.stride - 1) / c.stride;
  const int64_t seen = c.seen[b], end = seen + c.counts[b], start = seen - seen % c.block;
  const int64_t blocks = imin(SPAN, imax(1, (end - start + c.block - 1) / c.block));
  const int64_t rows = c.window + (1 + blocks) * c.block, near = c.window + c.block;
  const int64_t columns = lead(round_up(all, VL));
  const int64_t history = History::floats(D, M, rows), statistics = Statistics::floats(D, groups * samples);
  const int64_t looking = LookSpace::floats(c.block, D, M, round_up(all, VL), near);
  const int64_t slot_floats = all * (wide(D) + wide(M) + 1) + 64;
  float* at = scratch(history + statistics + looking + 2 * slot_floats + (round_up(D, VL) + 1) * columns +
                      MergeSpace::floats(size + c.block, D) + 2 * c.tokens + 512);
  int64_t* order = nullptr;
  if (c.mask) {
    order = reinterpret_cast<int64_t*>(take(at, 2 * c.tokens));
    for (int64_t t = 0, n = 0; t < c.tokens; ++t) {
      if (c.mask[b * c.tokens + t]) order[n++] = t;
    }
  }
  float* places[3] = {take(at, history), take(at, statistics), take(at, looking)};
  const auto make_slots = [&] {
    float *key = take(at, all * wide(D)), *value = take(at, all * wide(M)), *bias = take(at, all);
    return Slots{key + c.sinks * wide(D), value + c.sinks * wide(M), bias, 0};
  };
  const Slots slots = make_slots(), spare = make_slots();
  float *turned = take(at, round_up(D, VL) * columns), *bias = take(at, columns);
  Walk w{c,
         head,
         b,
         kv,
         groups,
         size,
         seen,
         end,
         c.merged[b],
         samples,
         order,
         History(D, M, rows, start - c.window - c.block, places[0]),
         Statistics(D, groups * samples, places[1]),
         LookSpace(c.block, D, M, round_up(all, VL), near, places[2]),
         slots,
         spare,
         Far{c.sinks, 0, turned, bias, nullptr, columns},
         MergeSpace(size + c.block, D, at)};
  w.run();
  return w.flags;
}

}  // namespace
