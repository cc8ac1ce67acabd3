// The running sums of one kv head in work space, and their scale: true sums are S 2^level.
#pragma once
#include "maps.h"

namespace {

constexpr double LN2 = 0.6931471805599453, LOG2E = 1.4426950408889634;
constexpr double EMPTY = -__builtin_inf();

struct Sums {
  double* level;  // EMPTY while no key was seen
  float* Z;       // (lead(r))
  float* S;       // (r, wide(M)) forward; (M, lead(r)) backward, where it is wanted the other way round
  int64_t floats; // Z and S together: they lie side by side
};

INLINE int64_t sums_floats(const Call& c) { return 16 + lead(c.features) + c.features * wide(c.value_dim); }

INLINE Sums view(const Call& c, float* at) {
  return {reinterpret_cast<double*>(at), at + 16, at + 16 + lead(c.features), sums_floats(c) - 16};
}

// A level that this code has written is a whole number of bits, and is read back as exactly that.
INLINE double read_level(float natural) {
  if (!(natural > -__builtin_inff())) return EMPTY;
  const double bits = natural * LOG2E, whole = __builtin_rint(bits);
  return float(whole * LN2) == natural ? whole : bits;
}

INLINE float write_level(double level) { return level == EMPTY ? -__builtin_inff() : float(level * LN2); }

// Whether work space has sums as a caller has them: then they can be read where they are.
INLINE bool same_layout(const Call& c) { return c.features % 16 == 0 && wide(c.value_dim) == c.value_dim; }

void clear(const Call& c, Sums s) {
  *s.level = c.scaled ? EMPTY : 0;  // without log-weights the scale is 1 throughout
  memset(s.Z, 0, size_t(s.floats) * 4);
}

void scale_sums(Sums s, float factor) {
  if (factor == 1) return;
  for (int64_t i = 0; i < s.floats; ++i) s.Z[i] *= factor;
}

void unpack(const Call& c, Sums s, const float* S, const float* Z, double level) {
  const int64_t r = c.features, M = c.value_dim, ld = wide(M);
  clear(c, s);
  *s.level = level;
  if (level == EMPTY) return;
  memcpy(s.Z, Z, size_t(r) * 4);
  for (int64_t i = 0; i < r; ++i) memcpy(s.S + i * ld, S + i * M, size_t(M) * 4);
}

void load_sums(const Call& c, int64_t head, float* at) {
  const int64_t r = c.features, M = c.value_dim;
  const Sums s = view(c, at);
  if (!c.S) return clear(c, s);
  unpack(c, s, c.S + head * r * M, c.Z + head * r, read_level(c.scale[head]));
  if (!c.scaled) {
    if (*s.level != EMPTY) scale_sums(s, exp2s(float(*s.level)));
    *s.level = 0;
  }
}

bool all_finite(const float* x, int64_t n) {
  vec bad = {};
  int64_t i = 0;
  for (; i + VL <= n; i += VL) {
    const vec y = load(x + i);
    bad += (y - y) * 0.0f + (y - y);  // 0 for finite numbers, NaN for others
  }
  float s = sum(bad);
  for (; i < n; ++i) s += x[i] - x[i];
  return s == 0;
}

void pack(const Call& c, Sums s, float* S, float* Z) {
  const int64_t r = c.features, M = c.value_dim;
  memcpy(Z, s.Z, size_t(r) * 4);
  copy_out(s.S, wide(M), r, M, S);
}

int32_t store_sums(const Call& c, int64_t head, const float* at) {
  const int64_t r = c.features, M = c.value_dim;
  const Sums s = view(c, const_cast<float*>(at));
  if (c.S_new) {
    pack(c, s, c.S_new + head * r * M, c.Z_new + head * r);
    c.scale_new[head] = write_level(*s.level);
  }
  return all_finite(s.Z, r) && all_finite(s.S, r * wide(M)) ? OK : NOT_FINITE;
}

// into = into decayed, plus later.
void merge_sums(const Call& c, float* into, const float* later, double log2_decay) {
  const Sums a = view(c, into), b = view(c, const_cast<float*>(later));
  if (c.scaled) *a.level += log2_decay;
  if (*b.level == EMPTY) return;
  const int64_t n = a.floats;
  if (*a.level == EMPTY) {
    *a.level = *b.level;
    memcpy(a.Z, b.Z, size_t(n) * 4);
    return;
  }
  const double level = *a.level > *b.level ? *a.level : *b.level;
  const float fa = exp2s(float(*a.level - level)), fb = exp2s(float(*b.level - level));
  for (int64_t i = 0; i < n; ++i) a.Z[i] = a.Z[i] * fa + b.Z[i] * fb;
  *a.level = level;
}

}  // namespace
