// The library's entry points: which instruction set, and which threads.
#include "backward_calls.h"
#include "forward_calls.h"

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

template <class Body>
int32_t guarded_call(const Call& c, const Body& body) {
  if (c.batch * c.kv_heads == 0) return OK;
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
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
