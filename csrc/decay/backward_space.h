/// Work space of the backward pass.
#pragma once
#include "decay/forward.h"

namespace {

/// Work space of one thread.
struct BackwardSpace {
  float *query, *key, *value, *grad_out;      // (CHUNK, row_stride(D or M)): copies where rows cannot be used in place
  float *query_decayed, *value_decayed;       // (CHUNK, row_stride(D or M))
  float *key_t, *value_t;                     // (D or M, CHUNK_LD)
  float *scores, *grad_scores, *pairs;        // (CHUNK, CHUNK_LD): P, A, and dO V^T o P
  float *grad_query, *grad_key, *grad_value;  // (CHUNK, row_stride(D or M))
  float* states_t;                            // (chunks of a segment, M, row_stride(D)): S^T before each chunk
  float *grad_state, *grad_state_t;           // (D, row_stride(M)), (M, row_stride(D))
  ChannelSpace channel;
  float *grad_pairs, *passing, *kept, *state_dots;  // per channel: three of (CHUNK, row_stride(D)), and (D)
};

/// Work space of one head of a segment.
BackwardSpace backward_space(const DecayCall& c) {
  const int64_t D = row_stride(c.dim), M = row_stride(c.value_dim), tall_D = round_up(c.dim, 16),
                tall_M = round_up(c.value_dim, 16);
  const int64_t chunks = c.segment / CHUNK, states = tall_M * D * (chunks + 1) + tall_D * M;
  float* at = scratch(CHUNK * (5 * D + 4 * M + 3 * CHUNK_LD) + (tall_D + tall_M) * CHUNK_LD + states +
                      (c.per_channel ? channel_space_floats(c) + (3 * CHUNK + 1) * D : 0) + 16);
  BackwardSpace s{};
  s.query = take_floats(at, CHUNK * D), s.key = take_floats(at, CHUNK * D);
  s.value = take_floats(at, CHUNK * M), s.grad_out = take_floats(at, CHUNK * M);
  s.query_decayed = take_floats(at, CHUNK * D), s.value_decayed = take_floats(at, CHUNK * M);
  s.key_t = take_floats(at, tall_D * CHUNK_LD), s.value_t = take_floats(at, tall_M * CHUNK_LD);
  s.scores = take_floats(at, CHUNK * CHUNK_LD), s.grad_scores = take_floats(at, CHUNK * CHUNK_LD);
  s.pairs = take_floats(at, CHUNK * CHUNK_LD);
  s.grad_query = take_floats(at, CHUNK * D), s.grad_key = take_floats(at, CHUNK * D);
  s.grad_value = take_floats(at, CHUNK * M);
  s.states_t = take_floats(at, tall_M * D * chunks);
  s.grad_state = take_floats(at, tall_D * M), s.grad_state_t = take_floats(at, tall_M * D);
  s.channel = channel_space(c, at);
  if (c.per_channel) {
    s.grad_pairs = take_floats(at, CHUNK * D), s.passing = take_floats(at, CHUNK * D), s.kept = take_floats(at, CHUNK * D);
    s.state_dots = take_floats(at, D);
  }
  return s;
}

/// to (n, dim) = from, or += from.
void put_rows(const float* from, int64_t ld, int64_t n, int64_t dim, float* to, bool add) {
  if (!add) return unpad_rows(from, ld, n, dim, to);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = 0; d < dim; ++d) to[i * dim + d] += from[i * ld + d];
  }
}

}  // namespace
