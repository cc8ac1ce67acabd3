/// A linear layer for a few rows: bound by the time to read the weights, which are streamed once, ROWS rows side by side.
#pragma once
#include "core/load_rows.h"
#include "mixer/abi.h"

namespace {

constexpr int ROWS = 4;  // of the weights at a time; asking for them ahead of their use made it slower

struct Float32Weights {
  typedef float Type;
  INLINE static vec wide(const float* p) { return load(p); }
  INLINE static float wide_one(float x) { return x; }
};

struct BFloat16Weights {
  typedef uint16_t Type;
  /// VL weights as float32.
  INLINE static vec wide(const uint16_t* p) {
    typedef uint16_t halves __attribute__((vector_size(VL * 2), aligned(2), may_alias));
    typedef uint32_t words __attribute__((vector_size(VL * 4)));
    const words bits = __builtin_convertvector(*reinterpret_cast<const halves*>(p), words) << 16;
    return (vec)bits;
  }
  INLINE static float wide_one(uint16_t x) { return bfloat16_to_float(x); }
};

/// out (R) = R rows of the weights, (inputs) each, times x (inputs).
template <class Weights, int R>
INLINE void dot_rows(const typename Weights::Type* const* rows, int64_t inputs, const float* x, float* out) {
  vec even[R] = {}, odd[R] = {};
  int64_t i = 0;
  for (; i + 2 * VL <= inputs; i += 2 * VL) {
    const vec a = load(x + i), b = load(x + i + VL);
    UNROLL(4)
    for (int r = 0; r < R; ++r) {
      even[r] += Weights::wide(rows[r] + i) * a;
      odd[r] += Weights::wide(rows[r] + i + VL) * b;
    }
  }
  for (int r = 0; r < R; ++r) {
    float rest = sum(even[r] + odd[r]);
    for (int64_t k = i; k < inputs; ++k) rest += Weights::wide_one(rows[r][k]) * x[k];
    out[r] = rest;
  }
}

/// out (rows, [first, last)) = x (rows, inputs) weight^T.
template <class Weights>
void project_rows(const ProjectCall& c, int64_t first, int64_t last) {
  const auto* weight = static_cast<const typename Weights::Type*>(c.weight);
  for (int64_t o = first; o < last;) {
    const int64_t count = last - o >= ROWS ? ROWS : 1;
    const typename Weights::Type* rows[ROWS];
    for (int64_t k = 0; k < count; ++k) rows[k] = weight + (c.order ? c.order[o + k] : o + k) * c.inputs;
    for (int64_t n = 0; n < c.rows; ++n) {
      float* out = c.out + n * c.outputs + o;
      const float* x = c.x + n * c.x_stride;
      if (count == ROWS) {
        dot_rows<Weights, ROWS>(rows, c.inputs, x, out);
      } else {
        dot_rows<Weights, 1>(rows, c.inputs, x, out);
      }
      for (int64_t k = 0; c.bias && k < count; ++k) out[k] += c.bias[o + k];
    }
    o += count;
  }
}

/// Outputs [first, last) of every row.
void project(const ProjectCall& c, int64_t first, int64_t last) {
  if (c.dtype == BFLOAT16) return project_rows<BFloat16Weights>(c, first, last);
  project_rows<Float32Weights>(c, first, last);
}

}  // namespace
