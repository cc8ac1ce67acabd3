/// Chunks of tokens: their rows in work space, and the decays between any two of them.
#pragma once
#include "core/exp.h"
#include "core/gemm.h"
#include "core/load_rows.h"
#include "decay/abi.h"

namespace {

constexpr int64_t CHUNK = 64;
constexpr int64_t CHUNK_LD = CHUNK + 16;  // distance of rows with a number for each token of the chunk
constexpr int WORDS = int(CHUNK) / VL;    // vectors that hold a number for each token of the chunk

/// Tokens [t, t + n) of one batch entry, n <= CHUNK.
struct Chunk {
  int64_t batch, t, n;
  const uint8_t* mask;  // (n), or null
};

INLINE Chunk chunk_at(const DecayCall& c, int64_t batch, int64_t t, int64_t end) {
  return {batch, t, imin(CHUNK, end - t), c.mask ? c.mask + batch * c.tokens + t : nullptr};
}

/// The next `floats` numbers of work space.
INLINE float* take_floats(float*& at, int64_t floats) {
  float* mine = at;
  at += round_up(floats, 16);
  return mine;
}

INLINE int64_t output_heads(const DecayCall& c) { return imax(c.query_heads, c.heads); }
/// Output heads that read one state head.
INLINE int64_t readers(const DecayCall& c) { return output_heads(c) / c.heads; }
INLINE int64_t query_head(const DecayCall& c, int64_t output) { return output * c.query_heads / output_heads(c); }
INLINE int64_t key_head(const DecayCall& c, int64_t head) { return head * c.key_heads / c.heads; }

/// Rows of a chunk as padded float32, in place where that is possible, else in `copy` (CHUNK, row_stride(dim)).
/// `hide`: masked rows become 0.
Rows chunk_rows(const DecayCall& c, const Chunk& x, const void* base, const int64_t* stride, int64_t head, int64_t dim,
                bool hide, float* copy) {
  const void* first = token_ptr(c.dtype, base, stride, x.batch, head, x.t);
  return load_rows(c.dtype, first, stride[2], dim, x.n, hide ? x.mask : nullptr, true, copy);
}

/// The decays of one state head in a chunk, where they are one number for each token. Products of factors <= 1 only, so
/// that nothing overflows and nothing cancels, however strong the decay.
struct HeadDecay {
  float step[CHUNK];    // exp(g_i)
  float before[CHUNK];  // exp(g_0 + .. + g_i): from the state before the chunk to token i
  float after[CHUNK];   // exp(g_{j+1} + ..): from token j to the end of the chunk; times its input
  float input[CHUNK];   // what multiplies the value of token i
  double log_total;     // g_0 + ..
};

/// Everything else from step, which has the g of n tokens and 0 behind them, and input.
void multiply_decays(int64_t n, HeadDecay& d) {
  d.log_total = 0;
  for (int64_t i = 0; i < CHUNK; ++i) d.log_total += d.step[i];
  for (int w = 0; w < WORDS; ++w) store(d.step + w * VL, exp_decay(load(d.step + w * VL)));
  float product = 1;
  for (int64_t i = 0; i < n; ++i) d.before[i] = product *= d.step[i];
  product = 1;
  for (int64_t j = n - 1; j >= 0; --j) d.after[j] = product * d.input[j], product *= d.step[j];
}

/// g of a chunk: 0 for masked tokens.
void load_head_decay(const DecayCall& c, const Chunk& x, int64_t head, HeadDecay& d) {
  const float* g = c.log_decay + x.batch * c.decay_stride[0] + head * c.decay_stride[1] + x.t * c.decay_stride[2];
  const float* u =
      !c.input ? nullptr : c.input + x.batch * c.input_stride[0] + head * c.input_stride[1] + x.t * c.input_stride[2];
  for (int64_t i = 0; i < CHUNK; ++i) {
    d.step[i] = i < x.n && (!x.mask || x.mask[i]) ? g[i * c.decay_stride[2]] : 0;
    d.input[i] = c.input && i < x.n ? u[i * c.input_stride[2]] : 1;
  }
  multiply_decays(x.n, d);
}

/// Calls row(i, factors) for each token i, with factors[j] = exp(g_{j+1} + .. + g_i) for j <= i and 0 for j > i, as
/// WORDS vectors. `step`: exp(g_i), or null without decay. `input`: multiplies factors[j] by input_j; null: by 1.
template <class Row>
INLINE void decay_rows(const float* step, int64_t n, const Row& row, const float* input = nullptr) {
  vec factors[WORDS] = {};
  for (int64_t i = 0; i < n; ++i) {
    const vec factor = splat(step ? step[i] : 1.0f);
    UNROLL(16)
    for (int w = 0; w < WORDS; ++w) {
      const vec here = lanes() + float(w * VL) == splat(float(i)) ? splat(input ? input[i] : 1.0f) : vec{};
      factors[w] = factors[w] * factor + here;
    }
    row(i, factors);
  }
}

/// to (n, ld) = factor_i from (n, ld_from), rows of `dim` numbers padded to whole vectors.
void scale_rows(Rows from, const float* factor, int64_t n, int64_t dim, float* to, int64_t ld) {
  for (int64_t i = 0; i < n; ++i) {
    const vec f = splat(factor[i]);
    for (int64_t j = 0; j < dim; j += VL) store(to + i * ld + j, f * load(from.at + i * from.ld + j));
  }
}

}  // namespace
