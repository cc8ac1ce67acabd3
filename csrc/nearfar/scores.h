/// What is done to the scores of a query before the softmax: a cap, and biases of the nearest positions.
#pragma once
#include "core/simd.h"

namespace {

/// All in units of log2, as logits are.
struct Scores {
  float cap;          // a score s becomes cap tanh(s / cap); 0 for none
  const float* band;  // (reach): biases of the distances reach - 1 .. 0, relative to that of everything farther; or null
  int64_t reach;
};

/// cap tanh(x / cap).
INLINE vec capped(vec x, float cap) {
  const float rate = 2 * 1.44269504f / cap;
  return cap - 2 * cap / (exp2v(x * rate) + 1.0f);
}

/// Caps a row of scores; whole vectors are read and written.
INLINE void cap_row(float* row, int64_t n, float cap) {
  for (int64_t j = 0; j < n; j += VL) store(row + j, capped(load(row + j), cap));
}

/// Adds the biases of a query at `position` to its logits row (n) of the keys at the positions from `first` on.
INLINE void add_band(const Scores& s, int64_t position, int64_t first, int64_t n, float* row) {
  const int64_t shift = s.reach - 1 - (position - first);  // of the band against the row
  const int64_t last = imin(n, s.reach - shift);
  for (int64_t j = imax(0, -shift); j < last; ++j) row[j] += s.band[j + shift];
}

}  // namespace
