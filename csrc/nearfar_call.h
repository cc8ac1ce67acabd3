// What a caller of near/far attention hands over. The fields are mirrored, in this order, by
// src/linattn/engines/native/library.py.
#pragma once
#include <stdint.h>

// Shapes: B batch, H kv heads, Hq query heads, G of them for a kv head, L new tokens, D dim, M value dim, E = D + M: a
// token's scaled key beside its value. nearfar/state.py says what the parts of a memory are.
struct NearFarCall {
  int64_t batch, heads, kv_heads, tokens, dim, value_dim;
  int64_t window, sinks, block, stride, threads;
  int64_t held, held_new;    // near tokens before and after
  int64_t slots, slots_new;  // of all heads together, empty ones included
  int32_t dtype;
  float root, alpha;  // root: of the scale, multiplies queries and keys
  int32_t pad;
  int64_t steps;                    // single tokens after `seen`, of a step
  const void *query, *key, *value;  // query: null if no token asks
  int64_t query_stride[3], key_stride[3], value_stride[3];
  const uint8_t* mask;                                // (B, L), 1 = visible
  const int64_t *seen, *counts, *merged;              // (B): tokens before, visible new ones, end of the slots
  const int64_t *budgets, *first_slot, *first_slot_new;  // (H): most slots, and where a head's begin
  const float* sink;   // (B, H, sinks, E)
  const float* near;   // (B, H, held, E)
  int64_t near_stride[2];
  const float *slot, *bias;         // (B, slots, E), (B, slots)
  const float *moments, *queries;   // (B, H, D + 1, D + 1), (B, H, G, block / stride, D + 1)
  float* sink_new;
  float* near_new;
  int64_t near_new_stride[2];
  float *slot_new, *bias_new, *moments_new, *queries_new;
  float* out;  // (B, Hq, L, M), or null
};

// n slots into `size`, for each of `problems` heads.
struct MergeCall {
  int64_t problems, slots, size, dim, value_dim, threads;
  float alpha;
  int32_t pad;
  const float *slot, *bias;       // (problems, n, E), (problems, n); -inf for an empty slot
  const float *anchor, *metric;   // (problems, D), (problems, D, D)
  float *slot_new, *bias_new;     // (problems, size, E), (problems, size)
  int64_t* place;                 // (problems, n): where each went
};

// What one instruction set offers: pieces of work on one kv head, or one problem. Each returns flags of call.h.
struct NearFarPieces {
  int32_t (*walk)(const NearFarCall&, int64_t head);
  int32_t (*step)(const NearFarCall&, int64_t head);
  int32_t (*merge)(const MergeCall&, int64_t problem);
};
