/// Elementwise functions of the scan: powers of two relative to 1, softplus, sigmoid.
#pragma once
#include "core/simd.h"

namespace {

constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.69314718055994531f;

/// 2^x = (1 + e) 2^k with a whole k and |e| < 0.42. A number times 2^x is (y + e y) 2^k: near x = 0 that keeps all digits
/// of 2^x - 1, which a rounded 2^x would not, so that a slow decay stays exact over any number of tokens.
struct Power {
  vec e, k;
};

/// 2^x, as a power of two and what it is multiplied by.
INLINE Power power(vec x) {
#if defined(__AVX512F__)
  const vec k = (vec)_mm512_maskz_roundscale_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = x < -150.0f ? splat(-150.0f) : x;
  x = x > 150.0f ? splat(150.0f) : x;
  const vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
  const vec k = (x + shift) - shift;
#endif
  const vec f = x - k;
  vec p = splat(0.0013333538f);  // (2^f - 1) / f on [-1/2, 1/2] to 4.4e-7
  p = p * f + 0.009666245f;
  p = p * f + 0.055505004f;
  p = p * f + 0.24022351f;
  p = p * f + 0.6931471f;
  return {p * f, k};
}

/// y 2^k for whole k.
INLINE vec scale_by(vec y, vec k) {
#if defined(__AVX512F__)
  return (vec)_mm512_maskz_scalef_ps(0xffff, (__m512)y, (__m512)k);
#else
  const ivec n = __builtin_convertvector(k, ivec), half = n >> 1, rest = n - half;
  return y * (vec)((half + 127) << 23) * (vec)((rest + 127) << 23);
#endif
}

/// y 2^x.
INLINE vec decayed(vec y, vec x) {
  const Power p = power(x);
  return scale_by(y + p.e * y, p.k);
}

/// 2^x - 1, with all its digits near x = 0.
INLINE vec power_minus_1(vec x) {
  const Power p = power(x);
  const vec whole = scale_by(splat(1.0f), p.k);
  return p.e * whole + (whole - 1.0f);
}

INLINE vec absolute(vec x) { return x < 0.0f ? -x : x; }

/// 1 / (1 + exp(-x)).
INLINE vec sigmoid(vec x) {
#if defined(__AVX512F__)
  // One Newton step from 14 bits: a division would take as long as all the rest. Up to 2^120, whose reciprocal is normal.
  const vec y = x * -LOG2_E, d = 1.0f + exp2v(y > 120.0f ? splat(120.0f) : y);
  const vec r = (vec)_mm512_maskz_rcp14_ps(0xffff, (__m512)d);
  return r + r * (1.0f - d * r);
#else
  return 1.0f / (1.0f + exp2v(x * -LOG2_E));
#endif
}

/// log(1 + exp(x)), to a few units in the last place for every x; x itself above 20, as torch has it.
INLINE vec softplus(vec x) {
  const vec y = exp2v(absolute(x) * -LOG2_E), s = y / (2.0f + y), z = s * s;  // log(1 + y) = 2 artanh(s)
  vec p = splat(0.2817823f);
  p = p * z + 0.27960628f;
  p = p * z + 0.4002491f;
  p = p * z + 0.66666317f;
  p = p * z + 2.0f;
  const vec sum = (x > 0.0f ? x : vec{}) + s * p;
  return x <= 20.0f ? sum : x;  // NaN goes through
}

}  // namespace
