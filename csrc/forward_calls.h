// Forward calls: their pieces, and what must happen before and between them.
#pragma once
#include <atomic>
#include <vector>

#include "split.h"

namespace {

int64_t tokens_before(const Call& c, int64_t head) { return c.tokens ? c.tokens[head] : 0; }
int64_t guarded_before(const Call& c, int64_t head) { return c.guarded ? c.guarded[head] : 0; }

int64_t visible(const Call& c, int64_t head, int64_t begin, int64_t end) {
  if (!c.mask) return end - begin;
  const uint8_t* mask = c.mask + head / c.kv_heads * c.keys;
  int64_t count = 0;
  for (int64_t t = begin; t < end; ++t) count += mask[t];
  return count;
}

double decay(const Call& c, int64_t head, int64_t begin, int64_t end) {
  double total = 0;
  if (c.log_decay) {
    for (int64_t t = begin; t < end; ++t) total += c.log_decay[head * c.keys + t];
  }
  return total * 1.4426950408889634;
}

int32_t absorb(const Call& c) {
  const Pieces& p = pieces();
  const int64_t heads = c.batch * c.kv_heads, parts = stretches(heads, c.keys, c.threads, UNIT);
  Space space(c, heads * parts);
  std::atomic<int32_t> flags{OK};
  run_in_order(heads * parts, STEPS, c.threads, [&](int64_t i, int64_t step) {
    const int64_t head = i / parts, part = i % parts;
    const int64_t first = bound(c.keys, part, parts, UNIT), tokens = bound(c.keys, part + 1, parts, UNIT) - first;
    if (step == 0 && part == 0) p.load_sums(c, head, space[i]);
    if (step == 0 && part > 0) p.clear_sums(c, space[i]);
    const int64_t begin = step_bound(tokens, step, UNIT), end = step_bound(tokens, step + 1, UNIT);
    if (begin < end) flags |= p.absorb(c, head, first + begin, first + end, space[i], {});
    if (step == STEPS - 1 && parts == 1) flags |= p.store_sums(c, head, space[i]);
  });
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t part = 1; part < parts; ++part) p.merge_sums(c, space[head * parts], space[head * parts + part], 0);
    if (parts > 1) flags |= p.store_sums(c, head, space[head * parts]);
    c.tokens_new[head] = tokens_before(c, head) + visible(c, head, 0, c.keys);
  }
  return flags;
}

int32_t read(const Call& c) {
  const Pieces& p = pieces();
  use_large_pages(c.out, c.batch * c.heads * c.queries * c.value_dim);
  const int64_t heads = c.batch * c.kv_heads, rows = c.queries * (c.heads / c.kv_heads);
  const int64_t parts = stretches(heads, rows, c.threads, UNIT), lines = heads * parts;
  std::vector<int64_t> small(size_t(lines * STEPS));
  std::atomic<int32_t> flags{OK};
  run(lines * STEPS, c.threads, [&](int64_t i) {
    const int64_t part = i % lines % parts, first = bound(rows, part, parts, UNIT);
    const int64_t count = bound(rows, part + 1, parts, UNIT) - first;
    const int64_t begin = step_bound(count, i / lines, UNIT), end = step_bound(count, i / lines + 1, UNIT);
    if (begin < end) flags |= p.read(c, i % lines / parts, first + begin, first + end, &small[size_t(i)], {});
  });
  for (int64_t head = 0; head < heads && c.guarded_new; ++head) c.guarded_new[head] = guarded_before(c, head);
  for (int64_t i = 0; i < lines * STEPS && c.guarded_new; ++i) {
    const int64_t head = i % lines / parts;
    if (c.tokens[head]) c.guarded_new[head] += small[size_t(i)];
  }
  return flags;
}

// A state in one buffer: each part starts at a multiple of 16 floats, in the order of the fields of Sums.
struct Packed {
  float *S, *Z, *scale;
  int64_t *tokens, *guarded;
  Packed(const Call& c, float* at) {
    const int64_t heads = c.batch * c.kv_heads;
    const auto take = [&](int64_t floats) {
      float* mine = at;
      at += (floats + 15) / 16 * 16;
      return mine;
    };
    S = take(heads * c.features * c.value_dim), Z = take(heads * c.features), scale = take(heads);
    tokens = reinterpret_cast<int64_t*>(take(2 * heads)), guarded = reinterpret_cast<int64_t*>(take(2 * heads));
  }
};

int32_t step(const Call& c) {
  const Pieces& p = pieces();
  const int64_t work = c.features * c.value_dim * c.batch * c.kv_heads;
  const int64_t threads = work > 200000 ? c.threads : 1;  // waking threads takes longer than a small step
  const int64_t most = threads > 1 ? 4 : 16, parts = (c.kv_heads + most - 1) / most;
  std::atomic<int32_t> flags{OK};
  run(c.batch * parts, threads, [&](int64_t i) {
    const int64_t first = i % parts * most, left = c.kv_heads - first;
    flags |= p.step(c, i / parts * c.kv_heads + first, left < most ? left : most);
  });
  return flags;
}

int32_t causal(const Call& c) {
  const Pieces& p = pieces();
  const int64_t heads = c.batch * c.kv_heads, unit = c.segment ? c.segment : 240;
  std::atomic<int32_t> flags{OK};
  if (c.keys == 1 && !c.marks && c.S) return step(c);
  use_large_pages(c.out, c.batch * c.heads * c.queries * c.value_dim);
  if (c.marks) use_large_pages(c.marks, heads * ((c.keys + unit - 1) / unit) * (c.features * (c.value_dim + 1) + 1));
  const int64_t parts = stretches(heads, c.keys, c.threads, unit);
  Space space(c, heads * parts);
  std::vector<int64_t> small(size_t(heads * parts)), seen(size_t(heads * parts));
  if (parts > 1) {  // first the sums of each stretch but the last, then what comes before each
    run(heads * parts, c.threads, [&](int64_t i) {
      const int64_t part = i % parts;
      p.clear_sums(c, space[i]);
      if (part == 0) return;
      p.causal(c, i / parts, bound(c.keys, part - 1, parts, unit), bound(c.keys, part, parts, unit), space[i], nullptr, 0, {});
    });
  }
  for (int64_t head = 0; head < heads; ++head) {
    p.load_sums(c, head, space[head * parts]);
    seen[size_t(head * parts)] = tokens_before(c, head);
    if (parts == 1) continue;
    Space running(c, 1);
    std::memcpy(running[0], space[head * parts], size_t(space.size) * 4);
    for (int64_t part = 1; part < parts; ++part) {
      const int64_t begin = bound(c.keys, part - 1, parts, unit), end = bound(c.keys, part, parts, unit);
      p.merge_sums(c, running[0], space[head * parts + part], decay(c, head, begin, end));
      std::memcpy(space[head * parts + part], running[0], size_t(space.size) * 4);
      seen[size_t(head * parts + part)] = seen[size_t(head * parts + part - 1)] + visible(c, head, begin, end);
    }
  }
  run_in_order(heads * parts, STEPS, c.threads, [&](int64_t i, int64_t step) {
    const int64_t head = i / parts, part = i % parts, first = bound(c.keys, part, parts, unit);
    const int64_t tokens = bound(c.keys, part + 1, parts, unit) - first;
    const int64_t begin = first + step_bound(tokens, step, unit), end = first + step_bound(tokens, step + 1, unit);
    const Next next = after(i, step, heads * parts, c.threads);
    Soon soon{next.line, next.step < STEPS ? step_bound(tokens, next.step, unit) : tokens};
    soon.keys = soon.queries = parts == 1 && soon.token < tokens;
    if (begin < end) flags |= p.causal(c, head, begin, end, space[i], &small[size_t(i)], seen[size_t(i)], soon);
    seen[size_t(i)] += visible(c, head, begin, end);
    if (part == parts - 1 && step == STEPS - 1) flags |= p.store_sums(c, head, space[i]);
  });
  for (int64_t head = 0; head < heads && c.tokens_new; ++head) {
    c.tokens_new[head] = tokens_before(c, head) + visible(c, head, 0, c.keys);
    c.guarded_new[head] = guarded_before(c, head);
    for (int64_t part = 0; part < parts; ++part) c.guarded_new[head] += small[size_t(head * parts + part)];
  }
  return flags;
}

// From nothing to the output: the sums in between are nobody's.
int32_t whole(const Call& c, bool is_causal) {
  if (is_causal) return causal(c);
  const int64_t heads = c.batch * c.kv_heads, r = c.features, rows = c.queries * (c.heads / c.kv_heads);
  std::vector<int64_t> tokens(static_cast<size_t>(heads));
  std::unique_ptr<float[]> sums(new float[size_t(heads * (r * c.value_dim + r + 1))]);
  Call first = c, second = c;
  first.S_new = sums.get(), first.Z_new = first.S_new + heads * r * c.value_dim, first.scale_new = first.Z_new + heads * r;
  first.tokens_new = tokens.data();
  second.S = first.S_new, second.Z = first.Z_new, second.scale = first.scale_new, second.tokens = tokens.data();
  second.scaled = 1;  // the sums' scale cancels: it is not applied
  if (heads < c.threads) {
    const int32_t flags = absorb(first);
    return flags | read(second);
  }
  // Heads for every thread: each goes from keys to queries by itself, and threads meet only at the end.
  use_large_pages(c.out, c.batch * c.heads * c.queries * c.value_dim);
  const Pieces& p = pieces();
  Space space(c, heads);
  std::atomic<int32_t> flags{OK};
  run_in_order(heads, 1 + STEPS, c.threads, [&](int64_t head, int64_t step) {
    const Next next = after(head, step, heads, c.threads);
    Soon soon{next.line};
    if (next.step > 0) soon.token = next.step <= STEPS ? step_bound(rows, next.step - 1, UNIT) : rows;
    soon.keys = next.step == 0, soon.queries = next.step > 0 && soon.token < rows;
    if (step == 0) {
      p.load_sums(first, head, space[head]);
      flags |= p.absorb(first, head, 0, c.keys, space[head], soon);
      flags |= p.store_sums(first, head, space[head]);
      return;
    }
    int64_t small = 0;
    const int64_t begin = step_bound(rows, step - 1, UNIT), end = step_bound(rows, step, UNIT);
    if (begin < end) flags |= p.read(second, head, begin, end, &small, soon);
  });
  return flags;
}

}  // namespace
