// What the parts of the driver share: buffers of exact size, random numbers, threads, and a count of what went wrong.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../call.h"

extern "C" const char* linattn_isa();

namespace {

uint32_t seed = 1;
float draw() {
  seed = seed * 1664525u + 1013904223u;
  return float(seed >> 8) / float(1 << 23) - 1.0f;
}

template <class T>
struct Buffer {
  std::unique_ptr<T[]> at;
  size_t size;
  explicit Buffer(int64_t n, bool random = false) : at(new T[size_t(n)]()), size(size_t(n)) {
    for (size_t i = 0; random && i < size; ++i) at[i] = T(draw());
  }
  operator T*() { return at.get(); }
};

int32_t side_by_side(int64_t begin, int64_t end, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  std::vector<std::thread> threads;
  for (int64_t i = begin; i < end; ++i) threads.emplace_back(body, i, i + 1, context);
  for (auto& t : threads) t.join();
  return 0;
}

int failures = 0;
void expect(bool right, const std::string& what) {
  if (right) return;
  ++failures;
  std::printf("wrong: %s\n", what.c_str());
}

double difference(const float* a, const float* b, size_t n) {
  double worst = 0, top = 1e-6;
  for (size_t i = 0; i < n; ++i) {
    worst = std::fmax(worst, std::fabs(double(a[i]) - b[i]));
    top = std::fmax(top, std::fabs(double(b[i])));
  }
  return std::isnan(worst) ? INFINITY : worst / top;
}

}  // namespace
