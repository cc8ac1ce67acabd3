/// Decayed sums over ragged shapes: one call and two, one thread and several, and token by token must agree; gradients must
/// not depend on threads.
#pragma once
#include "decay/abi.h"
#include "digests.h"

extern "C" {
int32_t linattn_decay_forward(const DecayCall*);
int32_t linattn_decay_backward(const DecayCall*);
int32_t linattn_decay_decode(const DecayCall*, const void*, const void*, const void*, const float*, const uint8_t*,
                             const float*, float*, void*, int64_t*, int64_t);
}

namespace {

/// One case. decay: 0 none, 1 per head, 2 per channel.
struct DecayShape {
  int64_t batch, query_heads, key_heads, heads, tokens, dim, value_dim;
  int32_t decay, dtype;
  bool mask, packed;
};

/// A case with all its buffers, each of exactly the size it must have.
struct DecayRun {
  static constexpr int64_t SEGMENT = 128;
  DecayShape s;
  int64_t outputs, sequences, segments = 0, states;
  std::vector<int64_t> bounds;
  Buffer<float> q, k, v, decay, state, final_state, out, grad_out;
  Buffer<uint16_t> hq, hk, hv, hout, hgrad;
  Buffer<uint8_t> mask;
  std::string shape, name;

  explicit DecayRun(const DecayShape& given)
      : s(given),
        outputs(s.query_heads > s.heads ? s.query_heads : s.heads),
        sequences(s.packed ? 3 : 1),
        states(s.batch * sequences * s.heads * s.dim * s.value_dim),
        q(s.batch * s.query_heads * s.tokens * s.dim, true),
        k(s.batch * s.key_heads * s.tokens * s.dim, true),
        v(s.batch * s.heads * s.tokens * s.value_dim, true),
        decay(s.batch * s.heads * s.tokens * (s.decay == 2 ? s.dim : 1)),
        state(states, true),
        final_state(states),
        out(s.batch * outputs * s.tokens * s.value_dim),
        grad_out(int64_t(out.size), true),
        hq(int64_t(q.size)),
        hk(int64_t(k.size)),
        hv(int64_t(v.size)),
        hout(int64_t(out.size)),
        hgrad(int64_t(out.size)),
        mask(s.batch * s.tokens) {
    bounds = s.packed ? std::vector<int64_t>{0, s.tokens / 3, s.tokens / 3, s.tokens} : std::vector<int64_t>{0, s.tokens};
    for (int64_t i = 0; i < sequences; ++i) {
      segments += (bounds[size_t(i + 1)] - bounds[size_t(i)] + SEGMENT - 1) / SEGMENT;
    }
    for (size_t i = 0; i < decay.size; ++i) decay[i] = i % 13 == 0 ? -25.0f : -0.02f * float(i % 7);
    for (size_t i = 0; i < mask.size; ++i) mask[i] = i % 5 != 0;
    for (size_t i = 0; i < hq.size; ++i) hq[i] = uint16_t(0x3800 + i % 512);
    for (size_t i = 0; i < hk.size; ++i) hk[i] = uint16_t(0x3000 + i % 700);
    for (size_t i = 0; i < hv.size; ++i) hv[i] = uint16_t(0x3400 + i % 900);
    for (size_t i = 0; i < hgrad.size; ++i) hgrad[i] = uint16_t(0x3400 + i % 600);
    shape = "decay " + std::to_string(s.decay) + " dtype " + std::to_string(s.dtype) + " heads " +
            std::to_string(s.query_heads) + "," + std::to_string(s.key_heads) + "," + std::to_string(s.heads) + " tokens " +
            std::to_string(s.tokens) + " dim " + std::to_string(s.dim) + " values " + std::to_string(s.value_dim) +
            (s.mask ? " mask" : "") + (s.packed ? " packed" : "");
    name = std::string(linattn_isa()) + " " + shape;
  }

  /// Strides of (B, heads, T, width).
  void set_strides(int64_t* to, int64_t heads, int64_t width) const {
    to[0] = heads * s.tokens * width, to[1] = s.tokens * width, to[2] = width;
  }

  /// A forward call of all tokens.
  DecayCall call(int64_t threads) {
    DecayCall c;
    std::memset(&c, 0, sizeof c);
    c.batch = s.batch, c.query_heads = s.query_heads, c.key_heads = s.key_heads, c.heads = s.heads, c.tokens = s.tokens;
    c.dim = s.dim, c.value_dim = s.value_dim, c.sequences = sequences, c.threads = threads;
    c.dtype = s.dtype, c.per_channel = s.decay == 2, c.scale = 0.5f;
    const bool wide = s.dtype == FLOAT32;
    c.query = wide ? static_cast<void*>(q) : hq, c.key = wide ? static_cast<void*>(k) : hk;
    c.value = wide ? static_cast<void*>(v) : hv, c.out = wide ? static_cast<void*>(out) : hout;
    c.grad_out = wide ? static_cast<void*>(grad_out) : hgrad;
    set_strides(c.query_stride, s.query_heads, s.dim), set_strides(c.key_stride, s.key_heads, s.dim);
    set_strides(c.value_stride, s.heads, s.value_dim), set_strides(c.out_stride, outputs, s.value_dim);
    set_strides(c.grad_out_stride, outputs, s.value_dim);
    set_strides(c.decay_stride, s.heads, s.decay == 2 ? s.dim : 1);
    c.log_decay = s.decay ? static_cast<float*>(decay) : nullptr;
    c.mask = s.mask ? static_cast<uint8_t*>(mask) : nullptr;
    c.bounds = bounds.data(), c.state = state, c.state_new = final_state;
    return c;
  }
};

/// Forward and backward with one thread and with several.
void check_decay_training(DecayRun& run) {
  const DecayShape& s = run.s;
  Buffer<float> checkpoints(s.batch * run.segments * s.heads * s.dim * s.value_dim);
  std::vector<std::unique_ptr<Buffer<float>>> first;
  for (const int64_t threads : {1, 3}) {
    DecayCall c = run.call(threads);
    c.segment = DecayRun::SEGMENT, c.checkpoints = checkpoints;
    expect(linattn_decay_forward(&c) == OK, run.name + ": forward with checkpoints");
    std::vector<std::unique_ptr<Buffer<float>>> grads;
    for (const size_t n : {run.q.size, run.k.size, run.v.size, run.decay.size, run.state.size}) {
      grads.emplace_back(new Buffer<float>(int64_t(n)));
    }
    c.grad_state_new = run.state, c.grad_query = *grads[0], c.grad_key = *grads[1], c.grad_value = *grads[2];
    c.grad_log_decay = s.decay ? static_cast<float*>(*grads[3]) : nullptr, c.grad_state = *grads[4];
    expect(linattn_decay_backward(&c) == OK, run.name + ": backward");
    for (size_t i = 0; i < grads.size(); ++i) {
      const std::string what = "gradient " + std::to_string(i);
      if (threads == 1) {
        digests.same(run.shape + ": " + what, *grads[i], grads[i]->size, 1e-4);
      } else {
        expect(difference(*grads[i], *first[i], grads[i]->size) < 1e-4, run.name + ": " + what + ", threads");
      }
    }
    if (threads == 1) first.swap(grads);
  }
}

/// Token by token, the state updated in place (float32, one sequence).
void check_decay_decode(DecayRun& run) {
  const DecayShape& s = run.s;
  Buffer<float> state(run.states), row(s.batch * run.outputs * s.value_dim), joined(int64_t(run.out.size));
  Buffer<uint8_t> mask(s.batch);
  std::memcpy(state, run.state, run.state.size * 4);
  DecayCall c = run.call(1);
  c.tokens = 1;
  for (int64_t& stride : c.out_stride) stride = s.value_dim;
  c.out_stride[0] = run.outputs * s.value_dim;
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t b = 0; b < s.batch; ++b) mask[b] = run.mask[b * s.tokens + t];
    const float* g = s.decay ? run.decay + t * (s.decay == 2 ? s.dim : 1) : nullptr;
    expect(linattn_decay_decode(&c, run.q + t * s.dim, run.k + t * s.dim, run.v + t * s.value_dim, g,
                                s.mask ? static_cast<uint8_t*>(mask) : nullptr, state, state, row, nullptr, 1) == OK,
           run.name + ": decode");
    for (int64_t h = 0; h < s.batch * run.outputs; ++h) {
      std::memcpy(joined + (h * s.tokens + t) * s.value_dim, row + h * s.value_dim, size_t(s.value_dim) * 4);
    }
  }
  expect(difference(joined, run.out, joined.size) < 1e-4, run.name + ": token by token");
  expect(difference(state, run.final_state, state.size) < 1e-4, run.name + ": the state token by token");
}

/// All entries for one shape.
void check_decay(const DecayShape& s) {
  seed = 1;
  DecayRun run(s);
  DecayCall c = run.call(1);
  expect(linattn_decay_forward(&c) == OK, run.name + ": forward");
  digests.same(run.shape + ": state", run.final_state, run.final_state.size, 1e-4);
  if (s.dtype == FLOAT32) {
    digests.same(run.shape + ": out", run.out, run.out.size, 1e-4);
    Buffer<float> again(int64_t(run.out.size)), state(run.states);
    DecayCall shared = run.call(5);
    shared.out = again, shared.state_new = state;
    expect(linattn_decay_forward(&shared) == OK, run.name + ": forward, threads");
    expect(difference(again, run.out, again.size) < 1e-4, run.name + ": threads");
    expect(difference(state, run.final_state, state.size) < 1e-4, run.name + ": the state, threads");
    if (!s.packed && s.tokens < 80) check_decay_decode(run);
  }
  check_decay_training(run);
}

/// Shapes without their tokens, decay and dtype.
const DecayShape DECAY_SIZES[] = {
    {1, 1, 1, 1, 0, 1, 1, 0, 0, false, false},  {2, 2, 1, 2, 0, 7, 5, 0, 0, true, false},
    {1, 1, 1, 3, 0, 16, 33, 0, 0, false, true}, {1, 4, 1, 2, 0, 20, 16, 0, 0, true, true},
    {1, 2, 3, 6, 0, 5, 20, 0, 0, false, false},
};

/// All shapes on the current instruction set; returns how many.
int decay_shapes(const std::vector<int64_t>& lengths, bool all_types) {
  int count = 0;
  for (const int32_t dtype : {FLOAT32, FLOAT16, BFLOAT16}) {
    if (dtype != FLOAT32 && !all_types) break;
    for (const int64_t tokens : lengths) {
      for (DecayShape s : DECAY_SIZES) {
        for (s.decay = 0; s.decay < 3; ++s.decay) s.tokens = tokens, s.dtype = dtype, check_decay(s), ++count;
      }
    }
  }
  return count;
}

}  // namespace
