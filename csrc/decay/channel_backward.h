/// The backward pass with a decay for each row of S. As in backward.h, with the pairs j < i in
/// core/channel_decay_backward.h; a token's own score does not decay and is kept apart from them, because in the gradient
/// of the decays it would cancel.
#pragma once
#include "core/channel_decay_backward.h"
#include "decay/backward_space.h"

namespace {

/// grad_scores (round_up(n, 16), CHUNK_LD) = scale dO V^T below the diagonal, else 0; own[i]: on it.
void split_diagonal(int64_t n, float scale, float* grad_scores, float* own) {
  for (int64_t i = 0; i < round_up(n, DECAY_BLOCK); ++i) {
    float* row = grad_scores + i * CHUNK_LD;
    own[i] = i < n ? row[i] * scale : 0;
    for (int64_t j = 0; j < CHUNK; ++j) row[j] = i < n && j < i ? row[j] * scale : 0;
  }
}

/// S^T before each chunk of a segment, as rebuild_states.
void rebuild_channel_states(const DecayCall& c, const DecayPart& part, int64_t head, const BackwardSpace& s) {
  const int64_t D = row_stride(c.dim), size = round_up(c.value_dim, 16) * D;
  for (int64_t t = part.begin, i = 0; t + CHUNK < part.end; t += CHUNK, ++i) {
    const Chunk x = chunk_at(c, part.batch, t, part.end);
    const ChannelDecay decay = load_chunk_decay(c, x, head, s.channel.decay);
    copy_chunk(c, x, c.key, c.key_stride, key_head(c, head), true, s.key);
    decay_to_end(decay, s.key, s.channel.key_decayed);
    const Rows v = chunk_rows(c, x, c.value, c.value_stride, head, c.value_dim, true, s.value);
    float* next = s.states_t + (i + 1) * size;
    memcpy(next, s.states_t + i * size, size_t(size) * 4);
    const Operand o{v.at, 1, v.ld, s.channel.key_decayed, D, x.n};
    gemm(c.value_dim, round_up(c.dim, VL), &o, 1, FadeRows{next, D, decay.total, nullptr});
  }
}

/// dS <- diag(e^{G_C}) dS + scale (Q e^G)^T dO for one output head; `factor`: e^{G_C}, or null where it was applied
/// already.
void update_grad_state(const DecayCall& c, int64_t n, const float* query_decayed, Rows g, const float* factor,
                       const BackwardSpace& s) {
  const int64_t D = row_stride(c.dim), M = row_stride(c.value_dim), width = round_up(c.value_dim, VL);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t m = 0; m < width; m += VL) store(s.value_decayed + i * M + m, load(g.at + i * g.ld + m) * c.scale);
  }
  const Operand o{query_decayed, 1, D, s.value_decayed, M, n};
  if (factor) return gemm(c.dim, width, &o, 1, DecayRowsAndAdd{s.grad_state, M, factor});
  gemm(c.dim, width, &o, 1, Store<true>{s.grad_state, M});
}

/// One output head: gradients of its queries, and its share in those of keys, values and decays.
/// s.passing (n, D) += q dq - k dk of what decays inside the chunk or is read from the state.
void channel_output(const DecayCall& c, const Chunk& x, int64_t output, const float* state_t, const ChannelDecay& decay,
                    Rows v, const BackwardSpace& s) {
  const int64_t D = row_stride(c.dim), M = row_stride(c.value_dim), n = x.n, whole_D = round_up(c.dim, VL);
  const int64_t head = query_head(c, output);
  copy_chunk(c, x, c.query, c.query_stride, head, false, s.query);
  const Rows g = chunk_rows(c, x, c.grad_out, c.grad_out_stride, output, c.value_dim, false, s.grad_out);
  channel_weights(decay, s.query, s.key, s.scores, s.channel.work);
  for (int64_t i = 0; i < n * CHUNK_LD; i += VL) store(s.scores + i, load(s.scores + i) * c.scale);
  const Operand outs{s.scores, 1, CHUNK_LD, g.at, g.ld, n, FROM_ROW};
  gemm(n, round_up(c.value_dim, VL), &outs, 1, Store<true>{s.grad_value, M});

  transpose(v.at, v.ld, n, c.value_dim, s.value_t, CHUNK_LD);
  const Operand values{g.at, g.ld, 1, s.value_t, CHUNK_LD, c.value_dim};
  gemm(n, round_up(n, VL), &values, 1, Store<false>{s.grad_scores, CHUNK_LD}, nullptr, true);
  float own[CHUNK];
  split_diagonal(n, c.scale, s.grad_scores, own);
  memset(s.grad_query, 0, size_t(CHUNK * D) * 4);
  const Operand state{g.at, g.ld, 1, state_t, D, c.value_dim};
  gemm(n, whole_D, &state, 1, StoreScaled{s.grad_query, D, c.scale});
  const float* const left[1] = {s.query};
  const float* const grad[1] = {s.grad_scores};
  float* const grad_left[1] = {s.grad_query};
  channel_scores_backward<1>(decay, s.key, left, grad, CHUNK_LD, grad_left, s.grad_pairs, s.channel.work);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = 0; d < whole_D; d += VL) {
      const int64_t at = i * D + d;
      const vec q = load(s.query + at), k = load(s.key + at), dq = load(s.grad_query + at), dk = load(s.grad_pairs + at);
      store(s.passing + at, load(s.passing + at) + (q * dq - k * dk));
      store(s.grad_query + at, dq + k * own[i]);
      store(s.grad_key + at, load(s.grad_key + at) + dk + q * own[i]);
    }
  }
  float* to = c.grad_query + ((x.batch * c.query_heads + head) * c.tokens + x.t) * c.dim;
  put_rows(s.grad_query, D, n, c.dim, to, output * c.query_heads % output_heads(c) != 0);
  decay_from_start(decay, s.query, s.query_decayed);
  update_grad_state(c, n, s.query_decayed, g, output % readers(c) == 0 ? decay.total : nullptr, s);
}

/// Gradients of the log decays: what is read or paired from t on, keys before t that the state keeps, and the state.
/// kept (n, row_stride(D)): k dk of what the state keeps; state (D): e^{G_C} <S, dS> by rows.
void write_channel_grads(const DecayCall& c, const Chunk& x, int64_t head, const float* kept, const float* state,
                         const BackwardSpace& s) {
  const int64_t D = row_stride(c.dim);
  float* to = c.grad_log_decay + ((x.batch * c.heads + head) * c.tokens + x.t) * c.dim;
  for (int64_t d = 0; d < c.dim; d += VL) {
    vec before[CHUNK], sum = load(state + d);
    for (int64_t t = 0; t < x.n; ++t) before[t] = sum, sum += load(kept + t * D + d);
    sum = vec{};
    for (int64_t t = x.n - 1; t >= 0; --t) {
      sum += load(s.passing + t * D + d);
      store_some(to + t * c.dim + d, x.mask && !x.mask[t] ? vec{} : before[t] + sum, c.dim - d);
    }
  }
}

/// state (D) = e^{G_C} <S, dS> by rows, from S^T and dS^T.
void decayed_state_dots(const DecayCall& c, const ChannelDecay& decay, const float* state_t, const float* grad_state_t,
                        float* to) {
  const int64_t D = row_stride(c.dim);
  for (int64_t d = 0; d < c.dim; d += VL) {
    vec total = {};
    for (int64_t m = 0; m < c.value_dim; ++m) total += load(state_t + m * D + d) * load(grad_state_t + m * D + d);
    store(to + d, total * load(decay.total + d));
  }
}

/// One chunk of one state head, as backward_chunk.
void backward_channels(const DecayCall& c, const Chunk& x, int64_t head, const float* state_t, const BackwardSpace& s) {
  const int64_t D = row_stride(c.dim), M = row_stride(c.value_dim), n = x.n, whole_D = round_up(c.dim, VL);
  const ChannelDecay decay = load_chunk_decay(c, x, head, s.channel.decay);
  copy_chunk(c, x, c.key, c.key_stride, key_head(c, head), true, s.key);
  const Rows v = chunk_rows(c, x, c.value, c.value_stride, head, c.value_dim, true, s.value);
  transpose(s.grad_state, M, c.dim, c.value_dim, s.grad_state_t, D);
  decayed_state_dots(c, decay, state_t, s.grad_state_t, s.state_dots);
  memset(s.grad_key, 0, size_t(CHUNK * D) * 4);
  const Operand values{v.at, v.ld, 1, s.grad_state_t, D, c.value_dim};
  gemm(n, whole_D, &values, 1, Store<false>{s.grad_key, D});
  decay_to_end(decay, s.grad_key, s.grad_key);
  for (int64_t i = 0; i < n * D; i += VL) store(s.kept + i, load(s.key + i) * load(s.grad_key + i));
  decay_to_end(decay, s.key, s.channel.key_decayed);
  const Operand keys{s.channel.key_decayed, D, 1, s.grad_state, M, c.dim};
  gemm(n, round_up(c.value_dim, VL), &keys, 1, Store<false>{s.grad_value, M});
  memset(s.passing, 0, size_t(CHUNK * D) * 4);
  for (int64_t output = head * readers(c); output < (head + 1) * readers(c); ++output) {
    channel_output(c, x, output, state_t, decay, v, s);
  }
  const int64_t key = key_head(c, head);
  float* grad_key = c.grad_key + ((x.batch * c.key_heads + key) * c.tokens + x.t) * c.dim;
  put_rows(s.grad_key, D, n, c.dim, grad_key, head * c.key_heads % c.heads != 0);
  unpad_rows(s.grad_value, M, n, c.value_dim, c.grad_value + ((x.batch * c.heads + head) * c.tokens + x.t) * c.value_dim);
  write_channel_grads(c, x, head, s.kept, s.state_dots, s);
}

}  // namespace
