/// Shared by the parts of the driver: buffers of exact size, random numbers, threads, and a count of failures.
#pragma once
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "linear/abi.h"
#include "nearfar/abi.h"

extern "C" const char* linattn_isa();

namespace {

thread_local uint32_t seed = 1;  // set again for each shape, so that every instruction set gets the same numbers
/// A random number in [-1, 1).
float draw() {
  seed = seed * 1664525u + 1013904223u;
  return float(seed >> 8) / float(1 << 23) - 1.0f;
}

/// n numbers on the heap, so that AddressSanitizer sees any access outside.
template <class T>
struct Buffer {
  std::unique_ptr<T[]> at;
  size_t size;
  explicit Buffer(int64_t n, bool random = false) : at(new T[size_t(n)]()), size(size_t(n)) {
    for (size_t i = 0; random && i < size; ++i) at[i] = T(draw());
  }
  operator T*() { return at.get(); }
};

/// Replaces torch's parallel loop; the threads start together, or the first might do all the work.
int32_t side_by_side(int64_t begin, int64_t end, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  std::atomic<int64_t> ready{0};
  std::vector<std::thread> threads;
  for (int64_t i = begin; i < end; ++i) {
    threads.emplace_back([&ready, begin, end, body, context, i] {
      ready.fetch_add(1, std::memory_order_relaxed);
      while (ready.load(std::memory_order_relaxed) < end - begin) std::this_thread::yield();
      body(i, i + 1, context);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}

std::atomic<int> failures{0};
/// Counts and prints a failure.
void expect(bool right, const std::string& what) {
  if (right) return;
  ++failures;
  std::printf("wrong: %s\n", what.c_str());
}

/// The largest difference of a and b (n), relative to the largest number of b; infinite where there is a NaN.
double difference(const float* a, const float* b, size_t n) {
  double worst = 0, top = 1e-6;
  for (size_t i = 0; i < n; ++i) {
    const double error = std::fabs(double(a[i]) - b[i]);
    if (std::isnan(error)) return INFINITY;  // fmax would pass over it
    worst = std::fmax(worst, error);
    top = std::fmax(top, std::fabs(double(b[i])));
  }
  return worst / top;
}

}  // namespace
