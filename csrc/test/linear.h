/// Linear attention over ragged shapes: calls split over threads, stateful and stateless calls must agree.
#pragma once
#include "digests.h"

extern "C" {
int32_t linattn_linear_update_state(const LinearCall*);
int32_t linattn_linear_read_state(const LinearCall*);
int32_t linattn_linear_causal_forward(const LinearCall*);
int32_t linattn_linear_update_state_backward(const LinearCall*);
int32_t linattn_linear_read_state_backward(const LinearCall*);
int32_t linattn_linear_causal_backward(const LinearCall*);
int32_t linattn_linear_forward(const LinearCall*, const void*, const void*, const void*, float*, int64_t, int32_t);
int32_t linattn_linear_decode(const LinearCall*, const void*, const void*, const void*, const void* const*, float*, float*,
                              float*, const uint8_t*, int64_t, uint64_t);
}

namespace {

/// One case.
struct LinearShape {
  int64_t batch, heads, groups, tokens, dim, value_dim, features;
  int32_t map, dtype;
  bool mask, decay;
};

/// n rounded up to a multiple of 16.
int64_t whole_vectors(int64_t n) { return (n + 15) / 16 * 16; }

/// feature_stride and row_stride of core/load_rows.h, as a caller computes them.
int64_t caller_feature_stride(int64_t n) { return whole_vectors(n) + 16; }
int64_t caller_row_stride(int64_t n) { return n > 64 ? caller_feature_stride(n) : whole_vectors(n); }

/// The number of features of a map.
int64_t feature_count(int32_t map, int64_t dim, int64_t features) {
  if (map == MAP_TRIG) return 2 * features;
  if (map == MAP_EXP) return features;
  return map == MAP_QUADRATIC ? 1 + dim + dim * (dim + 1) / 2 : dim;
}

/// A case with all its buffers, each of exactly the size it must have.
struct LinearRun {
  static constexpr int64_t SEGMENT = 96;
  LinearShape s;
  int64_t B, H, Hq, T, D, M, r, projected, states;
  Buffer<float> q, k, v;
  Buffer<uint16_t> hq, hk, hv;
  Buffer<float> projection, projection_t, bias;
  Buffer<uint8_t> mask;
  Buffer<double> decay, log_weight;
  Buffer<float> S, Z, scale, S_new, Z_new, scale_new;
  Buffer<int64_t> tokens, guarded, tokens_new, guarded_new;
  Buffer<float> out, again, checkpoints, grad_out;
  Buffer<float> gq, gk, gv, gS, gZ, glog;
  LinearCall c;
  std::string shape, name;

  explicit LinearRun(const LinearShape& shape_of_run)
      : s(shape_of_run),
        B(s.batch),
        H(s.heads),
        Hq(H * s.groups),
        T(s.tokens),
        D(s.dim),
        M(s.value_dim),
        r(feature_count(s.map, D, s.features)),
        projected(s.map == MAP_TRIG ? r / 2 : r),
        states(B * H * r * M),
        q(B * Hq * T * D, true),
        k(B * H * T * D, true),
        v(B * H * T * M, true),
        hq(B * Hq * T * D),
        hk(B * H * T * D),
        hv(B * H * T * M),
        projection(projected * caller_row_stride(D), true),
        projection_t(D * caller_feature_stride(projected)),
        bias(caller_feature_stride(projected)),
        mask(B * T),
        decay(B * H * T),
        log_weight(B * H * T),
        S(states),
        Z(B * H * r),
        scale(B * H),
        S_new(states),
        Z_new(B * H * r),
        scale_new(B * H),
        tokens(B * H),
        guarded(B * H),
        tokens_new(B * H),
        guarded_new(B * H),
        out(B * Hq * T * M),
        again(B * Hq * T * M),
        checkpoints(B * H * ((T + SEGMENT - 1) / SEGMENT) * (r * (M + 1) + 2)),
        grad_out(B * Hq * T * M, true),
        gq(B * Hq * T * D),
        gk(B * H * T * D),
        gv(B * H * T * M),
        gS(states),
        gZ(B * H * r),
        glog(B * H * T) {
    fill_inputs();
    fill_call();
    shape = "map " + std::to_string(s.map) + " dtype " + std::to_string(s.dtype) + " heads " + std::to_string(B * H) +
            " tokens " + std::to_string(T) + " dim " + std::to_string(D) + " values " + std::to_string(M) + " features " +
            std::to_string(r);
    name = std::string(linattn_isa()) + " " + shape;
  }

  /// Half-precision inputs, masks and decays with fixed patterns; the float inputs are random.
  void fill_inputs() {
    if (s.map == MAP_IDENTITY) {  // features of both signs make denominators near 0, where threads show their rounding
      for (size_t i = 0; i < q.size; ++i) q[i] = std::fabs(q[i]);
      for (size_t i = 0; i < k.size; ++i) k[i] = std::fabs(k[i]);
    }
    for (size_t i = 0; i < hq.size; ++i) hq[i] = uint16_t(0x3800 + i % 512);
    for (size_t i = 0; i < hk.size; ++i) hk[i] = uint16_t(0x3000 + i % 700);
    for (size_t i = 0; i < hv.size; ++i) hv[i] = uint16_t(0x3400 + i % 900);
    const int64_t ld = caller_feature_stride(projected);
    for (int64_t i = 0; i < ld; ++i) bias[i] = i < projected ? 0 : -1e30f;
    for (int64_t i = 0; i < projected; ++i) {
      for (int64_t d = 0; d < D; ++d) projection_t[d * ld + i] = projection[i * caller_row_stride(D) + d];
    }
    for (int64_t i = 0; i < B * T; ++i) mask[i] = i % 3 != 0;
    for (int64_t i = 0; i < B * H * T; ++i) decay[i] = -0.05 * double(i % 7), log_weight[i] = 0.1 * double(i % 5);
    for (int64_t i = 0; i < B * H; ++i) scale[i] = -INFINITY;
  }

  /// The call, with everything but log_decay and log_weight.
  void fill_call() {
    std::memset(&c, 0, sizeof c);
    c.batch = B, c.heads = Hq, c.kv_heads = H, c.queries = c.keys = T, c.dim = D, c.value_dim = M, c.features = r;
    c.threads = 1, c.segment = SEGMENT, c.feature_map = s.map, c.dtype = s.dtype, c.input_scale = 0.5f;
    c.scaled = s.map == MAP_EXP || s.map == MAP_TRIG || s.decay;
    c.norm_coef = s.map == MAP_EXP ? -0.3 : s.map == MAP_TRIG ? 0.7 : 0;
    c.quadratic_low[0] = c.quadratic_low[1] = c.quadratic_high[0] = c.quadratic_high[1] = 1;
    c.projection = projection, c.projection_t = projection_t, c.projection_bias = bias;
    const bool float_input = s.dtype == FLOAT32;
    c.query = float_input ? static_cast<void*>(q) : hq, c.key = float_input ? static_cast<void*>(k) : hk;
    c.value = float_input ? static_cast<void*>(v) : hv;
    const int64_t strides[3][3] = {{Hq * T * D, T * D, D}, {H * T * D, T * D, D}, {H * T * M, T * M, M}};
    std::memcpy(c.query_stride, strides[0], 24), std::memcpy(c.key_stride, strides[1], 24);
    std::memcpy(c.value_stride, strides[2], 24);
    c.mask = s.mask ? static_cast<uint8_t*>(mask) : nullptr;
    c.S = S, c.Z = Z, c.log_scale = scale, c.tokens = tokens, c.guarded = guarded;
    c.S_new = S_new, c.Z_new = Z_new, c.log_scale_new = scale_new, c.tokens_new = tokens_new, c.guarded_new = guarded_new;
    c.out = out, c.checkpoints = checkpoints, c.grad_out = grad_out;
    c.grad_query = gq, c.grad_key = gk, c.grad_value = gv, c.grad_S = gS, c.grad_Z = gZ, c.grad_log_weight = glog;
  }

  /// Compares the gradients with those of other instruction sets.
  void compare_gradients(const std::string& of) {
    digests.same(shape + of + ", query", gq, gq.size, 1e-3);
    digests.same(shape + of + ", key", gk, gk.size, 1e-3);
    digests.same(shape + of + ", value", gv, gv.size, 1e-3);
  }

  /// Causal: one thread, then three, which share the tokens of a head.
  void check_causal() {
    c.log_decay = s.decay ? static_cast<double*>(decay) : nullptr;
    c.log_weight = s.decay ? static_cast<double*>(log_weight) : nullptr;
    expect(linattn_linear_causal_forward(&c) == OK, name + ": causal");
    expect(linattn_linear_causal_backward(&c) == OK, name + ": causal backward");
    Buffer<float> first(B * H * T * D);
    std::memcpy(first, gk, first.size * 4), std::memcpy(again, out, again.size * 4);
    c.threads = 3;
    const bool forward = linattn_linear_causal_forward(&c) == OK;
    expect(forward && difference(again, out, out.size) < 1e-4, name + ": causal, threads");
    const bool backward = linattn_linear_causal_backward(&c) == OK;
    expect(backward && difference(first, gk, gk.size) < 1e-3, name + ": causal backward, threads");
    digests.same(shape + ": causal", out, out.size, 1e-4);
    compare_gradients(": causal backward");
  }

  /// Not causal, from the state that the causal call has left.
  void check_state() {
    c.log_decay = nullptr, c.checkpoints = nullptr, c.segment = 0;
    expect(linattn_linear_update_state(&c) == OK, name + ": update_state");
    c.S = S_new, c.Z = Z_new, c.log_scale = scale_new, c.tokens = tokens_new;
    expect(linattn_linear_read_state(&c) == OK, name + ": read_state");
    expect(linattn_linear_read_state_backward(&c) == OK, name + ": read_state backward");
    Buffer<float> upS(states, true), upZ(B * H * r, true);
    c.grad_S_new = upS, c.grad_Z_new = upZ;
    expect(linattn_linear_update_state_backward(&c) == OK, name + ": update_state backward");
    c.grad_S_new = c.grad_Z_new = nullptr;
    digests.same(shape + ": read_state", out, out.size, 1e-4);
    compare_gradients(": backward");
  }

  /// Stateless: heads for every thread, and threads that share a head.
  void check_forward() {
    LinearCall plain = c;
    plain.S = plain.Z = plain.log_scale = nullptr, plain.tokens = plain.guarded = plain.guarded_new = nullptr;
    const auto forward = [&](float* to, int64_t threads) {
      return linattn_linear_forward(&plain, c.query, c.key, c.value, to, threads, 0) == OK;
    };
    expect(forward(out, B * H), name + ": forward");
    expect(forward(again, B * H + 2), name + ": forward, shared heads");
    expect(difference(again, out, out.size) < 1e-4, name + ": forward, threads");
    digests.same(shape + ": forward", out, out.size, 1e-4);
  }

  /// One token: by a causal call, and by the decode entry with a state in parts or packed.
  void check_decode() {
    Buffer<float> S2(states), Z2(B * H * r), scale2(B * H);
    Buffer<int64_t> tokens2(B * H);
    c.S_new = S2, c.Z_new = Z2, c.log_scale_new = scale2, c.tokens_new = tokens2;
    expect(linattn_linear_causal_forward(&c) == OK, name + ": one token");
    if (s.mask || s.decay) return;  // the decode entry does not take these
    const int64_t counts = 2 * whole_vectors(2 * B * H);
    const int64_t floats = whole_vectors(states) + whole_vectors(B * H * r) + whole_vectors(B * H) + counts;
    Buffer<float> first(floats), second(floats), row(B * Hq * M);
    const void* parts[5] = {c.S, c.Z, c.log_scale, c.tokens, c.guarded};
    const auto decode = [&](const void* const* from, float* old_state, float* new_state) {
      return linattn_linear_decode(&c, c.query, c.key, c.value, from, old_state, new_state, row, nullptr, 0, 0) == OK;
    };
    expect(decode(parts, nullptr, first), name + ": decode, state in parts");
    expect(difference(first, S2, size_t(states)) < 1e-6, name + ": the packed state");
    expect(decode(nullptr, first, second), name + ": decode, packed state");
    digests.same(shape + ": decode", row, row.size, 1e-4);
  }
};

/// All checks of one case.
void check_linear(const LinearShape& s) {
  seed = 1;
  LinearRun run(s);
  run.check_causal();
  run.check_state();
  run.check_forward();
  if (s.tokens == 1) run.check_decode();
}

}  // namespace
