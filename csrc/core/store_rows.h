/// Rows of padded float32 work space written as the caller's dtype.
#pragma once
#include "core/load_rows.h"

namespace {

/// float32 to float16 bits, rounded to nearest even; NaN stays NaN.
INLINE uint16_t narrow_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits & 0x80000000u, size = bits ^ sign;
  const uint32_t odd = (size >> 13) & 1;
  uint32_t normal = (size + 0xfffu + odd - (112u << 23)) >> 13;
  normal = normal > 0x7c00u ? 0x7c00u : normal;
  // Below 2^-14 an addition rounds at the place of float16's last bit.
  float small;
  memcpy(&small, &size, 4);
  small += 0.5f;
  uint32_t low;
  memcpy(&low, &small, 4);
  low -= 0x3f000000u;
  const uint32_t h = size > 0x7f800000u ? 0x7e00u : size < 0x38800000u ? low : size >= 0x47800000u ? 0x7c00u : normal;
  return uint16_t(h | sign >> 16);
}

/// Rounds a row (n) to the precision of float16.
OUTLINE void round_to_half(float* row, int64_t n) {
  for (int64_t d = 0; d < n; ++d) row[d] = half_to_float(narrow_half(row[d]));
}

/// float32 to bfloat16 bits, rounded to nearest even; NaN stays NaN.
INLINE uint16_t narrow_brain(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

/// n rows of `dim` numbers, `ld` apart in `from`, to rows of the dtype `stride` apart.
OUTLINE void store_rows(int32_t dtype, const float* from, int64_t ld, int64_t n, int64_t dim, void* to, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) {
    const float* row = from + i * ld;
    if (dtype == FLOAT32) {
      memcpy(static_cast<float*>(to) + i * stride, row, size_t(dim) * 4);
      continue;
    }
    uint16_t* out = static_cast<uint16_t*>(to) + i * stride;
    if (dtype == FLOAT16) {
      for (int64_t d = 0; d < dim; ++d) out[d] = narrow_half(row[d]);
    } else {
      for (int64_t d = 0; d < dim; ++d) out[d] = narrow_brain(row[d]);
    }
  }
}

}  // namespace
