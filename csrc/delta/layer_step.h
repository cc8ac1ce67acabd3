/// One token of a layer of the delta rule between its projections, as one call: convolution, gates, the rule and the gated
/// norm.
#pragma once
#include <cmath>
#include <cstring>
#include <memory>

#include "delta/abi.h"
#include "mixer/abi.h"

namespace {

/// Channels of the queries, keys and values of a layer.
struct StepChannels {
  int64_t part[3];
  explicit StepChannels(const DeltaLayerStep& s) : part{s.key_heads * s.dim, s.key_heads * s.dim, s.heads * s.value_dim} {}
  int64_t all() const { return part[0] + part[1] + part[2]; }
};

/// Numbers between the convolution and the norm, in one piece of memory.
struct StepSpace {
  std::unique_ptr<float[]> held;
  float *rows[3], *beta, *log_decay, *out;  // queries, keys and values (B, .) each; (B, H); (B, H) or (B, H, D); (B, H, M)
  explicit StepSpace(const DeltaLayerStep& s) {
    const StepChannels channels(s);
    const int64_t heads = s.batch * s.heads, decays = heads * (s.channels ? s.dim : 1);
    held.reset(new float[size_t(s.batch * channels.all() + heads * (1 + s.value_dim) + decays)]);
    rows[0] = held.get(), rows[1] = rows[0] + s.batch * channels.part[0], rows[2] = rows[1] + s.batch * channels.part[1];
    beta = rows[2] + s.batch * channels.part[2], log_decay = beta + heads, out = log_decay + decays;
  }
};

/// to (B, channels) <- silu of the convolution of part i, whose first channel is `first`; the inputs held move on.
inline ConvStep step_convolution(const DeltaLayerStep& s, int i, int64_t first, int64_t channels, float* to) {
  const float* const x[3] = {s.query, s.key, s.value};
  ConvStep c;
  std::memset(&c, 0, sizeof c);
  c.batch = s.batch, c.channels = channels, c.width = s.width, c.held = s.held, c.dtype = FLOAT32, c.silu = 1;
  c.x_stride[0] = s.mixed_stride, c.x_stride[1] = 1;
  c.state_stride[0] = s.conv_stride[0], c.state_stride[1] = s.conv_stride[1];
  c.x = x[i], c.state = s.conv_state + first * s.conv_stride[1], c.out = to;
  c.weight = s.filter + first * s.width, c.bias = s.filter_bias ? s.filter_bias + first : nullptr;
  return c;
}

/// The shapes and strides of the rule on the rows of a StepSpace, without its inputs.
inline DeltaCall step_rule(const DeltaLayerStep& s) {
  const StepChannels channels(s);
  DeltaCall c;
  std::memset(&c, 0, sizeof c);
  c.batch = s.batch, c.query_heads = c.key_heads = s.key_heads, c.heads = s.heads, c.tokens = 1;
  c.dim = s.dim, c.value_dim = s.value_dim, c.channels = s.channels, c.normalize = 1, c.scale = s.scale;
  c.query_stride[0] = c.key_stride[0] = channels.part[0], c.value_stride[0] = channels.part[2];
  c.query_stride[1] = c.key_stride[1] = s.dim, c.value_stride[1] = s.value_dim;
  c.beta_stride[0] = s.heads, c.beta_stride[1] = 1;
  c.decay_stride[1] = s.channels ? s.dim : 1, c.decay_stride[0] = s.heads * c.decay_stride[1];
  c.out_stride[0] = s.heads * s.value_dim, c.out_stride[1] = c.out_stride[2] = s.value_dim;
  return c;
}

/// out (B, H M) <- norm(x) norm_weight act(gate), norm over each head of x (B, H, M).
inline NormCall step_norm(const DeltaLayerStep& s, const float* x) {
  NormCall c;
  std::memset(&c, 0, sizeof c);
  c.rows = s.batch * s.heads, c.size = s.value_dim, c.groups = 1, c.threads = 1, c.per_token = s.heads;
  c.x_stride[0] = s.heads * s.value_dim, c.gate_stride[0] = s.gate_stride;
  c.x_stride[1] = c.gate_stride[1] = s.value_dim;
  c.dtype = FLOAT32, c.sigmoid = s.sigmoid, c.eps = s.eps, c.x = x, c.gate = s.gate, c.weight = s.norm_weight,
  c.out = s.out;
  return c;
}

}  // namespace
