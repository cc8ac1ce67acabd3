// How a call is split: stretches of tokens for threads that share a head, and steps for those that do not.
#pragma once
#include <cstdlib>
#include <cstring>
#include <memory>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "dispatch.h"

namespace {

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
// Few, because a step may begin with sums and tokens that another thread has had in its cache.
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

// Memory that was never touched costs a fault for every page of it: of a long output, fewer and larger ones.
void use_large_pages(float* at, int64_t floats) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t LARGE = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(at) + LARGE - 1) / LARGE * LARGE;
  const uintptr_t end = reinterpret_cast<uintptr_t>(at + floats) / LARGE * LARGE;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace
