/// Shared by all subjects: the instruction set in use, torch's parallel loop, work space.
#include "core/dispatch.h"

#include <cstdlib>
#include <cstring>

#include "core/threads.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

#if defined(__x86_64__) && !defined(LINATTN_ONLY_PORTABLE)
/// Whether this CPU converts float16; not every compiler knows __builtin_cpu_supports("f16c").
bool has_half_conversion() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

/// Whether this CPU and this library have the instruction set of a level.
bool supported(int level) {
#if defined(LINATTN_ONLY_PORTABLE)
#elif defined(__aarch64__)
  if (level == 1) return true;
#elif defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_half_conversion();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (level == 2) return avx512;
  if (level == 1) return avx2;
#endif
  return level == 0;
}

std::atomic<int> chosen{-1};

std::atomic<ParallelLoop> torch_loop{nullptr};

/// One thread's work space.
struct Scratch {
  float* at = nullptr;
  int64_t floats = 0;
  ~Scratch() { std::free(at); }
};

/// The work space of the calling thread.
Scratch& own_scratch() {
  thread_local Scratch mine;
  return mine;
}

}  // namespace

/// The level in use; found at the first call.
int isa_level() {
  int level = chosen.load(std::memory_order_relaxed);
  if (level >= 0) return level;
  for (level = 2; !supported(level);) --level;
  chosen.store(level, std::memory_order_relaxed);
  return level;
}

/// See core/threads.h.
ParallelLoop parallel_loop() { return torch_loop.load(std::memory_order_relaxed); }

/// See core/scratch.h.
__attribute__((visibility("hidden"))) float* scratch(int64_t floats) {
  Scratch& mine = own_scratch();
  if (mine.floats < floats) {
    std::free(mine.at);
    mine.floats = 0;
    mine.at = static_cast<float*>(std::aligned_alloc(64, size_t((floats * 4 + 127) / 64 * 64)));
    if (!mine.at) throw std::bad_alloc();
    mine.floats = floats;
  }
  return mine.at;
}

/// How many floats of work space the calling thread holds, for tests.
EXPORT int64_t linattn_scratch_floats() { return own_scratch().floats; }

/// The ABI version, which callers compare with their own.
EXPORT int64_t linattn_abi_version() { return ABI_VERSION; }
/// Sets the parallel loop, torch's, that every later call runs on.
EXPORT void linattn_set_parallel_for(ParallelLoop loop) { torch_loop.store(loop); }

/// The name of the instruction set in use.
EXPORT const char* linattn_isa() {
#if defined(__aarch64__)
  return isa_level() ? "neon" : "portable";
#else
  constexpr const char* NAMES[] = {"portable", "avx2", "avx512"};
  return NAMES[isa_level()];
#endif
}

/// Chooses an instruction set by its level (isa_level). Returns whether this CPU has it.
EXPORT int32_t linattn_set_isa(int32_t level) {
  const bool has = level >= 0 && level <= 2 && supported(level);
  if (has) chosen.store(level);
  return has;
}

/// The two halves of a 128-bit product, combined.
static inline uint64_t fold(uint64_t a, uint64_t b) {
  __extension__ typedef unsigned __int128 Wide;
  const Wide product = Wide(a) * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

/// See core/dispatch.h. Sums of words would not do: scaling all floats by a power of two, or changing all signs, adds the
/// same power of two to each word, which vanishes after 2^k of them.
EXPORT uint64_t linattn_checksum(const uint8_t* at, int64_t count) {
  constexpr uint64_t KEYS[4] = {0x9E3779B97F4A7C15u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0xD6E8FEB86659FD93u};
  uint64_t lanes[4] = {KEYS[1], KEYS[2], KEYS[3], KEYS[0]};
  const auto add = [&](const uint8_t* from) {
    for (int i = 0; i < 4; ++i) {
      uint64_t words[2];
      std::memcpy(words, from + i * 16, 16);
      lanes[i] = fold(words[0] ^ KEYS[i], words[1] ^ lanes[i]);
    }
  };
  const int64_t full = count / 64 * 64;
  for (int64_t i = 0; i < full; i += 64) add(at + i);
  if (full < count) {
    uint8_t rest[64] = {};
    std::memcpy(rest, at + full, size_t(count - full));
    add(rest);
  }
  uint64_t mixed = uint64_t(count) ^ KEYS[0];
  for (int i = 0; i < 4; ++i) mixed = fold(mixed ^ KEYS[i], lanes[i] ^ KEYS[3 - i]);
  return mixed;
}
