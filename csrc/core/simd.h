/// Float vectors of the instruction set this file is compiled for: 16 (AVX-512), 8 (AVX2) or 4 lanes (NEON, portable), with
/// the vector extensions of gcc and clang, and intrinsics where those would need more instructions.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(LINATTN_NEON)  // set by CMake: every aarch64 CPU has NEON, also when the portable set is compiled
#include <arm_neon.h>
#endif
#ifdef __clang__
#include <utility>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int VL = 16;
constexpr int MR = 6, NR = 4;  // rows and vectors of a register tile
constexpr int TALL = 8;        // rows of a tile with fewer vectors
#elif defined(__AVX2__)
constexpr int VL = 8;
constexpr int MR = 6, NR = 2, TALL = 6;
#elif defined(LINATTN_NEON)
constexpr int VL = 4;
constexpr int MR = 4, NR = 4, TALL = 4;  // with more rows gcc spills some of the 32 registers inside the product's loop
#else
constexpr int VL = 4;
constexpr int MR = 4, NR = 2, TALL = 4;
#endif

typedef float vec __attribute__((vector_size(VL * 4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4)));
typedef float unaligned_vec __attribute__((vector_size(VL * 4), aligned(4), may_alias));

/// INLINE: into every caller, so that shapes known there are constants. UNROLL: for loops over registers. The sanitizers'
/// build does neither: with every access checked, such code would take the compiler many minutes. OUTLINE: into no caller,
/// for long code that works on a row at a time or less often, so that the library has it once.
#define OUTLINE [[maybe_unused]] __attribute__((noinline))
#ifdef LINATTN_FAST_COMPILE
#define INLINE [[maybe_unused]] inline
#define UNROLL(times)
#else
#define INLINE inline __attribute__((always_inline))
#define PRAGMA(text) _Pragma(#text)
#define UNROLL(times) PRAGMA(GCC unroll times)
#endif

/// VL floats from any address.
INLINE vec load(const float* p) { return *reinterpret_cast<const unaligned_vec*>(p); }
/// VL floats to any address.
INLINE void store(float* p, vec x) { *reinterpret_cast<unaligned_vec*>(p) = x; }
/// x in every lane.
INLINE vec splat(float x) { return x - vec{}; }
/// The larger of each pair of lanes; b where a is NaN.
INLINE vec vmax(vec a, vec b) { return a > b ? a : b; }

/// Minimum, maximum, n rounded up to a multiple of `to`, and whether x is neither infinite nor NaN.
INLINE int64_t imin(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t imax(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE float fmax2(float a, float b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE bool finite(float x) { return x - x == 0; }

/// 0, 1, 2, .., VL - 1.
INLINE vec lanes() {
  vec x;
  for (int i = 0; i < VL; ++i) x[i] = float(i);
  return x;
}

/// The sum of the lanes.
INLINE float sum(vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#elif defined(LINATTN_NEON)
  return vaddvq_f32((float32x4_t)x);
#else
  float s = 0;
  for (int i = 0; i < VL; ++i) s += x[i];
  return s;
#endif
}

/// The largest lane.
INLINE float max_lane(vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(LINATTN_NEON)
  return vmaxnmvq_f32((float32x4_t)x);
#else
  float m = x[0];
  for (int i = 1; i < VL; ++i) m = x[i] > m ? x[i] : m;
  return m;
#endif
}

/// The square root of each lane.
INLINE vec sqrtv(vec x) {
#if defined(__AVX512F__)
  return (vec)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (vec)_mm256_sqrt_ps((__m256)x);
#elif defined(LINATTN_NEON)
  return (vec)vsqrtq_f32((float32x4_t)x);
#else
  for (int i = 0; i < VL; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

/// The first n floats, the other lanes 0; n may be larger than VL.
INLINE vec load_some(const float* p, int64_t n) {
  if (n >= VL) return load(p);
  vec x = {};
  memcpy(&x, p, size_t(n) * 4);
  return x;
}

/// The first n lanes; n may be larger than VL.
INLINE void store_some(float* p, vec x, int64_t n) {
  if (n >= VL) return store(p, x);
  memcpy(p, &x, size_t(n) * 4);
}

#ifdef __clang__
/// low, high: the 2 x 2 blocks of `half` lanes of the rows a, b transposed.
template <int half, int... I>
INLINE void interleave_lanes(vec a, vec b, vec& low, vec& high, std::integer_sequence<int, I...>) {
  low = __builtin_shufflevector(a, b, (I & half ? VL + I - half : I)...);
  high = __builtin_shufflevector(a, b, (I & half ? VL + I : I + half)...);
}

/// See interleave_lanes.
template <int half>
INLINE void interleave(vec a, vec b, vec& low, vec& high) {
  interleave_lanes<half>(a, b, low, high, std::make_integer_sequence<int, VL>{});
}
#else  // gcc before 12 has no __builtin_shufflevector
/// low, high: the 2 x 2 blocks of `half` lanes of the rows a, b transposed.
template <int half>
INLINE void interleave(vec a, vec b, vec& low, vec& high) {
  ivec first, second;
  UNROLL(16)
  for (int i = 0; i < VL; ++i) {
    first[i] = i & half ? VL + i - half : i;
    second[i] = i & half ? VL + i : i + half;
  }
  low = __builtin_shuffle(a, b, first);
  high = __builtin_shuffle(a, b, second);
}
#endif

/// One of the log2(VL) steps of transpose_tile.
template <int half>
INLINE void transpose_step(vec (&x)[VL]) {
  UNROLL(16)
  for (int i = 0; i < VL; ++i) {
    if (!(i & half)) interleave<half>(x[i], x[i + half], x[i], x[i + half]);
  }
}

/// Transposes VL x VL numbers.
INLINE void transpose_tile(vec (&x)[VL]) {
  transpose_step<1>(x);
  transpose_step<2>(x);
  if constexpr (VL > 4) transpose_step<4>(x);
  if constexpr (VL > 8) transpose_step<8>(x);
}

/// One of the log2(VL) steps of reduce.
template <bool MAX, int half>
INLINE void reduce_step(vec (&x)[VL]) {
  UNROLL(8)
  for (int i = 0; i < VL / 2 / half; ++i) {
    vec low, high;
    interleave<half>(x[2 * i], x[2 * i + 1], low, high);
    x[i] = MAX ? vmax(low, high) : low + high;
  }
}

/// Lane i: the sum, or the maximum, of the lanes of x[i].
template <bool MAX>
INLINE vec reduce(vec (&x)[VL]) {
  reduce_step<MAX, 1>(x);
  reduce_step<MAX, 2>(x);
  if constexpr (VL > 4) reduce_step<MAX, 4>(x);
  if constexpr (VL > 8) reduce_step<MAX, 8>(x);
  return x[0];
}

/// to (n): the sum, or the maximum, of each of n vectors (n, VL).
template <bool MAX>
inline void reduce_rows(const float* vectors, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += VL) {
    vec x[VL];
    if (i + VL <= n) {
      UNROLL(16)
      for (int k = 0; k < VL; ++k) x[k] = load(vectors + (i + k) * VL);
    } else {
      for (int k = 0; k < VL; ++k) x[k] = load(vectors + imin(i + k, n - 1) * VL);
    }
    store_some(to + i, reduce<MAX>(x), n - i);
  }
}

/// The largest of x (n).
inline float max_element(const float* x, int64_t n) {
  vec m[4];
  for (vec& each : m) each = splat(x[0]);
  int64_t i = 0;
  for (; i + 4 * VL <= n; i += 4 * VL) {
    UNROLL(4)
    for (int k = 0; k < 4; ++k) m[k] = vmax(load(x + i + k * VL), m[k]);
  }
  float rest = max_lane(vmax(vmax(m[0], m[1]), vmax(m[2], m[3])));
  for (; i < n; ++i) rest = fmax2(x[i], rest);
  return rest;
}

/// 2^x with a relative error of 2e-7, 0 below 2^-126; a minimax polynomial of 2^f on [0, 1).
INLINE vec exp2v(vec x) {
#if defined(__AVX512F__)
  vec f = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(LINATTN_NEON)
  x = (vec)vminq_f32(vmaxq_f32((float32x4_t)x, vdupq_n_f32(-150.0f)), vdupq_n_f32(129.0f));  // keeps NaN
  const ivec n = (ivec)vcvtmq_s32_f32((float32x4_t)x);
  const vec f = x - __builtin_convertvector(n, vec);
#else
  x = x < -150.0f ? splat(-150.0f) : x;
  x = x > 129.0f ? splat(129.0f) : x;
  ivec n = __builtin_convertvector(x, ivec);
  ivec down = __builtin_convertvector(n, vec) > x;  // -1 where the conversion rounded up
  n += down;
  vec f = x - __builtin_convertvector(n, vec);
#endif
  vec p = splat(0.0018775769f);
  p = p * f + 0.0089893406f;
  p = p * f + 0.055826318f;
  p = p * f + 0.24015361f;
  p = p * f + 0.69315308f;
  p = p * f + 0.99999994f;
#if defined(__AVX512F__)
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  // Two factors, so that the exponent of each stays in range; results below 2^-126 may become 0.
  ivec half = n >> 1;
  ivec rest = n - half;
  return p * (vec)((half + 127) << 23) * (vec)((rest + 127) << 23);
#endif
}

/// 2^x of W vectors, two at a time, which hides the latency of each step.
template <int W>
INLINE void exp2_all(vec (&x)[W]) {
#if defined(__AVX512F__)
  UNROLL(4)
  for (int w = 0; w < W; w += 2) {
    const int v = w + 1 < W ? w + 1 : w;
    const vec a = x[w], b = x[v];
    const vec f = (vec)_mm512_reduce_ps((__m512)a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const vec g = (vec)_mm512_reduce_ps((__m512)b, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    vec p = f * 0.0018775769f + 0.0089893406f, q = g * 0.0018775769f + 0.0089893406f;
    p = p * f + 0.055826318f, q = q * g + 0.055826318f;
    p = p * f + 0.24015361f, q = q * g + 0.24015361f;
    p = p * f + 0.69315308f, q = q * g + 0.69315308f;
    p = p * f + 0.99999994f, q = q * g + 0.99999994f;
    x[w] = (vec)_mm512_scalef_ps((__m512)p, (__m512)a);
    if (v != w) x[v] = (vec)_mm512_scalef_ps((__m512)q, (__m512)b);
  }
#else
  for (int w = 0; w < W; ++w) x[w] = exp2v(x[w]);
#endif
}

/// 2^x of one number.
INLINE float exp2s(float x) { return exp2v(splat(x))[0]; }

}  // namespace
