/// Rows of tokens: where they are in the caller's tensors, and how they are loaded into padded float32 work space.
#pragma once
#include "core/abi.h"
#include "core/scratch.h"
#include "core/simd.h"

namespace {

/// Floats between two rows of n features: padded to whole vectors, with a vector of slack, so that a ragged end may be
/// written in full.
INLINE int64_t feature_stride(int64_t n) { return round_up(n, 16) + 16; }

/// Floats between two rows of any other n numbers: above 64 kept off powers of two, which would map to the same cache sets.
INLINE int64_t row_stride(int64_t n) { return n > 64 ? feature_stride(n) : round_up(n, 16); }

/// Rows `ld` floats apart.
struct Rows {
  const float* at;
  int64_t ld;
};

/// float16 bits to float32.
INLINE float half_to_float(uint16_t h) {
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

/// VL numbers as they are stored, here as float32.
INLINE vec load_numbers(const float* from) { return load(from); }
/// The same of float16 bits.
INLINE vec load_numbers(const uint16_t* from) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  static_assert(VL == 8, "AVX2 has vectors of 8 floats");
  return (vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  vec x;
  for (int i = 0; i < VL; ++i) x[i] = half_to_float(from[i]);
  return x;
#endif
}
/// The same of codes in 8 bits.
INLINE vec load_numbers(const int8_t* from) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  vec x;
  for (int i = 0; i < VL; ++i) x[i] = float(from[i]);
  return x;
#endif
}
/// The first n of VL numbers as they are stored, then 0.
INLINE vec load_some_numbers(const float* from, int64_t n) { return load_some(from, n); }
/// The same of codes in 8 bits.
INLINE vec load_some_numbers(const int8_t* from, int64_t n) {
  int8_t some[VL] = {};
  if (n < VL) memcpy(some, from, size_t(n)), from = some;
  return load_numbers(from);
}
/// The same of float16 bits.
INLINE vec load_some_numbers(const uint16_t* from, int64_t n) {
  uint16_t some[VL] = {};
  if (n < VL) memcpy(some, from, size_t(n) * 2), from = some;
  return load_numbers(from);
}

/// bfloat16 bits to float32.
INLINE float bfloat16_to_float(uint16_t h) {
  uint32_t bits = uint32_t(h) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

/// to (row_stride(dim)) = one row (dim) of any dtype times `factor`, padded with 0.
OUTLINE void load_row(int32_t dtype, const void* row, int64_t dim, float factor, float* to) {
  memset(to + dim, 0, size_t(row_stride(dim) - dim) * 4);
  if (dtype == FLOAT32) {
    const float* from = static_cast<const float*>(row);
    if (factor == 1) {
      memcpy(to, from, size_t(dim) * 4);
    } else {
      for (int64_t d = 0; d < dim; ++d) to[d] = from[d] * factor;
    }
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(row);
    if (dtype == FLOAT16) {
      for (int64_t d = 0; d < dim; ++d) to[d] = half_to_float(from[d]) * factor;
    } else {
      for (int64_t d = 0; d < dim; ++d) to[d] = bfloat16_to_float(from[d]) * factor;
    }
  }
}

/// Bytes of one number.
INLINE int64_t dtype_size(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

/// n rows of `dim` numbers, `stride` numbers apart: in place where possible, else copied to `copy` (n, row_stride(dim)).
/// Rows hidden by `mask` (n) become 0. `vectors`: the rows will be read in whole vectors, so that they must be padded.
inline Rows load_rows(int32_t dtype, const void* base, int64_t stride, int64_t dim, int64_t n, const uint8_t* mask,
                      bool vectors, float* copy) {
  if (dtype == FLOAT32 && !mask && (!vectors || dim % VL == 0)) return {static_cast<const float*>(base), stride};
  const int64_t ld = row_stride(dim), bytes = stride * dtype_size(dtype);
  for (int64_t i = 0; i < n; ++i) {
    if (mask && !mask[i]) {
      memset(copy + i * ld, 0, size_t(ld) * 4);
    } else {
      load_row(dtype, static_cast<const char*>(base) + i * bytes, dim, 1, copy + i * ld);
    }
  }
  return {copy, ld};
}

/// The address of token t of a head in a tensor with `stride` (batch, head, token).
inline const void* token_ptr(int32_t dtype, const void* base, const int64_t* stride, int64_t batch, int64_t head,
                             int64_t t) {
  const int64_t at = batch * stride[0] + head * stride[1] + t * stride[2];
  return static_cast<const char*>(base) + at * dtype_size(dtype);
}

/// to (n) = |x|^2 of n rows (dim).
inline void squared_norms(Rows x, int64_t n, int64_t dim, float* to) {
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

/// to (n) = |x|^2 of n columns of x (dim, ld); ld is at least n rounded up to whole vectors.
inline void squared_column_norms(const float* x, int64_t ld, int64_t n, int64_t dim, float* to) {
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

/// to (m, ld_to) = from (n, ld_from) transposed, both rounded up to whole vectors; rows of `from` behind n count as 0.
inline void transpose(const float* from, int64_t ld_from, int64_t n, int64_t m, float* to, int64_t ld_to) {
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

/// to (n, dim) = from (n, ld) without its padding.
inline void unpad_rows(const float* from, int64_t ld, int64_t n, int64_t dim, float* to) {
  for (int64_t i = 0; i < n; ++i) memcpy(to + i * dim, from + i * ld, size_t(dim) * 4);
}

}  // namespace
