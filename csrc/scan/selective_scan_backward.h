/// The selective scan of Mamba-1, backward: segment by segment from the last to the first. The states of a segment are
/// computed again from its checkpoint; then the gradient of the state runs through it against time.
#pragma once
#include <initializer_list>

#include "scan/selective_scan.h"

namespace {

constexpr int BACK = 4;  // states in registers at a time

/// Work space of one range of channels. V = vectors of channels, N = padded states, T = SCAN_SEGMENT.
struct ScanSpace {
  float *A, *grad_h, *grad_A;        // (V, N, VL)
  float *grad_D, *grad_bias;         // (V, VL)
  float *B, *C;                      // (T, N)
  float *grad_B, *grad_C;            // (T, N, VL): lanes still apart
  float *h, *decay;                  // (T + 1, BACK, VL), (T, BACK, VL): the states, and what multiplies them less 1
  float *u, *dt, *du, *y, *raw, *z;  // (T, VL)
  float *grad, *grad_du, *grad_dt;   // (T, VL): of y, of du, and of dt through the decays

  /// Floats of work space for V vectors of channels with N states each.
  static int64_t floats(int64_t V, int64_t N) {
    return 3 * V * N * VL + 2 * V * VL + 2 * SCAN_SEGMENT * N + 2 * SCAN_SEGMENT * N * VL +
           (2 * SCAN_SEGMENT + 1) * BACK * VL + 9 * BLOCK_FLOATS;
  }
  ScanSpace(int64_t V, int64_t N, float* at) {
    const auto take = [&](int64_t floats) { return (at += floats) - floats; };
    A = take(V * N * VL), grad_h = take(V * N * VL), grad_A = take(V * N * VL);
    grad_D = take(V * VL), grad_bias = take(V * VL);
    grad_B = take(SCAN_SEGMENT * N * VL), grad_C = take(SCAN_SEGMENT * N * VL);
    h = take((SCAN_SEGMENT + 1) * BACK * VL), decay = take(SCAN_SEGMENT * BACK * VL);
    for (float** block : {&u, &dt, &du, &y, &raw, &z, &grad, &grad_du, &grad_dt}) *block = take(BLOCK_FLOATS);
    B = take(SCAN_SEGMENT * N), C = take(SCAN_SEGMENT * N);
  }
};

/// Fills s.h and s.decay of BACK states, from the state in s.h[0]; s.y += sum of C h. n: the first of the states.
void scan_again(const ScanSpace& s, int64_t tokens, int64_t N, int64_t n, const float* A) {
  vec state[BACK], rate[BACK];
  UNROLL(4)
  for (int j = 0; j < BACK; ++j) state[j] = load(s.h + j * VL), rate[j] = load(A + (n + j) * VL);
  for (int64_t i = 0; i < tokens; ++i) {
    const vec step = load(s.dt + i * VL), x = load(s.du + i * VL);
    vec y = load(s.y + i * VL);
    UNROLL(4)
    for (int j = 0; j < BACK; ++j) {
      const vec less = power_minus_1(step * rate[j]);
      state[j] = (state[j] + less * state[j]) + x * splat(s.B[i * N + n + j]);
      y += state[j] * splat(s.C[i * N + n + j]);
      store(s.decay + (i * BACK + j) * VL, less);
      store(s.h + ((i + 1) * BACK + j) * VL, state[j]);
    }
    store(s.y + i * VL, y);
  }
}

/// Runs the gradient of BACK states from the last token to the first. grad_h, grad_A: (BACK, VL) of these states.
void scan_reverse(const ScanSpace& s, int64_t tokens, int64_t N, int64_t n, const float* A, float* grad_h, float* grad_A) {
  vec grad[BACK], rates[BACK];
  UNROLL(4)
  for (int j = 0; j < BACK; ++j) grad[j] = load(grad_h + j * VL), rates[j] = load(grad_A + j * VL);
  for (int64_t i = tokens - 1; i >= 0; --i) {
    const vec step = load(s.dt + i * VL), x = load(s.du + i * VL), up = load(s.grad + i * VL);
    vec grad_du = load(s.grad_du + i * VL), grad_dt = load(s.grad_dt + i * VL);
    UNROLL(4)
    for (int j = 0; j < BACK; ++j) {
      const int64_t mixed = i * N + n + j;
      const vec before = load(s.h + (i * BACK + j) * VL), after = load(s.h + ((i + 1) * BACK + j) * VL);
      const vec less = load(s.decay + (i * BACK + j) * VL);
      const vec g = grad[j] + up * splat(s.C[mixed]);
      store(s.grad_C + mixed * VL, load(s.grad_C + mixed * VL) + up * after);
      store(s.grad_B + mixed * VL, load(s.grad_B + mixed * VL) + g * x);
      grad_du += g * splat(s.B[mixed]);
      const vec log_decay = g * (before + less * before);  // gradient of dt A
      grad_dt += log_decay * load(A + (n + j) * VL);
      rates[j] += log_decay * step;
      grad[j] = g + less * g;
    }
    store(s.grad_du + i * VL, grad_du);
    store(s.grad_dt + i * VL, grad_dt);
  }
  UNROLL(4)
  for (int j = 0; j < BACK; ++j) store(grad_h + j * VL, grad[j]), store(grad_A + j * VL, rates[j]);
}

/// s.grad (tokens, VL) goes from the gradient of the gated output y silu(z) to that of y.
void gate_backward(const ScanSpace& s, int64_t tokens) {
  for (int64_t i = 0; i < tokens; ++i) {
    const vec z = load(s.z + i * VL);
    store(s.grad + i * VL, load(s.grad + i * VL) * z * sigmoid(z));
  }
}

/// s.y (tokens, VL) goes from y to the gradient of z; s.grad is the gradient of the gated output.
void gate_input_backward(const ScanSpace& s, int64_t tokens) {
  for (int64_t i = 0; i < tokens; ++i) {
    const vec z = load(s.z + i * VL), share = sigmoid(z), slope = share * (1.0f + z * (1.0f - share));
    store(s.y + i * VL, load(s.grad + i * VL) * load(s.y + i * VL) * slope);
  }
}

/// From s.grad, s.grad_du and s.grad_dt to the gradients of u, delta, D and bias of vector v.
void tokens_backward(const ScanCall& c, const ScanSpace& s, int64_t v, int64_t channel, int64_t lanes, int64_t tokens) {
  vec D = c.D ? load_some(c.D + channel, lanes) : vec{}, grad_D = load(s.grad_D + v * VL);
  vec grad_bias = load(s.grad_bias + v * VL);
  for (int64_t i = 0; i < tokens; ++i) {
    const vec u = load(s.u + i * VL), dt = load(s.dt + i * VL), up = load(s.grad + i * VL);
    const vec grad_du = load(s.grad_du + i * VL);
    vec grad_dt = grad_du * u + load(s.grad_dt + i * VL) * LN_2;  // A is in units of log2
    if (c.softplus) grad_dt *= sigmoid(load(s.raw + i * VL));
    grad_D += up * u;
    grad_bias += grad_dt;
    store(s.grad_du + i * VL, up * D + grad_du * dt);
    store(s.grad_dt + i * VL, grad_dt);
  }
  store(s.grad_D + v * VL, grad_D);
  store(s.grad_bias + v * VL, grad_bias);
}

/// One segment of one vector of channels.
void segment_backward(const ScanCall& c, const ScanSpace& s, int64_t batch, int64_t v, int64_t channel, int64_t lanes,
                      int64_t t, int64_t tokens, int64_t N) {
  const int64_t segments = (c.tokens + SCAN_SEGMENT - 1) / SCAN_SEGMENT;
  const float* from = c.checkpoints + (batch * segments + t / SCAN_SEGMENT) * c.states * c.channels + channel;
  load_tokens(c, batch, channel, lanes, t, tokens, {s.u, s.dt, s.du, s.y}, s.raw);
  load_block(c.grad_out, batch, channel, lanes, t, tokens, s.grad);
  if (c.z.at) {
    load_block(c.z, batch, channel, lanes, t, tokens, s.z);
    gate_backward(s, tokens);
  }
  memset(s.grad_du, 0, size_t(tokens * VL) * 4);
  memset(s.grad_dt, 0, size_t(tokens * VL) * 4);
  float* A = s.A + v * N * VL;
  for (int64_t n = 0; n < N; n += BACK) {
    for (int64_t j = 0; j < BACK; ++j) {
      store(s.h + j * VL, n + j < c.states ? load_some(from + (n + j) * c.channels, lanes) : vec{});
    }
    const int64_t at = (v * N + n) * VL;
    scan_again(s, tokens, N, n, A);
    scan_reverse(s, tokens, N, n, A, s.grad_h + at, s.grad_A + at);
  }
  tokens_backward(c, s, v, channel, lanes, tokens);
  store_block(c.grad_u, batch, channel, lanes, t, tokens, s.grad_du);
  store_block(c.grad_delta, batch, channel, lanes, t, tokens, s.grad_dt);
  if (c.z.at) {
    load_block(c.grad_out, batch, channel, lanes, t, tokens, s.grad);
    gate_input_backward(s, tokens);
    store_block(c.grad_z, batch, channel, lanes, t, tokens, s.y);
  }
}

/// to (tokens, n) <- the sums over lanes of from (tokens, N, VL).
void sum_lanes(const float* from, int64_t tokens, int64_t states, int64_t N, float* to) {
  for (int64_t i = 0; i < tokens; ++i) reduce_rows<false>(from + i * N * VL, states, to + i * states);
}

/// Gradients of channels [begin, end) of one batch entry, which lie in one group. part: which of c.parts they are.
void scan_backward(const ScanCall& c, int64_t batch, int64_t begin, int64_t end, int64_t part) {
  const int64_t N = padded_states(c), V = vectors(end - begin), group = begin / (c.channels / c.groups);
  const ScanSpace s(V, N, scratch(ScanSpace::floats(V, N)));
  const int64_t states = batch * c.channels * c.states;
  memset(s.grad_A, 0, size_t(V * N * VL) * 4);
  memset(s.grad_D, 0, size_t(V * VL) * 4);
  memset(s.grad_bias, 0, size_t(V * VL) * 4);
  memset(s.grad_h, 0, size_t(V * N * VL) * 4);
  for (int64_t v = 0; v < V; ++v) {
    const int64_t at = begin + v * VL, lanes = imin(VL, end - at);
    load_columns(c.A, c.states, at, lanes, N, LOG2_E, s.A + v * N * VL);
    if (c.grad_state_new) load_columns(c.grad_state_new + states, c.states, at, lanes, N, 1, s.grad_h + v * N * VL);
  }
  for (int64_t t = (c.tokens - 1) / SCAN_SEGMENT * SCAN_SEGMENT; c.tokens && t >= 0; t -= SCAN_SEGMENT) {
    const int64_t tokens = imin(SCAN_SEGMENT, c.tokens - t);
    load_mixing(c.B, c.states, N, batch, group, t, tokens, s.B);
    load_mixing(c.C, c.states, N, batch, group, t, tokens, s.C);
    memset(s.grad_B, 0, size_t(tokens * N * VL) * 4);
    memset(s.grad_C, 0, size_t(tokens * N * VL) * 4);
    for (int64_t v = 0; v < V; ++v) {
      const int64_t at = begin + v * VL;
      segment_backward(c, s, batch, v, at, imin(VL, end - at), t, tokens, N);
    }
    const int64_t to = (((part * c.batch + batch) * c.groups + group) * c.tokens + t) * c.states;
    sum_lanes(s.grad_B, tokens, c.states, N, c.grad_B + to);
    sum_lanes(s.grad_C, tokens, c.states, N, c.grad_C + to);
  }
  for (int64_t v = 0; v < V; ++v) {
    const int64_t at = begin + v * VL, lanes = imin(VL, end - at), channel = batch * c.channels + at;
    store_columns(c.grad_A + states, c.states, at, lanes, s.grad_A + v * N * VL);
    store_columns(c.grad_state + states, c.states, at, lanes, s.grad_h + v * N * VL);
    store_some(c.grad_D + channel, load(s.grad_D + v * VL), lanes);
    store_some(c.grad_bias + channel, load(s.grad_bias + v * VL), lanes);
  }
}

}  // namespace
