/// One token of the depthwise convolution. The window of a channel is a few numbers that lie together: they are shifted
/// while they are in registers.
#pragma once
#include "core/store_rows.h"
#include "mixer/abi.h"
#include "scan/functions.h"

namespace {

struct Float32Number {
  typedef float Type;
  INLINE static float wide(float x) { return x; }
  INLINE static float narrow(float x) { return x; }
};
struct Float16Number {
  typedef uint16_t Type;
  INLINE static float wide(uint16_t x) { return half_to_float(x); }
  INLINE static uint16_t narrow(float x) { return narrow_half(x); }
};
struct BFloat16Number {
  typedef uint16_t Type;
  INLINE static float wide(uint16_t x) { return bfloat16_to_float(x); }
  INLINE static uint16_t narrow(float x) { return narrow_brain(x); }
};

/// sums (channels): the convolution of one batch entry before its activation.
template <class Number>
INLINE void shift_windows(const ConvStep& c, int64_t batch, float* sums) {
  typedef typename Number::Type Type;
  const Type* x = static_cast<const Type*>(c.x) + batch * c.x_stride[0];
  Type* state = static_cast<Type*>(c.state) + batch * c.state_stride[0];
  for (int64_t i = 0; i < c.channels; ++i) {
    Type* window = state + i * c.state_stride[1];
    const float* weight = c.weight + i * c.width;
    const Type fresh = x[i * c.x_stride[1]];
    float sum = (c.bias ? c.bias[i] : 0) + weight[c.width - 1] * Number::wide(fresh);
    const Type* used = window + c.held - (c.width - 1);
    for (int64_t k = 0; k + 1 < c.width; ++k) sum += weight[k] * Number::wide(used[k]);
    for (int64_t k = 0; k + 1 < c.held; ++k) window[k] = window[k + 1];
    window[c.held - 1] = fresh;
    sums[i] = sum;
  }
}

/// out (B, C) of one token in the number type of the call.
template <class Number>
void step_batch(const ConvStep& c) {
  float* sums = scratch(round_up(c.channels, 16));
  for (int64_t b = 0; b < c.batch; ++b) {
    shift_windows<Number>(c, b, sums);
    auto* out = static_cast<typename Number::Type*>(c.out) + b * c.channels;
    for (int64_t i = 0; c.silu && i < c.channels; i += VL) {
      const vec x = load_some(sums + i, c.channels - i);
      store_some(sums + i, x * sigmoid(x), c.channels - i);
    }
    for (int64_t i = 0; i < c.channels; ++i) out[i] = Number::narrow(sums[i]);
  }
}

/// One token of a depthwise convolution: out (B, C), and the window (B, C, held) moves on by one.
void conv_step(const ConvStep& c) {
  switch (c.dtype) {
    case FLOAT16: return step_batch<Float16Number>(c);
    case BFLOAT16: return step_batch<BFloat16Number>(c);
    default: return step_batch<Float32Number>(c);
  }
}

}  // namespace
