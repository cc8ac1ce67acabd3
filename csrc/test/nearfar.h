/// Near/far attention over ragged shapes: one call, two calls and token by token must agree.
#pragma once
#include "nearfar_bidirectional.h"

extern "C" {
int32_t linattn_nearfar_merge(const MergeCall*);
int32_t linattn_nearfar_backward(const NearFarGrads*);
}

namespace {

/// The gradients of a prefill's inputs, in buffers of exact size.
struct Grads {
  Buffer<float> query, key, value, sink, near, slot, bias, band;
  /// By those of its output rows (B, Hq, count, M), and of the state after it; either may be null.
  Grads(const NearFarShape& s, const Tape& tape, const float* out, Grads* after)
      : query(s.batch * s.heads * s.groups * tape.c.tokens * s.dim),
        key(s.batch * s.heads * tape.c.tokens * s.dim),
        value(s.batch * s.heads * tape.c.tokens * s.value_dim),
        sink(numbers(s, tape.before->sink)),
        near(numbers(s, tape.before->near)),
        slot(numbers(s, tape.before->slot)),
        bias(int64_t(tape.before->bias.size)),
        band(s.batch * s.heads * s.groups * s.reach) {
    const auto of = [&](Buffer<float> Grads::* field) -> const float* {
      return after ? (after->*field).at.get() : nullptr;
    };
    float* biases = s.reach > 0 ? static_cast<float*>(band) : nullptr;
    const NearFarGrads g{&tape.c,
                         out,
                         of(&Grads::sink),
                         of(&Grads::near),
                         of(&Grads::slot),
                         of(&Grads::bias),
                         query,
                         key,
                         value,
                         sink,
                         near,
                         slot,
                         bias,
                         biases};
    expect(linattn_nearfar_backward(&g) == OK, "backward");
  }
  /// How many numbers a field of a state holds.
  static int64_t numbers(const NearFarShape& s, const Buffer<uint8_t>& field) {
    return int64_t(field.size) / s.entry_bytes() * (s.dim + s.value_dim);
  }
};

/// The gradients of keys and values (B, H, count, .) of a later call behind those of an earlier one.
void join(const NearFarShape& s, const Grads& early, const Grads& late, int64_t cut, float* key, float* value) {
  const int64_t T = s.tokens, D = s.dim, M = s.value_dim;
  for (int64_t h = 0; h < s.batch * s.heads; ++h) {
    std::memcpy(key + h * T * D, &early.key.at[size_t(h * cut * D)], size_t(cut * D) * 4);
    std::memcpy(key + (h * T + cut) * D, &late.key.at[size_t(h * (T - cut) * D)], size_t((T - cut) * D) * 4);
    std::memcpy(value + h * T * M, &early.value.at[size_t(h * cut * M)], size_t(cut * M) * 4);
    std::memcpy(value + (h * T + cut) * M, &late.value.at[size_t(h * (T - cut) * M)], size_t((T - cut) * M) * 4);
  }
}

/// One call and two calls give the same gradients; those of the second call go through the state between them.
void check_backward(NearFarRun& run) {
  const NearFarShape& s = run.s;
  const int64_t Hq = s.batch * s.heads * s.groups, T = s.tokens, M = s.value_dim, cut = T / 3;
  Buffer<float> way(Hq * T * M, true);
  Tape whole;
  run.restart();
  run.prefill(0, T, run.out, &whole);
  const Grads grads(s, whole, way, nullptr);
  digests.same(run.shape + " grad query", grads.query.at.get(), grads.query.size, 1e-3);
  digests.same(run.shape + " grad key", grads.key.at.get(), grads.key.size, 1e-3);
  if (cut <= 0) return;
  Tape first, second;
  Buffer<float> early(Hq * cut * M), late(Hq * (T - cut) * M), key(int64_t(grads.key.size)),
      value(int64_t(grads.value.size));
  run.restart();
  run.prefill(0, cut, early, &first);
  run.prefill(cut, T - cut, late, &second);
  for (int64_t h = 0; h < Hq; ++h) {
    std::memcpy(early + h * cut * M, way + h * T * M, size_t(cut * M) * 4);
    std::memcpy(late + h * (T - cut) * M, way + (h * T + cut) * M, size_t((T - cut) * M) * 4);
  }
  Grads later(s, second, late, nullptr);
  const Grads earlier(s, first, early, &later);
  join(s, earlier, later, cut, key, value);
  expect(difference(key, grads.key.at.get(), key.size) < 1e-3, run.name + ": gradients of keys by two calls");
  expect(difference(value, grads.value.at.get(), value.size) < 1e-3, run.name + ": gradients of values by two calls");
}

/// One call, split calls and token by token give the same outputs.
void check_nearfar(const NearFarShape& s) {
  seed = 1;
  NearFarRun run(s);
  const int64_t Hq = s.batch * s.heads * s.groups, M = s.value_dim, T = s.tokens;
  run.restart();
  run.prefill(0, T, run.out);
  // The last bit of a slot in 16 or 8 bits may differ.
  const double close = s.state_bits == 32 ? 1e-4 : s.state_bits == 16 ? 1e-3 : 1e-2;
  digests.same(run.shape, run.out, run.out.size, close);
  for (const int64_t cut : {T / 3, T - 1}) {
    if (cut <= 0) continue;
    Buffer<float> early(Hq * cut * M), late(Hq * (T - cut) * M), joined(Hq * T * M);
    run.restart();
    run.prefill(0, cut, early);
    run.prefill(cut, T - cut, late);
    for (int64_t h = 0; h < Hq; ++h) {
      std::memcpy(joined + h * T * M, early + h * cut * M, size_t(cut * M) * 4);
      std::memcpy(joined + (h * T + cut) * M, late + h * (T - cut) * M, size_t((T - cut) * M) * 4);
    }
    expect(difference(joined, run.out, joined.size) < close, run.name + ": two calls");
  }
  if (!s.recall) check_backward(run);
  if (s.mask || s.batch > 1) return;
  Buffer<float> joined(Hq * T * M), row(Hq * M);
  run.restart();
  for (int64_t t = 0; t < T; ++t) {
    run.decode(t, row);
    for (int64_t h = 0; h < Hq; ++h) std::memcpy(joined + (h * T + t) * M, row + h * M, size_t(M) * 4);
  }
  expect(difference(joined, run.out, joined.size) < close, run.name + ": token by token");
}

/// Merges n slots into `size`; every slot must get a place.
void check_merge(int64_t n, int64_t size, int64_t D, int64_t M) {
  const int64_t problems = 3, E = D + M;
  seed = 1;
  Buffer<float> slot(problems * n * E, true), bias(problems * n, true);
  Buffer<float> anchor(problems * D, true), metric(problems * D), rate(problems * n);
  Buffer<float> slot_new(problems * size * E), bias_new(problems * size);
  Buffer<int64_t> place(problems * n);
  for (int64_t i = 0; i < problems * D; ++i) metric[i] = 1;
  for (int64_t i = 0; i < problems * n; ++i) rate[i] = float(i % 7) / 7;
  for (int64_t i = 0; i < n / 4; ++i) bias[n + 3 * i] = -INFINITY;
  MergeCall c{problems, n,    size, D,      M,      2,        0.25f,    n % 2 ? 0.0f : 3.0f,
              slot,     bias, rate, anchor, metric, slot_new, bias_new, place};
  const std::string name = "merge of " + std::to_string(n) + " into " + std::to_string(size);
  expect(linattn_nearfar_merge(&c) == OK, name);
  digests.same(name, bias_new, bias_new.size, 1e-4);
  for (int64_t i = 0; i < problems * n; ++i) expect(place[i] >= 0 && place[i] < size, "a place outside the slots");
}

const NearFarShape NEARFAR_SIZES[] = {
    {1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 0, false},
    {2, 2, 2, 0, 7, 5, 9, 3, 8, 6, 0, true},
    {2, 2, 2, 0, 7, 5, 9, 3, 8, 6, 0, true, 0, 0, 0, 32, 16},
    {1, 1, 3, 0, 20, 80, 13, 2, 8, 14, 0, false, 0.9f, 0, 2, 8, 16},
    {2, 2, 2, 0, 7, 5, 9, 3, 8, 6, 0, true, 0, 0, 0, 32, 8},
    {1, 1, 3, 0, 20, 80, 13, 2, 8, 14, 0, false, 0.9f, 0, 2, 16, 8},
    {1, 2, 1, 0, 33, 17, 20, 4, 16, 12, 0, false, 0, 0, 0, 32, 8},
    {1, 2, 1, 0, 16, 33, 20, 4, 16, 12, 0, false},
    {1, 1, 3, 0, 20, 80, 13, 2, 7, 40, 0, false},
    {1, 1, 1, 0, 33, 16, 5, 9, 4, 0, 0, true},
    {2, 1, 2, 0, 7, 5, 9, 3, 8, 6, 0, true, 0.9f, 10},
    {1, 2, 2, 0, 17, 9, 12, 2, 7, 10, 0, false, 0, 13},
    {1, 2, 2, 0, 16, 9, 9, 2, 8, 10, 0, false, 0, 0, 3},
    {2, 1, 1, 0, 7, 33, 5, 3, 6, 8, 0, true, 0, 0, 2},
    {1, 1, 4, 0, 20, 16, 12, 0, 16, 6, 0, false, 0.9f, 0, 2, 16},
    {1, 1, 5, 0, 9, 80, 8, 5, 8, 12, 0, false, 0, 9, 4, 8},
    {1, 2, 3, 0, 33, 5, 3, 1, 7, 0, 0, false, 0, 0, 3, 8},
    {2, 2, 1, 0, 8, 8, 10, 2, 5, 9, 0, true, 0, 0, 99, 8},
};

/// Runs all near/far shapes with these lengths; returns how many.
int nearfar_shapes(const std::vector<int64_t>& lengths, bool all_types) {
  int count = 1;
  for (const int32_t dtype : {FLOAT32, FLOAT16, BFLOAT16}) {
    if (dtype != FLOAT32 && !all_types) break;
    for (const int64_t tokens : lengths) {
      for (NearFarShape s : NEARFAR_SIZES) {
        s.tokens = tokens, s.dtype = dtype;
        check_nearfar(s);
        check_bidirectional(s);
        count += 2;
      }
    }
  }
  check_bidirectional({1, 2, 1, 2600, 7, 5, 9, 3, 8, 20, FLOAT32, true});  // segments of several levels
  for (const int64_t n : {2, 17, 130, 193}) {
    for (const int64_t size : {int64_t(1), n / 2, n - 1}) check_merge(n, size, n % 7 + 1, n % 5 + 1), ++count;
  }
  return count;
}

}  // namespace
