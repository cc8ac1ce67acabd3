/// The call structure of linear attention. engines/native/ffi.py mirrors the fields in this order.
#pragma once
#include "core/dispatch.h"

enum FeatureMap : int32_t { MAP_EXP, MAP_TRIG, MAP_IDENTITY, MAP_ELU, MAP_RELU, MAP_QUADRATIC };

/// One call. Shapes: B batch, H kv heads, Hq query heads, L queries, T keys, D dim, M value dim, r features.
/// query, key and value have strides (in elements) over batch, head and token; everything else is contiguous.
struct LinearCall {
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim, features;
  int64_t threads;
  int64_t segment;  // tokens between two checkpoints: a multiple of BLOCK (key_block.h)
  int32_t feature_map, dtype;
  int32_t scaled;  // keys carry log-weights (by the map, decay or log_weight), so the state needs a log2_scale
  int32_t reserved;
  double norm_coef, norm_const;               // EXP, TRIG: log2-weight of a key = norm_coef |x|^2 + norm_const
  float input_scale;                          // multiplies x (maps without projection)
  float quadratic_low[2], quadratic_high[2];  // QUADRATIC: coefficients of 1, x; of x_i^2, x_i x_j
  float reserved2;
  const float* projection;       // (r or frequencies, row_stride(D)): EXP in units of log2
  const float* projection_t;     // (D, feature_stride(r or frequencies)), padded with 0
  const float* projection_bias;  // (feature_stride(r)): EXP, padded with -1e30; or null
  const void *query, *key, *value;
  int64_t query_stride[3], key_stride[3], value_stride[3];
  const uint8_t* mask;                   // (B, T), 1 = visible
  const double *log_decay, *log_weight;  // (B, H, T), natural logarithms
  const float *S, *Z, *log_scale;        // incoming state: (B, H, r, M), (B, H, r), (B, H) natural; null: empty
  const int64_t *tokens, *guarded;       // (B, H): visible keys so far, outputs whose denominator was too small; null: 0
  float *S_new, *Z_new, *log_scale_new;  // outgoing state, or null
  int64_t *tokens_new, *guarded_new;
  float* out;          // (B, Hq, L, M)
  float* checkpoints;  // (B, H, ceil(T / segment), r (M + 1) + 2): the state before each segment, for the backward pass
  // Backward: all float32.
  const float *grad_out, *grad_S_new, *grad_Z_new;
  float *grad_query, *grad_key, *grad_value, *grad_S, *grad_Z;
  float* grad_log_weight;  // (B, H, T)
};

/// Keys that a kv head has seen before the call.
inline int64_t tokens_before(const LinearCall& c, int64_t head) { return c.tokens ? c.tokens[head] : 0; }

/// Which gradients a causal backward kernel computes: of queries; of keys, values and the state.
enum GradTargets : int32_t { GRAD_QUERIES = 1, GRAD_KEYS = 2 };

/// The work this thread is likely to take next; its first rows are prefetched at the end of the current work.
struct PrefetchHint {
  int64_t head = 0;   // kv head
  int64_t token = 0;  // key, or row of queries counted over the query heads of `head`
  bool keys = false, queries = false;
};

/// The kernels of one instruction set. Each works on one kv head; [begin, end) are tokens, or rows of queries counted over
/// the head's group. `state` and `grad_state` are views into work space (linear_state.h, backward.h).
struct LinearKernels {
  int64_t (*state_size)(const LinearCall&);
  void (*load_state)(const LinearCall&, int64_t head, float* state);
  int32_t (*store_state)(const LinearCall&, int64_t head, const float* state);
  void (*clear_state)(const LinearCall&, float* state);
  void (*merge_states)(const LinearCall&, float* into, const float* later, double log2_decay);
  int32_t (*update_state)(const LinearCall&, int64_t head, int64_t begin, int64_t end, float* state, PrefetchHint);
  int32_t (*read_state)(const LinearCall&, int64_t head, int64_t begin, int64_t end, int64_t* guarded, PrefetchHint);
  int32_t (*causal_forward)(const LinearCall&, int64_t head, int64_t begin, int64_t end, float* state, int64_t* guarded,
                            int64_t seen, PrefetchHint);
  int32_t (*decode)(const LinearCall&, int64_t head, int64_t count);  // `count` heads of one batch entry
  void (*update_state_backward)(const LinearCall&, int64_t head, int64_t begin, int64_t end);
  void (*read_state_backward)(const LinearCall&, int64_t head, int64_t begin, int64_t end, float* grad_state);
  void (*causal_backward)(const LinearCall&, int64_t head, int64_t begin, int64_t end, int32_t targets, float* grad_state);
  void (*load_grad_state)(const LinearCall&, int64_t head, float* grad_state);
  void (*store_grad_state)(const LinearCall&, int64_t head, const float* grad_state);
};

DECLARE_KERNELS(LinearKernels, linear)
