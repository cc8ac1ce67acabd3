/// Gated root-mean-square norms: each row is read and written once.
#pragma once
#include <math.h>

#include "core/store_rows.h"
#include "mixer/abi.h"
#include "scan/functions.h"

namespace {

/// The address of a row: rows are counted over tokens, and within a token over `per_token` rows (heads).
INLINE const void* row_at(const NormCall& c, const void* base, const int64_t* stride, int64_t row) {
  const int64_t at = row / c.per_token * stride[0] + row % c.per_token * stride[1];
  return static_cast<const char*>(base) + at * dtype_size(c.dtype);
}

/// x (n) as float32: in place, or copied to `copy`.
INLINE const float* floats(const NormCall& c, const void* x, float* copy) {
  if (c.dtype == FLOAT32) return static_cast<const float*>(x);
  load_row(c.dtype, x, c.size, 1, copy);
  return copy;
}

/// A number rounded to the call's dtype, as models do between the norm and the weight.
INLINE void round_row(const NormCall& c, float* x) {
  if (c.dtype == FLOAT16) {
    for (int64_t i = 0; i < c.size; ++i) x[i] = half_to_float(narrow_half(x[i]));
  } else if (c.dtype == BFLOAT16) {
    for (int64_t i = 0; i < c.size; ++i) x[i] = bfloat16_to_float(narrow_brain(x[i]));
  }
}

INLINE vec activation(const NormCall& c, vec gate) { return c.sigmoid ? sigmoid(gate) : gate * sigmoid(gate); }

/// y (size) = norm of one row before its weight.
INLINE void normalize_row(const NormCall& c, const float* x, const float* gate, float* y) {
  const int64_t part = c.size / c.groups;
  for (int64_t g = 0; g < c.groups; ++g) {
    const float* from = x + g * part;
    float* to = y + g * part;
    vec squares = {};
    for (int64_t i = 0; i < part; i += VL) {
      vec v = load_some(from + i, part - i);
      if (gate && c.gate_first) v *= activation(c, load_some(gate + g * part + i, part - i));
      squares += v * v;
      store_some(to + i, v, part - i);
    }
    const float factor = 1.0f / sqrtf(sum(squares) / float(part) + c.eps);
    for (int64_t i = 0; i < part; i += VL) store_some(to + i, load_some(to + i, part - i) * factor, part - i);
  }
}

/// Rows [first, last). In half precision the norm is rounded before the weight multiplies it, unless `wide_weight`.
void gated_norm(const NormCall& c, int64_t first, int64_t last) {
  const int64_t ld = row_stride(c.size);
  float *x_copy = scratch(3 * ld + 48), *gate_copy = x_copy + ld, *y = gate_copy + ld;
  for (int64_t row = first; row < last; ++row) {
    const float* x = floats(c, row_at(c, c.x, c.x_stride, row), x_copy);
    const float* gate = c.gate ? floats(c, row_at(c, c.gate, c.gate_stride, row), gate_copy) : nullptr;
    float* const out = c.dtype == FLOAT32 ? static_cast<float*>(c.out) + row * c.size : y;
    normalize_row(c, x, gate, out);
    if (c.dtype != FLOAT32 && !c.wide_weight) round_row(c, out);
    for (int64_t i = 0; i < c.size; i += VL) {
      const int64_t left = c.size - i;
      vec v = load_some(out + i, left);
      if (c.weight) v *= load_some(c.weight + i, left);
      store_some(out + i, v, left);
    }
    if (gate && !c.gate_first) {
      if (c.dtype != FLOAT32 && !c.wide_weight) round_row(c, out);
      for (int64_t i = 0; i < c.size; i += VL) {
        const int64_t left = c.size - i;
        store_some(out + i, load_some(out + i, left) * activation(c, load_some(gate + i, left)), left);
      }
    }
    if (c.dtype != FLOAT32) store_rows(c.dtype, y, ld, 1, c.size, static_cast<uint16_t*>(c.out) + row * c.size, 0);
  }
}

}  // namespace
