/// What a caller of the delta rule hands over. The fields are mirrored, in this order, by
/// src/linattn/engines/native/delta_rule.py.
///
/// S <- exp(g_t) S;  S <- S + beta_t k_t (v_t - k_t^T S);  out_t = scale q_t^T S
#pragma once
#include <stdint.h>

#include "core/dispatch.h"

/// Shapes: B batch, H state heads, Hq query heads, Hk key heads, Ho = max(Hq, H) output heads, T tokens, D dim, M value
/// dim, n sequences that lie end to end in each batch entry. Tokens have strides (in elements) over batch, head and token.
struct DeltaCall {
  int64_t batch, query_heads, key_heads, heads, tokens, dim, value_dim, sequences, threads;
  int32_t dtype;      // of query, key, value, out and grad_out
  int32_t channels;   // log_decay is (B, H, T, D) rather than (B, H, T)
  int32_t normalize;  // divide queries and keys by sqrt(sum of squares + 1e-6)
  float scale;
  const void *query, *key, *value;  // (B, Hq, T, D), (B, Hk, T, D), (B, H, T, M)
  int64_t query_stride[3], key_stride[3], value_stride[3];
  const float *beta, *log_decay;  // (B, H, T); log_decay null: nothing decays
  int64_t beta_stride[3], decay_stride[3];
  const uint8_t* mask;    // (B, T), 1 = visible; null: all are
  const int64_t* bounds;  // (n + 1): where sequences begin and end
  const float* state;     // (B n, H, D, M); null: zeros
  float* state_new;       // (B n, H, D, M); may be `state` itself for a single token
  void* out;              // (B, Ho, T, M)
  int64_t out_stride[3];
  float* checkpoints;  // (B, H, checkpoint_count, D, M): states inside sequences, for the backward pass; or null
  // Backward. grad_out has the dtype and shape of out; everything else is contiguous float32.
  const void* grad_out;
  int64_t grad_out_stride[3];
  const float* grad_state_new;  // (B n, H, D, M), or null
  float* grad_query;            // (parts, B, Ho, T, D)
  float* grad_key;              // (parts, B, H, T, D)
  float* grad_value;            // (B, H, T, M)
  float* grad_beta;             // (parts, B, H, T)
  float* grad_log_decay;        // (parts, B, H, T) or (parts, B, H, T, D)
  float* grad_state;            // (B n, H, D, M)
  int64_t parts;                // into how many the value columns are cut; what each part adds must be summed up
};

/// Tokens of a chunk, and between two checkpoints.
constexpr int64_t CHUNK = 64, SEGMENT = 512;

/// Checkpoints of one head in a sequence: the states where its segments start, but for the first.
inline int64_t checkpoint_count(int64_t tokens) { return tokens > SEGMENT ? (tokens - 1) / SEGMENT : 0; }

/// Value columns [begin, end) of one state head in one sequence.
struct DeltaPart {
  int64_t batch, sequence, head, begin, end;
};

/// What a layer computes around the rule (Qwen's gated delta net, KDA): query, key and value of the call are then the
/// inputs of a causal convolution with silu, beta those of a sigmoid, and log_decay x those of decay_scale softplus(x +
/// decay_bias), or of decay_bound sigmoid(-decay_scale (x + decay_bias)) where decay_bound is not 0. out is norm(.)
/// norm_weight act(gate), norm dividing by sqrt(mean of squares + eps) of a head. The call is float32, of one sequence,
/// without a mask or checkpoints; D and M are multiples of 16, Hq = Hk. The histories hold the inputs of the convolution
/// before the first token.
struct DeltaLayer {
  int64_t width, channels;                                // of the convolution, and the distance of the rows of its filters
  const float *query_filter, *key_filter, *value_filter;  // (width, Hk D), (width, Hk D), (width, H M)
  const float *query_history, *key_history, *value_history;  // likewise, for each batch entry width - 1 rows; null: zeros
  const float *decay_scale, *decay_bias;                     // (H); (H), or (H, D) for a decay of each channel
  const float* gate;                                         // (B, H, T, M)
  int64_t gate_stride[3];
  const float* norm_weight;  // (M)
  float eps, decay_bound;
  int32_t sigmoid, pad;  // sigmoid: act is sigmoid, else silu
};

/// One token of such a layer after others: float32, D and M of any size. The convolution's inputs and the state move on.
/// b and a, the inputs of beta and of the decay, have strides over batch, key head and the value heads that share it. The
/// decay is that of DeltaLayer with decay_scale = -exp(A_log).
struct DeltaLayerStep {
  int64_t batch, key_heads, heads, dim, value_dim, threads;
  int64_t width, held;  // of the convolution, and the inputs that conv_state holds for each channel, at least width - 1
  int64_t mixed_stride, gate_stride, b_stride[3], a_stride[3], conv_stride[2];  // conv_stride: over batch and channel
  int32_t channels, sigmoid;  // channels: a is (B, H, D) rather than (B, H). sigmoid: as in DeltaLayer
  float scale, eps, decay_bound;
  int32_t pad;
  const float *query, *key, *value;   // (B, Hk D), (B, Hk D), (B, H M), rows mixed_stride apart
  const float *b, *a, *gate;          // (B, H), (B, H) or (B, H, D), (B, H M)
  const float *filter, *filter_bias;  // (2 Hk D + H M, width), and for each channel one number, or null
  const float *A_log, *dt_bias;       // (H); (H) or (H, D)
  const float* norm_weight;           // (M)
  float *conv_state, *state, *out;    // (B, 2 Hk D + H M, held), (B, H, D, M), (B, H M)
};

constexpr int64_t MOST_SHARED = 4;  // value heads that forward_layer computes together; one with a decay of each channel

/// Tokens [begin, end) of value heads [first, first + count), which share a key head. Where begin > 0, the call's state_new
/// holds their states before it.
struct LayerPart {
  int64_t batch, first, count, begin, end;
};

struct DeltaKernels {
  void (*forward_layer)(const DeltaCall&, const DeltaLayer&, const LayerPart&);
  void (*forward)(const DeltaCall&, const DeltaPart&);
  void (*backward)(const DeltaCall&, const DeltaPart&, int64_t part);
  void (*decode)(const DeltaCall&, int64_t first, int64_t count);
  bool (*step_fits)(const DeltaCall&);  // core/step_checks.h
  int32_t (*step_flags)(const DeltaCall&, int64_t* tokens);
  void (*step_gates)(const DeltaLayerStep&, float* beta, float* log_decay);  // delta/gates.h
};

DECLARE_KERNELS(DeltaKernels, delta)
