/// One token of the selective scan. Lanes are the states of a channel here, as they lie in memory: nothing is transposed.
#pragma once
#include "scan/blocks.h"
#include "scan/functions.h"

namespace {

/// The numbers of channels [c, c + VL) at the first token; lanes from `count` on are 0.
INLINE vec numbers(const Strided& x, int64_t batch, int64_t c, int64_t count) {
  alignas(64) float y[VL] = {};
  widen(x.dtype, x.at, batch * x.stride[0] + c * x.stride[1], x.stride[1], count, y);
  return load(y);
}

/// The new states of one channel, from old (n) to `fresh` (n), and their sum weighted by C, lane by lane.
INLINE vec step_channel(int64_t states, const float* A, const float* B, const float* C, float dt, float du,
                        const float* old, float* fresh) {
  vec sum = {};
  for (int64_t n = 0; n < states; n += VL) {
    const int64_t left = states - n;
    const vec before = old ? load_some(old + n, left) : vec{};
    const vec rate = load_some(A + n, left) * (dt * LOG2_E);
    const vec after = decayed(before, rate) + load_some(B + n, left) * du;
    store_some(fresh + n, after, left);
    sum += after * load_some(C + n, left);
  }
  return sum;
}

/// Output and new state of channels [begin, end) of one batch entry, which lie in one group; c.tokens is 1.
void scan_step(const ScanCall& c, int64_t batch, int64_t begin, int64_t end) {
  const int64_t N = c.states, group = begin / (c.channels / c.groups);
  float *B = scratch(2 * round_up(N, 16)), *C = B + round_up(N, 16);
  widen(c.B.dtype, c.B.at, batch * c.B.stride[0] + group * c.B.stride[1], c.B.stride[2], N, B);
  widen(c.C.dtype, c.C.at, batch * c.C.stride[0] + group * c.C.stride[1], c.C.stride[2], N, C);
  for (int64_t at = begin; at < end; at += VL) {
    const int64_t count = imin(VL, end - at);
    const vec u = numbers(c.u, batch, at, count);
    vec dt = numbers(c.delta, batch, at, count);
    if (c.bias) dt += load_some(c.bias + at, count);
    if (c.softplus) dt = softplus(dt);
    vec sums[VL] = {};
    alignas(64) float steps[VL], inputs[VL];
    store(steps, dt);
    store(inputs, dt * u);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t row = (at + k) * N, state = batch * c.channels * N + row;
      const float* old = c.state ? c.state + state : nullptr;
      sums[k] = step_channel(N, c.A + row, B, C, steps[k], inputs[k], old, c.state_new + state);
    }
    vec y = reduce<false>(sums);
    if (c.D) y += load_some(c.D + at, count) * u;
    if (c.z.at) {
      const vec z = numbers(c.z, batch, at, count);
      y *= z * sigmoid(z);
    }
    alignas(64) float out[VL];
    store(out, y);
    narrow(c.out.dtype, c.out.at, batch * c.out.stride[0] + at * c.out.stride[1], c.out.stride[1], count, out);
  }
}

}  // namespace
