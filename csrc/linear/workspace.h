/// Buffers for the states of a call.
#pragma once
#include "core/partition.h"
#include "linear/abi.h"

namespace {

/// The same call with keys that count as carrying log-weights.
inline LinearCall with_scale(const LinearCall& c) {
  LinearCall scaled = c;
  scaled.scaled = 1;
  return scaled;
}

/// Work space for `count` states, one for each head or split.
struct StateBuffers {
  int64_t size;  // floats of each
  std::unique_ptr<float, decltype(&std::free)> floats;
  StateBuffers(const LinearCall& c, int64_t count)
      : size((linear_kernels().state_size(c) + 15) / 16 * 16),
        floats(static_cast<float*>(std::aligned_alloc(64, size_t(size * count * 4 + 64))), &std::free) {
    if (!floats) throw std::bad_alloc();
  }
  /// Sets state i to 0.
  void clear(int64_t i) { std::memset((*this)[i], 0, size_t(size) * 4); }
  /// State i.
  float* operator[](int64_t i) { return floats.get() + i * size; }
};

}  // namespace
