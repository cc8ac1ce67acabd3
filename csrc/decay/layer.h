/// Mamba-2 between its projections, in one pass over the tokens: convolution, silu, time steps, the scan, and the gate.
#pragma once
#include "core/convolve_rows.h"
#include "decay/forward.h"

namespace {

/// Rows [x.t, x.t + x.n) of a head through the convolution: to (n, row_stride(dim)).
Rows convolve_chunk(const ScanLayer& layer, const Chunk& x, const void* base, const int64_t* stride, int64_t head,
                    int64_t dim, const float* weight, const float* bias, const float* history, float* to) {
  const int64_t older = x.batch * (layer.width - 1) * layer.channels;  // where the history of this sequence begins
  const RowFilter filter{layer.width, layer.channels, weight + head * dim, bias ? bias + head * dim : nullptr,
                         history ? history + older + head * dim : nullptr};
  const void* first = token_ptr(FLOAT32, base, stride, x.batch, head, 0);
  convolve_rows(filter, first, stride[2], x.t, dim, x.n, x.n, to, row_stride(dim));
  return {to, row_stride(dim)};
}

/// input = softplus(the call's + step_bias), step = A input: the time steps of a head, and the decay over each.
void load_time_steps(const DecayCall& c, const ScanLayer& layer, const Chunk& x, int64_t head, HeadDecay& d) {
  const float* u = c.input + x.batch * c.input_stride[0] + head * c.input_stride[1] + x.t * c.input_stride[2];
  for (int64_t i = 0; i < CHUNK; ++i) d.input[i] = i < x.n ? u[i * c.input_stride[2]] : 0;
  for (int64_t i = 0; i < CHUNK; i += VL) {
    const vec input = softplus(load(d.input + i) + layer.step_bias[head]);
    store(d.input + i, input);
    store(d.step + i, input * layer.A[head]);
  }
  for (int64_t i = x.n; i < CHUNK; ++i) d.step[i] = 0;
  multiply_decays(x.n, d);
}

/// out (n, M) <- rows silu(gate), and the sum of squares of each row to `squares`.
void write_gated(const DecayCall& c, const ScanLayer& layer, const Chunk& x, int64_t head, const float* rows, int64_t ld) {
  const int64_t* stride = layer.gate_stride;
  const float* gate = layer.gate + x.batch * stride[0] + head * stride[1] + x.t * stride[2];
  float* squares = layer.squares + (x.batch * c.heads + head) * c.tokens + x.t;
  float* to = const_cast<float*>(static_cast<const float*>(token_ptr(FLOAT32, c.out, c.out_stride, x.batch, head, x.t)));
  for (int64_t i = 0; i < x.n; ++i, gate += stride[2], to += c.out_stride[2]) {
    vec total = {};
    for (int64_t m = 0; m < c.value_dim; m += VL) {
      const vec z = load(gate + m), y = load(rows + i * ld + m) * (z * sigmoid(z));
      total += y * y;
      store(to + m, y);
    }
    squares[i] = sum(total);
  }
}

/// What the next chunk reads, for the prefetcher.
void ask_for_chunk(const DecayCall& c, const ScanLayer& layer, const Chunk& x, int64_t head, Prefetcher& ahead) {
  ahead.clear();
  const int64_t t = x.t + x.n, n = imin(CHUNK, c.tokens - t), bytes = c.value_dim * 4, *stride = layer.gate_stride;
  if (n <= 0) return;
  ahead.add(token_ptr(FLOAT32, c.value, c.value_stride, x.batch, head, t), bytes, c.value_stride[2] * 4, n);
  if (layer.gate) ahead.add(token_ptr(FLOAT32, layer.gate, stride, x.batch, head, t), bytes, stride[2] * 4, n);
}

/// One head in one chunk: its outputs, then its state.
void layer_head(const DecayCall& c, const ScanLayer& layer, const Chunk& x, int64_t head, const ForwardSpace& s,
                const SharedRows& shared, float* S) {
  const int64_t D = row_stride(c.dim), M = row_stride(c.value_dim);
  HeadDecay decay;
  load_time_steps(c, layer, x, head, decay);
  const Rows v = convolve_chunk(layer, x, c.value, c.value_stride, head, c.value_dim, layer.value_filter, layer.value_bias,
                                layer.value_history, s.value);
  decay_scores(&decay, c.skip ? c.skip[head] : 0, x.n, s.scores, s.weights);
  scale_rows(shared.q, decay.before, x.n, c.dim, s.query_decayed, D);
  Prefetcher ahead;
  ask_for_chunk(c, layer, x, head, ahead);
  const Operand o[2] = {{s.query_decayed, D, 1, S, M, c.dim}, {s.weights, CHUNK_LD, 1, v.at, v.ld, x.n, UP_TO_ROW}};
  if (layer.gate) {
    gemm(x.n, c.value_dim, o, 2, StoreScaled{s.out, M, c.scale}, &ahead);
    write_gated(c, layer, x, head, s.out, M);
  } else {
    const void* to = token_ptr(FLOAT32, c.out, c.out_stride, x.batch, head, x.t);
    gemm(x.n, c.value_dim, o, 2, StoreScaled{const_cast<float*>(static_cast<const float*>(to)), c.out_stride[2], c.scale},
         &ahead);
  }
  update_state(c, x, &decay, shared.k, v, s, S, x.t >= COMPENSATE_FROM);
}

/// The tokens and heads of one part of a layer. Where begin > 0, state_new holds their states before it.
void forward_layer(const DecayCall& c, const ScanLayer& layer, const DecayPart& part) {
  const ForwardSpace s = forward_space(c, part);
  const int64_t size = c.dim * c.value_dim;
  for (int64_t i = 0; i < part.heads; ++i) {
    const float* before = part.begin > part.first ? part.state_new : part.state;
    load_state(c, before ? before + i * size : nullptr, s.states + i * s.state_floats, s.state_floats);
  }
  for (int64_t t = part.begin; t < part.end; t += CHUNK) {
    const Chunk x = chunk_at(c, part.batch, t, part.end);
    SharedRows shared;
    for (int64_t i = 0; i < part.heads; ++i) {
      const int64_t head = part.head + i, key = key_head(c, head);
      if (shared.key_head != key) {
        shared.key_head = key;
        shared.k = convolve_chunk(layer, x, c.key, c.key_stride, key, c.dim, layer.key_filter, layer.key_bias,
                                  layer.key_history, s.key);
        shared.q = convolve_chunk(layer, x, c.query, c.query_stride, key, c.dim, layer.query_filter, layer.query_bias,
                                  layer.query_history, s.query);
        transpose(shared.k.at, shared.k.ld, x.n, c.dim, s.key_t, CHUNK_LD);
        chunk_scores(c, x.n, shared.q, s.key_t, s.scores);
      }
      layer_head(c, layer, x, head, s, shared, s.states + i * s.state_floats);
    }
  }
  for (int64_t i = 0; i < part.heads; ++i) {
    unpad_rows(s.states + i * s.state_floats, row_stride(c.value_dim), c.dim, c.value_dim, part.state_new + i * size);
  }
}

}  // namespace
