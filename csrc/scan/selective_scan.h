/// The selective scan of Mamba-1, forward: lanes are channels, the states of a channel are separate vectors. Work goes by
/// blocks of SCAN_SEGMENT tokens, and inside of a block by groups of states that stay in registers.
#pragma once
#include "scan/blocks.h"
#include "scan/functions.h"

namespace {

#if defined(__AVX512F__) || defined(LINATTN_NEON)
constexpr int STATES = 8;  // states in registers at a time
#else
constexpr int STATES = 4;
#endif

/// n rounded up to whole groups of states. What is added has A = B = C = 0, so that it stays 0.
INLINE int64_t padded_states(const ScanCall& c) { return round_up(c.states, 8); }

INLINE int64_t vectors(int64_t channels) { return (channels + VL - 1) / VL; }

/// to (tokens, padded) <- x (batch, group, state, token) of tokens [t, t + tokens); padded states become 0.
void load_mixing(const Strided& x, int64_t states, int64_t padded, int64_t batch, int64_t group, int64_t t, int64_t tokens,
                 float* to) {
  const int64_t first = batch * x.stride[0] + group * x.stride[1] + t * x.stride[3];
  for (int64_t i = 0; i < tokens; ++i) {
    widen(x.dtype, x.at, first + i * x.stride[3], x.stride[2], states, to + i * padded);
    for (int64_t n = states; n < padded; ++n) to[i * padded + n] = 0;
  }
}

/// One block of VL channels: all (tokens, VL).
struct Block {
  float *u, *dt, *du, *y;
};

/// dt, du = dt u and y = D u of a block; u and the raw delta are read from the caller's memory.
/// raw: takes delta + bias before softplus; may be null.
void load_tokens(const ScanCall& c, int64_t batch, int64_t channel, int64_t count, int64_t t, int64_t tokens,
                 const Block& k, float* raw) {
  load_block(c.u, batch, channel, count, t, tokens, k.u);
  load_block(c.delta, batch, channel, count, t, tokens, k.dt);
  const vec bias = c.bias ? load_some(c.bias + channel, count) : vec{}, D = c.D ? load_some(c.D + channel, count) : vec{};
  for (int64_t i = 0; i < tokens; ++i) {
    vec dt = load(k.dt + i * VL) + bias;
    if (raw) store(raw + i * VL, dt);
    if (c.softplus) dt = softplus(dt);
    const vec u = load(k.u + i * VL);
    store(k.dt + i * VL, dt);
    store(k.du + i * VL, dt * u);
    store(k.y + i * VL, D * u);
  }
}

/// h (S, VL) over the tokens of a block, from rates A (S, VL) in units of log2; y (tokens, VL) += sum of C h.
/// B, C: (tokens, padded), at the first of the S states. next: what will be read soon.
template <int S>
void scan_states(int64_t tokens, int64_t padded, const float* A, const float* B, const float* C, const float* dt,
                 const float* du, float* y, float* h, const BlockLines (&next)[2]) {
  const BlockLines one = next[0], two = next[1];
  vec state[S], rate[S];
  UNROLL(8)
  for (int n = 0; n < S; ++n) state[n] = load(h + n * VL), rate[n] = load(A + n * VL);
  for (int64_t i = 0; i < tokens; ++i, B += padded, C += padded) {
    one.prefetch(i);
    two.prefetch(i);
    const vec step = load(dt + i * VL), x = load(du + i * VL);
    vec even = load(y + i * VL), odd = {};
    UNROLL(8)
    for (int n = 0; n < S; ++n) {
      state[n] = decayed(state[n], step * rate[n]) + x * splat(B[n]);
      (n % 2 ? odd : even) += state[n] * splat(C[n]);
    }
    store(y + i * VL, even + odd);
  }
  UNROLL(8)
  for (int n = 0; n < S; ++n) store(h + n * VL, state[n]);
}

/// y (tokens, VL) *= silu(z).
void apply_gate(int64_t tokens, const float* z, float* y) {
  for (int64_t i = 0; i < tokens; ++i) {
    const vec x = load(z + i * VL);
    store(y + i * VL, load(y + i * VL) * x * sigmoid(x));
  }
}

/// Writes the state h (n, VL) that a segment starts with to its checkpoint.
void keep_checkpoint(const ScanCall& c, int64_t batch, int64_t channel, int64_t count, int64_t segment, const float* h) {
  const int64_t segments = (c.tokens + SCAN_SEGMENT - 1) / SCAN_SEGMENT;
  float* to = c.checkpoints + (batch * segments + segment) * c.states * c.channels + channel;
  for (int64_t n = 0; n < c.states; ++n) store_some(to + n * c.channels, load(h + n * VL), count);
}

/// Outputs and the final state of channels [begin, end) of one batch entry, which lie in one group.
void scan(const ScanCall& c, int64_t batch, int64_t begin, int64_t end) {
  const int64_t N = padded_states(c), count = vectors(end - begin), group = begin / (c.channels / c.groups);
  float* A = scratch(2 * count * N * VL + 5 * BLOCK_FLOATS + 2 * SCAN_SEGMENT * N);
  float *h = A + count * N * VL, *blocks = h + count * N * VL;
  const Block k{blocks, blocks + BLOCK_FLOATS, blocks + 2 * BLOCK_FLOATS, blocks + 3 * BLOCK_FLOATS};
  float *z = blocks + 4 * BLOCK_FLOATS, *B = z + BLOCK_FLOATS, *C = B + SCAN_SEGMENT * N;
  const int64_t states = batch * c.channels * c.states;
  for (int64_t v = 0; v < count; ++v) {
    const int64_t at = begin + v * VL, lanes = imin(VL, end - at);
    load_columns(c.A, c.states, at, lanes, N, LOG2_E, A + v * N * VL);
    if (c.state) {
      load_columns(c.state + states, c.states, at, lanes, N, 1, h + v * N * VL);
    } else {
      memset(h + v * N * VL, 0, size_t(N * VL) * 4);
    }
  }
  for (int64_t t = 0; t < c.tokens; t += SCAN_SEGMENT) {
    const int64_t tokens = imin(SCAN_SEGMENT, c.tokens - t);
    load_mixing(c.B, c.states, N, batch, group, t, tokens, B);
    load_mixing(c.C, c.states, N, batch, group, t, tokens, C);
    for (int64_t v = 0; v < count; ++v) {
      const int64_t at = begin + v * VL, lanes = imin(VL, end - at);
      float *rates = A + v * N * VL, *state = h + v * N * VL;
      load_tokens(c, batch, at, lanes, t, tokens, k, nullptr);
      if (c.checkpoints) keep_checkpoint(c, batch, at, lanes, t / SCAN_SEGMENT, state);
      const bool more = t + 2 * SCAN_SEGMENT <= c.tokens;  // the next block is whole, so that all its pieces are there
      for (int64_t n = 0; n < N; n += STATES) {
        BlockLines next[2];
        if (more && n == 0) next[0] = {c.u, batch, at, t + SCAN_SEGMENT}, next[1] = {c.delta, batch, at, t + SCAN_SEGMENT};
        if (more && n == STATES)
          next[0] = {c.z, batch, at, t + SCAN_SEGMENT}, next[1] = {c.out, batch, at, t + SCAN_SEGMENT};
        scan_states<STATES>(tokens, N, rates + n * VL, B + n, C + n, k.dt, k.du, k.y, state + n * VL, next);
      }
      if (c.z.at) {
        load_block(c.z, batch, at, lanes, t, tokens, z);
        apply_gate(tokens, z, k.y);
      }
      store_block(c.out, batch, at, lanes, t, tokens, k.y);
    }
  }
  for (int64_t v = 0; v < count; ++v) {
    const int64_t at = begin + v * VL;
    store_columns(c.state_new + states, c.states, at, imin(VL, end - at), h + v * N * VL);
  }
}

}  // namespace
