// Backward calls, split as the forward ones are.
#pragma once
#include "split.h"

namespace {

int32_t absorb_backward(const Call& c) {
  const Pieces& p = pieces();
  const int64_t heads = c.batch * c.kv_heads, unit = 240, parts = stretches(heads, c.keys, c.threads, unit);
  use_large_pages(c.grad_key, heads * c.keys * c.dim);
  use_large_pages(c.grad_value, heads * c.keys * c.value_dim);
  run(heads * parts, c.threads, [&](int64_t i) {
    const int64_t part = i % parts;
    p.absorb_backward(c, i / parts, bound(c.keys, part, parts, unit), bound(c.keys, part + 1, parts, unit));
  });
  return OK;
}

// into += more, for summed gradients, which have no levels of their own.
void add(float* into, const float* more, int64_t floats, float factor) {
  for (int64_t i = 16; i < floats; ++i) into[i] += factor * more[i];
}

int32_t read_backward(const Call& c) {
  const Pieces& p = pieces();
  const int64_t heads = c.batch * c.kv_heads, rows = c.queries * (c.heads / c.kv_heads), unit = 240;
  const int64_t parts = stretches(heads, rows, c.threads, unit);
  Space space(c, heads * parts);
  use_large_pages(c.grad_query, heads * rows * c.dim);
  run(heads * parts, c.threads, [&](int64_t i) {
    const int64_t head = i / parts, part = i % parts;
    space.clear(i);
    p.read_backward(c, head, bound(rows, part, parts, unit), bound(rows, part + 1, parts, unit), space[i]);
  });
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t part = 1; part < parts; ++part) add(space[head * parts], space[head * parts + part], space.size, 1);
    p.store_grad(c, head, space[head * parts]);
  }
  return OK;
}

int32_t causal_backward(const Call& c) {
  const Pieces& p = pieces();
  const int64_t heads = c.batch * c.kv_heads, parts = stretches(heads, c.keys, c.threads, c.segment);
  Space space(c, heads * parts);
  use_large_pages(c.grad_query, c.batch * c.heads * c.queries * c.dim);
  use_large_pages(c.grad_key, heads * c.keys * c.dim);
  use_large_pages(c.grad_value, heads * c.keys * c.value_dim);
  if (parts == 1) {
    run_in_order(heads, STEPS, c.threads, [&](int64_t head, int64_t step) {
      if (step == 0) p.load_grad(c, head, space[head]);
      const int64_t segments = (c.keys + c.segment - 1) / c.segment;  // from the last one back
      const int64_t begin = (segments - step_bound(segments, step + 1, 1)) * c.segment;
      const int64_t end = (segments - step_bound(segments, step, 1)) * c.segment;
      if (begin < end) p.causal_backward(c, head, begin, end < c.keys ? end : c.keys, 3, space[head]);
      if (step == STEPS - 1) p.store_grad(c, head, space[head]);
    });
    return OK;
  }
  // First each stretch's own part of the gradients of the sums, then, from the end, what comes after each.
  const auto stretch = [&](int64_t i, int32_t what) {
    const int64_t part = i % parts;
    const int64_t begin = bound(c.keys, part, parts, c.segment), end = bound(c.keys, part + 1, parts, c.segment);
    p.causal_backward(c, i / parts, begin, end, what, space[i]);
  };
  run(heads * parts, c.threads, [&](int64_t i) {
    space.clear(i);
    *reinterpret_cast<double*>(space[i]) = 1;
    stretch(i, 1);
  });
  for (int64_t head = 0; head < heads; ++head) {
    Space after(c, 1), before(c, 1);
    p.load_grad(c, head, after[0]);
    for (int64_t part = parts - 1; part >= 0; --part) {
      float* here = space[head * parts + part];
      std::memcpy(before[0], here, size_t(space.size) * 4);
      add(before[0], after[0], space.size, float(*reinterpret_cast<double*>(here)));
      std::memcpy(here, after[0], size_t(space.size) * 4);
      std::memcpy(after[0], before[0], size_t(space.size) * 4);
    }
    p.store_grad(c, head, after[0]);
  }
  run(heads * parts, c.threads, [&](int64_t i) { stretch(i, 2); });
  return OK;
}

}  // namespace
