// A block of keys made ready: values, and features weighted so that neither overflows nor vanishes.
#pragma once
#include "sums.h"

namespace {

// How far, in bits, a feature may rise above the level of the sums before the level must follow. Levels move by whole
// bits, which is exact, so that where a block ends or how high a later key rises does not change earlier rows.
constexpr float HIGHEST = 30, LARGEST = 0x1p30f;

constexpr int64_t BLOCK = 48;  // causal rows: few, because queries meet the keys of their own block one by one
static_assert(BLOCK % 16 == 0, "a block of keys is laid out in whole vectors");

struct Keys {
  int64_t n;          // rows of this block
  Rows x, v;
  float* offset;      // (n) log2-weight of each key against the level
  float* phi;         // (n, lead(r)), weighted; or
  float* turned;      // (r, BLOCK), a column for each key
  float* columns;     // (r) sums of phi over the keys, or null; or
  float* sums;        // (r, VL) what adds up to them
  float lowered;      // what the sums were multiplied with before this block, because the level rose
  double log2_decay;  // of the whole block
  bool any;           // a key is visible
};

struct KeySpace {
  float *x, *v, *offset, *tops, *phi, *columns, *work;
  double* weight;
  float *turned = nullptr, *x_turned = nullptr, *sums = nullptr;  // where features are wanted as columns
  Ahead* ahead = nullptr;
};

INLINE int64_t key_floats(const Call& c, int64_t n) {
  return n * (wide(c.dim) + wide(c.value_dim) + 4) + 64 + lead(c.features) + map_work(c, n);
}

INLINE KeySpace key_space(const Call& c, int64_t n, float* at, float* phi) {
  KeySpace s;
  s.weight = reinterpret_cast<double*>(at);
  s.x = at + 2 * round_up(n, 16);
  s.v = s.x + n * wide(c.dim);
  s.offset = s.v + n * wide(c.value_dim);
  s.tops = s.offset + n;
  s.columns = s.tops + n;
  s.work = s.columns + lead(c.features);
  s.phi = phi;
  return s;
}

// Features of at most BLOCK keys as columns; those behind the last key are 0. Exponential ones come out of the product so.
void turned_features(const Call& c, const Keys& k, int64_t n, const KeySpace& s) {
  if (c.map != MAP_EXP) {
    features(c, k.x, n, k.offset, s.phi, s.tops, s.work, {s.ahead});
    transpose(s.phi, lead(c.features), n, c.features, s.turned, BLOCK);
    return;
  }
  const int64_t columns = round_up(n, VL);
  for (int64_t i = n; i < columns; ++i) k.offset[i] = HIDDEN;
  const Operand o{c.weight, wide(c.dim), 1, s.x_turned, BLOCK, c.dim};
  product(c.features, columns, &o, 1, ExpColumns{s.turned, BLOCK, k.offset, c.bias, s.tops, s.sums}, s.ahead);
}

// The keys [t, t + n) of a kv head. With `cut`, the block ends before a key that would lift the level for the rows
// before it, and `sums` are those before the block; else the level rises to the highest key of the block.
Keys take_keys(const Call& c, int64_t head, int64_t t, int64_t n, Sums sums, bool cut, const KeySpace& space) {
  const int64_t b = head / c.kv_heads, h = head % c.kv_heads;
  const uint8_t* mask = c.mask ? c.mask + b * c.keys + t : nullptr;
  Keys k;
  const bool turn_x = space.turned && c.map == MAP_EXP;
  k.x = rows(c, token(c, c.key, c.key_stride, b, h, t), c.key_stride[2], c.dim, n, mask, turn_x, space.x);
  if (turn_x) transpose(k.x.at, k.x.ld, n, c.dim, space.x_turned, BLOCK);
  k.v = rows(c, token(c, c.value, c.value_stride, b, h, t), c.value_stride[2], c.value_dim, n, mask, true, space.v);
  k.phi = space.phi;
  k.turned = space.turned;
  k.columns = nullptr;
  k.sums = turn_x ? space.sums : nullptr;
  k.offset = space.offset;
  k.lowered = 1;

  const int64_t at = head * c.keys + t;
  if (c.square != 0) {
    if (turn_x) {
      square_columns(space.x_turned, BLOCK, n, c.dim, space.tops);
    } else {
      square_sums(k.x, n, c.dim, space.tops);
    }
    for (int64_t i = 0; i < n; ++i) space.weight[i] = c.constant + c.square * space.tops[i];
  } else {
    for (int64_t i = 0; i < n; ++i) space.weight[i] = c.constant;
  }
  if (c.log_weight) {
    for (int64_t i = 0; i < n; ++i) space.weight[i] += LOG2E * c.log_weight[at + i];
  }
  if (cut && c.log_decay) {
    double decayed = 0;
    for (int64_t i = 0; i < n; ++i) space.weight[i] -= decayed += LOG2E * c.log_decay[at + i];
  }
  if (mask) {
    for (int64_t i = 0; i < n; ++i) space.weight[i] = mask[i] ? space.weight[i] : EMPTY;
  }
  int64_t first = 0;  // visible row
  while (first < n && !(space.weight[first] > EMPTY)) ++first;
  k.any = first < n;
  bool fresh = *sums.level == EMPTY && k.any;
  if (fresh) *sums.level = __builtin_ceil(space.weight[first]);
  const double level = *sums.level;
  double raised = 0;
  for (int attempt = 0; attempt < 4; ++attempt) {
    const double above = k.any ? level + raised : 0;
    for (int64_t i = 0; i < n; ++i) k.offset[i] = fmax2(float(space.weight[i] - above), HIDDEN);
    if (space.turned) {
      turned_features(c, k, n, space);
    } else {
      k.columns = attempt == 0 && !(fresh && c.map == MAP_EXP) ? space.columns : nullptr;
      features(c, k.x, n, k.offset, k.phi, space.tops, space.work, {space.ahead, nullptr, nullptr, false, k.columns});
    }
    if (!c.scaled || !k.any) break;
    if (c.map == MAP_EXP && k.columns) {
      if (largest(k.columns, c.features) <= LARGEST) break;  // features are positive: none of them is larger
      k.columns = nullptr;
      features(c, k.x, n, k.offset, k.phi, space.tops, space.work, {space.ahead});
    }
    const float highest = largest(space.tops, n);
    if (highest <= HIGHEST && !fresh) break;
    int64_t high = 0;
    while (high < n && !(space.tops[high] > HIGHEST)) ++high;
    const bool low = fresh && (cut ? space.tops[first] : highest) < -HIGHEST;
    if (high == n && !low) break;
    if (cut && high < n && high > first) {
      n = high;
      k.columns = k.sums = nullptr;
      break;
    }
    const float by = cut ? space.tops[low ? first : high] : highest;
    if (!finite(by)) break;  // reported by the sums, which are no longer finite
    raised += __builtin_ceil(by);
    fresh = false;
  }
  if (raised != 0) {
    k.lowered = exp2s(float(-raised));
    scale_sums(sums, k.lowered);
    *sums.level = level + raised;
  }
  k.n = n;
  k.log2_decay = 0;
  if (cut && c.log_decay) {
    for (int64_t i = 0; i < n; ++i) k.log2_decay += LOG2E * c.log_decay[at + i];
  }
  return k;
}

// Z += sum of the keys' features.
void add_to_Z(const Call& c, const Keys& k, float* Z) {
  const int64_t r = c.features;
  if (k.columns) {
    for (int64_t j = 0; j < r; ++j) Z[j] += k.columns[j];
  } else if (k.turned) {
    if (!k.sums) {
      for (int64_t i = 0; i < r; ++i) memset(k.turned + i * BLOCK + k.n, 0, size_t(BLOCK - k.n) * 4);
    }
    for (int64_t j = 0; j < r; j += VL) {
      vec rows[VL];
      for (int i = 0; i < VL; ++i) {
        const int64_t at = imin(j + i, r - 1);
        rows[i] = load(k.sums ? k.sums + at * VL : k.turned + at * BLOCK);
        for (int64_t t = VL; t < BLOCK && !k.sums; t += VL) rows[i] += load(k.turned + at * BLOCK + t);
      }
      store_some(Z + j, load_some(Z + j, r - j) + reduce<false>(rows), r - j);
    }
  } else {
    add_rows(k.phi, lead(r), k.n, r, nullptr, Z);
  }
}

}  // namespace
