/// Near/far attention without a causal mask over ragged shapes: exact where every key has a slot, and the same on any
/// number of threads.
#pragma once
#include "digests.h"
#include "nearfar_run.h"

extern "C" {
int32_t linattn_nearfar_bidirectional(const BidirectionalCall*);
}

namespace {

/// Outputs (B, Hq, T, M) of all queries of a run, which see the first `keys` keys in `size` slots.
Buffer<float> bidirectional(NearFarRun& run, int64_t keys, int64_t size, int64_t threads) {
  const NearFarShape& s = run.s;
  run.restart();
  const NearFarCall tokens = run.call(0, s.tokens);
  std::vector<int64_t> sizes(size_t(s.heads), size);
  Buffer<uint8_t> mask(s.batch * keys);
  for (int64_t i = 0; i < s.batch * keys; ++i) mask[i] = run.mask[i / keys * s.tokens + i % keys];
  Buffer<float> out(int64_t(run.out.size));
  BidirectionalCall c;
  std::memset(&c, 0, sizeof c);
  c.batch = s.batch, c.heads = tokens.heads, c.kv_heads = s.heads, c.queries = s.tokens, c.keys = keys;
  c.dim = s.dim, c.value_dim = s.value_dim, c.same_tokens = keys == s.tokens, c.threads = threads;
  c.window = s.window, c.block = s.block, c.dtype = s.dtype, c.sqrt_scale = tokens.sqrt_scale, c.alpha = 0.25f;
  c.logit_cap = s.cap, c.query = tokens.query, c.key = tokens.key, c.value = tokens.value;
  std::memcpy(c.query_stride, tokens.query_stride, 24), std::memcpy(c.key_stride, tokens.key_stride, 24);
  std::memcpy(c.value_stride, tokens.value_stride, 24);
  c.sizes = sizes.data(), c.mask = s.mask ? static_cast<uint8_t*>(mask) : nullptr, c.out = out;
  expect(linattn_nearfar_bidirectional(&c) == OK, run.name + ": without a causal mask");
  return out;
}

/// The same by definition, with a slot for every key; float32 tokens.
Buffer<float> softmax_attention(NearFarRun& run, int64_t keys) {
  const NearFarShape& s = run.s;
  const int64_t T = s.tokens, D = s.dim, M = s.value_dim;
  Buffer<float> out(int64_t(run.out.size));
  for (int64_t row = 0; row < s.batch * s.heads * s.groups * T; ++row) {
    const int64_t kv = row / T / s.groups, b = kv / s.heads;
    const float* x = run.q + row * D;
    double total = 0;
    std::vector<double> sum(size_t(M), 0.0);
    for (int64_t j = 0; j < keys; ++j) {
      if (s.mask && !run.mask[b * T + j]) continue;
      const float *key = run.k + (kv * T + j) * D, *value = run.v + (kv * T + j) * M;
      double score = 0;
      for (int64_t d = 0; d < D; ++d) score += 0.49 * double(x[d]) * double(key[d]);
      const double weight = std::exp(s.cap > 0 ? double(s.cap) * std::tanh(score / double(s.cap)) : score);
      total += weight;
      for (int64_t d = 0; d < M; ++d) sum[size_t(d)] += weight * double(value[d]);
    }
    for (int64_t d = 0; d < M && total > 0; ++d) out[row * M + d] = float(sum[size_t(d)] / total);
  }
  return out;
}

/// Queries and keys of the same tokens, and queries that see fewer keys.
void check_bidirectional(const NearFarShape& s) {
  seed = 1;
  NearFarRun run(s);
  for (const int64_t keys : {s.tokens, (s.tokens + 1) / 2}) {
    const std::string form = " without a causal mask, keys " + std::to_string(keys);
    if (s.dtype == FLOAT32 && s.tokens < 200) {
      Buffer<float> exact = softmax_attention(run, keys), found = bidirectional(run, keys, keys, 3);
      expect(difference(found, exact, found.size) < 1e-4, run.name + form + ": a slot for every key");
    }
    Buffer<float> out = bidirectional(run, keys, s.slots, 3), alone = bidirectional(run, keys, s.slots, 1);
    expect(difference(out, alone, out.size) == 0, run.name + form + ": threads");
    // On a line, and between numbers that repeat themselves, instruction sets may merge different pairs.
    if (s.dtype == FLOAT32 && s.dim > 1) digests.same(run.shape + form, out, out.size, 1e-4);
  }
}

}  // namespace
