/// What callers of the small steps around an update rule hand over: gated norms, and one token of the convolution and of
/// Mamba-2's scan. The fields are mirrored, in this order, by src/linattn/engines/native/mixer.py.
#pragma once
#include <stdint.h>

#include "core/dispatch.h"

/// out = weight norm(x act(gate)) with `gate_first`, else weight norm(x) act(gate), where norm divides by
/// sqrt(mean of squares + eps) within each of `groups` equal parts of a row.
struct NormCall {
  int64_t rows, size, groups, threads;
  int64_t per_token;                    // rows of x and gate that share a stride; see row_at in mixer/gated_norm.h
  int64_t x_stride[2], gate_stride[2];  // between tokens, and between the rows of a token
  int32_t dtype, gate_first, sigmoid, wide_weight;  // sigmoid: act is sigmoid, else silu. wide_weight: see gated_norm.h
  float eps;
  int32_t pad;
  const void *x, *gate;  // gate null: none
  const float* weight;   // (size); null: ones
  void* out;             // (rows, size), contiguous
};

/// One token of a depthwise convolution: out = act(bias + sum_i weight_i window_i), with the window of `width` inputs that
/// ends at x; the state (batch, channels, held) moves on by one. All of `dtype` but weight and bias.
struct ConvStep {
  int64_t batch, channels, width, held;
  int64_t x_stride[2], state_stride[2];  // over batch and channel; the inputs held are contiguous
  int32_t dtype, silu;
  const void* x;
  void *state, *out;           // out: (batch, channels), contiguous
  const float *weight, *bias;  // (channels, width), (channels) or null
};

/// One token of Mamba-2: S <- exp(dt A) S + dt x B^T;  out = (S C + D x) act(z), with dt = softplus(dt + bias) if asked
/// for. S is (batch, heads, dim, states), updated in place; x and z (batch, heads, dim), B and C (batch, groups, states).
struct SsdStep {
  int64_t batch, heads, groups, dim, states, threads, softplus;
  int64_t x_stride[2], dt_stride[2], B_stride[2], C_stride[2], z_stride[2];  // over batch, and over heads or groups
  float* state;
  const float *x, *dt, *B, *C, *z;  // z may be null
  const float *A, *D, *bias;        // (heads); D and bias may be null
  float* out;                       // (batch, heads, dim)
};

/// out (rows, outputs) = x (rows, inputs) weight^T + bias. project is for a few rows, project_many for hundreds, in
/// float32.
struct ProjectCall {
  int64_t rows, inputs, outputs, threads, dtype, x_stride;  // dtype: of weight, FLOAT32 or BFLOAT16
  const float* x;
  const void* weight;  // (outputs, inputs)
  const float* bias;   // (outputs) or null
  float* out;
  const int64_t* order;  // (outputs): the row of weight for each output, or null: all in their order
  /// project_many: out = diag(row_scale) x diag(input_scale) weight^T + bias, for a norm before the product; null: ones.
  const float *row_scale, *input_scale;  // (rows), (inputs)
};

constexpr int64_t PROJECT_OUTPUTS = 192;  // of a block of project_many

struct MixerKernels {
  void (*gated_norm)(const NormCall&, int64_t first, int64_t last);  // rows
  void (*conv_step)(const ConvStep&);
  void (*ssd_step)(const SsdStep&, int64_t first, int64_t last);     // heads, counted over the batch
  void (*project)(const ProjectCall&, int64_t first, int64_t last);  // outputs
  void (*project_many)(const ProjectCall&, int64_t begin, int64_t end, int64_t first, int64_t last);  // rows, outputs
};

DECLARE_KERNELS(MixerKernels, mixer)
