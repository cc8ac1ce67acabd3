/// Depthwise causal convolution, backward. It runs along with the tokens: the gradient of an input is complete w - 1 tokens
/// later, so gradients come out w - 1 tokens behind, the first of them being those of the state.
#pragma once
#include "scan/conv.h"

namespace {

/// Gradients of the weights of VL channels, summed over tokens.
struct FilterGrad {
  vec weight[MOST_WIDTH] = {};
  vec bias = {};
};

/// to (tokens, VL) <- the gradient of the sums before silu, from that of the outputs, which `to` holds; `grad` takes its
/// share.
template <int W>
void sums_backward(int64_t tokens, const Filter& f, bool silu, const float* window, float* to, FilterGrad& grad) {
  vec sums[W], bias = grad.bias;
  UNROLL(8)
  for (int i = 0; i < W; ++i) sums[i] = grad.weight[i];
  for (int64_t t = 0; t < tokens; ++t, window += VL) {
    vec g = load(to + t * VL);
    if (silu) {
      vec sum = f.bias;
      UNROLL(8)
      for (int i = 0; i < W; ++i) sum += load(f.weight + i * VL) * load(window + i * VL);
      const vec share = sigmoid(sum);
      g *= share * (1.0f + sum * (1.0f - share));
      store(to + t * VL, g);
    }
    bias += g;
    UNROLL(8)
    for (int i = 0; i < W; ++i) sums[i] += g * load(window + i * VL);
  }
  grad.bias = bias;
  UNROLL(8)
  for (int i = 0; i < W; ++i) grad.weight[i] = sums[i];
}

/// to (tokens, VL) <- gradients of inputs: token t's comes from the gradients of sums t .. t + W - 1, (tokens + W - 1, VL).
template <int W>
void inputs_backward(int64_t tokens, const Filter& f, const float* sums, float* to) {
  for (int64_t t = 0; t < tokens; ++t, sums += VL) {
    vec g = {};
    UNROLL(8)
    for (int i = 0; i < W; ++i) g += load(f.weight + (W - 1 - i) * VL) * load(sums + i * VL);
    store(to + t * VL, g);
  }
}

/// Where the gradients of the inputs of one sequence go: positions count from the first input of the state.
struct InputGrads {
  const ConvCall& c;
  int64_t batch, row, channel, lanes, first, length;

  /// Writes gradients (count, VL) of positions [at, at + count); those of inputs that became the new state get its
  /// gradient.
  void write(int64_t at, int64_t count, float* from, const float* grad_new) const {
    const int64_t carried = c.width - 1;
    for (int64_t i = 0; grad_new && i < count; ++i) {
      const int64_t kept = at + i - length;  // the new state is the last w - 1 of length + w - 1 inputs
      if (kept >= 0) store(from + i * VL, load(from + i * VL) + load(grad_new + kept * VL));
    }
    const int64_t of_state = imin(count, imax(carried - at, 0));
    if (of_state && c.grad_state.at) store_block(c.grad_state, row, channel, lanes, at, of_state, from);
    if (count > of_state) {
      store_block(c.grad_x, batch, channel, lanes, first + at + of_state - carried, count - of_state, from + of_state * VL);
    }
  }
};

/// One sequence of one vector of channels; adds to `grad`.
void sequence_backward(const ConvCall& c, int64_t batch, int64_t sequence, int64_t channel, int64_t lanes, const Filter& f,
                       FilterGrad& grad) {
  const int64_t W = c.width, carried = (W - 1) * VL, row = batch * c.sequences + sequence;
  const int64_t first = c.bounds[sequence], last = c.bounds[sequence + 1];
  float* window = scratch(3 * (BLOCK_FLOATS + carried) + carried);
  float *sums = window + carried + BLOCK_FLOATS, *out = sums + carried + BLOCK_FLOATS,
        *state = out + carried + BLOCK_FLOATS;
  const InputGrads to{c, batch, row, channel, lanes, first, last - first};
  if (c.grad_state_new.at) {
    load_block(c.grad_state_new, row, channel, lanes, 0, W - 1, state);
  } else {
    state = nullptr;
  }
  load_history(c, row, channel, lanes, window);
  memset(sums, 0, size_t(carried) * 4);
  for (int64_t t = first; t < last; t += SCAN_SEGMENT) {
    const int64_t tokens = imin(SCAN_SEGMENT, last - t);
    load_block(c.x, batch, channel, lanes, t, tokens, window + carried);
    load_block(c.grad_out, batch, channel, lanes, t, tokens, sums + carried);
    with_width(W, [&](auto width) {
      sums_backward<decltype(width)::value>(tokens, f, c.silu, window, sums + carried, grad);
      inputs_backward<decltype(width)::value>(tokens, f, sums, out);
    });
    to.write(t - first, tokens, out, state);
    memmove(window, window + tokens * VL, size_t(carried) * 4);
    memmove(sums, sums + tokens * VL, size_t(carried) * 4);
  }
  memset(sums + carried, 0, size_t(carried) * 4);  // what follows the sequence has no gradient
  with_width(W, [&](auto width) { inputs_backward<decltype(width)::value>(W - 1, f, sums, out); });
  to.write(last - first, W - 1, out, state);
}

/// Gradients of channels [begin, end) of every sequence of one batch entry.
void conv_backward(const ConvCall& c, int64_t batch, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; at += VL) {
    const int64_t lanes = imin(VL, end - at), channel = batch * c.channels + at;
    const Filter f(c, at, lanes);
    FilterGrad grad;
    for (int64_t i = 0; i < c.sequences; ++i) sequence_backward(c, batch, i, at, lanes, f, grad);
    alignas(64) float weight[MOST_WIDTH * VL];
    for (int64_t i = 0; i < c.width; ++i) store(weight + i * VL, grad.weight[i]);
    store_columns(c.grad_weight + batch * c.channels * c.width, c.width, at, lanes, weight);
    store_some(c.grad_bias + channel, grad.bias, lanes);
  }
}

}  // namespace
