/// One token of Mamba-2's scan: each head's state is read once and written once, in place.
#pragma once
#include "core/exp.h"
#include "core/simd.h"
#include "mixer/abi.h"
#include "scan/functions.h"

namespace {

/// VL rows of a head's state (dim, states) at a time, so that their sums are reduced together.
INLINE void step_rows(const SsdStep& s, float* state, int64_t rows, float decay, const float* inputs, const float* B,
                      const float* C, vec (&sums)[VL]) {
  for (int64_t r = 0; r < rows; ++r) {
    float* row = state + r * s.states;
    const vec input = splat(inputs[r]);
    vec sum = {};
    for (int64_t n = 0; n < s.states; n += VL) {
      const int64_t left = s.states - n;
      const vec after = load_some(row + n, left) * decay + input * load_some(B + n, left);
      store_some(row + n, after, left);
      sum += after * load_some(C + n, left);
    }
    sums[r] = sum;
  }
}

/// Heads [first, last), counted over the batch.
void ssd_step(const SsdStep& s, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t b = i / s.heads, h = i % s.heads, group = h * s.groups / s.heads;
    vec dt = splat(s.dt[b * s.dt_stride[0] + h * s.dt_stride[1]] + (s.bias ? s.bias[h] : 0));
    if (s.softplus) dt = softplus(dt);
    const float step = dt[0], decay = exp_decay(step * s.A[h]), skip = s.D ? s.D[h] : 0;
    const float* x = s.x + b * s.x_stride[0] + h * s.x_stride[1];
    const float* z = s.z ? s.z + b * s.z_stride[0] + h * s.z_stride[1] : nullptr;
    const float *B = s.B + b * s.B_stride[0] + group * s.B_stride[1], *C = s.C + b * s.C_stride[0] + group * s.C_stride[1];
    for (int64_t p = 0; p < s.dim; p += VL) {
      const int64_t rows = imin(VL, s.dim - p);
      const vec u = load_some(x + p, rows);
      alignas(64) float inputs[VL];
      store(inputs, u * step);
      vec sums[VL] = {};
      step_rows(s, s.state + (i * s.dim + p) * s.states, rows, decay, inputs, B, C, sums);
      vec y = reduce<false>(sums) + u * skip;
      if (z) {
        const vec gate = load_some(z + p, rows);
        y *= gate * sigmoid(gate);
      }
      store_some(s.out + i * s.dim + p, y, rows);
    }
  }
}

}  // namespace
