/// The forward pass, chunk by chunk: out = scale (P V + diag(e^G) Q S), S <- e^{G_C} S + K^T diag(e^{G_C - G}) V, with
/// P = Q K^T o exp(G_i - G_j) on and below the diagonal.
#pragma once
#include <math.h>

#include "core/store_rows.h"
#include "decay/channel_forward.h"

namespace {

/// From this position of a sequence on, what rounding takes from the state is kept and added again: the sum of very many
/// equal tokens would drift.
constexpr int64_t COMPENSATE_FROM = 16384;

/// C = scale A B.
struct StoreScaled {
  float* c;
  int64_t ldc;
  float scale;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(c + i * ldc + j + w * VL, acc[w] * scale);
  }
};

/// C = factor C + A B; the product is summed first, as by Store.
struct DecayAndAdd {
  float* c;
  int64_t ldc;
  float factor;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    float* to = c + i * ldc + j;
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(to + w * VL, load(to + w * VL) * factor + acc[w]);
  }
};

/// The same with compensated (Kahan) addition: `lost` is what rounding added too much so far. factor - 1 is
/// `less`, or follows from factors[i].
struct DecayAndAddExactly {
  float *c, *lost;
  int64_t ldc;
  float less;
  const float* factors = nullptr;  // (D), or null
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      const int64_t at = i * ldc + j + w * VL;
      const float change = factors ? factors[i] - 1 : less;
      const vec old = load(c + at), kept = load(lost + at);
      const vec more = (acc[w] + old * change) - (kept + kept * change);
      const vec sum = old + more;
      store(c + at, sum);
      store(lost + at, (sum - old) - more);
    }
  }
};

/// Work space of one thread, and what of it is valid for the current chunk.
struct ForwardSpace {
  float *query, *key, *value;  // (CHUNK, row_stride(D or M)): copies where rows cannot be used in place
  float* key_t;                // (D, CHUNK_LD)
  float *scores, *weights;     // (CHUNK, CHUNK_LD): Q K^T, and with decays
  float* query_decayed;        // (CHUNK, row_stride(D))
  float *value_decayed, *out;  // (CHUNK, row_stride(M))
  float* states;               // (heads, 1 or 2, D, row_stride(M)): S, and what its rounding lost
  int64_t state_floats;        // of one head
  bool compensated;
  ChannelSpace channel;
};

/// Work space of a part, with a state for each of its heads.
ForwardSpace forward_space(const DecayCall& c, const DecayPart& part) {
  ForwardSpace s;
  const int64_t D = row_stride(c.dim), M = row_stride(c.value_dim), tall = round_up(c.dim, 16);
  s.compensated = part.end - part.first > COMPENSATE_FROM;
  s.state_floats = c.dim * M * (s.compensated ? 2 : 1);
  float* at = scratch(CHUNK * (3 * D + 3 * M + 2 * CHUNK_LD) + tall * CHUNK_LD + channel_space_floats(c) +
                      part.heads * round_up(s.state_floats, 16) + 16);
  s.query = take_floats(at, CHUNK * D), s.key = take_floats(at, CHUNK * D), s.value = take_floats(at, CHUNK * M);
  s.key_t = take_floats(at, tall * CHUNK_LD);
  s.scores = take_floats(at, CHUNK * CHUNK_LD), s.weights = take_floats(at, CHUNK * CHUNK_LD);
  s.query_decayed = take_floats(at, CHUNK * D);
  s.value_decayed = take_floats(at, CHUNK * M), s.out = take_floats(at, CHUNK * M);
  s.channel = channel_space(c, at);
  s.states = at;
  s.state_floats = round_up(s.state_floats, 16);
  return s;
}

/// to (D, row_stride(M)), padded with 0 = from (D, M), or 0.
void load_state(const DecayCall& c, const float* from, float* to, int64_t floats) {
  const int64_t M = c.value_dim, ld = row_stride(M);
  memset(to, 0, size_t(floats) * 4);
  for (int64_t d = 0; from && d < c.dim; ++d) memcpy(to + d * ld, from + d * M, size_t(M) * 4);
}

/// scores (n, CHUNK_LD) = Q K^T on and below the diagonal.
void chunk_scores(const DecayCall& c, int64_t n, Rows q, const float* key_t, float* scores) {
  const Operand o{q.at, q.ld, 1, key_t, CHUNK_LD, c.dim};
  gemm(n, round_up(n, VL), &o, 1, Store<false>{scores, CHUNK_LD}, nullptr, true);
}

/// weights = scores o exp(G_i - G_j) input_j for j <= i, 0 above the diagonal, whatever the scores are there; `skip` is
/// added on the diagonal. decay: null without.
void decay_scores(const HeadDecay* decay, float skip, int64_t n, const float* scores, float* weights) {
  const float *step = decay ? decay->step : nullptr, *input = decay ? decay->input : nullptr;
  const auto row = [&](int64_t i, const vec(&factors)[WORDS]) __attribute__((always_inline)) {
    UNROLL(16)
    for (int w = 0; w < WORDS; ++w) {
      const vec x = load(scores + i * CHUNK_LD + w * VL) * factors[w];
      store(weights + i * CHUNK_LD + w * VL, factors[w] != 0.0f ? x : vec{});
    }
    weights[i * CHUNK_LD + i] += skip;
  };
  decay_rows(step, n, row, input);
}

/// S <- e^{G_C} S + K^T diag(e^{G_C - G}) V. decay: null without.
void update_state(const DecayCall& c, const Chunk& x, const HeadDecay* decay, Rows k, Rows v, const ForwardSpace& s,
                  float* S, bool exactly) {
  const int64_t M = row_stride(c.value_dim), width = round_up(c.value_dim, VL);
  if (decay) {
    scale_rows(v, decay->after, x.n, width, s.value_decayed, M);
    v = {s.value_decayed, M};
  }
  const Operand o{k.at, 1, k.ld, v.at, v.ld, x.n};
  if (exactly) {
    const float less = decay ? float(expm1(decay->log_total)) : 0;
    gemm(c.dim, width, &o, 1, DecayAndAddExactly{S, S + c.dim * M, M, less});
  } else if (decay) {
    gemm(c.dim, width, &o, 1, DecayAndAdd{S, M, float(exp(decay->log_total))});
  } else {
    gemm(c.dim, width, &o, 1, Store<true>{S, M});
  }
}

/// Rows of a chunk's output, from padded float32 to the caller's type.
void write_rows(const DecayCall& c, const Chunk& x, int64_t head, const float* from, int64_t ld) {
  void* to = const_cast<void*>(token_ptr(c.dtype, c.out, c.out_stride, x.batch, head, x.t));
  store_rows(c.dtype, from, ld, x.n, c.value_dim, to, c.out_stride[2]);
}

/// out = scale (weights V + Q S) for one output head; Q has its decays already.
void chunk_output(const DecayCall& c, const Chunk& x, int64_t head, Rows q, Rows v, const float* S, const ForwardSpace& s) {
  const int64_t M = row_stride(c.value_dim), width = round_up(c.value_dim, VL);
  const Operand o[2] = {{q.at, q.ld, 1, S, M, c.dim}, {s.weights, CHUNK_LD, 1, v.at, v.ld, x.n, UP_TO_ROW}};
  if (c.dtype == FLOAT32 && width == c.value_dim) {
    float* to = const_cast<float*>(static_cast<const float*>(token_ptr(FLOAT32, c.out, c.out_stride, x.batch, head, x.t)));
    return gemm(x.n, width, o, 2, StoreScaled{to, c.out_stride[2], c.scale});
  }
  gemm(x.n, width, o, 2, StoreScaled{s.out, M, c.scale});
  write_rows(c, x, head, s.out, M);
}

/// What successive heads of a chunk can share: rows of a query or key head, and Q K^T of a pair of them.
struct SharedRows {
  int64_t query_head = -1, key_head = -1;
  Rows q{}, k{};
};

/// One state head in one chunk: the outputs that read it, then its state.
void forward_head(const DecayCall& c, const Chunk& x, int64_t head, bool outputs, bool exactly, const ForwardSpace& s,
                  SharedRows& shared, float* S) {
  const int64_t D = row_stride(c.dim);
  HeadDecay space;
  if (c.log_decay) load_head_decay(c, x, head, space);
  const HeadDecay* decay = c.log_decay ? &space : nullptr;
  const bool other_key = shared.key_head != key_head(c, head);
  if (other_key) {
    shared.key_head = key_head(c, head);
    shared.k = chunk_rows(c, x, c.key, c.key_stride, shared.key_head, c.dim, true, s.key);
    if (outputs) transpose(shared.k.at, shared.k.ld, x.n, c.dim, s.key_t, CHUNK_LD);
    shared.query_head = -1;
  }
  const Rows v = chunk_rows(c, x, c.value, c.value_stride, head, c.value_dim, true, s.value);
  for (int64_t output = head * readers(c); outputs && output < (head + 1) * readers(c); ++output) {
    if (shared.query_head != query_head(c, output)) {
      shared.query_head = query_head(c, output);
      shared.q = chunk_rows(c, x, c.query, c.query_stride, shared.query_head, c.dim, false, s.query);
      chunk_scores(c, x.n, shared.q, s.key_t, s.scores);
    }
    decay_scores(decay, c.skip ? c.skip[head] : 0, x.n, s.scores, s.weights);
    Rows q = shared.q;
    if (decay) {
      scale_rows(q, decay->before, x.n, round_up(c.dim, VL), s.query_decayed, D);
      q = {s.query_decayed, D};
    }
    chunk_output(c, x, output, q, v, S, s);
  }
  update_state(c, x, decay, shared.k, v, s, S, exactly);
}

/// The same with a decay for each channel.
void forward_channels(const DecayCall& c, const Chunk& x, int64_t head, bool outputs, bool exactly, const ForwardSpace& s,
                      SharedRows& shared, float* S) {
  const int64_t D = row_stride(c.dim), M = row_stride(c.value_dim), width = round_up(c.value_dim, VL);
  const ChannelDecay decay = load_chunk_decay(c, x, head, s.channel.decay);
  if (shared.key_head != key_head(c, head)) {
    shared.key_head = key_head(c, head);
    copy_chunk(c, x, c.key, c.key_stride, shared.key_head, true, s.key);
  }
  const Rows v = chunk_rows(c, x, c.value, c.value_stride, head, c.value_dim, true, s.value);
  for (int64_t output = head * readers(c); outputs && output < (head + 1) * readers(c); ++output) {
    if (shared.query_head != query_head(c, output)) {
      shared.query_head = query_head(c, output);
      copy_chunk(c, x, c.query, c.query_stride, shared.query_head, false, s.query);
    }
    channel_weights(decay, s.query, s.key, s.weights, s.channel.work);
    decay_from_start(decay, s.query, s.query_decayed);
    chunk_output(c, x, output, {s.query_decayed, D}, v, S, s);
  }
  decay_to_end(decay, s.key, s.channel.key_decayed);
  const Operand o{s.channel.key_decayed, 1, D, v.at, v.ld, x.n};
  if (exactly) {
    gemm(c.dim, width, &o, 1, DecayAndAddExactly{S, S + c.dim * M, M, 0, decay.total});
  } else {
    gemm(c.dim, width, &o, 1, DecayRowsAndAdd{S, M, decay.total});
  }
}

/// Outputs and states of one part of a call.
int32_t forward(const DecayCall& c, const DecayPart& part) {
  const ForwardSpace s = forward_space(c, part);
  const int64_t size = c.dim * c.value_dim;
  for (int64_t i = 0; i < part.heads; ++i) {
    load_state(c, part.state ? part.state + i * size : nullptr, s.states + i * s.state_floats, s.state_floats);
  }
  for (int64_t t = part.begin; t < part.end; t += CHUNK) {
    const Chunk x = chunk_at(c, part.batch, t, part.end);
    SharedRows shared;
    for (int64_t i = 0; i < part.heads; ++i) {
      float* S = s.states + i * s.state_floats;
      if (part.checkpoints && (t - part.first) % c.segment == 0) {
        float* to = part.checkpoints + ((t - part.first) / c.segment * c.heads + part.head + i) * size;
        unpad_rows(S, row_stride(c.value_dim), c.dim, c.value_dim, to);
      }
      const bool exactly = t - part.first >= COMPENSATE_FROM;
      const auto one_head = c.per_channel ? forward_channels : forward_head;
      one_head(c, x, part.head + i, part.outputs, exactly, s, shared, S);
    }
  }
  for (int64_t i = 0; part.state_new && i < part.heads; ++i) {
    unpad_rows(s.states + i * s.state_floats, row_stride(c.value_dim), c.dim, c.value_dim, part.state_new + i * size);
  }
  return OK;
}

}  // namespace
