/// Backward calls, divided among threads as the forward ones are.
#pragma once
#include <cmath>

#include "linear/workspace.h"

namespace {

/// Gradients of the keys and values of update_state.
int32_t update_state_backward(const LinearCall& c) {
  const LinearKernels& kernels = linear_kernels();
  const int64_t heads = c.batch * c.kv_heads, unit = 240, parts = split_count(heads, c.keys, c.threads, unit);
  use_large_pages(c.grad_key, heads * c.keys * c.dim);
  use_large_pages(c.grad_value, heads * c.keys * c.value_dim);
  parallel_for(heads * parts, c.threads, [&](int64_t i) {
    const int64_t part = i % parts;
    const int64_t begin = split_begin(c.keys, part, parts, unit), end = split_begin(c.keys, part + 1, parts, unit);
    kernels.update_state_backward(c, i / parts, begin, end);
  });
  return OK;
}

/// into += factor more, for gradients of states (`floats` each), which start with a factor of 16 floats.
void add_grad_states(float* into, const float* more, int64_t floats, float factor) {
  for (int64_t i = 16; i < floats; ++i) into[i] += factor * more[i];
}

/// Gradients of the queries and of the state of read_state.
int32_t read_state_backward(const LinearCall& c) {
  const LinearKernels& kernels = linear_kernels();
  const int64_t heads = c.batch * c.kv_heads, rows = c.queries * (c.heads / c.kv_heads), unit = 240;
  const int64_t parts = split_count(heads, rows, c.threads, unit);
  StateBuffers grads(c, heads * parts);
  use_large_pages(c.grad_query, heads * rows * c.dim);
  parallel_for(heads * parts, c.threads, [&](int64_t i) {
    const int64_t head = i / parts, part = i % parts;
    const int64_t begin = split_begin(rows, part, parts, unit), end = split_begin(rows, part + 1, parts, unit);
    grads.clear(i);
    kernels.read_state_backward(c, head, begin, end, grads[i]);
  });
  for (int64_t head = 0; head < heads; ++head) {
    float* total = grads[head * parts];
    for (int64_t part = 1; part < parts; ++part) add_grad_states(total, grads[head * parts + part], grads.size, 1);
    kernels.store_grad_state(c, head, total);
  }
  return OK;
}

/// The counterpart of keeps_scale: whether the forward pass, whose first checkpoints have the incoming scales, kept one.
bool forward_kept_scale(const LinearCall& c) {
  if (c.scaled || !c.mask) return false;
  const int64_t floats = c.features * (c.value_dim + 1) + 2, count = (c.keys + c.segment - 1) / c.segment;
  for (int64_t head = 0; head < c.batch * c.kv_heads && count > 0; ++head) {
    double log2_scale;
    std::memcpy(&log2_scale, c.checkpoints + head * count * floats + floats - 2, sizeof log2_scale);
    if (log2_scale != 0 && std::isfinite(log2_scale)) return true;
  }
  return false;
}

/// Heads for every thread: each is processed from its last segment to its first.
void causal_backward_by_heads(const LinearCall& c) {
  const LinearKernels& kernels = linear_kernels();
  const int64_t heads = c.batch * c.kv_heads, segments = (c.keys + c.segment - 1) / c.segment;
  StateBuffers grads(c, heads);
  parallel_for_in_order(heads, SLICES, c.threads, [&](int64_t head, int64_t slice) {
    if (slice == 0) kernels.load_grad_state(c, head, grads[head]);
    const int64_t begin = (segments - slice_begin(segments, slice + 1, 1)) * c.segment;
    const int64_t end = (segments - slice_begin(segments, slice, 1)) * c.segment;
    const int32_t all = GRAD_QUERIES | GRAD_KEYS;
    if (begin < end) kernels.causal_backward(c, head, begin, end < c.keys ? end : c.keys, all, grads[head]);
    if (slice == SLICES - 1) kernels.store_grad_state(c, head, grads[head]);
  });
}

/// Threads share a head: first each split's own part of the gradient of the state, with the gradients of queries; then,
/// from the end, the gradient of the state behind each split; then the gradients of keys and values.
void causal_backward_by_splits(const LinearCall& c, int64_t parts) {
  const LinearKernels& kernels = linear_kernels();
  const int64_t heads = c.batch * c.kv_heads;
  StateBuffers grads(c, heads * parts);
  const auto backward = [&](int64_t i, int32_t targets) {
    const int64_t part = i % parts, begin = split_begin(c.keys, part, parts, c.segment);
    kernels.causal_backward(c, i / parts, begin, split_begin(c.keys, part + 1, parts, c.segment), targets, grads[i]);
  };
  parallel_for(heads * parts, c.threads, [&](int64_t i) {
    grads.clear(i);
    *reinterpret_cast<double*>(grads[i]) = 1;
    backward(i, GRAD_QUERIES);
  });
  for (int64_t head = 0; head < heads; ++head) {
    StateBuffers after(c, 1), before(c, 1);
    kernels.load_grad_state(c, head, after[0]);
    for (int64_t part = parts - 1; part >= 0; --part) {
      float* here = grads[head * parts + part];
      std::memcpy(before[0], here, size_t(grads.size) * 4);
      add_grad_states(before[0], after[0], grads.size, float(*reinterpret_cast<double*>(here)));
      std::memcpy(here, after[0], size_t(grads.size) * 4);
      std::memcpy(after[0], before[0], size_t(grads.size) * 4);
    }
    kernels.store_grad_state(c, head, after[0]);
  }
  parallel_for(heads * parts, c.threads, [&](int64_t i) { backward(i, GRAD_KEYS); });
}

/// Gradients of queries, keys, values and the incoming state of causal_forward.
int32_t causal_backward(const LinearCall& c) {
  if (forward_kept_scale(c)) return causal_backward(with_scale(c));
  const int64_t heads = c.batch * c.kv_heads, parts = split_count(heads, c.keys, c.threads, c.segment);
  use_large_pages(c.grad_query, c.batch * c.heads * c.queries * c.dim);
  use_large_pages(c.grad_key, heads * c.keys * c.dim);
  use_large_pages(c.grad_value, heads * c.keys * c.value_dim);
  if (parts == 1) {
    causal_backward_by_heads(c);
  } else {
    causal_backward_by_splits(c, parts);
  }
  return OK;
}

}  // namespace
