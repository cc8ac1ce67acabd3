/// Keys and values as a near/far state stores them: float32, float16, or codes in 8 bits. nearfar/entry_codes.py has the
/// same.
#pragma once
#include "core/store_rows.h"

namespace {

constexpr float CODE_LEVELS = 127;
constexpr int64_t CODE_GROUP = 32;  // numbers that share a step, which their codes are multiplied with
constexpr int64_t STEP_BYTES = 2;   // a bfloat16

/// Bytes of the steps of n numbers.
INLINE int64_t steps_bytes(int64_t n) { return (n + CODE_GROUP - 1) / CODE_GROUP * STEP_BYTES; }

/// The step between two codes of n numbers: a bfloat16. 0 if all are 0, NaN if one of them is not finite.
INLINE float code_step(const float* row, int64_t n) {
  float top = 0, bad = 0;
  for (int64_t d = 0; d < n; ++d) {
    const float size = __builtin_fabsf(row[d]);
    top = top < size ? size : top;
    bad += row[d] * 0.0f;
  }
  const float step = bfloat16_to_float(narrow_brain(top / CODE_LEVELS));
  return bad != 0 ? __builtin_nanf("") : step < 0x1p-126f ? 0 : step;
}

/// The code of x, for a step that is finite.
INLINE float code_of(float x, float step) {
  if (!(step > 0)) return 0;
  const float code = __builtin_rintf(x / step);
  return code > -CODE_LEVELS ? (code < CODE_LEVELS ? code : CODE_LEVELS) : -CODE_LEVELS;
}

/// Rounds a row (n) to what a state of that type stores. Rounding twice changes nothing.
OUTLINE void round_row(int64_t dtype, float* row, int64_t n) {
  if (dtype == FLOAT16) return round_to_half(row, n);
  for (int64_t at = 0; dtype == CODES && at < n; at += CODE_GROUP) {
    const int64_t end = imin(at + CODE_GROUP, n);
    const float step = code_step(row + at, end - at);
    for (int64_t d = at; d < end; ++d) row[d] = code_of(row[d], step) * step;
  }
}

/// A row (n) as codes, and their steps.
OUTLINE void store_codes(const float* row, int64_t n, char* codes, char* steps) {
  for (int64_t at = 0; at < n; at += CODE_GROUP, steps += STEP_BYTES) {
    const int64_t end = imin(at + CODE_GROUP, n);
    const float step = code_step(row + at, end - at);
    const uint16_t bits = narrow_brain(step);
    memcpy(steps, &bits, STEP_BYTES);
    for (int64_t d = at; d < end; ++d) codes[d] = char(int8_t(code_of(row[d], step)));
  }
}

/// The step of number d, of those at an address.
INLINE float load_step(const char* steps, int64_t d) {
  uint16_t bits;
  memcpy(&bits, steps + d / CODE_GROUP * STEP_BYTES, STEP_BYTES);
  return bfloat16_to_float(bits);
}

/// to (row_stride(n)): a row from its codes, padded with 0.
OUTLINE void load_codes(const char* codes, const char* steps, int64_t n, float* to) {
  const int8_t* from = reinterpret_cast<const int8_t*>(codes);
  for (int64_t at = 0; at < n; at += CODE_GROUP) {
    const float step = load_step(steps, at);
    for (int64_t d = at; d < imin(at + CODE_GROUP, n); ++d) to[d] = float(from[d]) * step;
  }
  for (int64_t d = n; d < row_stride(n); ++d) to[d] = 0;
}

}  // namespace
