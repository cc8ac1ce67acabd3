/// What a caller of the selective scan and of the causal convolution hands over. The fields are mirrored, in this order, by
/// src/linattn/engines/native/selective_scan.py and causal_conv1d.py.
#pragma once
#include <stdint.h>

#include "core/dispatch.h"

/// A tensor in the caller's memory, of any strides (in elements). Tokens are (batch, channel, token); B and C of the scan
/// are (batch, group, state, token). `at` may be null where the tensor is optional.
struct Strided {
  void* at;
  int64_t stride[4];
  int64_t dtype;  // Dtype
};

/// Shapes: b batch, c channels, g groups of channels that share B and C, n states, t tokens.
///   dt = softplus(delta + bias) or delta + bias;   h <- exp(dt A) h + dt B u;   out = (sum_n C h + D u) silu(z)
struct ScanCall {
  int64_t batch, channels, groups, states, tokens, threads;
  int64_t softplus;
  int64_t parts;  // backward: ranges of a group's channels, which threads take
  Strided u, delta, z, B, C, out;
  const float *A, *D, *bias;  // (c, n), (c), (c); D and bias may be null
  const float* state;         // (b, c, n); null: zeros
  float* state_new;           // (b, c, n); may be `state` itself in scan_step
  float* checkpoints;         // (b, ceil(t / SCAN_SEGMENT), n, c): the state where a segment starts; null: not kept
  Strided grad_out;
  const float* grad_state_new;         // (b, c, n); null: zeros
  Strided grad_u, grad_delta, grad_z;  // as u, delta, z
  float *grad_A, *grad_D, *grad_bias;  // (b, c, n), (b, c), (b, c): sums over the tokens of one batch entry
  float *grad_B, *grad_C;              // (parts, b, g, t, n): sums over the channels of one part
  float* grad_state;                   // (b, c, n)
};

/// Shapes: b batch, c channels, t tokens, w width; s sequences end to end in each batch entry.
///   out_t = act(bias + sum_i weight_i x_(t - w + 1 + i)), where the state stands before the first token of a sequence
struct ConvCall {
  int64_t batch, channels, tokens, width, sequences, threads;
  int64_t silu;
  const int64_t* bounds;  // (s + 1): where sequences start and end
  Strided x, out;
  const float *weight, *bias;  // (c, w), (c) or null
  Strided state, state_new;    // (b s, c, w - 1) with strides; state may be null: zeros
  Strided grad_out, grad_x;
  Strided grad_state_new, grad_state;  // the first may be null: zeros
  float *grad_weight, *grad_bias;      // (b, c, w), (b, c)
};

constexpr int64_t SCAN_SEGMENT = 64;  // tokens in a block of work, and between two checkpoints
constexpr int64_t MOST_WIDTH = 8;     // of a convolution

/// What one instruction set offers: the channels [begin, end) of one batch entry, which lie in one group for the scan.
struct ScanKernels {
  void (*scan)(const ScanCall&, int64_t batch, int64_t begin, int64_t end);
  void (*scan_backward)(const ScanCall&, int64_t batch, int64_t begin, int64_t end, int64_t part);
  void (*scan_step)(const ScanCall&, int64_t batch, int64_t begin, int64_t end);
  void (*conv)(const ConvCall&, int64_t batch, int64_t begin, int64_t end);
  void (*conv_backward)(const ConvCall&, int64_t batch, int64_t begin, int64_t end);
};

DECLARE_KERNELS(ScanKernels, scan)
