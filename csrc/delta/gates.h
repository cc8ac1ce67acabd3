/// The gates of a layer of the delta rule, from what its projections left: beta, and the decay of a head or of each
/// channel.
#pragma once
#include "delta/forward.h"
#include "scan/functions.h"

namespace {

/// scale softplus(x), or bound sigmoid(-scale x) with a bound; scale, bound <= 0.
INLINE vec gate_log_decay(vec x, float scale, float bound) {
  return bound != 0 ? sigmoid(x * -scale) * bound : softplus(x) * scale;
}

/// s.beta (padded) = sigmoid of the call's; s.head, or s.channel.a and s.channel.total: the decays of n tokens of one head.
/// Uses s.key_in.
void load_gates(const DeltaCall& c, const DeltaLayer& layer, const Place& at, int64_t t, int64_t n, int64_t padded,
                Space& s) {
  const float *beta = at.beta(t), *decay = at.log_decay(t);
  for (int64_t i = 0; i < padded; ++i) s.beta[i] = i < n ? beta[i * c.beta_stride[2]] : 0;
  for (int64_t i = 0; i < padded; i += VL) store(s.beta + i, sigmoid(load(s.beta + i)));
  for (int64_t i = n; i < padded; ++i) s.beta[i] = 0;
  const float scale = layer.decay_scale[at.p.head];
  if (c.channels) {
    const float* const bias = layer.decay_bias + at.p.head * c.dim;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t d = 0; d < c.dim; d += VL) {
        const vec x = load(decay + i * c.decay_stride[2] + d) + load(bias + d);
        store(s.key_in + i * s.ld_key + d, gate_log_decay(x, scale, layer.decay_bound));
      }
    }
    s.channel = channel_decay_space(padded, s.full, s.ld_key, s.channel.a);
    load_channel_decay(s.channel, s.key_in, s.ld_key, c.dim, n, nullptr);
  } else {
    float log_decay[CHUNK];
    const float bias = layer.decay_bias[at.p.head];
    for (int64_t i = 0; i < padded; ++i) log_decay[i] = i < n ? decay[i * c.decay_stride[2]] : 0;
    for (int64_t i = 0; i < padded; i += VL) {
      store(log_decay + i, gate_log_decay(load(log_decay + i) + bias, scale, layer.decay_bound));
    }
    load_head_decay(log_decay, 1, n, padded, nullptr, s.head);
  }
}

/// beta (B, H), log_decay (B, H) or (B, H, D) of one token.
void step_gates(const DeltaLayerStep& s, float* beta, float* log_decay) {
  const int64_t shared = s.heads / s.key_heads, count = s.batch * s.heads, n = s.channels ? s.dim : 1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t batch = i / s.heads, h = i % s.heads, key = h / shared, rest = h % shared;
    beta[i] = s.b[batch * s.b_stride[0] + key * s.b_stride[1] + rest * s.b_stride[2]];
    const float* const a = s.a + batch * s.a_stride[0] + key * s.a_stride[1] + rest * s.a_stride[2];
    const float scale = -__builtin_expf(s.A_log[h]);
    for (int64_t d = 0; d < n; d += VL) {
      const vec x = load_some(a + d, n - d) + load_some(s.dt_bias + h * n + d, n - d);
      store_some(log_decay + i * n + d, gate_log_decay(x, scale, s.decay_bound), n - d);
    }
  }
  for (int64_t i = 0; i < count; i += VL) {
    store_some(beta + i, sigmoid(load_some(beta + i, count - i)), count - i);
  }
}

}  // namespace
