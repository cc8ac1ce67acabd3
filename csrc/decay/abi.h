/// What a caller of the decayed sums hands over. The fields are mirrored, in this order, by
/// src/linattn/engines/native/decayed_sums_bindings.py.
#pragma once
#include "core/dispatch.h"

/// S <- exp(g_t) S + k_t v_t^T, out_t = scale q_t^T S, for every state head; g_t is a number or one for each row of S.
/// Shapes: B batch, Hq query heads, Hk key heads, H state (and value) heads, Ho = max(Hq, H) output heads, T tokens,
/// D dim, M value dim, n sequences end to end in each batch entry. Output head o reads query head o Hq / Ho and state head
/// o H / Ho; state head h takes keys of key head h Hk / H.
/// Strides are in elements, over batch, head and token; what has none is contiguous.
struct DecayCall {
  int64_t batch, query_heads, key_heads, heads, tokens, dim, value_dim, sequences, threads;
  int64_t segment;      // tokens from one checkpoint to the next: a multiple of CHUNK (decay/chunk.h)
  int32_t dtype;        // of query, key, value, out and grad_out
  int32_t per_channel;  // log_decay is (B, H, T, D), else (B, H, T)
  float scale;
  int32_t pad;
  const void *query, *key, *value;
  int64_t query_stride[3], key_stride[3], value_stride[3];
  const float* log_decay;  // <= 0; null: no decay
  int64_t decay_stride[3];
  const uint8_t* mask;    // (B, T), 1 = visible; null: all are
  const int64_t* bounds;  // (n + 1): where the sequences begin, and T
  const float* state;     // (B n, H, D, M); null: zeros
  float* state_new;       // (B n, H, D, M)
  void* out;
  int64_t out_stride[3];
  float* checkpoints;  // (B, segments of all n sequences, H, D, M): the state where a segment begins; null: not kept
  /// Forward only, with one decay for each head: values are multiplied by input (B, H, T), and skip (H) times the value of
  /// a token itself is added to its output, before `scale`. Null: neither.
  const float *input, *skip;
  int64_t input_stride[3];
  /// Backward. The gradients are float32 and contiguous; those of log_decay and of the state may be null.
  const void* grad_out;
  int64_t grad_out_stride[3];
  const float* grad_state_new;  // null: zeros
  float *grad_query, *grad_key, *grad_value, *grad_log_decay, *grad_state;
};

/// Tokens [begin, end) of one sequence of one batch entry, for state heads [head, head + heads).
struct DecayPart {
  int64_t batch, first, begin, end, head, heads;  // first: where the sequence begins
  const float* state;                             // (heads, D, M) before `begin`; null: zeros
  float* state_new;                               // (heads, D, M) at `end`; null: not needed
  float* checkpoints;                             // (segments of the sequence, H, D, M); null: not kept
  bool outputs;                                   // else only the state is computed
  const float* grad_state = nullptr;              // (heads, D, M) at `end`, backward; null: zeros
};

/// What Mamba-2 computes around the scan: query, key and value of the call are then the inputs of a causal convolution with
/// silu, input that of softplus(. + step_bias), which times A is the log decay, and with a gate out is the output times
/// silu(gate), whose squares are summed for each token and head. The call is float32, of one sequence, without a mask or
/// checkpoints; D and M are multiples of 16, Hq = Hk. The histories hold the inputs of the convolution before the first
/// token.
struct ScanLayer {
  int64_t width, channels;                                // of the convolution, and the distance of the rows of its filters
  const float *query_filter, *key_filter, *value_filter;  // (width, Hk D), (width, Hk D), (width, H M)
  const float *query_bias, *key_bias, *value_bias;        // (Hk D), (Hk D), (H M); or null
  const float *query_history, *key_history, *value_history;  // as the filters, for each batch entry width - 1 rows; or null
  const float *A, *step_bias;                                // (H)
  const float* gate;                                         // (B, H, T, M), or null
  int64_t gate_stride[3];
  float* squares;  // (B, H, T); null without a gate
};

/// What one instruction set offers. Each kernel returns flags (core/abi.h).
struct DecayKernels {
  void (*forward_layer)(const DecayCall&, const ScanLayer&, const DecayPart&);
  int32_t (*forward)(const DecayCall&, const DecayPart&);
  int32_t (*decode)(const DecayCall&, int64_t batch, int64_t head);
  int32_t (*backward)(const DecayCall&, const DecayPart&);        // of one segment
  int32_t (*backward_state)(const DecayCall&, const DecayPart&);  // the gradient of the state before it alone
  bool (*step_fits)(const DecayCall&);                            // core/step_checks.h
  int32_t (*step_flags)(const DecayCall&, int64_t* tokens);
};

DECLARE_KERNELS(DecayKernels, decay)
