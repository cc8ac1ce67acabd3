/// Work space that a thread keeps from call to call.
#pragma once
#include <stdint.h>

/// Returns at least `floats` floats, 64-byte aligned, that belong to the calling thread until its next call of scratch().
/// Throws std::bad_alloc.
float* scratch(int64_t floats);

/// Splits `floats` floats off the front of `space`; the next part starts 64-byte aligned again.
inline __attribute__((always_inline)) float* carve(float*& space, int64_t floats) {
  float* part = space;
  space += (floats + 15) / 16 * 16;
  return part;
}
