/// Forward calls: how the work is divided among threads, and what happens before and between the kernels.
#pragma once
#include <atomic>
#include <cmath>
#include <vector>

#include "linear/workspace.h"

namespace {

/// Guarded denominators before the call.
int64_t guarded_before(const LinearCall& c, int64_t head) { return c.guarded ? c.guarded[head] : 0; }

/// The number of visible keys among [begin, end).
int64_t count_visible(const LinearCall& c, int64_t head, int64_t begin, int64_t end) {
  if (!c.mask) return end - begin;
  const uint8_t* mask = c.mask + head / c.kv_heads * c.keys;
  int64_t count = 0;
  for (int64_t t = begin; t < end; ++t) count += mask[t];
  return count;
}

/// log2 of the decay over the tokens [begin, end).
double log2_decay(const LinearCall& c, int64_t head, int64_t begin, int64_t end) {
  double total = 0;
  if (c.log_decay) {
    for (int64_t t = begin; t < end; ++t) total += c.log_decay[head * c.keys + t];
  }
  return total * 1.4426950408889634;
}

/// Whether the incoming state has a scale that a call without log-weights must keep: multiplied with it, the state could
/// vanish, though masks may leave rows that see nothing else.
bool keeps_scale(const LinearCall& c) {
  if (c.scaled || !c.mask || !c.log_scale) return false;
  for (int64_t head = 0; head < c.batch * c.kv_heads; ++head) {
    if (c.log_scale[head] != 0 && std::isfinite(c.log_scale[head])) return true;
  }
  return false;
}

/// Adds keys and values to the state; where threads share a head, the states of its splits are merged.
int32_t update_state(const LinearCall& c) {
  if (keeps_scale(c)) return update_state(with_scale(c));
  const LinearKernels& kernels = linear_kernels();
  const int64_t heads = c.batch * c.kv_heads, parts = split_count(heads, c.keys, c.threads, UNIT);
  StateBuffers states(c, heads * parts);
  std::atomic<int32_t> flags{OK};
  parallel_for_in_order(heads * parts, SLICES, c.threads, [&](int64_t i, int64_t slice) {
    const int64_t head = i / parts, part = i % parts, first = split_begin(c.keys, part, parts, UNIT);
    const int64_t tokens = split_begin(c.keys, part + 1, parts, UNIT) - first;
    if (slice == 0 && part == 0) kernels.load_state(c, head, states[i]);
    if (slice == 0 && part > 0) kernels.clear_state(c, states[i]);
    const int64_t begin = slice_begin(tokens, slice, UNIT), end = slice_begin(tokens, slice + 1, UNIT);
    if (begin < end) flags |= kernels.update_state(c, head, first + begin, first + end, states[i], {});
    if (slice == SLICES - 1 && parts == 1) flags |= kernels.store_state(c, head, states[i]);
  });
  for (int64_t head = 0; head < heads; ++head) {
    float* merged = states[head * parts];
    for (int64_t part = 1; part < parts; ++part) kernels.merge_states(c, merged, states[head * parts + part], 0);
    if (parts > 1) flags |= kernels.store_state(c, head, merged);
    c.tokens_new[head] = tokens_before(c, head) + count_visible(c, head, 0, c.keys);
  }
  return flags;
}

/// Outputs of queries that see the whole incoming state.
int32_t read_state(const LinearCall& c) {
  const LinearKernels& kernels = linear_kernels();
  use_large_pages(c.out, c.batch * c.heads * c.queries * c.value_dim);
  const int64_t heads = c.batch * c.kv_heads, rows = c.queries * (c.heads / c.kv_heads);
  const int64_t parts = split_count(heads, rows, c.threads, UNIT), lines = heads * parts;
  std::vector<int64_t> guarded(size_t(lines * SLICES));
  std::atomic<int32_t> flags{OK};
  parallel_for(lines * SLICES, c.threads, [&](int64_t i) {
    const int64_t part = i % lines % parts, first = split_begin(rows, part, parts, UNIT);
    const int64_t count = split_begin(rows, part + 1, parts, UNIT) - first;
    const int64_t begin = slice_begin(count, i / lines, UNIT), end = slice_begin(count, i / lines + 1, UNIT);
    int64_t* small = &guarded[size_t(i)];
    if (begin < end) flags |= kernels.read_state(c, i % lines / parts, first + begin, first + end, small, {});
  });
  for (int64_t head = 0; head < heads && c.guarded_new; ++head) c.guarded_new[head] = guarded_before(c, head);
  for (int64_t i = 0; i < lines * SLICES && c.guarded_new; ++i) {
    const int64_t head = i % lines / parts;
    if (c.tokens[head]) c.guarded_new[head] += guarded[size_t(i)];
  }
  return flags;
}

/// A state in one buffer: S, Z, log_scale, tokens, guarded, each at a multiple of 16 floats.
struct PackedState {
  float *S, *Z, *log_scale;
  int64_t *tokens, *guarded;
  PackedState(const LinearCall& c, float* at) {
    const int64_t heads = c.batch * c.kv_heads;
    S = carve(at, heads * c.features * c.value_dim), Z = carve(at, heads * c.features), log_scale = carve(at, heads);
    tokens = reinterpret_cast<int64_t*>(carve(at, 2 * heads));
    guarded = reinterpret_cast<int64_t*>(carve(at, 2 * heads));
  }
};

/// One token for every head.
int32_t decode(const LinearCall& c) {
  const LinearKernels& kernels = linear_kernels();
  const int64_t work = c.features * c.value_dim * c.batch * c.kv_heads;
  const int64_t threads = work > 200000 ? c.threads : 1;  // waking threads takes longer than a small step
  const int64_t most = threads > 1 ? 4 : 16, parts = (c.kv_heads + most - 1) / most;
  std::atomic<int32_t> flags{OK};
  parallel_for(c.batch * parts, threads, [&](int64_t i) {
    const int64_t first = i % parts * most, left = c.kv_heads - first;
    flags |= kernels.decode(c, i / parts * c.kv_heads + first, left < most ? left : most);
  });
  return flags;
}

/// Splits of a causal call: the state before each, and the visible keys before it.
struct CausalSplits {
  int64_t parts, unit;
  StateBuffers states;
  std::vector<int64_t> seen;

  CausalSplits(const LinearCall& c, int64_t split_parts, int64_t split_unit)
      : parts(split_parts),
        unit(split_unit),
        states(c, c.batch * c.kv_heads * split_parts),
        seen(size_t(c.batch * c.kv_heads * split_parts)) {
    if (parts > 1) sum_splits(c);
    for (int64_t head = 0; head < c.batch * c.kv_heads; ++head) accumulate(c, head);
  }

  /// The first token of a split.
  int64_t begin(const LinearCall& c, int64_t part) const { return split_begin(c.keys, part, parts, unit); }

  /// states[i] = the state of the keys of the split before i alone.
  void sum_splits(const LinearCall& c) {
    const LinearKernels& kernels = linear_kernels();
    parallel_for(c.batch * c.kv_heads * parts, c.threads, [&](int64_t i) {
      const int64_t part = i % parts;
      kernels.clear_state(c, states[i]);
      if (part == 0) return;
      kernels.causal_forward(c, i / parts, begin(c, part - 1), begin(c, part), states[i], nullptr, 0, {});
    });
  }

  /// Turns the states of single splits into the states before each split of a head.
  void accumulate(const LinearCall& c, int64_t head) {
    const LinearKernels& kernels = linear_kernels();
    kernels.load_state(c, head, states[head * parts]);
    seen[size_t(head * parts)] = tokens_before(c, head);
    if (parts == 1) return;
    StateBuffers running(c, 1);
    std::memcpy(running[0], states[head * parts], size_t(states.size) * 4);
    for (int64_t part = 1; part < parts; ++part) {
      const int64_t i = head * parts + part, from = begin(c, part - 1), to = begin(c, part);
      kernels.merge_states(c, running[0], states[i], log2_decay(c, head, from, to));
      std::memcpy(states[i], running[0], size_t(states.size) * 4);
      seen[size_t(i)] = seen[size_t(i - 1)] + count_visible(c, head, from, to);
    }
  }
};

/// Causal attention over new tokens, from the incoming to the outgoing state.
int32_t causal_forward(const LinearCall& c) {
  if (c.keys == 1 && !c.checkpoints && c.S) return decode(c);
  if (keeps_scale(c)) return causal_forward(with_scale(c));
  const LinearKernels& kernels = linear_kernels();
  const int64_t heads = c.batch * c.kv_heads, unit = c.segment ? c.segment : 240;
  const int64_t checkpoint = c.features * (c.value_dim + 1) + 2;
  use_large_pages(c.out, c.batch * c.heads * c.queries * c.value_dim);
  if (c.checkpoints) use_large_pages(c.checkpoints, heads * ((c.keys + unit - 1) / unit) * checkpoint);
  const int64_t parts = split_count(heads, c.keys, c.threads, unit);
  CausalSplits splits(c, parts, unit);
  std::vector<int64_t> guarded(size_t(heads * parts));
  std::atomic<int32_t> flags{OK};
  parallel_for_in_order(heads * parts, SLICES, c.threads, [&](int64_t i, int64_t slice) {
    const int64_t head = i / parts, part = i % parts, first = splits.begin(c, part);
    const int64_t tokens = splits.begin(c, part + 1) - first;
    const int64_t begin = first + slice_begin(tokens, slice, unit), end = first + slice_begin(tokens, slice + 1, unit);
    const LineSlice next = likely_next(i, slice, heads * parts, c.threads);
    PrefetchHint hint{next.line, next.slice < SLICES ? slice_begin(tokens, next.slice, unit) : tokens};
    hint.keys = hint.queries = parts == 1 && hint.token < tokens;
    int64_t *small = &guarded[size_t(i)], &seen = splits.seen[size_t(i)];
    if (begin < end) flags |= kernels.causal_forward(c, head, begin, end, splits.states[i], small, seen, hint);
    seen += count_visible(c, head, begin, end);
    if (part == parts - 1 && slice == SLICES - 1) flags |= kernels.store_state(c, head, splits.states[i]);
  });
  for (int64_t head = 0; head < heads && c.tokens_new; ++head) {
    c.tokens_new[head] = tokens_before(c, head) + count_visible(c, head, 0, c.keys);
    c.guarded_new[head] = guarded_before(c, head);
    for (int64_t part = 0; part < parts; ++part) c.guarded_new[head] += guarded[size_t(head * parts + part)];
  }
  return flags;
}

/// Heads for every thread: each is processed from keys to outputs by itself, and threads meet only at the end. `update` and
/// `read` are the two halves of the call.
int32_t forward_by_heads(const LinearCall& update, const LinearCall& read) {
  const int64_t heads = read.batch * read.kv_heads, rows = read.queries * (read.heads / read.kv_heads);
  use_large_pages(read.out, read.batch * read.heads * read.queries * read.value_dim);
  const LinearKernels& kernels = linear_kernels();
  StateBuffers states(update, heads);
  std::atomic<int32_t> flags{OK};
  parallel_for_in_order(heads, 1 + SLICES, read.threads, [&](int64_t head, int64_t slice) {
    const LineSlice next = likely_next(head, slice, heads, read.threads);
    PrefetchHint hint{next.line};
    if (next.slice > 0) hint.token = next.slice <= SLICES ? slice_begin(rows, next.slice - 1, UNIT) : rows;
    hint.keys = next.slice == 0, hint.queries = next.slice > 0 && hint.token < rows;
    if (slice == 0) {
      kernels.load_state(update, head, states[head]);
      flags |= kernels.update_state(update, head, 0, update.keys, states[head], hint);
      flags |= kernels.store_state(update, head, states[head]);
      return;
    }
    int64_t guarded = 0;
    const int64_t begin = slice_begin(rows, slice - 1, UNIT), end = slice_begin(rows, slice, UNIT);
    if (begin < end) flags |= kernels.read_state(read, head, begin, end, &guarded, hint);
  });
  return flags;
}

/// Stateless forward; the intermediate state is discarded.
int32_t forward(const LinearCall& c, bool is_causal) {
  if (is_causal) return causal_forward(c);
  const int64_t heads = c.batch * c.kv_heads, r = c.features;
  std::vector<int64_t> tokens(static_cast<size_t>(heads));
  std::unique_ptr<float[]> state(new float[size_t(heads * (r * c.value_dim + r + 1))]);
  LinearCall update = c, read = c;
  update.S_new = state.get(), update.Z_new = update.S_new + heads * r * c.value_dim;
  update.log_scale_new = update.Z_new + heads * r, update.tokens_new = tokens.data();
  read.S = update.S_new, read.Z = update.Z_new, read.log_scale = update.log_scale_new, read.tokens = tokens.data();
  read.scaled = 1;  // the state's scale cancels: it is not applied
  if (heads >= c.threads) return forward_by_heads(update, read);
  const int32_t flags = update_state(update);
  return flags | read_state(read);
}

}  // namespace
