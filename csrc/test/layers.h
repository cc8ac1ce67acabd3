/// Layers between their projections: buffers of exactly the size that the calls may touch.
#pragma once
#include "decay/abi.h"
#include "delta/abi.h"
#include "digests.h"

extern "C" {
int32_t linattn_delta_layer(const DeltaCall*, const DeltaLayer*);
int32_t linattn_delta_layer_step(const DeltaLayerStep*);
int32_t linattn_scan_layer(const DecayCall*, const ScanLayer*);
}

namespace {

/// Strides over batch, head and token of rows (tokens, channels) that hold heads of `dim` side by side.
void row_strides(int64_t tokens, int64_t channels, int64_t dim, int64_t (&to)[3]) {
  to[0] = tokens * channels, to[1] = dim, to[2] = channels;
}

/// Sizes that both layers have: heads of `dim` that share `key_heads` of `key_dim`.
struct LayerShape {
  int64_t tokens, key_heads, heads, key_dim, dim, width;
  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return heads * dim; }
  int64_t channels() const { return 2 * keys() + values(); }
  bool continued() const { return width < 4; }  // tokens come before the call
};

/// What is held of the tokens before a call.
struct LayerBefore {
  Buffer<float> history, state;
  LayerBefore(const LayerShape& s, int64_t batch)
      : history(batch * (s.width - 1) * s.channels(), true), state(batch * s.heads * s.key_dim * s.dim, true) {}
  /// Lets a call of either layer go on from it.
  template <class Call, class Layer>
  void give(const LayerShape& s, Call& c, Layer& layer) {
    c.state = state;
    layer.query_history = history, layer.key_history = history + s.keys(), layer.value_history = history + 2 * s.keys();
  }
};

/// How the state of a delta-rule layer decays: by heads or by channels, without a bound or with one. By channels, the
/// activation of its gate is the sigmoid, as in KDA.
struct LayerDecay {
  bool channels;
  float bound;
  int64_t count(const LayerShape& s) const { return s.heads * (channels ? s.key_dim : 1); }
  std::string name() const { return std::string(channels ? " by channels" : "") + (bound != 0 ? ", bounded" : ""); }
};

/// A delta-rule layer in one pass: the same numbers on every instruction set.
void check_delta_layer(const LayerShape& s, const LayerDecay& by) {
  seed = 1;
  const int64_t T = s.tokens, B = 2, bounds[2] = {0, T}, decays = by.count(s);
  Buffer<float> mixed(B * T * s.channels(), true), betas(B * T * s.heads, true), gate(B * T * s.values(), true);
  Buffer<float> filters(s.width * s.channels(), true), norm(s.dim, true);
  Buffer<float> log_decay(B * T * decays, true), decay(s.heads, true), decay_bias(decays, true);
  Buffer<float> out(B * T * s.values()), final(B * s.heads * s.key_dim * s.dim);
  for (int64_t h = 0; h < s.heads; ++h) decay[size_t(h)] = -std::fabs(decay[size_t(h)]);
  DeltaCall c;
  DeltaLayer layer;
  std::memset(&c, 0, sizeof c), std::memset(&layer, 0, sizeof layer);
  c.batch = B, c.query_heads = c.key_heads = s.key_heads, c.heads = s.heads, c.tokens = T, c.dim = s.key_dim;
  c.value_dim = s.dim, c.sequences = 1, c.threads = 3, c.normalize = 1, c.scale = 0.5f, c.bounds = bounds;
  c.query = mixed, c.key = mixed + s.keys(), c.value = mixed + 2 * s.keys();
  row_strides(T, s.channels(), s.key_dim, c.query_stride), row_strides(T, s.channels(), s.key_dim, c.key_stride);
  row_strides(T, s.channels(), s.dim, c.value_stride), row_strides(T, s.values(), s.dim, c.out_stride);
  row_strides(T, s.heads, 1, c.beta_stride), row_strides(T, decays, decays / s.heads, c.decay_stride);
  c.beta = betas, c.log_decay = log_decay, c.channels = by.channels, c.state_new = final, c.out = out;
  layer.width = s.width, layer.channels = s.channels(), layer.eps = 1e-3f;
  layer.query_filter = filters, layer.key_filter = filters + s.keys(), layer.value_filter = filters + 2 * s.keys();
  layer.decay_scale = decay, layer.decay_bias = decay_bias, layer.gate = gate, layer.norm_weight = norm;
  layer.decay_bound = by.bound, layer.sigmoid = by.channels;
  LayerBefore before(s, B);
  if (s.continued()) before.give(s, c, layer);
  row_strides(T, s.values(), s.dim, layer.gate_stride);
  const std::string name =
      "delta layer" + by.name() + ", tokens " + std::to_string(T) + " heads " + std::to_string(s.heads);
  expect(linattn_delta_layer(&c, &layer) == OK, name);
  digests.same(name, out, out.size, 1e-3);
  digests.same(name + ": state", final, final.size, 1e-3);
}

/// Two tokens of such a layer, one after the other; then one that is not finite in the second batch entry, whose state
/// stays.
void check_delta_layer_step(const LayerShape& s, const LayerDecay& by) {
  seed = 1;
  const int64_t B = 2, channels = s.channels(), held = s.width - 1, decays = by.count(s), shared = s.heads / s.key_heads;
  Buffer<float> mixed(B * channels, true), b(B * s.heads, true), a(B * decays, true), gate(B * s.values(), true);
  Buffer<float> filter(channels * s.width, true), bias(channels, true), norm(s.dim, true), out(B * s.values());
  Buffer<float> A_log(s.heads, true), dt_bias(decays, true);
  Buffer<float> conv_state(B * channels * held, true), state(B * s.heads * s.key_dim * s.dim, true);
  DeltaLayerStep c;
  std::memset(&c, 0, sizeof c);
  c.batch = B, c.key_heads = s.key_heads, c.heads = s.heads, c.dim = s.key_dim, c.value_dim = s.dim, c.threads = 3;
  c.width = s.width, c.held = held, c.mixed_stride = channels, c.gate_stride = s.values(), c.scale = 0.5f, c.eps = 1e-3f;
  c.b_stride[0] = s.heads, c.b_stride[1] = shared, c.b_stride[2] = 1;
  c.a_stride[0] = decays, c.a_stride[1] = decays / s.key_heads, c.a_stride[2] = decays / s.heads;
  c.conv_stride[0] = channels * held, c.conv_stride[1] = held;
  c.channels = by.channels, c.sigmoid = by.channels, c.decay_bound = by.bound;
  c.query = mixed, c.key = mixed + s.keys(), c.value = mixed + 2 * s.keys();
  c.b = b, c.a = a, c.gate = gate, c.filter = filter, c.filter_bias = bias;
  c.A_log = A_log, c.dt_bias = dt_bias, c.norm_weight = norm;
  c.conv_state = conv_state, c.state = state, c.out = out;
  const std::string name =
      "delta layer step" + by.name() + ", heads " + std::to_string(s.heads) + " dim " + std::to_string(s.dim);
  expect(linattn_delta_layer_step(&c) == OK && linattn_delta_layer_step(&c) == OK, name);
  digests.same(name, out, out.size, 1e-3);
  digests.same(name + ": state", state, state.size, 1e-3);
  const std::vector<float> before(&state[state.size / 2], &state[state.size - 1] + 1);
  a[a.size - 1] = NAN;
  expect(linattn_delta_layer_step(&c) & NOT_FINITE, name + ": not finite");
  expect(std::memcmp(before.data(), &state[state.size / 2], before.size() * 4) == 0, name + ": the state stays");
}

/// The same of a Mamba-2 layer, with its gate or without.
void check_scan_layer(const LayerShape& s, bool gated) {
  seed = 1;
  const int64_t T = s.tokens, B = 2, bounds[2] = {0, T};
  Buffer<float> mixed(B * T * s.channels(), true), steps(B * T * s.heads, true), gate(B * T * s.values(), true);
  Buffer<float> filters(s.width * s.channels(), true), bias(s.channels(), true), A(s.heads, true), rest(2 * s.heads, true);
  Buffer<float> out(B * T * s.values()), final(B * s.heads * s.key_dim * s.dim), squares(B * s.heads * T);
  for (size_t h = 0; h < A.size; ++h) A[h] = -std::fabs(A[h]);
  DecayCall c;
  ScanLayer layer;
  std::memset(&c, 0, sizeof c), std::memset(&layer, 0, sizeof layer);
  c.batch = B, c.query_heads = c.key_heads = s.key_heads, c.heads = s.heads, c.tokens = T, c.dim = s.key_dim;
  c.value_dim = s.dim, c.sequences = 1, c.threads = 3, c.scale = 1, c.bounds = bounds;
  c.query = mixed, c.key = mixed + s.keys(), c.value = mixed + 2 * s.keys();
  row_strides(T, s.channels(), s.key_dim, c.query_stride), row_strides(T, s.channels(), s.key_dim, c.key_stride);
  row_strides(T, s.channels(), s.dim, c.value_stride), row_strides(T, s.values(), s.dim, c.out_stride);
  row_strides(T, s.heads, 1, c.input_stride);
  c.input = steps, c.skip = rest, c.state_new = final, c.out = out;
  layer.width = s.width, layer.channels = s.channels(), layer.A = A, layer.step_bias = rest + s.heads;
  layer.query_filter = filters, layer.key_filter = filters + s.keys(), layer.value_filter = filters + 2 * s.keys();
  LayerBefore before(s, B);
  if (s.continued()) before.give(s, c, layer);
  if (gated) {
    layer.query_bias = bias, layer.key_bias = bias + s.keys(), layer.value_bias = bias + 2 * s.keys();
    layer.gate = gate, layer.squares = squares;
    row_strides(T, s.values(), s.dim, layer.gate_stride);
  }
  const std::string name = "scan layer, tokens " + std::to_string(T) + " heads " + std::to_string(s.heads);
  expect(linattn_scan_layer(&c, &layer) == OK, name);
  digests.same(name, out, out.size, 1e-3);
  digests.same(name + ": state", final, final.size, 1e-3);
  if (gated) digests.same(name + ": squares", squares, squares.size, 1e-3);
}

const LayerDecay DECAYS[3] = {{false, 0}, {true, 0}, {true, -5}};

/// All shapes of both layers. Returns how many there are.
int layer_shapes() {
  for (const LayerShape& s : {LayerShape{1, 1, 1, 16, 16, 4}, {70, 1, 5, 32, 48, 2}, {97, 2, 4, 16, 32, 3}}) {
    for (const LayerDecay& by : DECAYS) check_delta_layer(s, by);
    check_scan_layer(s, s.heads != 5);
  }
  for (const LayerShape& s : {LayerShape{1, 1, 1, 16, 16, 4}, {1, 2, 6, 7, 5, 2}, {1, 1, 4, 64, 128, 3}}) {
    for (const LayerDecay& by : DECAYS) check_delta_layer_step(s, by);
  }
  return 21;
}

}  // namespace
