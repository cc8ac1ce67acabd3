/// Checks of one token before a state is overwritten: bad input must lose nothing.
#pragma once
#include "core/abi.h"

namespace {

/// Whether no number of x (n), as bits, has all bits of its exponent set.
template <class Bits>
bool all_finite(const Bits* x, int64_t n, Bits exponent) {
  Bits bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= Bits((x[i] & exponent) == exponent);
  return !bad;
}

/// Whether n numbers of a dtype are finite: their exponents are not all ones.
inline bool all_finite(const void* x, int64_t n, int32_t dtype) {
  if (dtype == FLOAT32) return all_finite(static_cast<const uint32_t*>(x), n, uint32_t(0x7f800000));
  return all_finite(static_cast<const uint16_t*>(x), n, uint16_t(dtype == FLOAT16 ? 0x7c00 : 0x7f80));
}

/// Whether n logarithms of decays are 0 or below, and not NaN.
inline bool all_decays(const float* x, int64_t n) {
  uint32_t bad = 0;  // as wide as a float, so that compilers compare whole vectors
  for (int64_t i = 0; i < n; ++i) bad |= uint32_t(!(x[i] <= 0.0f));
  return !bad;
}

/// Whether the rows (batch, heads, n) of one token are finite.
inline bool rows_finite(const void* x, const int64_t* stride, int64_t batch, int64_t heads, int64_t n, int32_t dtype) {
  const int64_t bytes = dtype == FLOAT32 ? 4 : 2;
  for (int64_t i = 0; i < batch * heads; ++i) {
    const int64_t at = i / heads * stride[0] + i % heads * stride[1];
    if (!all_finite(static_cast<const char*>(x) + at * bytes, n, dtype)) return false;
  }
  return true;
}

/// Whether one token of an update rule, without a mask, can be served: all inputs finite, no decay above 1. decays: for
/// each head, 1 or the dim.
template <class Call>
bool step_fits(const Call& c, int64_t decays) {
  for (int64_t i = 0; c.log_decay && i < c.batch * c.heads; ++i) {
    const int64_t at = i / c.heads * c.decay_stride[0] + i % c.heads * c.decay_stride[1];
    if (!all_decays(c.log_decay + at, decays)) return false;
  }
  return rows_finite(c.query, c.query_stride, c.batch, c.query_heads, c.dim, c.dtype) &&
         rows_finite(c.key, c.key_stride, c.batch, c.key_heads, c.dim, c.dtype) &&
         rows_finite(c.value, c.value_stride, c.batch, c.heads, c.value_dim, c.dtype);
}

/// The flags of a served step: whether its output, contiguous, is finite. tokens: (batch, heads) counts, one more each; or
/// null.
template <class Call>
int32_t step_flags(const Call& c, int64_t* tokens) {
  for (int64_t i = 0; tokens && i < c.batch * c.heads; ++i) ++tokens[i];
  const int64_t heads = c.query_heads > c.heads ? c.query_heads : c.heads;
  return all_finite(c.out, c.batch * heads * c.value_dim, c.dtype) ? OK : OVERFLOWED;
}

}  // namespace
