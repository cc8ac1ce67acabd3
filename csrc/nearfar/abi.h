/// The call structures of near/far attention. engines/native/ffi.py mirrors the fields in this order.
#pragma once
#include "core/dispatch.h"

/// The far tokens of the heads with recall. A token's cell is its position plus `shift`; blocks of `unit` cells have
/// bounds. nearfar/far_cache.py describes the numbers. E, B and H are as below, R is the number of kv heads with recall.
struct FarCacheCall {
  int64_t heads, unit, bits, shift;
  int64_t capacity;          // cells that `entries` and `bounds` have room for
  int64_t cells, cells_new;  // before and after the call
  int64_t position;          // coordinate of the keys that is told from the cell, or -1
  float position_unit;       // what a cell counts there
  int32_t reserved;
  const int64_t *recall, *row;  // (H): blocks that a kv head recalls, and its index among those with recall
  void *entries, *bounds;  // (B, R, capacity, E), (B, R, capacity / unit, width); new tokens are written to their cells
  const int64_t* slot;     // (B, R, cells): the slot that a token was merged into
  const float* log_share;  // (B, R, cells): log of its share of that slot, -inf for an empty cell
  int64_t* slot_new;       // (B, R, cells_new); null in a decoding step, which changes nothing
  float* log_share_new;
};

/// A prefill or one decoding step. Shapes: B batch, H kv heads, Hq query heads, G query heads of one kv head, L new tokens,
/// D dim, M value dim, E = D + M: a token's scaled key beside its value. nearfar/state.py describes the parts of a state.
struct NearFarCall {
  int64_t batch, heads, kv_heads, tokens, dim, value_dim;
  int64_t window, sinks, block, stride, threads;
  int64_t near_tokens, near_tokens_new;  // length of the near field before and after
  int64_t slots, slots_new;              // of all heads together, empty ones included
  int32_t dtype;
  float sqrt_scale;  // square root of the softmax scale: multiplies queries and keys
  float alpha;
  float logit_cap;                  // of the scores; 0 for none
  int64_t step;                     // decode: tokens since `seen`
  int64_t reach;                    // distances with a bias of their own; no slot is nearer
  int64_t entry_dtype;              // of the state's entries: FLOAT32, FLOAT16 or CODES, to which tokens are rounded
  const float* band;                // (Hq, reach): biases as in scores.h, or null
  const void *query, *key, *value;  // query: null if only the state is wanted
  int64_t query_stride[3], key_stride[3], value_stride[3];
  const uint8_t* mask;                                   // (B, L), 1 = visible
  const int64_t *seen, *counts, *merged, *entered;       // (B): tokens before, visible new ones, end of the merged keys,
                                                         // start of the last block that was entered
  const int64_t *budgets, *first_slot, *first_slot_new;  // (H): maximum of slots, and the index of a head's first slot
  const void* sink;                                      // (B, H, sinks, E)
  const void* near;                                      // (B, H, near_tokens, E)
  int64_t near_stride[2];
  const void* slot;                       // (B, slots, E)
  const float* bias;                      // (B, slots)
  const float *received, *near_received;  // (B, slots, 2), (B, H, window, 2): attention, and from how many queries
  const float *moments, *query_samples;   // (B, H, 2, D + 1), (B, H, G, block / stride, D + 1)
  void* sink_new;
  void* near_new;
  int64_t near_new_stride[2];
  void* slot_new;
  float *bias_new, *received_new, *near_received_new, *moments_new, *query_samples_new;
  float* out;               // (B, Hq, L, M), or null
  const FarCacheCall* far;  // null if no head has recall
  float* merges;            // (B, H, merge_blocks, 2 merge_rows + D): what the merges decided, for backward; or null
  int64_t merge_blocks, merge_rows;  // blocks that new tokens may touch; slots that a merge may see, of any head
};

/// The gradients of a prefill, all float32 and contiguous. Those of its results are null where they are 0; those of its
/// inputs start as 0, and rows of hidden tokens and of slots that are empty are not written.
struct NearFarGrads {
  const NearFarCall* call;  // with what prefill got, and with its `merges`
  const float *out, *sink_new, *near_new, *slot_new, *bias_new;
  float *query, *key, *value;        // (B, Hq, L, D) or null, (B, H, L, D), (B, H, L, M)
  float *sink, *near, *slot, *bias;  // of the incoming state
  float* band;                       // (B, Hq, reach), or null
};

/// Merges `slots` slots into `size`, independently for each of `problems` heads.
struct MergeCall {
  int64_t problems, slots, size, dim, value_dim, threads;
  float alpha;
  float logit_cap;               // of the scores; 0 for none
  const float *slot, *bias;      // (problems, slots, E), (problems, slots); bias -inf for an empty slot
  const float* rate;             // (problems, slots): attention received per query, or null
  const float *anchor, *metric;  // (problems, D): mean and variance of the queries
  float *slot_new, *bias_new;    // (problems, size, E), (problems, size)
  int64_t* place;                // (problems, slots): the new index of each slot
};

/// Attention without a causal mask and without a state. L queries see S keys; other shapes as above.
struct BidirectionalCall {
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  int64_t same_tokens;    // whether queries and keys are the same tokens, with `window` exact keys around each block
  int64_t window, block;  // used if they are
  int64_t threads;
  int32_t dtype;
  float sqrt_scale;  // square root of the softmax scale: multiplies queries and keys
  float alpha;       // of the merging rule
  float logit_cap;   // of the scores; 0 for none
  const void *query, *key, *value;
  int64_t query_stride[3], key_stride[3], value_stride[3];
  const int64_t* sizes;  // (H): slots for the keys of a kv head
  const uint8_t* mask;   // (B, S), 1 = visible; null for all
  float* out;            // (B, Hq, L, M)
};

/// What the tasks of such a call share (bidirectional_shape.h).
struct BidirectionalSpace {
  float* at;                // (B, H, floats)
  int64_t floats;           // of one kv head
  int64_t blocks_per_task;  // blocks of queries that one task attends for
};

/// Its stages, for one task of a kv head each; a stage needs the results of all tasks of the one before.
struct BidirectionalKernels {
  int32_t (*read_queries)(const BidirectionalCall&, const BidirectionalSpace&, int64_t head);
  int32_t (*merge_part)(const BidirectionalCall&, const BidirectionalSpace&, int64_t head, int64_t part);
  int32_t (*merge_keys)(const BidirectionalCall&, const BidirectionalSpace&, int64_t head);
  int32_t (*attend)(const BidirectionalCall&, const BidirectionalSpace&, int64_t head, int64_t task);
};

/// The kernels of one instruction set, each for one kv head or one merge problem. They return flags (core/abi.h).
struct NearFarKernels {
  int32_t (*prefill)(const NearFarCall&, int64_t head);
  int32_t (*decode)(const NearFarCall&, int64_t head);
  int32_t (*merge)(const MergeCall&, int64_t problem);
  int32_t (*backward)(const NearFarGrads&, int64_t head);
  BidirectionalKernels bidirectional;
};

DECLARE_KERNELS(NearFarKernels, nearfar)
