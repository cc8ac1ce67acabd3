// The selective scan and the causal convolution over ragged shapes, both layouts and every number type.
#pragma once
#include "digests.h"
#include "scan/abi.h"

extern "C" {
int32_t linattn_scan(const ScanCall*);
int32_t linattn_scan_step(const ScanCall*);
int32_t linattn_scan_backward(const ScanCall*);
int32_t linattn_conv(const ConvCall*);
int32_t linattn_conv_backward(const ConvCall*);
}

namespace {

// Tokens (batch, channels, tokens) in exactly the memory they need, channels or tokens contiguous.
struct TokenBuffer {
  Buffer<float> wide;
  Buffer<uint16_t> half;
  Strided view;

  TokenBuffer(int64_t b, int64_t c, int64_t t, int32_t dtype, bool channels_last, bool random)
      : wide(dtype == FLOAT32 ? b * c * t : 0, random), half(dtype == FLOAT32 ? 0 : b * c * t) {
    for (size_t i = 0; random && i < half.size; ++i)
      half[i] = uint16_t((dtype == FLOAT16 ? 0x3000 : 0x3e00) + i * 37 % 900);
    view = {dtype == FLOAT32 ? static_cast<void*>(wide) : half, {c * t, t, 1, 0}, dtype};
    if (channels_last) view.stride[1] = 1, view.stride[2] = c;
  }
  /// As float32, for comparisons; half types keep their upper bits.
  std::vector<float> numbers() {
    std::vector<float> all(wide.at.get(), wide.at.get() + wide.size);
    for (size_t i = 0; i < half.size; ++i) all.push_back(float(half[i] >> 3));
    return all;
  }
};

struct ScanShape {
  int64_t batch, channels, groups, states, tokens;
  int32_t dtype;
  bool channels_last, bare;
};

/// A selective scan, forward and backward.
void check_scan(const ScanShape& s) {
  seed = 1;
  const int64_t b = s.batch, c = s.channels, g = s.groups, n = s.states, t = s.tokens, parts = 2;
  TokenBuffer u(b, c, t, s.dtype, s.channels_last, true), delta(b, c, t, s.dtype, !s.channels_last, true);
  TokenBuffer z(b, c, t, s.dtype, s.channels_last, true), out(b, c, t, s.dtype, s.channels_last, false);
  TokenBuffer grad_out(b, c, t, s.dtype, s.channels_last, true), gu(b, c, t, s.dtype, s.channels_last, false);
  TokenBuffer gdelta(b, c, t, s.dtype, !s.channels_last, false), gz(b, c, t, s.dtype, s.channels_last, false);
  TokenBuffer B(b, g * n, t, s.dtype, false, true), C(b, g * n, t, s.dtype, false, true);
  Buffer<float> A(c * n, true), D(c, true), bias(c, true), h(b * c * n, true), last(b * c * n), up(b * c * n, true);
  for (size_t i = 0; i < A.size; ++i) A[i] = -std::fabs(A[i]) * 30;
  for (size_t i = 0; i < delta.wide.size; ++i) delta.wide[i] = std::fabs(delta.wide[i]);  // or bare states would explode
  Buffer<float> checkpoints(b * ((t + SCAN_SEGMENT - 1) / SCAN_SEGMENT) * n * c), gA(b * c * n), gD(b * c), gbias(b * c),
      gh(b * c * n);
  Buffer<float> gB(parts * b * g * t * n), gC(parts * b * g * t * n);
  ScanCall k;
  std::memset(&k, 0, sizeof k);
  k.batch = b, k.channels = c, k.groups = g, k.states = n, k.tokens = t, k.threads = 1, k.softplus = !s.bare,
  k.parts = parts;
  k.u = u.view, k.delta = delta.view, k.out = out.view, k.A = A, k.state_new = last, k.checkpoints = checkpoints;
  k.B = {B.view.at, {g * n * t, n * t, t, 1}, s.dtype}, k.C = {C.view.at, {g * n * t, n * t, t, 1}, s.dtype};
  if (!s.bare) k.z = z.view, k.D = D, k.bias = bias, k.state = h, k.grad_state_new = up;
  k.grad_out = grad_out.view, k.grad_u = gu.view, k.grad_delta = gdelta.view, k.grad_z = gz.view;
  k.grad_A = gA, k.grad_D = gD, k.grad_bias = gbias, k.grad_B = gB, k.grad_C = gC, k.grad_state = gh;
  const std::string shape = "scan, dtype " + std::to_string(s.dtype) + " channels " + std::to_string(c) + " groups " +
                            std::to_string(g) + " states " + std::to_string(n) + " tokens " + std::to_string(t) +
                            (s.channels_last ? " channels last" : "") + (s.bare ? " bare" : "");
  const std::string name = std::string(linattn_isa()) + " " + shape;
  expect(linattn_scan(&k) == OK && linattn_scan_backward(&k) == OK, name);
  const std::vector<float> first = out.numbers(), grad = gdelta.numbers();
  k.threads = 3;
  expect(linattn_scan(&k) == OK && linattn_scan_backward(&k) == OK, name + ", threads");
  expect(out.numbers() == first && gdelta.numbers() == grad, name + ": threads change nothing");
  digests.same(shape + ": state", last, last.size, 1e-4);
  digests.same(shape + ": A", gA, gA.size, 1e-3);
  digests.same(shape + ": B", gB, gB.size, 1e-3);
  if (s.dtype == FLOAT32) {
    digests.same(shape, out.wide, out.wide.size, 1e-4);
    digests.same(shape + ": delta", gdelta.wide, gdelta.wide.size, 1e-3);
  }
  if (t != 1) return;
  Buffer<float> again(b * c * n);
  k.state_new = again;
  expect(linattn_scan_step(&k) == OK && difference(again, last, last.size) < 1e-5, name + ": step");
}

struct ConvShape {
  int64_t batch, channels, tokens, width;
  std::vector<int64_t> bounds;
  int32_t dtype;
  bool channels_last, bare;
};

/// A causal convolution of packed sequences, forward and backward.
void check_conv(const ConvShape& s) {
  seed = 1;
  const int64_t b = s.batch, c = s.channels, t = s.tokens, w = s.width, n = int64_t(s.bounds.size()) - 1;
  TokenBuffer x(b, c, t, s.dtype, s.channels_last, true), out(b, c, t, s.dtype, s.channels_last, false);
  TokenBuffer up(b, c, t, s.dtype, !s.channels_last, true), gx(b, c, t, s.dtype, s.channels_last, false);
  TokenBuffer state(b * n, c, w - 1, s.dtype, false, true), last(b * n, c, w - 1, s.dtype, false, false);
  TokenBuffer up_last(b * n, c, w - 1, s.dtype, false, true), gstate(b * n, c, w - 1, s.dtype, false, false);
  Buffer<float> weight(c * w, true), bias(c, true), gweight(b * c * w), gbias(b * c);
  ConvCall k;
  std::memset(&k, 0, sizeof k);
  k.batch = b, k.channels = c, k.tokens = t, k.width = w, k.sequences = n, k.threads = 1, k.silu = !s.bare;
  k.bounds = s.bounds.data(), k.x = x.view, k.out = out.view, k.weight = weight, k.state_new = last.view;
  if (!s.bare) k.bias = bias, k.state = state.view, k.grad_state_new = up_last.view;
  k.grad_out = up.view, k.grad_x = gx.view, k.grad_state = gstate.view, k.grad_weight = gweight, k.grad_bias = gbias;
  const std::string shape = "conv, dtype " + std::to_string(s.dtype) + " channels " + std::to_string(c) + " tokens " +
                            std::to_string(t) + " width " + std::to_string(w) + (s.channels_last ? " channels last" : "") +
                            (s.bare ? " bare" : "");
  const std::string name = std::string(linattn_isa()) + " " + shape;
  expect(linattn_conv(&k) == OK && linattn_conv_backward(&k) == OK, name);
  const std::vector<float> first = out.numbers(), grad = gx.numbers();
  k.threads = 3;
  expect(linattn_conv(&k) == OK && linattn_conv_backward(&k) == OK, name + ", threads");
  expect(out.numbers() == first && gx.numbers() == grad, name + ": threads change nothing");
  digests.same(shape + ": weight", gweight, gweight.size, 1e-3);
  if (s.dtype == FLOAT32) {
    digests.same(shape, out.wide, out.wide.size, 1e-4);
    digests.same(shape + ": x", gx.wide, gx.wide.size, 1e-3);
  }
}

/// Runs all shapes of scans and convolutions with these lengths; returns how many.
int scan_shapes(const std::vector<int64_t>& lengths, bool all_types) {
  int count = 0;
  for (const int64_t t : lengths) {
    for (const int32_t dtype : {FLOAT32, FLOAT16, BFLOAT16}) {
      if (dtype != FLOAT32 && !all_types) break;
      for (const bool flag : {false, true}) {
        check_scan({2, 19, 1, 16, t, dtype, flag, false});
        check_scan({1, 66, 3, 5, t, dtype, flag, true});
        check_conv({2, 19, t, 4, {0, t}, dtype, flag, false});
        check_conv({1, 66, t, 3, {0, 0, (t + 1) / 2, t}, dtype, flag, true});
        check_conv({1, 5, t, 8, {0, t / 3, t}, dtype, flag, false});
        count += 5;
      }
    }
  }
  check_scan({1, 300, 1, 16, 200, FLOAT32, true, false});  // so large that threads share it
  check_conv({1, 300, 300, 4, {0, 300}, FLOAT32, true, false});
  return count + 2;
}

}  // namespace
