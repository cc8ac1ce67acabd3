/// Depthwise causal convolution along the tokens, forward: lanes are channels, a sliding window of tokens lies in work
/// space.
#pragma once
#include "scan/blocks.h"
#include "scan/functions.h"

namespace {

/// (w - 1, VL) inputs before the first token of sequence `row`; zeros without a state.
void load_history(const ConvCall& c, int64_t row, int64_t channel, int64_t lanes, float* to) {
  if (c.state.at) {
    load_block(c.state, row, channel, lanes, 0, c.width - 1, to);
  } else {
    memset(to, 0, size_t((c.width - 1) * VL) * 4);
  }
}

/// What the convolution of VL channels multiplies with and adds.
struct Filter {
  float weight[MOST_WIDTH * VL];  // (w, VL)
  vec bias;
  Filter(const ConvCall& c, int64_t channel, int64_t lanes) : bias(c.bias ? load_some(c.bias + channel, lanes) : vec{}) {
    load_columns(c.weight, c.width, channel, lanes, c.width, 1, weight);
  }
};

/// y (tokens, VL) <- bias + the sum of weight times window (tokens + W - 1, VL), through silu if asked for. next: what will
/// be read and written soon.
template <int W>
void convolve(int64_t tokens, const Filter& f, bool silu, const float* window, float* y, const BlockLines (&next)[2]) {
  const BlockLines one = next[0], two = next[1];
  vec weight[W];
  UNROLL(8)
  for (int i = 0; i < W; ++i) weight[i] = load(f.weight + i * VL);
  for (int64_t t = 0; t < tokens; ++t, window += VL) {
    one.prefetch(t);
    two.prefetch(t);
    vec sum = f.bias;
    UNROLL(8)
    for (int i = 0; i < W; ++i) sum += weight[i] * load(window + i * VL);
    if (silu) sum *= sigmoid(sum);
    store(y + t * VL, sum);
  }
}

/// Calls action with the width as a compile-time number.
template <class Action>
INLINE void with_width(int64_t width, const Action& action) {
  switch (width) {
    case 2: return action(std::integral_constant<int, 2>());
    case 3: return action(std::integral_constant<int, 3>());
    case 4: return action(std::integral_constant<int, 4>());
    case 5: return action(std::integral_constant<int, 5>());
    case 6: return action(std::integral_constant<int, 6>());
    case 7: return action(std::integral_constant<int, 7>());
    case 8: return action(std::integral_constant<int, 8>());
  }
}

/// One sequence of channels [begin, end): outputs, and the inputs that the next call needs.
void convolve_sequence(const ConvCall& c, int64_t batch, int64_t sequence, int64_t begin, int64_t end) {
  const int64_t V = (end - begin + VL - 1) / VL, W = c.width, row = batch * c.sequences + sequence;
  const int64_t first = c.bounds[sequence], last = c.bounds[sequence + 1], carried = (W - 1) * VL;
  float* history = scratch(V * carried + 2 * BLOCK_FLOATS + carried);  // (V, w - 1, VL)
  float *window = history + V * carried, *y = window + carried + BLOCK_FLOATS;
  for (int64_t v = 0; v < V; ++v) {
    const int64_t at = begin + v * VL;
    load_history(c, row, at, imin(VL, end - at), history + v * carried);
  }
  for (int64_t t = first; t < last; t += SCAN_SEGMENT) {
    const int64_t tokens = imin(SCAN_SEGMENT, last - t);
    for (int64_t v = 0; v < V; ++v) {
      const int64_t at = begin + v * VL, lanes = imin(VL, end - at);
      const Filter f(c, at, lanes);
      memcpy(window, history + v * carried, size_t(carried) * 4);
      load_block(c.x, batch, at, lanes, t, tokens, window + carried);
      memcpy(history + v * carried, window + tokens * VL, size_t(carried) * 4);
      BlockLines next[2];
      if (t + 2 * SCAN_SEGMENT <= last)
        next[0] = {c.x, batch, at, t + SCAN_SEGMENT}, next[1] = {c.out, batch, at, t + SCAN_SEGMENT};
      with_width(W, [&](auto width) { convolve<decltype(width)::value>(tokens, f, c.silu, window, y, next); });
      store_block(c.out, batch, at, lanes, t, tokens, y);
    }
  }
  for (int64_t v = 0; c.state_new.at && v < V; ++v) {
    const int64_t at = begin + v * VL;
    store_block(c.state_new, row, at, imin(VL, end - at), 0, W - 1, history + v * carried);
  }
}

/// Channels [begin, end) of every sequence of one batch entry.
void conv(const ConvCall& c, int64_t batch, int64_t begin, int64_t end) {
  for (int64_t i = 0; i < c.sequences; ++i) convolve_sequence(c, batch, i, begin, end);
}

}  // namespace
