/// The steps around an update rule over ragged shapes and every number type.
#pragma once
#include "digests.h"
#include "mixer/abi.h"

extern "C" {
int32_t linattn_gated_norm(const NormCall*);
int32_t linattn_conv_step(const ConvStep*);
int32_t linattn_ssd_step(const SsdStep*);
int32_t linattn_project(const ProjectCall*);
int32_t linattn_project_many(const ProjectCall*);
}

namespace {

/// n numbers of a dtype on the heap.
struct NumberBuffer {
  Buffer<float> wide;
  Buffer<uint16_t> half;
  NumberBuffer(int64_t n, int32_t dtype) : wide(dtype == FLOAT32 ? n : 0, true), half(dtype == FLOAT32 ? 0 : n) {
    for (size_t i = 0; i < half.size; ++i) half[i] = uint16_t((dtype == FLOAT16 ? 0x3000 : 0x3e00) + i * 37 % 900);
  }
  void* data() { return half.size ? static_cast<void*>(half) : static_cast<void*>(wide); }
};

/// A gated norm of (rows, size), in groups.
void check_norm(int64_t rows, int64_t size, int64_t groups, int32_t dtype, bool gate_first) {
  seed = 1;
  NumberBuffer x(rows * size, dtype), gate(rows * size, dtype), out(rows * size, dtype);
  Buffer<float> weight(size, true);
  NormCall c;
  std::memset(&c, 0, sizeof c);
  c.rows = rows, c.size = size, c.groups = groups, c.threads = 3, c.per_token = 1, c.dtype = dtype, c.eps = 1e-5f;
  c.x_stride[0] = c.gate_stride[0] = size, c.gate_first = gate_first, c.sigmoid = !gate_first;
  c.x = x.data(), c.gate = gate.data(), c.weight = weight, c.out = out.data();
  const std::string name =
      "gated norm, dtype " + std::to_string(dtype) + " size " + std::to_string(size) + (gate_first ? " gate first" : "");
  expect(linattn_gated_norm(&c) == OK, name);
  if (dtype == FLOAT32) digests.same(name, out.wide, out.wide.size, 1e-4);
}

/// One token of a convolution of (batch, channels).
void check_conv_step(int64_t batch, int64_t channels, int64_t width, int64_t held, int32_t dtype) {
  seed = 1;
  NumberBuffer x(batch * channels, dtype), state(batch * channels * held, dtype), out(batch * channels, dtype);
  Buffer<float> weight(channels * width, true), bias(channels, true);
  ConvStep c;
  std::memset(&c, 0, sizeof c);
  c.batch = batch, c.channels = channels, c.width = width, c.held = held, c.dtype = dtype, c.silu = 1;
  c.x_stride[0] = channels, c.x_stride[1] = 1, c.state_stride[0] = channels * held, c.state_stride[1] = held;
  c.x = x.data(), c.state = state.data(), c.out = out.data(), c.weight = weight, c.bias = bias;
  const std::string name = "conv step, dtype " + std::to_string(dtype) + " channels " + std::to_string(channels);
  expect(linattn_conv_step(&c) == OK, name);
  if (dtype == FLOAT32) digests.same(name, out.wide, out.wide.size, 1e-4);
}

/// One token of Mamba-2, with or without gate, skip connection and bias.
void check_ssd_step(int64_t heads, int64_t groups, int64_t dim, int64_t states, bool bare) {
  seed = 1;
  Buffer<float> state(heads * dim * states, true), x(heads * dim, true), z(heads * dim, true), out(heads * dim);
  Buffer<float> dt(heads, true), A(heads, true), D(heads, true), bias(heads, true), B(groups * states, true),
      C(groups * states, true);
  for (size_t i = 0; i < A.size; ++i) A[i] = -std::fabs(A[i]), dt[i] = std::fabs(dt[i]);
  SsdStep s;
  std::memset(&s, 0, sizeof s);
  s.batch = 1, s.heads = heads, s.groups = groups, s.dim = dim, s.states = states, s.threads = 3, s.softplus = !bare;
  s.x_stride[1] = s.z_stride[1] = dim, s.dt_stride[1] = 1, s.B_stride[1] = s.C_stride[1] = states;
  s.state = state, s.x = x, s.dt = dt, s.B = B, s.C = C, s.A = A, s.out = out;
  if (!bare) s.z = z, s.D = D, s.bias = bias;
  const std::string name =
      "ssd step, heads " + std::to_string(heads) + " dim " + std::to_string(dim) + (bare ? " bare" : "");
  expect(linattn_ssd_step(&s) == OK, name);
  digests.same(name, out, out.size, 1e-4);
  digests.same(name + ": state", state, state.size, 1e-4);
}

/// A product with few rows; with two of them, in another order of outputs.
void check_project(int64_t rows, int64_t inputs, int64_t outputs, int32_t dtype) {
  seed = 1;
  Buffer<float> x(rows * inputs, true), bias(outputs, true), out(rows * outputs);
  NumberBuffer weight(inputs * outputs, dtype);
  Buffer<int64_t> order(outputs);
  for (int64_t i = 0; i < outputs; ++i) order[size_t(i)] = outputs - 1 - i;
  ProjectCall c{rows, inputs, outputs, 3, dtype, inputs, x, weight.data(), bias, out, nullptr, nullptr, nullptr};
  if (rows == 2) c.order = order;
  const std::string name = "project, dtype " + std::to_string(dtype) + " inputs " + std::to_string(inputs);
  expect(linattn_project(&c) == OK, name);
  digests.same(name, out, out.size, 1e-4);
}

/// A product with many rows, with or without bias and order of outputs.
void check_project_many(int64_t rows, int64_t inputs, int64_t outputs, bool bare) {
  seed = 1;
  Buffer<float> x(rows * inputs, true), weight(inputs * outputs, true), bias(outputs, true), out(rows * outputs);
  Buffer<int64_t> order(outputs);
  for (int64_t i = 0; i < outputs; ++i) order[size_t(i)] = outputs - 1 - i;
  Buffer<float> row_scale(rows, true), input_scale(inputs, true);
  ProjectCall c{rows, inputs, outputs, 3, FLOAT32, inputs, x, weight, bias, out, order, row_scale, input_scale};
  if (bare) c.bias = nullptr, c.order = nullptr, c.row_scale = nullptr, c.input_scale = nullptr;
  const std::string name = "project many, inputs " + std::to_string(inputs) + " outputs " + std::to_string(outputs);
  expect(linattn_project_many(&c) == OK, name);
  digests.same(name, out, out.size, 1e-4);
}

/// Runs all shapes of the mixers; returns how many.
int mixer_shapes(bool all_types) {
  int count = 0;
  for (const int32_t dtype : {FLOAT32, FLOAT16, BFLOAT16}) {
    if (dtype != FLOAT32 && !all_types) break;
    for (const bool first : {false, true}) {
      check_norm(5, 7, 1, dtype, first);
      check_norm(3, 96, 3, dtype, first);
    }
    check_conv_step(2, 5, 4, 4, dtype);
    check_conv_step(1, 66, 2, 1, dtype);
    if (dtype != FLOAT16) check_project(2, 33, 7, dtype), check_project(1, 64, 16, dtype);
    count += 8;
  }
  for (const bool bare : {false, true}) check_ssd_step(3, 1, 5, 7, bare), check_ssd_step(4, 2, 33, 20, bare);
  check_ssd_step(24, 1, 64, 128, false);  // so large that threads share it
  check_project(1, 512, 700, FLOAT32);
  check_project_many(13, 7, 33, false);
  check_project_many(250, 70, 201, true);
  check_project_many(30, 1030, 16, false);
  check_norm(900, 128, 1, FLOAT32, false);
  return count + 10;
}

}  // namespace
