// The delta rule over ragged shapes: one call, two calls and token by token must agree, and threads must share heads.
#pragma once
#include "delta/abi.h"
#include "digests.h"

extern "C" {
int64_t linattn_delta_parts(const DeltaCall*);
int32_t linattn_delta_forward(const DeltaCall*);
int32_t linattn_delta_backward(const DeltaCall*);
int32_t linattn_delta_step(const DeltaCall*, const void*, const void*, const void*, const float*, const float*,
                           const uint8_t*, const float*, float*, void*, int64_t*, int64_t);
}

namespace {

struct DeltaShape {
  int64_t batch, query_heads, key_heads, heads, tokens, dim, value_dim;
  int32_t dtype;
  bool decays, channels, mask, normalize;
};

// Buffers have exactly the size they must have.
struct DeltaRun {
  DeltaShape s;
  int64_t out_heads, state_floats;
  Buffer<float> q, k, v, beta, decay, state, grad_final;
  Buffer<uint16_t> hq, hk, hv, half_out;
  Buffer<uint8_t> mask;
  Buffer<float> out, final;
  std::vector<int64_t> bounds;
  std::string shape, name;

  explicit DeltaRun(const DeltaShape& shape_of_run)
      : s(shape_of_run),
        out_heads(s.query_heads > s.heads ? s.query_heads : s.heads),
        state_floats(s.heads * s.dim * s.value_dim),
        q(s.batch * s.query_heads * s.tokens * s.dim, true),
        k(s.batch * s.key_heads * s.tokens * s.dim, true),
        v(s.batch * s.heads * s.tokens * s.value_dim, true),
        beta(s.batch * s.heads * s.tokens, true),
        decay(s.batch * s.heads * s.tokens * (s.channels ? s.dim : 1), true),
        state(s.batch * 2 * state_floats, true),
        grad_final(s.batch * 2 * state_floats, true),
        hq(int64_t(q.size)),
        hk(int64_t(k.size)),
        hv(int64_t(v.size)),
        half_out(s.batch * out_heads * s.tokens * s.value_dim),
        mask(s.batch * s.tokens),
        out(s.batch * out_heads * s.tokens * s.value_dim),
        final(s.batch * 2 * state_floats),
        bounds({0, s.tokens}) {
    for (size_t i = 0; i < hq.size; ++i) hq[i] = uint16_t(0x3800 + i % 512);
    for (size_t i = 0; i < hk.size; ++i) hk[i] = uint16_t(0x3000 + i * 7 % 1900);
    for (size_t i = 0; i < hv.size; ++i) hv[i] = uint16_t(0x3400 + i % 900);
    for (size_t i = 0; i < mask.size; ++i) mask[i] = i % 5 != 0;
    for (size_t i = 0; i < beta.size; ++i) beta[i] = beta[i] < 0 ? -beta[i] : beta[i];
    for (size_t i = 0; i < decay.size; ++i) decay[i] = decay[i] < 0 ? decay[i] : -decay[i];
    shape = "delta dtype " + std::to_string(s.dtype) + " heads " + std::to_string(s.query_heads) + "/" +
            std::to_string(s.key_heads) + "/" + std::to_string(s.heads) + " tokens " + std::to_string(s.tokens) + " dim " +
            std::to_string(s.dim) + " values " + std::to_string(s.value_dim) + (s.channels ? " channels" : "");
    name = std::string(linattn_isa()) + " " + shape;
  }

  /// A call for the tokens from `begin` on.
  DeltaCall call(int64_t begin) {
    DeltaCall c;
    std::memset(&c, 0, sizeof c);
    const int64_t T = s.tokens, width = s.channels ? s.dim : 1;
    c.batch = s.batch, c.query_heads = s.query_heads, c.key_heads = s.key_heads, c.heads = s.heads;
    c.tokens = T, c.dim = s.dim, c.value_dim = s.value_dim, c.sequences = 1, c.threads = 3;
    c.dtype = s.dtype, c.channels = s.channels, c.normalize = s.normalize, c.scale = 0.7f;
    const auto strides = [T](int64_t heads, int64_t dim, int64_t (&to)[3]) {
      to[0] = heads * T * dim, to[1] = T * dim, to[2] = dim;
    };
    strides(s.query_heads, s.dim, c.query_stride), strides(s.key_heads, s.dim, c.key_stride);
    strides(s.heads, s.value_dim, c.value_stride), strides(s.heads, 1, c.beta_stride);
    strides(s.heads, width, c.decay_stride), strides(out_heads, s.value_dim, c.out_stride);
    strides(out_heads, s.value_dim, c.grad_out_stride);
    const bool wide = s.dtype == FLOAT32;
    c.query = wide ? static_cast<void*>(q + begin * s.dim) : hq + begin * s.dim;
    c.key = wide ? static_cast<void*>(k + begin * s.dim) : hk + begin * s.dim;
    c.value = wide ? static_cast<void*>(v + begin * s.value_dim) : hv + begin * s.value_dim;
    c.beta = beta + begin, c.log_decay = s.decays ? decay + begin * width : nullptr;
    c.mask = s.mask ? mask + begin : nullptr, c.bounds = bounds.data();
    c.state = state, c.state_new = final;
    c.out = wide ? static_cast<void*>(out + begin * s.value_dim) : half_out + begin * s.value_dim;
    return c;
  }

  /// The gradients must not depend on the number of threads.
  void backward(int64_t threads) {
    seed = 2;  // the same grad_out however many threads there are
    DeltaCall c = call(0);
    c.threads = threads, c.parts = linattn_delta_parts(&c);
    const int64_t T = s.tokens, rows = s.batch * s.heads * T;
    int64_t saved = 0;
    for (size_t i = 0; i + 1 < bounds.size(); ++i) saved += checkpoint_count(bounds[i + 1] - bounds[i]);
    c.sequences = int64_t(bounds.size()) - 1;
    Buffer<float> checkpoints(s.batch * saved * state_floats), grad_out(int64_t(out.size), true);
    Buffer<float> grad_query(c.parts * s.batch * out_heads * T * s.dim), grad_key(c.parts * rows * s.dim);
    Buffer<float> grad_value(rows * s.value_dim), grad_beta(c.parts * rows);
    Buffer<float> grad_decay(c.parts * rows * (s.channels ? s.dim : 1)), grad_state(s.batch * c.sequences * state_floats);
    Buffer<uint16_t> half_grad(int64_t(out.size));
    for (size_t i = 0; i < half_grad.size; ++i) half_grad[i] = uint16_t(0x3000 + i * 11 % 1900);
    c.checkpoints = checkpoints;
    c.grad_out = s.dtype == FLOAT32 ? static_cast<void*>(grad_out) : half_grad;
    c.grad_state_new = grad_final;
    c.grad_query = grad_query, c.grad_key = grad_key, c.grad_value = grad_value, c.grad_beta = grad_beta;
    c.grad_log_decay = grad_decay, c.grad_state = grad_state;
    expect(linattn_delta_forward(&c) == OK, name + ": forward with checkpoints");
    expect(linattn_delta_backward(&c) == OK, name + ": backward");
    const std::string cut = shape + (c.sequences > 1 ? ": packed" : ": ");
    digests.same(cut + " gradient of values", grad_value, grad_value.size, 1e-4);
    digests.same(cut + " gradient of the state", grad_state, grad_state.size, 1e-4);
    if (c.parts > 1) return;
    digests.same(cut + " gradient of keys", grad_key, grad_key.size, 1e-4);
    digests.same(cut + " gradient of queries", grad_query, grad_query.size, 1e-4);
    digests.same(cut + " gradient of decays", grad_decay, grad_decay.size, 1e-4);
  }

  /// Token by token from the same state: the final state must be the same.
  void steps() {
    Buffer<float> now(s.batch * state_floats), one(s.batch * out_heads * s.value_dim);
    std::memcpy(now, state, now.size * 4);
    for (int64_t t = 0; t < s.tokens; ++t) {
      DeltaCall c = call(t);
      c.out_stride[0] = out_heads * s.value_dim, c.out_stride[1] = s.value_dim;
      Buffer<uint8_t> hidden(s.batch);
      for (int64_t b = 0; b < s.batch; ++b) hidden[b] = mask[b * s.tokens + t];
      c.tokens = 1;
      const uint8_t* visible = s.mask ? static_cast<uint8_t*>(hidden) : nullptr;
      const int32_t flags =
          linattn_delta_step(&c, c.query, c.key, c.value, c.beta, c.log_decay, visible, now, now, one, nullptr, 1 + t % 3);
      expect(flags == OK, name + ": step");
    }
    expect(difference(now, final, now.size) < 1e-4, name + ": token by token");
  }
};

/// Forward, token by token, and backward, also of two sequences.
void check_delta(const DeltaShape& s) {
  seed = 1;
  DeltaRun run(s);
  DeltaCall c = run.call(0);
  expect(linattn_delta_forward(&c) == OK, run.name + ": forward");
  digests.same(run.shape + ": final state", run.final, size_t(s.batch * run.state_floats), 1e-4);
  if (s.dtype == FLOAT32) digests.same(run.shape + ": out", run.out, run.out.size, 1e-4);
  if (s.dtype == FLOAT32 && s.tokens <= 70) run.steps();
  run.backward(1);
  run.backward(4);
  run.bounds = {0, s.tokens / 3, s.tokens};
  run.backward(2);
}

const DeltaShape DELTA_SIZES[] = {
    {1, 1, 1, 1, 0, 1, 1, 0, false, false, false, false}, {2, 4, 1, 2, 0, 7, 5, 0, true, false, true, true},
    {1, 1, 1, 2, 0, 16, 33, 0, true, true, false, true},  {1, 1, 1, 1, 0, 20, 96, 0, true, false, false, true},
    {1, 2, 1, 1, 0, 33, 80, 0, true, true, true, true},
};

/// Runs all shapes of the delta rule with these lengths; returns how many.
int delta_shapes(const std::vector<int64_t>& lengths, bool all_types) {
  int count = 0;
  for (const int32_t dtype : {FLOAT32, FLOAT16, BFLOAT16}) {
    if (dtype != FLOAT32 && !all_types) break;
    for (const int64_t tokens : lengths) {
      for (DeltaShape s : DELTA_SIZES) {
        s.tokens = tokens, s.dtype = dtype;
        check_delta(s);
        ++count;
      }
    }
  }
  return count;
}

}  // namespace
