/// The backward pass with decays per head. For a chunk with incoming state S, and dS the gradient of the state it leaves:
///   A = scale (dO V^T o E), P = scale (Q K^T o E), E = exp(G_i - G_j) on and below the diagonal
///   dQ = A K + scale diag(e^G) dO S^T        dK = A^T Q + diag(e^{G_C - G}) V dS^T
///   dV = P^T dO + diag(e^{G_C - G}) K dS     dS <- e^{G_C} dS + scale Q^T diag(e^G) dO
/// The gradient of g_t is the sum over what passes token t: pairs j < t <= i, the state read by i >= t, keys j < t kept by
/// the state, and the state itself. All of them are decayed already, so that nothing cancels.
#pragma once
#include "decay/channel_backward.h"

namespace {

/// C = factor_i A B.
struct StoreRowScaled {
  float* c;
  int64_t ldc;
  const float* factor;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(c + i * ldc + j + w * VL, acc[w] * factor[i]);
  }
};

/// The decays of a chunk, all 1 without any.
void load_decay(const DecayCall& c, const Chunk& x, int64_t head, HeadDecay& d) {
  if (c.log_decay) return load_head_decay(c, x, head, d);
  for (int64_t i = 0; i < CHUNK; ++i) d.step[i] = d.before[i] = d.after[i] = 1;
  d.log_total = 0;
}

/// From scores = Q K^T and grad_scores = dO V^T: P, A, and the pairs dO V^T o P, all 0 above the diagonal.
void decay_score_grads(const float* step, int64_t n, float scale, float* scores, float* grad_scores, float* pairs) {
  decay_rows(step, n, [&](int64_t i, const vec(&factors)[WORDS]) __attribute__((always_inline)) {
    UNROLL(16)
    for (int w = 0; w < WORDS; ++w) {
      const int64_t at = i * CHUNK_LD + w * VL;
      const vec factor = factors[w] * scale, raw = load(grad_scores + at);
      const vec p = factors[w] != 0.0f ? load(scores + at) * factor : vec{};
      store(scores + at, p);
      store(grad_scores + at, factors[w] != 0.0f ? raw * factor : vec{});
      store(pairs + at, factors[w] != 0.0f ? raw * p : vec{});
    }
  });
}

/// passing[t] += sum of pairs (i, j) with j < t <= i.
void add_passing_pairs(const float* pairs, int64_t n, double* passing) {
  vec below[WORDS] = {};  // for each j the sum over rows i >= t
  for (int64_t t = n - 1; t >= 0; --t) {
    vec total = {};
    UNROLL(16)
    for (int w = 0; w < WORDS; ++w) {
      below[w] += load(pairs + t * CHUNK_LD + w * VL);
      total += lanes() + float(w * VL) < splat(float(t)) ? below[w] : vec{};
    }
    passing[t] += double(sum(total));
  }
}

/// to[i] += a_i . b_i for n rows of `dim` numbers, whole vectors of them.
void add_row_dots(Rows a, const float* b, int64_t ldb, int64_t n, int64_t dim, double* to) {
  for (int64_t i = 0; i < n; ++i) {
    vec total = {};
    for (int64_t d = 0; d < dim; d += VL) total += load(a.at + i * a.ld + d) * load(b + i * ldb + d);
    to[i] += double(sum(total));
  }
}

/// What one chunk of one state head has: rows, decays, and the sums that become the gradient of its log decays.
struct HeadChunk {
  Rows k, v;
  HeadDecay decay;
  double read[CHUNK], kept[CHUNK], passing[CHUNK];  // by i >= t, of j < t, of pairs around t
};

/// S^T before each chunk of [begin, end), from the checkpoint `state` (D, M) before the first.
void rebuild_states(const DecayCall& c, const DecayPart& part, int64_t head, const float* state, const BackwardSpace& s) {
  const int64_t D = row_stride(c.dim), M = row_stride(c.value_dim), size = round_up(c.value_dim, 16) * D;
  load_state(c, state, s.grad_state, round_up(c.dim, 16) * M);
  memset(s.states_t, 0, size_t(size) * 4);
  transpose(s.grad_state, M, c.dim, c.value_dim, s.states_t, D);
  if (c.per_channel) return rebuild_channel_states(c, part, head, s);
  HeadChunk h;
  for (int64_t t = part.begin, i = 0; t + CHUNK < part.end; t += CHUNK, ++i) {
    const Chunk x = chunk_at(c, part.batch, t, part.end);
    load_decay(c, x, head, h.decay);
    h.k = chunk_rows(c, x, c.key, c.key_stride, key_head(c, head), c.dim, true, s.key);
    h.v = chunk_rows(c, x, c.value, c.value_stride, head, c.value_dim, true, s.value);
    scale_rows(h.v, h.decay.after, x.n, round_up(c.value_dim, VL), s.value_decayed, M);
    float* next = s.states_t + (i + 1) * size;
    memcpy(next, s.states_t + i * size, size_t(size) * 4);
    const Operand o{s.value_decayed, 1, M, h.k.at, h.k.ld, x.n};
    gemm(c.value_dim, round_up(c.dim, VL), &o, 1, DecayAndAdd{next, D, float(exp(h.decay.log_total))});
  }
}

/// One output head that reads the chunk's state: its query gradient, and its share in those of keys, values and decays.
void backward_output(const DecayCall& c, const Chunk& x, int64_t output, const float* state_t, HeadChunk& h,
                     const BackwardSpace& s) {
  const int64_t D = row_stride(c.dim), M = row_stride(c.value_dim), n = x.n, whole_D = round_up(c.dim, VL),
                whole_M = round_up(c.value_dim, VL);
  const int64_t head = query_head(c, output);
  const Rows q = chunk_rows(c, x, c.query, c.query_stride, head, c.dim, false, s.query);
  const Rows g = chunk_rows(c, x, c.grad_out, c.grad_out_stride, output, c.value_dim, false, s.grad_out);
  chunk_scores(c, n, q, s.key_t, s.scores);
  const Operand values{g.at, g.ld, 1, s.value_t, CHUNK_LD, c.value_dim};
  gemm(n, round_up(n, VL), &values, 1, Store<false>{s.grad_scores, CHUNK_LD}, nullptr, true);
  decay_score_grads(h.decay.step, n, c.scale, s.scores, s.grad_scores, s.pairs);

  float reads[CHUNK];
  for (int64_t i = 0; i < n; ++i) reads[i] = h.decay.before[i] * c.scale;
  const Operand state{g.at, g.ld, 1, state_t, D, c.value_dim};
  gemm(n, whole_D, &state, 1, StoreRowScaled{s.grad_query, D, reads});
  if (c.grad_log_decay) {
    add_passing_pairs(s.pairs, n, h.passing);
    add_row_dots(q, s.grad_query, D, n, whole_D, h.read);
  }
  const Operand keys{s.grad_scores, CHUNK_LD, 1, h.k.at, h.k.ld, n, UP_TO_ROW};
  gemm(n, whole_D, &keys, 1, Store<true>{s.grad_query, D});
  float* to = c.grad_query + ((x.batch * c.query_heads + head) * c.tokens + x.t) * c.dim;
  put_rows(s.grad_query, D, n, c.dim, to, output * c.query_heads % output_heads(c) != 0);

  const Operand queries{s.grad_scores, 1, CHUNK_LD, q.at, q.ld, n, FROM_ROW};
  gemm(n, whole_D, &queries, 1, Store<true>{s.grad_key, D});
  const Operand outs{s.scores, 1, CHUNK_LD, g.at, g.ld, n, FROM_ROW};
  gemm(n, whole_M, &outs, 1, Store<true>{s.grad_value, M});

  scale_rows(q, reads, n, whole_D, s.query_decayed, D);
  const Operand update{s.query_decayed, 1, D, g.at, g.ld, n};
  const bool first = output % readers(c) == 0;
  gemm(c.dim, whole_M, &update, 1, DecayAndAdd{s.grad_state, M, first ? float(exp(h.decay.log_total)) : 1.0f});
}

/// Gradients of one chunk's log decays; `state`: e^{G_C} <S, dS>.
void write_decay_grads(const DecayCall& c, const Chunk& x, int64_t head, const HeadChunk& h, double state) {
  float* to = c.grad_log_decay + (x.batch * c.heads + head) * c.tokens + x.t;
  double kept[CHUNK + 1] = {}, read = 0;
  for (int64_t t = 0; t < x.n; ++t) kept[t + 1] = kept[t] + h.kept[t];
  for (int64_t t = x.n - 1; t >= 0; --t) {
    read += h.read[t];
    to[t] = x.mask && !x.mask[t] ? 0 : float(h.passing[t] + read + kept[t] + state);
  }
}

/// One chunk of one state head. s.grad_state goes from the state after the chunk to the one before it.
void backward_chunk(const DecayCall& c, const Chunk& x, int64_t head, const float* state_t, const BackwardSpace& s) {
  const int64_t D = row_stride(c.dim), M = row_stride(c.value_dim), n = x.n, whole_D = round_up(c.dim, VL),
                whole_M = round_up(c.value_dim, VL);
  HeadChunk h{};
  load_decay(c, x, head, h.decay);
  h.k = chunk_rows(c, x, c.key, c.key_stride, key_head(c, head), c.dim, true, s.key);
  h.v = chunk_rows(c, x, c.value, c.value_stride, head, c.value_dim, true, s.value);
  transpose(h.k.at, h.k.ld, n, c.dim, s.key_t, CHUNK_LD);
  transpose(h.v.at, h.v.ld, n, c.value_dim, s.value_t, CHUNK_LD);
  transpose(s.grad_state, M, c.dim, c.value_dim, s.grad_state_t, D);
  const Operand values{h.v.at, h.v.ld, 1, s.grad_state_t, D, c.value_dim};
  gemm(n, whole_D, &values, 1, StoreRowScaled{s.grad_key, D, h.decay.after});
  const Operand keys{h.k.at, h.k.ld, 1, s.grad_state, M, c.dim};
  gemm(n, whole_M, &keys, 1, StoreRowScaled{s.grad_value, M, h.decay.after});
  double state = 0;
  if (c.grad_log_decay) {
    add_row_dots(h.k, s.grad_key, D, n, whole_D, h.kept);
    double rows[1] = {0};
    for (int64_t m = 0; m < c.value_dim; ++m)
      add_row_dots({state_t + m * D, D}, s.grad_state_t + m * D, D, 1, whole_D, rows);
    state = rows[0] * exp(h.decay.log_total);
  }
  for (int64_t output = head * readers(c); output < (head + 1) * readers(c); ++output) {
    backward_output(c, x, output, state_t, h, s);
  }
  const int64_t key = key_head(c, head);
  float* grad_key = c.grad_key + ((x.batch * c.key_heads + key) * c.tokens + x.t) * c.dim;
  put_rows(s.grad_key, D, n, c.dim, grad_key, head * c.key_heads % c.heads != 0);
  unpad_rows(s.grad_value, M, n, c.value_dim, c.grad_value + ((x.batch * c.heads + head) * c.tokens + x.t) * c.value_dim);
  if (c.grad_log_decay) write_decay_grads(c, x, head, h, state);
}

/// One segment of the heads of one group: part.state is the checkpoint before it, part.grad_state the gradient of the state
/// after it; part.state_new gets the gradient of the state before it, and may be part.grad_state.
int32_t backward(const DecayCall& c, const DecayPart& part) {
  const BackwardSpace s = backward_space(c);
  const int64_t M = row_stride(c.value_dim), size = c.dim * c.value_dim,
                state_t = round_up(c.value_dim, 16) * row_stride(c.dim);
  for (int64_t i = 0; i < part.heads; ++i) {
    rebuild_states(c, part, part.head + i, part.state + i * size, s);
    load_state(c, part.grad_state ? part.grad_state + i * size : nullptr, s.grad_state, round_up(c.dim, 16) * M);
    for (int64_t chunk = (part.end - part.begin - 1) / CHUNK; chunk >= 0; --chunk) {
      const Chunk x = chunk_at(c, part.batch, part.begin + chunk * CHUNK, part.end);
      const auto one_chunk = c.per_channel ? backward_channels : backward_chunk;
      one_chunk(c, x, part.head + i, s.states_t + chunk * state_t, s);
    }
    if (part.state_new) unpad_rows(s.grad_state, M, c.dim, c.value_dim, part.state_new + i * size);
  }
  return OK;
}

/// dS of one chunk of one state head alone.
void backward_state_chunk(const DecayCall& c, const Chunk& x, int64_t head, const BackwardSpace& s) {
  const int64_t D = row_stride(c.dim), M = row_stride(c.value_dim);
  HeadDecay decay;
  ChannelDecay channels{};
  if (c.per_channel) {
    channels = load_chunk_decay(c, x, head, s.channel.decay);
  } else {
    load_decay(c, x, head, decay);
    for (int64_t j = 0; j < x.n; ++j) decay.before[j] *= c.scale;
  }
  for (int64_t output = head * readers(c); output < (head + 1) * readers(c); ++output) {
    const bool first = output % readers(c) == 0;
    const Rows g = chunk_rows(c, x, c.grad_out, c.grad_out_stride, output, c.value_dim, false, s.grad_out);
    if (c.per_channel) {
      copy_chunk(c, x, c.query, c.query_stride, query_head(c, output), false, s.query);
      decay_from_start(channels, s.query, s.query_decayed);
      update_grad_state(c, x.n, s.query_decayed, g, first ? channels.total : nullptr, s);
      continue;
    }
    const Rows q = chunk_rows(c, x, c.query, c.query_stride, query_head(c, output), c.dim, false, s.query);
    scale_rows(q, decay.before, x.n, round_up(c.dim, VL), s.query_decayed, D);
    const Operand o{s.query_decayed, 1, D, g.at, g.ld, x.n};
    const float factor = first ? float(exp(decay.log_total)) : 1.0f;
    gemm(c.dim, round_up(c.value_dim, VL), &o, 1, DecayAndAdd{s.grad_state, M, factor});
  }
}

/// The gradient of the state before a part alone: part.state_new, from part.grad_state after it.
int32_t backward_state(const DecayCall& c, const DecayPart& part) {
  const BackwardSpace s = backward_space(c);
  const int64_t M = row_stride(c.value_dim), size = c.dim * c.value_dim;
  for (int64_t i = 0; i < part.heads; ++i) {
    load_state(c, part.grad_state ? part.grad_state + i * size : nullptr, s.grad_state, round_up(c.dim, 16) * M);
    for (int64_t chunk = (part.end - part.begin - 1) / CHUNK; chunk >= 0; --chunk) {
      backward_state_chunk(c, chunk_at(c, part.batch, part.begin + chunk * CHUNK, part.end), part.head + i, s);
    }
    unpad_rows(s.grad_state, M, c.dim, c.value_dim, part.state_new + i * size);
  }
  return OK;
}

}  // namespace
