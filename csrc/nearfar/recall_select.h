/// Which blocks of far tokens a token recalls: those with the largest scores, found a piece of all blocks at a time.
#pragma once
#include "core/scratch.h"
#include "core/simd.h"

namespace {

constexpr int64_t PIECE = 4096;  // blocks whose scores are kept at a time

/// The order of floats as that of integers.
INLINE ivec ordered(vec x) {
  const ivec bits = (ivec)x;
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

/// How many of x (n, whole vectors) are at least `least`.
inline int64_t count_from(const int32_t* x, int64_t n, int32_t least) {
  ivec total = {};
  for (int64_t j = 0; j < n; j += VL) {
    ivec y;
    memcpy(&y, x + j, sizeof y);
    total -= y >= least;
  }
  int64_t count = 0;
  for (int i = 0; i < VL; ++i) count += total[i];
  return count;
}

/// Whether one of VL integers is at least `least`.
INLINE bool any_from(const int32_t* x, int32_t least) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epi32_mask(_mm512_loadu_si512(x), _mm512_set1_epi32(least)) != 0;
#else
  bool any = false;
  for (int i = 0; i < VL; ++i) any |= x[i] >= least;
  return any;
#endif
}

/// Appends to `to` the indices, from `first` on, of those of VL integers that are at least `least`. Returns how many. VL
/// places are written.
INLINE int64_t append_from(const int32_t* x, int64_t first, int32_t least, int32_t* to) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_cmpge_epi32_mask(_mm512_loadu_si512(x), _mm512_set1_epi32(least));
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32(int32_t(first)));
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, index));
  return __builtin_popcount(mask);
#else
  int64_t count = 0;
  for (int i = 0; i < VL; ++i) to[count] = int32_t(first + i), count += x[i] >= least;
  return count;
#endif
}

/// to: the indices of the `most` largest of scores (n); the rest of the last vector must be -inf or less than all others.
/// The scores become integers of the same order. guess: where the least of them may be, and then where it is.
inline void select_largest(float* scores, int64_t n, int64_t most, int32_t* to, int32_t& guess) {
  int32_t* x = reinterpret_cast<int32_t*>(scores);
  ivec low_lanes = ordered(load(scores)), high_lanes = low_lanes;
  for (int64_t j = 0; j < n; j += VL) {
    const ivec y = ordered(load(scores + j));
    memcpy(x + j, &y, sizeof y);
    low_lanes = y < low_lanes ? y : low_lanes, high_lanes = y > high_lanes ? y : high_lanes;
  }
  int64_t low = low_lanes[0], high = high_lanes[0];
  for (int i = 1; i < VL; ++i) low = imin(low, low_lanes[i]), high = imax(high, high_lanes[i]);
  // At least `most` are >= low, and fewer are >= high + 1. Every other guess is by the counts, which are about linear.
  int64_t from_low = n, above_high = 0, middle = imin(imax(guess, low + 1), high);
  for (bool half = false; low < high; half = !half) {
    const int64_t count = count_from(x, n, int32_t(middle));
    if (count >= most) low = middle, from_low = count;
    if (count < most) high = middle - 1, above_high = count;
    if (count == most || low == high) break;
    const int64_t share = half ? (high - low) / 2 : (high - low) * (from_low - most) / (from_low - above_high);
    middle = low + 1 + imin(share, high - low - 1);
  }
  guess = int32_t(low);
  int64_t count = 0, ties = from_low > most && low < INT32_MAX ? most - count_from(x, n, int32_t(low + 1)) : most;
  for (int64_t first = 0; first < n; first += VL) {
    if (from_low == most) {
      count += append_from(x + first, first, int32_t(low), to + count);
    } else if (any_from(x + first, int32_t(low))) {
      for (int64_t j = first; j < first + VL; ++j) {
        to[count] = int32_t(j);
        count += x[j] > low || (x[j] == low && ties-- > 0);
      }
    }
  }
}

/// The best blocks of some tokens. Scores come piece by piece, in the order of the blocks.
class BestBlocks {
 public:
  /// Blocks of a piece, in whole panels of bounds.
  static int64_t piece(int64_t units, int64_t most) { return imin(round_up(units, 64), imax(PIECE, round_up(most, 64))); }
  static int64_t floats(int64_t tokens, int64_t units, int64_t most) {
    return tokens * (stride(units, most) + most + VL) + most + VL + 1 + 64;
  }

  /// units: all blocks. most: that a token takes, fewer than there are.
  BestBlocks(int64_t tokens, int64_t units, int64_t most_blocks, float*& at)
      : most(most_blocks), kept(room(units, most_blocks)), ld(stride(units, most_blocks)) {
    scores = carve(at, tokens * ld), blocks = reinterpret_cast<int32_t*>(carve(at, tokens * (most + VL)));
    picked = reinterpret_cast<int32_t*>(carve(at, most + VL)), guess = reinterpret_cast<int32_t*>(carve(at, 1));
    *guess = 0;
  }

  /// Where the scores of a piece for token i are to be written.
  float* row(int64_t i) const { return scores + i * ld + kept; }
  /// The blocks that token i takes, in ascending order.
  int32_t* chosen(int64_t i) const { return blocks + i * (most + VL); }

  /// Takes the best of n blocks from `first` on, in whole vectors, and of those before. last: no piece follows.
  void take(int64_t i, int64_t first, int64_t n, bool last) const {
    const int64_t held = first > 0 ? kept : 0;
    float *best = scores + i * ld, *from = best + kept - held;
    int32_t *to = chosen(i), *at = held > 0 ? picked : to, *best_bits = reinterpret_cast<int32_t*>(best);
    select_largest(from, held + n, most, at, *guess);
    if (held == 0 && last) return;
    for (int64_t k = 0; k < most; ++k) {  // at[k] >= k: nothing is overwritten before it is read
      const int64_t j = at[k];
      best_bits[k] = reinterpret_cast<int32_t*>(from)[j];
      to[k] = j < held ? to[j] : int32_t(first + j - held);
    }
    for (int64_t k = 0; k < most; ++k) best_bits[k] ^= (best_bits[k] >> 31) & 0x7fffffff;  // floats again
    for (int64_t k = most; k < kept; ++k) best[k] = -__builtin_inff();
  }

 private:
  const int64_t most, kept, ld;  // kept: room for the best so far, before the piece
  float* scores;                 // (tokens, ld)
  int32_t *blocks, *picked;      // (tokens, most + VL), (most + VL)
  int32_t* guess;                // of the least score that is taken: that of the token before

  static int64_t room(int64_t units, int64_t most) { return units > piece(units, most) ? round_up(most, VL) : 0; }
  static int64_t stride(int64_t units, int64_t most) { return room(units, most) + piece(units, most); }
};

}  // namespace
