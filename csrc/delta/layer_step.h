/// One token of a gated delta net between its projections, as one call: convolution, gates, the rule and the gated norm.
#pragma once
#include <cmath>
#include <cstring>
#include <memory>

#include "delta/abi.h"
#include "mixer/abi.h"

namespace {

/// log(1 + exp(x)); torch returns x itself above 20, too.
inline float softplus_of(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

/// beta, log_decay (B, H) from what the projections left.
inline void step_gates(const DeltaLayerStep& s, float* beta, float* log_decay) {
  const int64_t shared = s.heads / s.key_heads;
  for (int64_t i = 0; i < s.batch * s.heads; ++i) {
    const int64_t h = i % s.heads;
    const int64_t at = i / s.heads * s.ba_stride[0] + h / shared * s.ba_stride[1] + h % shared * s.ba_stride[2];
    beta[i] = 1 / (1 + std::exp(-s.b[at]));
    log_decay[i] = -std::exp(s.A_log[h]) * softplus_of(s.a[at] + s.dt_bias[h]);
  }
}

/// mixed (B, channels) <- silu of the convolution; the inputs that are held move on.
inline ConvStep step_convolution(const DeltaLayerStep& s, int64_t channels, float* mixed) {
  ConvStep c;
  std::memset(&c, 0, sizeof c);
  c.batch = s.batch, c.channels = channels, c.width = s.width, c.held = s.held, c.dtype = FLOAT32, c.silu = 1;
  c.x_stride[0] = s.mixed_stride, c.x_stride[1] = 1;
  c.state_stride[0] = s.conv_stride[0], c.state_stride[1] = s.conv_stride[1];
  c.x = s.mixed, c.state = s.conv_state, c.out = mixed, c.weight = s.filter, c.bias = s.filter_bias;
  return c;
}

/// The shapes and strides of the rule on mixed (B, channels), without its inputs.
inline DeltaCall step_rule(const DeltaLayerStep& s, int64_t channels) {
  DeltaCall c;
  std::memset(&c, 0, sizeof c);
  c.batch = s.batch, c.query_heads = c.key_heads = s.key_heads, c.heads = s.heads, c.tokens = 1;
  c.dim = s.dim, c.value_dim = s.value_dim, c.normalize = 1, c.scale = s.scale;
  c.query_stride[0] = c.key_stride[0] = c.value_stride[0] = channels;
  c.query_stride[1] = c.key_stride[1] = s.dim, c.value_stride[1] = s.value_dim;
  c.beta_stride[0] = c.decay_stride[0] = s.heads, c.beta_stride[1] = c.decay_stride[1] = 1;
  c.out_stride[0] = s.heads * s.value_dim, c.out_stride[1] = c.out_stride[2] = s.value_dim;
  return c;
}

/// out (B, H M) <- norm(x) norm_weight silu(gate), norm over each head of x (B, H, M).
inline NormCall step_norm(const DeltaLayerStep& s, const float* x) {
  NormCall c;
  std::memset(&c, 0, sizeof c);
  c.rows = s.batch * s.heads, c.size = s.value_dim, c.groups = 1, c.threads = 1, c.per_token = s.heads;
  c.x_stride[0] = s.heads * s.value_dim, c.gate_stride[0] = s.gate_stride;
  c.x_stride[1] = c.gate_stride[1] = s.value_dim;
  c.dtype = FLOAT32, c.eps = s.eps, c.x = x, c.gate = s.gate, c.weight = s.norm_weight, c.out = s.out;
  return c;
}

}  // namespace
