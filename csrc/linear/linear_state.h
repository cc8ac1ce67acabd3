/// The state of linear attention for one kv head in work space. The true sums are S 2^log2_scale and Z 2^log2_scale.
#pragma once
#include "linear/feature_maps.h"

namespace {

constexpr double LN2 = 0.6931471805599453, LOG2E = 1.4426950408889634;
constexpr double EMPTY = -__builtin_inf();

// Tokens from which on blocks are added with compensation: before, fewer than 400 blocks lose at most 1e-5 of the sums.
constexpr int64_t COMPENSATE_FROM = 16384;
// Tokens from which on states are rounded with a dither: see round_sum.
constexpr int64_t LONG_STREAM = 1024;

/// A view of the state in work space.
struct LinearState {
  double* log2_scale;  // EMPTY before the first visible key
  float* Z;            // (feature_stride(r))
  float* S;            // (r, row_stride(M)) forward; (M, feature_stride(r)) backward, where products need it transposed
  int64_t floats;      // Z and S together: they are adjacent
  int64_t low = 0;     // distance from each of them to its low-order part; 0: there is none (backward)
};

/// Floats of a state in work space.
INLINE int64_t state_floats(const LinearCall& c) {
  return 16 + 2 * (feature_stride(c.features) + c.features * row_stride(c.value_dim));
}

/// The state at `at` (state_floats).
INLINE LinearState state_view(const LinearCall& c, float* at) {
  const int64_t floats = (state_floats(c) - 16) / 2;
  return {reinterpret_cast<double*>(at), at + 16, at + 16 + feature_stride(c.features), floats, floats};
}

/// Floats of one checkpoint: S (r, M), Z (r) and log2_scale as a double, which may be far below 0, where a float has no
/// fractional bits left.
INLINE int64_t checkpoint_floats(const LinearCall& c) { return c.features * (c.value_dim + 1) + 2; }

/// The log2_scale of a checkpoint.
INLINE double checkpoint_log2_scale(const LinearCall& c, const float* checkpoint) {
  double log2_scale;
  memcpy(&log2_scale, checkpoint + checkpoint_floats(c) - 2, 8);
  return log2_scale;
}

/// A caller's log_scale in bits. Scales that this code has written are whole numbers of bits and are recovered exactly.
INLINE double log2_from_natural(float natural) {
  if (!(natural > -__builtin_inff())) return EMPTY;
  const double bits = natural * LOG2E, rounded = __builtin_rint(bits);
  return float(rounded * LN2) == natural ? rounded : bits;
}

/// The log_scale for a caller.
INLINE float natural_from_log2(double log2_scale) {
  return log2_scale == EMPTY ? -__builtin_inff() : float(log2_scale * LN2);
}

/// 2^bits, exact for whole numbers of bits, which exp2s is not: a state whose scale rises loses nothing.
INLINE float exp2_exact(double bits) {
  if (bits != __builtin_rint(bits) || bits <= -126 || bits >= 127) return exp2s(float(bits));
  const uint32_t exponent = uint32_t(127 + int32_t(bits)) << 23;
  float power;
  memcpy(&power, &exponent, 4);
  return power;
}

/// Whether a caller's S and Z have the layout of work space, so that they can be read in place.
INLINE bool same_layout(const LinearCall& c) { return c.features % 16 == 0 && row_stride(c.value_dim) == c.value_dim; }

/// The state before any key.
void clear_state(const LinearCall& c, LinearState s) {
  *s.log2_scale = c.scaled ? EMPTY : 0;  // without log-weights the scale is 1 throughout
  memset(s.Z, 0, size_t(s.floats + s.low) * 4);
}

/// S and Z times `factor`.
void scale_state(LinearState s, float factor) {
  if (factor == 1) return;
  for (int64_t i = 0; i < s.floats + s.low; ++i) s.Z[i] *= factor;
}

/// The state from contiguous S (r, M) and Z (r).
void unpack_state(const LinearCall& c, LinearState s, const float* S, const float* Z, double log2_scale) {
  const int64_t r = c.features, M = c.value_dim, ld = row_stride(M);
  clear_state(c, s);
  *s.log2_scale = log2_scale;
  if (log2_scale == EMPTY) return;
  memcpy(s.Z, Z, size_t(r) * 4);
  for (int64_t i = 0; i < r; ++i) memcpy(s.S + i * ld, S + i * M, size_t(M) * 4);
}

/// Contiguous S (r, M) and Z (r) from the state.
void pack_state(const LinearCall& c, LinearState s, float* S, float* Z) {
  const int64_t r = c.features, M = c.value_dim;
  memcpy(Z, s.Z, size_t(r) * 4);
  unpad_rows(s.S, row_stride(M), r, M, S);
}

/// The incoming state of a kv head, at `at` (state_floats).
void load_state(const LinearCall& c, int64_t head, float* at) {
  const int64_t r = c.features, M = c.value_dim;
  const LinearState s = state_view(c, at);
  if (!c.S) return clear_state(c, s);
  unpack_state(c, s, c.S + head * r * M, c.Z + head * r, log2_from_natural(c.log_scale[head]));
  if (!c.scaled) {
    if (*s.log2_scale != EMPTY) scale_state(s, exp2_exact(*s.log2_scale));
    *s.log2_scale = 0;
  }
}

/// Whether every number of x (n) is finite.
bool all_finite(const float* x, int64_t n) {
  vec bad = {};
  int64_t i = 0;
  for (; i + VL <= n; i += VL) {
    const vec y = load(x + i);
    bad += y - y;  // 0 for finite numbers, NaN for others
  }
  float s = sum(bad);
  for (; i < n; ++i) s += x[i] - x[i];
  return s == 0;
}

/// A number in (-1/2, 1/2) for feature i of a state that is rounded after `tokens` tokens: the same for the same call.
INLINE float dither(uint64_t tokens, int64_t i) {
  uint64_t x = (tokens + 1) * 0x9E3779B97F4A7C15u + uint64_t(i) * 0xD1B54A32D192ED03u;  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return float(int32_t(x >> 40) - (1 << 23)) * 0x1p-24f + 0x1p-25f;
}

/// The unit in the last place of x where `low` is not 0. Where it is, x is exact, and noise must not move it: below a power
/// of two, half a unit is a number of its own.
INLINE vec last_place(vec x, vec low) { return (vec)((ivec)x & 0x7f800000 & (low != 0)) * 0x1p-23f; }

/// total + low as one float32: to nearest where `random` is 0, else up or down by chance, so that a long stream of short
/// calls, which rounds its state at each of them, is not biased. `random` in (-1/2, 1/2).
INLINE vec round_sum(vec total, vec low, float random) { return total + (low + last_place(total, low) * random); }

/// The state as a caller has it, S (r, M) and Z (r), after a call that began with `tokens` tokens.
void round_state(const LinearCall& c, LinearState s, int64_t tokens, float* S, float* Z) {
  const int64_t r = c.features, M = c.value_dim, ld = row_stride(M);
  for (int64_t i = 0; i < r; ++i) {
    const float random = tokens < LONG_STREAM ? 0 : dither(uint64_t(tokens), i);
    Z[i] = round_sum(splat(s.Z[i]), splat(s.Z[i + s.low]), random)[0];
    for (int64_t j = 0; j < M; j += VL) {
      const float* at = s.S + i * ld + j;
      store_some(S + i * M + j, round_sum(load(at), load(at + s.low), random), M - j);
    }
  }
}

/// Writes the outgoing state of a kv head, if the caller wants it. Returns NOT_FINITE if it is not.
int32_t store_state(const LinearCall& c, int64_t head, const float* at) {
  const int64_t r = c.features, M = c.value_dim;
  const LinearState s = state_view(c, const_cast<float*>(at));
  if (c.S_new) {
    round_state(c, s, tokens_before(c, head), c.S_new + head * r * M, c.Z_new + head * r);
    c.log_scale_new[head] = natural_from_log2(*s.log2_scale);
  }
  return all_finite(s.Z, r) && all_finite(s.S, r * row_stride(M)) ? OK : NOT_FINITE;
}

/// into = into decayed + later, for states of consecutive tokens.
void merge_states(const LinearCall& c, float* into, const float* later, double log2_decay) {
  const LinearState a = state_view(c, into), b = state_view(c, const_cast<float*>(later));
  if (c.scaled) *a.log2_scale += log2_decay;
  if (*b.log2_scale == EMPTY) return;
  const int64_t n = a.floats;
  if (*a.log2_scale == EMPTY) {
    *a.log2_scale = *b.log2_scale;
    memcpy(a.Z, b.Z, size_t(n + a.low) * 4);
    return;
  }
  const double common = *a.log2_scale > *b.log2_scale ? *a.log2_scale : *b.log2_scale;
  const float fa = exp2_exact(*a.log2_scale - common), fb = exp2_exact(*b.log2_scale - common);
  for (int64_t i = 0; i < n; i += VL) {  // n is a multiple of 16
    vec total = load(a.Z + i) * fa, low = load(a.Z + i + a.low) * fa + load(b.Z + i + b.low) * fb;
    add_compensated(load(b.Z + i) * fb, total, low);
    store(a.Z + i, total);
    store(a.Z + i + a.low, low);
  }
  *a.log2_scale = common;
}

}  // namespace
