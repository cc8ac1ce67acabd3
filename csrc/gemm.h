// Products of small matrices in cache: register tiles of MR rows by NR vectors, with what happens to a finished tile
// (exp, masks, row sums, division) done while it is still in registers.
#pragma once
#include "ahead.h"

namespace {

enum Range { WHOLE, UP_TO_ROW, FROM_ROW };  // which k a row needs: all, k <= row, k >= row

// One summand A B of a product: element (i, k) of A is a[i * row + k * col], B is k x n with rows `ldb` apart.
struct Operand {
  const float* a;
  int64_t row, col;
  const float* b;
  int64_t ldb, k;
  Range range = WHOLE;
  INLINE int64_t first(int64_t i0) const { return range == FROM_ROW ? i0 : 0; }
  INLINE int64_t last(int64_t i1) const { return range == UP_TO_ROW ? imin(k, i1) : k; }
};

// Steps along k for which the loop is written out; in each of them one line of memory is asked for, because many at once
// would hold up the loads of the product.
constexpr int64_t STEP = 4;

// ALONG: rows of A lie in memory as such (col = 1), else its columns do (row = 1). Known when compiled, so that every
// number of A has an address the CPU makes by itself: beside the products there is room for few instructions.
template <int R, int W, bool ALONG>
INLINE void multiply(const Operand& o, int64_t i0, int64_t j0, vec (&acc)[R][W], Lines& lines) {
  const int64_t first = o.first(i0), last = o.last(i0 + R);
  const int64_t apart = ALONG ? o.row : o.col, ldb = o.ldb;
  const float* a = o.a + (ALONG ? i0 * apart + first : i0 + first * apart);
  const float* b = o.b + first * ldb + j0;
  const float *lower = a + 3 * apart, *lowest = a + 6 * apart;  // from one of three, every row is at most two away
  const auto step = [&](int64_t u) __attribute__((always_inline)) {
    vec right[W];
    UNROLL(4)
    for (int j = 0; j < W; ++j) right[j] = load(b + j * VL);
    UNROLL(8)
    for (int i = 0; i < R; ++i) {
      const vec left = splat(!ALONG  ? a[i]
                             : i < 3 ? a[i * apart + u]
                             : i < 6 ? lower[(i - 3) * apart + u]
                                     : lowest[(i - 6) * apart + u]);
      UNROLL(4)
      for (int j = 0; j < W; ++j) acc[i][j] += left * right[j];
    }
    b += ldb;
    if (!ALONG) a += apart;
  };
  int64_t k = last - first;
  for (; k >= STEP; k -= STEP) {
    lines.ask();
    UNROLL(4)
    for (int64_t u = 0; u < STEP; ++u) step(u);
    if (ALONG) a += STEP, lower += STEP, lowest += STEP;
  }
  UNROLL(1)
  for (; k > 0; --k) {
    step(0);
    if (ALONG) ++a, ++lower, ++lowest;
  }
}

template <class End>
constexpr bool sees_before = false;  // whether an End has `before`, which sees a tile before it is finished
template <class End>
constexpr bool sees_after = false;  // or `after`, which sees what became of it

template <class End>
constexpr bool narrow = false;  // whether an End mostly gets fewer than NR vectors: its tiles may have TALL rows then

template <class End>
constexpr int tile_rows(int64_t width) {
  return narrow<End> && width < NR ? TALL : MR;
}

template <int R, int W, class End>
__attribute__((noinline)) void tile(const Operand* o, int count, int64_t i0, int64_t j0, const End& given, Ahead* ahead) {
  const End end = given;  // its own: no store of a result can change it, so that it stays in registers
  vec acc[R][W];
  UNROLL(8)
  for (int i = 0; i < R; ++i) {
    UNROLL(4)
    for (int j = 0; j < W; ++j) acc[i][j] = end.start(i0 + i, j0 + j * VL);
  }
  Lines lines{reinterpret_cast<const char*>(o[0].a), 0};
  if (ahead) {
    int64_t asked = 0;
    for (int n = 0; n < count; ++n) asked += (o[n].last(i0 + R) - o[n].first(i0)) / STEP;
    lines = ahead->next(asked, o[0].a);
  }
  for (int n = 0; n < count; ++n) {
    if (o[n].col == 1) {
      multiply<R, W, true>(o[n], i0, j0, acc, lines);
    } else {
      multiply<R, W, false>(o[n], i0, j0, acc, lines);
    }
  }
  if constexpr (sees_before<End>) end.before(i0, j0, acc);
  UNROLL(8)
  for (int i = 0; i < R; ++i) end.template finish<W>(i0 + i, j0, acc[i]);
  if constexpr (sees_after<End>) end.after(i0, j0, acc);
}

template <int W, class End, int R = tile_rows<End>(W)>
void tiles(int rows, const Operand* o, int count, int64_t i0, int64_t j0, const End& end, Ahead* ahead) {
  if (rows == R) return tile<R, W>(o, count, i0, j0, end, ahead);
  if constexpr (R > 1) tiles<W, End, R - 1>(rows, o, count, i0, j0, end, ahead);
}

// end(i, j) <- sum over operands of A B, for m rows and n columns; n is a multiple of VL.
// With `lower`, tiles right of the diagonal, which starts `right` columns from the left, are skipped: `end` must not
// need them.
template <class End>
void product(int64_t m, int64_t n, const Operand* o, int count, const End& end, Ahead* ahead = nullptr, bool lower = false,
             int64_t right = 0) {
  for (int64_t j0 = 0; j0 < n; j0 += NR * VL) {
    const int64_t width = imin(NR, (n - j0) / VL), most = tile_rows<End>(width), steps = (m + most - 1) / most;
    for (int64_t s = 0; s < steps; ++s) {
      const int64_t i0 = s * m / steps, i1 = (s + 1) * m / steps;
      int64_t w = width;
      if (lower) {
        if (j0 >= i1 + right) continue;
        w = imin(w, (i1 + right - j0 + VL - 1) / VL);
      }
      switch (w) {
        case 1: tiles<1>(int(i1 - i0), o, count, i0, j0, end, ahead); break;
        case 2: tiles<2>(int(i1 - i0), o, count, i0, j0, end, ahead); break;
#if defined(__AVX512F__)
        case 3: tiles<3>(int(i1 - i0), o, count, i0, j0, end, ahead); break;
        case 4: tiles<4>(int(i1 - i0), o, count, i0, j0, end, ahead); break;
#endif
      }
    }
  }
}

// C = A B, or C += A B.
template <bool ADD>
struct Store {
  float* c;
  int64_t ldc;
  INLINE vec start(int64_t i, int64_t j) const { return ADD ? load(c + i * ldc + j) : vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(c + i * ldc + j + w * VL, acc[w]);
  }
};

}  // namespace
