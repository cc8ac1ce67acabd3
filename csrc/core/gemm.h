/// Products of small matrices in cache: register tiles of MR rows by NR vectors, with an epilogue (exp, masks, row sums,
/// division) that is applied to a tile while it is still in registers.
///
/// An epilogue has start(i, j), the vector a tile's accumulator starts from, and finish<W>(i, j, acc), which gets row i of
/// the tile, W vectors from column j on. It may have before(i, j, acc) and after(i, j, acc), which see the whole tile.
#pragma once
#include "core/prefetch.h"

namespace {

/// The k for which A is not 0, or not wanted: all, k <= row, k >= row.
enum KRange { ALL, UP_TO_ROW, FROM_ROW };

/// One term A B of a sum of products: A (m, k) has element (i, j) at a[i * row + j * col], B (k, n) has rows `ldb` lda.
struct Operand {
  const float* a;
  int64_t row, col;
  const float* b;
  int64_t ldb, k;
  KRange range = ALL;
  /// The k that the rows [i0, i1) need: [first(i0), last(i1)).
  INLINE int64_t first(int64_t i0) const { return range == FROM_ROW ? i0 : 0; }
  INLINE int64_t last(int64_t i1) const { return range == UP_TO_ROW ? imin(k, i1) : k; }
};

/// Unrolling along k; one line is prefetched for each STEP, because many at once would delay the loads of the product.
constexpr int64_t STEP = 4;

/// acc (R, W vectors) += rows [i0, i0 + R) of A times columns [j0, j0 + W VL) of B.
/// ROW_MAJOR: col = 1, else row = 1. A template parameter, so that addressing modes reach every number of A without extra
/// instructions.
template <int R, int W, bool ROW_MAJOR>
INLINE void multiply(const Operand& o, int64_t i0, int64_t j0, vec (&acc)[R][W], PrefetchLines& lines) {
  const int64_t first = o.first(i0), last = o.last(i0 + R);
  const int64_t lda = ROW_MAJOR ? o.row : o.col, ldb = o.ldb;
  const float* a = o.a + (ROW_MAJOR ? i0 * lda + first : i0 + first * lda);
  const float* b = o.b + first * ldb + j0;
  const float *lower = a + 3 * lda, *lowest = a + 6 * lda;  // every row is at most two away from one of three
  const auto step = [&](int64_t u) __attribute__((always_inline)) {
    vec right[W];
    UNROLL(4)
    for (int j = 0; j < W; ++j) right[j] = load(b + j * VL);
    UNROLL(8)
    for (int i = 0; i < R; ++i) {
      const vec left = splat(!ROW_MAJOR ? a[i]
                             : i < 3    ? a[i * lda + u]
                             : i < 6    ? lower[(i - 3) * lda + u]
                                        : lowest[(i - 6) * lda + u]);
      UNROLL(4)
      for (int j = 0; j < W; ++j) acc[i][j] += left * right[j];
    }
    b += ldb;
    if (!ROW_MAJOR) a += lda;
  };
  int64_t k = last - first;
  for (; k >= STEP; k -= STEP) {
    lines.prefetch();
    UNROLL(4)
    for (int64_t u = 0; u < STEP; ++u) step(u);
    if (ROW_MAJOR) a += STEP, lower += STEP, lowest += STEP;
  }
  UNROLL(1)
  for (; k > 0; --k) {
    step(0);
    if (ROW_MAJOR) ++a, ++lower, ++lowest;
  }
}

template <class Epilogue>
constexpr bool has_before = false;  // specialised where an epilogue has before()
template <class Epilogue>
constexpr bool has_after = false;  // specialised where an epilogue has after()

template <class Epilogue>
constexpr bool narrow = false;  // specialised where products mostly have fewer than NR vectors: TALL tiles then

/// Rows of a tile of `width` vectors.
template <class Epilogue>
constexpr int tile_rows(int64_t width) {
  return narrow<Epilogue> && width < NR ? TALL : MR;
}

/// acc (R, W vectors) += the products of `count` operands. Prefetches a line for each STEP of theirs.
template <int R, int W>
INLINE void multiply_all(const Operand* o, int count, int64_t i0, int64_t j0, vec (&acc)[R][W], Prefetcher* prefetcher) {
  PrefetchLines lines{reinterpret_cast<const char*>(o[0].a), 0};
  if (prefetcher) {
    int64_t steps = 0;
    for (int n = 0; n < count; ++n) steps += (o[n].last(i0 + R) - o[n].first(i0)) / STEP;
    lines = prefetcher->next(steps, o[0].a);
  }
  for (int n = 0; n < count; ++n) {
    if (o[n].col == 1) {
      multiply<R, W, true>(o[n], i0, j0, acc, lines);
    } else {
      multiply<R, W, false>(o[n], i0, j0, acc, lines);
    }
  }
}

/// multiply_all for accumulators in memory: one function for the tiles of every epilogue, where most of the code would be.
template <int R, int W>
__attribute__((noinline)) void multiply_shared(const Operand* o, int count, int64_t i0, int64_t j0, vec (&sums)[R][W],
                                               Prefetcher* prefetcher) {
  vec acc[R][W];
  UNROLL(8)
  for (int i = 0; i < R; ++i) {
    UNROLL(4)
    for (int j = 0; j < W; ++j) acc[i][j] = sums[i][j];
  }
  multiply_all<R, W>(o, count, i0, j0, acc, prefetcher);
  UNROLL(8)
  for (int i = 0; i < R; ++i) {
    UNROLL(4)
    for (int j = 0; j < W; ++j) sums[i][j] = acc[i][j];
  }
}

/// One tile: R rows from i0 on, W vectors from column j0 on.
template <int R, int W, class Epilogue>
__attribute__((noinline)) void tile(const Operand* o, int count, int64_t i0, int64_t j0, const Epilogue& epilogue,
                                    Prefetcher* prefetcher) {
  const Epilogue end = epilogue;  // a local copy, which no store can alias, so that it stays in registers
  vec acc[R][W];
  UNROLL(8)
  for (int i = 0; i < R; ++i) {
    UNROLL(4)
    for (int j = 0; j < W; ++j) acc[i][j] = end.start(i0 + i, j0 + j * VL);
  }
  if constexpr (R + 1 >= tile_rows<Epilogue>(W)) {
    multiply_all<R, W>(o, count, i0, j0, acc, prefetcher);
  } else {
    multiply_shared<R, W>(o, count, i0, j0, acc, prefetcher);  // matrices of few rows
  }
  if constexpr (has_before<Epilogue>) end.before(i0, j0, acc);
  UNROLL(8)
  for (int i = 0; i < R; ++i) end.template finish<W>(i0 + i, j0, acc[i]);
  if constexpr (has_after<Epilogue>) end.after(i0, j0, acc);
}

/// The tile with `rows` rows: turns a number into a template parameter.
template <int W, class Epilogue, int R = tile_rows<Epilogue>(W)>
void tiles(int rows, const Operand* o, int count, int64_t i0, int64_t j0, const Epilogue& end, Prefetcher* prefetcher) {
  if (rows == R) return tile<R, W>(o, count, i0, j0, end, prefetcher);
  if constexpr (R > 1) tiles<W, Epilogue, R - 1>(rows, o, count, i0, j0, end, prefetcher);
}

/// end(i, j) <- sum over `count` operands of A B, for m rows and n columns; n is a multiple of VL. With `lower`, tiles that
/// lie right of the diagonal, which starts at column `right`, are skipped.
template <class Epilogue>
void gemm(int64_t m, int64_t n, const Operand* o, int count, const Epilogue& end, Prefetcher* prefetcher = nullptr,
          bool lower = false, int64_t right = 0) {
  for (int64_t j0 = 0; j0 < n; j0 += NR * VL) {
    const int64_t width = imin(NR, (n - j0) / VL), most = tile_rows<Epilogue>(width), steps = (m + most - 1) / most;
    for (int64_t s = 0; s < steps; ++s) {
      const int64_t i0 = s * m / steps, i1 = (s + 1) * m / steps;
      int64_t w = width;
      if (lower) {
        if (j0 >= i1 + right) continue;
        w = imin(w, (i1 + right - j0 + VL - 1) / VL);
      }
      switch (w) {
        case 1: tiles<1>(int(i1 - i0), o, count, i0, j0, end, prefetcher); break;
        case 2: tiles<2>(int(i1 - i0), o, count, i0, j0, end, prefetcher); break;
        case 3:
          if constexpr (NR > 2) tiles<3>(int(i1 - i0), o, count, i0, j0, end, prefetcher);
          break;
        default:
          if constexpr (NR > 3) tiles<4>(int(i1 - i0), o, count, i0, j0, end, prefetcher);
          break;
      }
    }
  }
}

/// Epilogue: C (m, ldc) = A B, or C += A B. The product is summed first: its terms would be lost in large sums.
template <bool ADD>
struct Store {
  float* c;
  int64_t ldc;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    float* to = c + i * ldc + j;
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(to + w * VL, ADD ? load(to + w * VL) + acc[w] : acc[w]);
  }
};

/// sum + low <- sum + low + term. `low` takes what float32 loses of the sum (TwoSum: exact for any sizes).
INLINE void add_compensated(vec term, vec& sum, vec& low) {
  const vec more = term + low, total = sum + more, added = total - sum;
  low = (sum - (total - added)) + (more - added);
  sum = total;
}

/// Epilogue: C (m, ldc) += A B with compensation. The low-order parts of C are `low` floats behind it.
struct StoreCompensated {
  float* c;
  int64_t ldc, low;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    float* to = c + i * ldc + j;
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      vec total = load(to + w * VL), rest = load(to + w * VL + low);
      add_compensated(acc[w], total, rest);
      store(to + w * VL, total);
      store(to + w * VL + low, rest);
    }
  }
};

/// Epilogue: out (m, ld) = A B, row i times factor[i].
struct ScaleRows {
  float* out;
  int64_t ld;
  const float* factor;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(out + i * ld + j + w * VL, acc[w] * factor[i]);
  }
};

}  // namespace
