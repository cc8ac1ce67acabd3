/// Digests of results, by which instruction sets, compilers and machines are compared: the first result of a name is the
/// reference for the others. References may come from a file that another run has written.
#pragma once
#include <fstream>
#include <map>
#include <mutex>

#include "support.h"

namespace {

/// Randomly weighted sums over every SLICES-th number of a buffer, and its Euclidean norm.
struct Digest {
  static constexpr size_t SLICES = 8;
  double sums[SLICES] = {}, norm = 0, count = 0, infinite = 0;

  Digest() = default;
  Digest(const float* x, size_t n) : count(double(n)) {
    uint32_t random = 1;
    for (size_t i = 0; i < n; ++i) {
      random = random * 1664525u + 1013904223u;
      if (std::isinf(x[i])) {
        ++infinite;
        continue;
      }
      sums[i % SLICES] += double(x[i]) * (double(random >> 8) / double(1 << 23) - 1);
      norm += double(x[i]) * double(x[i]);
    }
    norm = std::sqrt(norm);
  }
  /// Relative to the size of the numbers; gradients that should be 0 are rounding errors of numbers near 1.
  double distance(const Digest& other) const {
    double worst = infinite == other.infinite ? std::fabs(norm - other.norm) : INFINITY;
    for (size_t i = 0; i < SLICES; ++i) {
      const double apart = std::fabs(sums[i] - other.sums[i]);
      worst = std::isnan(apart) ? INFINITY : std::fmax(worst, apart);
    }
    return worst / (norm + 0.01 * std::sqrt(count));
  }
};

/// All digests of a run, by name.
class Digests {
 public:
  /// Compares x (n) with the reference of this name; becomes the reference if there is none and no file was read.
  void same(const std::string& name, const float* x, size_t n, double tolerance) {
    const Digest mine(x, n);
    const std::lock_guard<std::mutex> lock(mutex);
    if (!fixed && known.emplace(name, mine).second) return;
    const auto found = known.find(name);
    expect(found != known.end() && mine.distance(found->second) < tolerance,
           std::string(linattn_isa()) + " differs: " + name);
  }

  /// Writes all digests to a file.
  void write(const char* path) const {
    std::ofstream file(path);
    file.precision(17);
    for (const auto& [name, d] : known) {
      file << name << "\n" << d.norm << " " << d.infinite;
      for (const double sum : d.sums) file << " " << sum;
      file << "\n";
    }
    expect(bool(file.flush()), std::string("cannot write ") + path);
  }

  /// Reads the references from a file.
  void read(const char* path) {
    std::ifstream file(path);
    fixed = true;
    for (std::string name; std::getline(file, name); file.ignore()) {
      Digest& d = known[name];
      file >> d.norm >> d.infinite;
      for (double& sum : d.sums) file >> sum;
    }
    expect(!known.empty(), std::string("nothing to compare with in ") + path);
  }

 private:
  std::mutex mutex;
  std::map<std::string, Digest> known;
  bool fixed = false;
};

Digests digests;

}  // namespace
