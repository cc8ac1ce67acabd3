// The library's entry points: which instruction set, which threads, and how a call is split into pieces.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "dispatch.h"

namespace {

struct Scratch {
  float* at = nullptr;
  int64_t floats = 0;
  ~Scratch() { std::free(at); }
};

const Pieces* supported(int level) {
#if defined(__x86_64__) && !defined(LINATTN_ONLY_PORTABLE)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (level == 2 && avx512) return linattn_avx512();
  if (level == 1 && avx2) return linattn_avx2();
#endif
  return level == 0 ? linattn_portable() : nullptr;
}

std::atomic<const Pieces*> chosen{nullptr};

std::atomic<ParallelFor> parallel_for{nullptr};

// How many stretches each head's tokens are cut into, so that every thread has work; a stretch is a multiple of `unit`.
int64_t stretches(int64_t heads, int64_t tokens, int64_t threads, int64_t unit) {
  if (heads >= threads || heads == 0) return 1;
  const int64_t wanted = (threads + heads - 1) / heads, most = (tokens + unit - 1) / unit;
  return wanted < most ? wanted : (most > 0 ? most : 1);
}

int64_t bound(int64_t tokens, int64_t part, int64_t parts, int64_t unit) {
  const int64_t units = (tokens + unit - 1) / unit, at = units * part / parts * unit;
  return at < tokens ? at : tokens;
}

// Steps in which a line of tokens is gone through: long ones first, and short ones at the end, when threads have to meet.
// Few, because memory is asked for ahead only within a step.
constexpr int64_t STEPS = 3;

// Where a step begins: at 0, 3/4, 15/16 of the tokens, and the end.
int64_t step_bound(int64_t tokens, int64_t step, int64_t unit) {
  const int64_t at = (tokens - (tokens >> 2 * step) + unit - 1) / unit * unit;
  return step == STEPS || at > tokens ? tokens : at;
}

constexpr int64_t UNIT = 120;  // tokens, where order does not matter: stretches and steps are multiples of it

// Room for the sums of `count` heads or stretches.
struct Space {
  int64_t size;
  std::unique_ptr<float, decltype(&std::free)> floats;
  Space(const Call& c, int64_t count)
      : size((pieces().sums_size(c) + 15) / 16 * 16),
        floats(static_cast<float*>(std::aligned_alloc(64, size_t(size * count * 4 + 64))), &std::free) {
    if (!floats) throw std::bad_alloc();
  }
  void clear(int64_t i) { std::memset((*this)[i], 0, size_t(size) * 4); }
  float* operator[](int64_t i) { return floats.get() + i * size; }
};

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

template <class Body>
int32_t guarded_call(const Call& c, const Body& body) {
  if (c.batch * c.kv_heads == 0) return OK;
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

// The keys of one step, of `tokens` from `first` on.
int32_t absorb_step(const Call& c, int64_t head, int64_t first, int64_t tokens, int64_t step, float* sums) {
  const int64_t begin = step_bound(tokens, step, UNIT), end = step_bound(tokens, step + 1, UNIT);
  return begin < end ? pieces().absorb(c, head, first + begin, first + end, sums) : OK;
}

// The same for queries, counted head by head.
int32_t read_step(const Call& c, int64_t head, int64_t first, int64_t rows, int64_t step, int64_t* guarded) {
  const int64_t begin = step_bound(rows, step, UNIT), end = step_bound(rows, step + 1, UNIT);
  return begin < end ? pieces().read(c, head, first + begin, first + end, guarded) : OK;
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
    flags |= absorb_step(c, head, first, tokens, step, space[i]);
    if (step == STEPS - 1 && parts == 1) flags |= p.store_sums(c, head, space[i]);
  });
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t part = 1; part < parts; ++part) p.merge_sums(c, space[head * parts], space[head * parts + part], 0);
    if (parts > 1) flags |= p.store_sums(c, head, space[head * parts]);
    c.tokens_new[head] = tokens_before(c, head) + visible(c, head, 0, c.keys);
  }
  return flags;
}

// Memory that was never touched costs a fault for every page of it: of a long output, fewer and larger ones.
void use_large_pages(float* at, int64_t floats) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t LARGE = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(at) + LARGE - 1) / LARGE * LARGE;
  const uintptr_t end = reinterpret_cast<uintptr_t>(at + floats) / LARGE * LARGE;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

int32_t read(const Call& c) {
  use_large_pages(c.out, c.batch * c.heads * c.queries * c.value_dim);
  const int64_t heads = c.batch * c.kv_heads, rows = c.queries * (c.heads / c.kv_heads);
  const int64_t parts = stretches(heads, rows, c.threads, UNIT), lines = heads * parts;
  std::vector<int64_t> small(size_t(lines * STEPS));
  std::atomic<int32_t> flags{OK};
  run(lines * STEPS, c.threads, [&](int64_t i) {
    const int64_t part = i % lines % parts, first = bound(rows, part, parts, UNIT);
    const int64_t count = bound(rows, part + 1, parts, UNIT) - first;
    flags |= read_step(c, i % lines / parts, first, count, i / lines, &small[size_t(i)]);
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
      p.causal(c, i / parts, bound(c.keys, part - 1, parts, unit), bound(c.keys, part, parts, unit), space[i], nullptr, 0);
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
    if (begin < end) flags |= p.causal(c, head, begin, end, space[i], &small[size_t(i)], seen[size_t(i)]);
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
  // Heads for every thread: each goes from keys to queries by itself, and threads meet only once.
  use_large_pages(c.out, c.batch * c.heads * c.queries * c.value_dim);
  const Pieces& p = pieces();
  Space space(c, heads);
  std::atomic<int32_t> flags{OK};
  run_in_order(heads, 2 * STEPS, c.threads, [&](int64_t head, int64_t step) {
    int64_t small = 0;
    if (step == 0) p.load_sums(first, head, space[head]);
    if (step < STEPS) flags |= absorb_step(first, head, 0, c.keys, step, space[head]);
    if (step == STEPS - 1) flags |= p.store_sums(first, head, space[head]);
    if (step >= STEPS) flags |= read_step(second, head, 0, rows, step - STEPS, &small);
  });
  return flags;
}

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

const Pieces& pieces() {
  const Pieces* p = chosen.load(std::memory_order_relaxed);
  for (int level = 2; !p; --level) p = supported(level);
  chosen.store(p, std::memory_order_relaxed);
  return *p;
}

ParallelFor threads_of_torch() { return parallel_for.load(std::memory_order_relaxed); }

__attribute__((visibility("hidden"))) float* scratch(int64_t floats) {
  thread_local Scratch mine;
  if (mine.floats < floats) {
    std::free(mine.at);
    mine.floats = 0;
    mine.at = static_cast<float*>(std::aligned_alloc(64, size_t((floats * 4 + 127) / 64 * 64)));
    if (!mine.at) throw std::bad_alloc();
    mine.floats = floats;
  }
  return mine.at;
}

EXPORT int64_t linattn_call_size() { return sizeof(Call); }
EXPORT int64_t linattn_interface() { return INTERFACE; }
EXPORT void linattn_use_threads(ParallelFor loop) { parallel_for.store(loop); }
EXPORT const char* linattn_isa() { return pieces().name; }

// 0 portable, 1 avx2, 2 avx512. Returns whether this CPU has it.
EXPORT int32_t linattn_set_isa(int32_t level) {
  const Pieces* p = level >= 0 && level <= 2 ? supported(level) : nullptr;
  if (p) chosen.store(p);
  return p != nullptr;
}

EXPORT int32_t linattn_absorb(const Call* c) { return guarded_call(*c, [&] { return absorb(*c); }); }
EXPORT int32_t linattn_read(const Call* c) { return guarded_call(*c, [&] { return read(*c); }); }
EXPORT int32_t linattn_causal(const Call* c) { return guarded_call(*c, [&] { return causal(*c); }); }
// With everything that calls of one shape have in common in `fixed`.
EXPORT int32_t linattn_whole(const Call* fixed, const void* query, const void* key, const void* value, float* out,
                             int64_t threads, int32_t is_causal) {
  Call c = *fixed;
  c.query = query, c.key = key, c.value = value, c.out = out, c.threads = threads;
  return guarded_call(c, [&] { return whole(c, is_causal); });
}
EXPORT int32_t linattn_absorb_backward(const Call* c) { return guarded_call(*c, [&] { return absorb_backward(*c); }); }
EXPORT int32_t linattn_read_backward(const Call* c) { return guarded_call(*c, [&] { return read_backward(*c); }); }
EXPORT int32_t linattn_causal_backward(const Call* c) { return guarded_call(*c, [&] { return causal_backward(*c); }); }

// One token, with everything that stays the same from step to step in `fixed`: the least a caller can hand over. The new
// state is one buffer, laid out as Packed says; the old one is such a buffer too, or the five tensors in `apart`.
EXPORT int32_t linattn_step(const Call* fixed, const void* query, const void* key, const void* value,
                            const void* const* apart, float* old, float* fresh, float* out) {
  Call c = *fixed;
  c.query = query, c.key = key, c.value = value, c.out = out;
  if (apart) {
    c.S = static_cast<const float*>(apart[0]), c.Z = static_cast<const float*>(apart[1]);
    c.scale = static_cast<const float*>(apart[2]);
    c.tokens = static_cast<const int64_t*>(apart[3]), c.guarded = static_cast<const int64_t*>(apart[4]);
  } else {
    const Packed p(c, old);
    c.S = p.S, c.Z = p.Z, c.scale = p.scale, c.tokens = p.tokens, c.guarded = p.guarded;
  }
  const Packed p(c, fresh);
  c.S_new = p.S, c.Z_new = p.Z, c.scale_new = p.scale, c.tokens_new = p.tokens, c.guarded_new = p.guarded;
  return guarded_call(c, [&] { return step(c); });
}
