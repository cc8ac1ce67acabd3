// What a caller hands over. The fields are mirrored, in this order, by src/linattn/engines/native/library.py.
#pragma once
#include <stdint.h>

#include "nearfar_call.h"

// Rises with every change of an entry point or of what one is handed; library.py must expect the same number.
constexpr int64_t INTERFACE = 5;

enum Map : int32_t { MAP_EXP, MAP_TRIG, MAP_IDENTITY, MAP_ELU, MAP_RELU, MAP_QUADRATIC };
enum Dtype : int32_t { FLOAT32, FLOAT16, BFLOAT16 };
enum Flag : int32_t { OK = 0, NOT_FINITE = 1, NO_MEMORY = 2 };

// Shapes: B batch, H kv heads, Hq query heads, L queries, T keys, D dim, M value dim, r features.
// Tokens have strides (in elements) over batch, head and token; everything else is contiguous.
struct Call {
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim, features;
  int64_t threads, segment;  // segment: a multiple of BLOCK (keys.h)
  int32_t map, dtype;
  int32_t scaled;  // keys carry log-weights: by the map, by decay or by log_weight
  int32_t pad;
  double square, constant;  // EXP, TRIG: log2-weight of a key = square |x|^2 + constant
  float root;               // multiplies x (maps without projection)
  float low[2], high[2];    // QUADRATIC: factors of 1, x; of x_i^2, x_i x_j
  float pad2;
  const float* weight;       // (r or frequencies, ld(D)): EXP in units of log2
  const float* weight_t;     // (D, ld(r or frequencies)), padded with 0
  const float* bias;         // (ld): EXP, padded with -1e30
  const void *query, *key, *value;
  int64_t query_stride[3], key_stride[3], value_stride[3];
  const uint8_t* mask;                     // (B, T), 1 = visible
  const double *log_decay, *log_weight;    // (B, H, T), natural
  const float *S, *Z, *scale;              // incoming sums: (B, H, r, M), (B, H, r), (B, H); null: no token was seen
  const int64_t *tokens, *guarded;         // (B, H); null counts as 0
  float *S_new, *Z_new, *scale_new;    // null: nobody wants them
  int64_t *tokens_new, *guarded_new;
  float* out;    // (B, Hq, L, M)
  float* marks;  // (B, H, ceil(T / segment), r (M + 1) + 1): the sums where a segment starts, for the backward pass
  // Backward: all float32.
  const float *grad_out, *grad_S_new, *grad_Z_new;
  float *grad_query, *grad_key, *grad_value, *grad_S, *grad_Z;
  float* grad_log;  // (B, H, T): of each key's log-weight
};

// What a thread will probably work on after a piece: its memory is asked for at the end of that.
struct Soon {
  int64_t head = 0, token = 0;  // of a kv head; queries are counted head by head
  bool keys = false, queries = false;
};

// What one instruction set offers: pieces of work on one kv head. `begin`, `end` are tokens.
// Sums in work space are S (r, wide(M)), Z (wide(r)) and their log2-scale; see sums.h.
struct Pieces {
  const char* name;
  int64_t (*sums_size)(const Call&);
  void (*load_sums)(const Call&, int64_t head, float* sums);
  int32_t (*store_sums)(const Call&, int64_t head, const float* sums);
  void (*clear_sums)(const Call&, float* sums);
  void (*merge_sums)(const Call&, float* into, const float* later, double log2_decay);
  int32_t (*absorb)(const Call&, int64_t head, int64_t begin, int64_t end, float* sums, Soon);
  int32_t (*read)(const Call&, int64_t head, int64_t begin, int64_t end, int64_t* guarded, Soon);
  int32_t (*causal)(const Call&, int64_t head, int64_t begin, int64_t end, float* sums, int64_t* guarded, int64_t seen,
                    Soon);
  int32_t (*step)(const Call&, int64_t head, int64_t count);  // heads of one batch entry
  void (*absorb_backward)(const Call&, int64_t head, int64_t begin, int64_t end);
  void (*read_backward)(const Call&, int64_t head, int64_t begin, int64_t end, float* grad_sums);
  void (*causal_backward)(const Call&, int64_t head, int64_t begin, int64_t end, int32_t parts, float* grad_sums);
  void (*load_grad)(const Call&, int64_t head, float* grad_sums);
  void (*store_grad)(const Call&, int64_t head, const float* grad_sums);
  NearFarPieces near_far;
};

extern "C" {
const Pieces* linattn_portable();
const Pieces* linattn_avx2();
const Pieces* linattn_avx512();
}

// Work space of the calling thread, 64-byte aligned, kept from call to call.
float* scratch(int64_t floats);
