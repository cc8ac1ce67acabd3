/// exp for decays: exact at 0, where exp2v is off by half a unit, so that a state which forgets nothing keeps its numbers.
#pragma once
#include "core/simd.h"

namespace {

/// exp(x) to 1.5e-7 for x <= 0, exactly 1 at 0; NaN stays NaN, and below about -103 it is 0.
INLINE vec exp_decay(vec x) {
  x = x < -110.0f ? splat(-110.0f) : x;
  const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const vec whole = (x * 1.44269504f + magic) - magic;
  vec r = x - whole * 0.693145752f;
  r = r - whole * 1.42860677e-6f;
  vec p = splat(1.9875691e-4f);
  p = p * r + 1.3981999e-3f;
  p = p * r + 8.3334519e-3f;
  p = p * r + 4.1665796e-2f;
  p = p * r + 1.6666665e-1f;
  p = p * r + 5.0e-1f;
  p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
  // maskz: gcc 12 takes the undefined register inside the plain intrinsic for an error of ours (-Wuninitialized).
  return (vec)_mm512_maskz_scalef_ps(__mmask16(-1), (__m512)p, (__m512)whole);
#else
  const ivec n = __builtin_convertvector(whole, ivec), half = n >> 1, rest = n - half;
  return p * (vec)((half + 127) << 23) * (vec)((rest + 127) << 23);
#endif
}

INLINE float exp_decay(float x) { return exp_decay(splat(x))[0]; }

}  // namespace
