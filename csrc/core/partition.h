/// How the tokens of a call are divided: into splits, where threads share a head, and into slices, where they do not.
#pragma once
#include <cstdlib>
#include <cstring>
#include <memory>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "core/threads.h"

namespace {

/// How many splits the tokens of each head are divided into, so that every thread has work. A split is a multiple of `unit`
/// tokens.
inline int64_t split_count(int64_t heads, int64_t tokens, int64_t threads, int64_t unit) {
  if (heads >= threads || heads == 0) return 1;
  const int64_t wanted = (threads + heads - 1) / heads, most = (tokens + unit - 1) / unit;
  return wanted < most ? wanted : (most > 0 ? most : 1);
}

/// The first token of split `part` of `parts`; part == parts gives the end.
inline int64_t split_begin(int64_t tokens, int64_t part, int64_t parts, int64_t unit) {
  const int64_t units = (tokens + unit - 1) / unit, at = units * part / parts * unit;
  return at < tokens ? at : tokens;
}

/// Slices in which a split is processed, one after the other by whichever thread is free: a long one first, short ones at
/// the end, when threads wait for each other. Few, because a slice may start with data in another core's cache.
constexpr int64_t SLICES = 3;

/// The first token of a slice: 0, 3/4, 15/16 of the tokens; slice == SLICES gives the end.
inline int64_t slice_begin(int64_t tokens, int64_t slice, int64_t unit) {
  const int64_t at = (tokens - (tokens >> 2 * slice) + unit - 1) / unit * unit;
  return slice == SLICES || at > tokens ? tokens : at;
}

constexpr int64_t UNIT = 120;  // tokens: the granularity of splits and slices where the order of tokens does not matter

/// Asks for huge pages behind a fresh output of `floats` floats, which saves most of its page faults.
inline void use_large_pages([[maybe_unused]] float* at, [[maybe_unused]] int64_t floats) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t LARGE = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(at) + LARGE - 1) / LARGE * LARGE;
  const uintptr_t end = reinterpret_cast<uintptr_t>(at + floats) / LARGE * LARGE;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace
