// Blocks of tokens: where a head's rows are, and how they come into work space as padded float32.
#pragma once
#include "call.h"
#include "simd.h"

namespace {

// Distance of rows in work space. Features get a vector of slack, so that a ragged end may be written in full, and
// every other width above 64 is kept off powers of two, which would crowd the same sets of the cache.
INLINE int64_t lead(int64_t n) { return round_up(n, 16) + 16; }
INLINE int64_t wide(int64_t n) { return n > 64 ? lead(n) : round_up(n, 16); }

struct Rows {
  const float* at;
  int64_t ld;
};

INLINE float widen_half(uint16_t h) {
  uint32_t bits = uint32_t(h & 0x7fff) << 13;
  float x;
  memcpy(&x, &bits, 4);
  x *= 0x1p112f;
  uint32_t y;
  memcpy(&y, &x, 4);
  y |= (bits >= 0x0f800000u ? 0x7f800000u : 0) | (uint32_t(h & 0x8000) << 16);
  memcpy(&x, &y, 4);
  return x;
}

INLINE float widen_brain(uint16_t h) {
  uint32_t bits = uint32_t(h) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// n rows of `dim` numbers, in place where they can be used so, else in `copy` (n x wide(dim)), padded with 0.
// Rows that `mask` hides become 0. With `vectors`, rows are read in whole vectors; else number by number.
Rows rows(const Call& c, const void* base, int64_t stride, int64_t dim, int64_t n, const uint8_t* mask, bool vectors,
          float* copy) {
  if (c.dtype == FLOAT32 && !mask && (!vectors || dim % VL == 0)) return {static_cast<const float*>(base), stride};
  const int64_t ld = wide(dim), full = round_up(dim, 16);
  for (int64_t i = 0; i < n; ++i) {
    float* to = copy + i * ld;
    for (int64_t d = dim; d < full; ++d) to[d] = 0;
    if (mask && !mask[i]) {
      memset(to, 0, size_t(dim) * 4);
    } else if (c.dtype == FLOAT32) {
      memcpy(to, static_cast<const float*>(base) + i * stride, size_t(dim) * 4);
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(base) + i * stride;
      if (c.dtype == FLOAT16) {
        for (int64_t d = 0; d < dim; ++d) to[d] = widen_half(from[d]);
      } else {
        for (int64_t d = 0; d < dim; ++d) to[d] = widen_brain(from[d]);
      }
    }
  }
  return {copy, ld};
}

INLINE int64_t number_bytes(const Call& c) { return c.dtype == FLOAT32 ? 4 : 2; }

const void* token(const Call& c, const void* base, const int64_t* stride, int64_t batch, int64_t head, int64_t t) {
  const int64_t at = batch * stride[0] + head * stride[1] + t * stride[2];
  return static_cast<const char*>(base) + at * number_bytes(c);
}

// |x|^2 of n rows.
void square_sums(Rows x, int64_t n, int64_t dim, float* to) {
  for (int64_t i = 0; i < n; i += VL) {
    vec s[VL];
    if (i + VL <= n && dim % VL == 0) {
      UNROLL(16)
      for (int k = 0; k < VL; ++k) s[k] = vec{};
      const float* row = x.at + i * x.ld;
      for (int64_t d = 0; d < dim; d += VL) {
        UNROLL(16)
        for (int k = 0; k < VL; ++k) {
          const vec y = load(row + k * x.ld + d);
          s[k] += y * y;
        }
      }
    } else {
      for (int k = 0; k < VL; ++k) {
        s[k] = vec{};
        const float* row = x.at + imin(i + k, n - 1) * x.ld;
        for (int64_t d = 0; d < dim; d += VL) {
          const vec y = load_some(row + d, dim - d);
          s[k] += y * y;
        }
      }
    }
    store_some(to + i, reduce<false>(s), n - i);
  }
}

// The same of n columns, as whole vectors.
void square_columns(const float* x, int64_t ld, int64_t n, int64_t dim, float* to) {
  for (int64_t i = 0; i < n; i += VL) {
    vec s = {}, t = {};
    for (int64_t d = 0; d + 1 < dim; d += 2) {
      const vec y = load(x + d * ld + i), z = load(x + (d + 1) * ld + i);
      s += y * y;
      t += z * z;
    }
    if (dim % 2) s += load(x + (dim - 1) * ld + i) * load(x + (dim - 1) * ld + i);
    store_some(to + i, s + t, n - i);
  }
}

// to (m x n) = from (n x m) transposed; rows and columns are rounded up to whole vectors, rows from n on count as 0.
void transpose(const float* from, int64_t ld_from, int64_t n, int64_t m, float* to, int64_t ld_to) {
  for (int64_t i = 0; i < n; i += VL) {
    for (int64_t j = 0; j < m; j += VL) {
      vec x[VL];
      if (i + VL <= n) {
        UNROLL(16)
        for (int k = 0; k < VL; ++k) x[k] = load(from + (i + k) * ld_from + j);
      } else {
        for (int k = 0; k < VL; ++k) x[k] = i + k < n ? load(from + (i + k) * ld_from + j) : vec{};
      }
      transpose_tile(x);
      UNROLL(16)
      for (int k = 0; k < VL; ++k) store(to + (j + k) * ld_to + i, x[k]);
    }
  }
}

// Copies n rows of `dim` numbers out of padded work space.
void copy_out(const float* from, int64_t ld, int64_t n, int64_t dim, float* to) {
  for (int64_t i = 0; i < n; ++i) memcpy(to + i * dim, from + i * ld, size_t(dim) * 4);
}

}  // namespace
