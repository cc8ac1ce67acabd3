/// Small operations on padded rows.
#pragma once
#include "core/simd.h"

namespace {

/// a . b; both (n), padded with 0 to whole vectors.
inline float dot(const float* a, const float* b, int64_t n) {
  n = round_up(n, VL);
  vec s = {}, t = {};
  int64_t i = 0;
  for (; i + 2 * VL <= n; i += 2 * VL) {
    s += load(a + i) * load(b + i);
    t += load(a + i + VL) * load(b + i + VL);
  }
  if (i < n) s += load(a + i) * load(b + i);
  return sum(s + t);
}

/// to (n) = from (n).
INLINE void copy_row(float* to, const float* from, int64_t n) { memcpy(to, from, size_t(n) * 4); }

/// to (n) += factor from (n), in whole vectors.
INLINE void add_row(float* to, const float* from, float factor, int64_t n) {
  for (int64_t j = 0; j < n; j += VL) store(to + j, load(to + j) + load(from + j) * factor);
}

/// row (n) *= factor, in whole vectors.
INLINE void scale_row(float* row, float factor, int64_t n) {
  for (int64_t j = 0; j < n; j += VL) store(row + j, load(row + j) * factor);
}

}  // namespace
