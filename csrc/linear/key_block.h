/// A block of keys: values, and features weighted relative to the state's scale so that none overflows or vanishes.
#pragma once
#include "linear/linear_state.h"

namespace {

/// How far, in bits, a feature may rise above the state's scale before the scale must follow. Scales move by whole bits,
/// which is exact: where a block ends, or how large a later key is, does not change earlier rows.
constexpr float MAX_LOG2 = 30, MAX_FEATURE = 0x1p30f;
/// How far below the scale the first key may be: little, because the guard of the denominators is relative to the scale,
/// which must not be far above the largest key that a row sees.
constexpr float MIN_LOG2 = -8;

/// Causal rows of a block: few, because queries meet the keys of their own block one by one.
constexpr int64_t BLOCK = 48;
static_assert(BLOCK % 16 == 0, "a block of keys is laid out in whole vectors");

/// A loaded block. Features are rows (phi) or columns (phi_t).
struct KeyBlock {
  int64_t n;  // keys of this block
  Rows x, v;
  float* offset;       // (n) log2-weight of each key relative to the state's scale
  float* phi;          // (n, feature_stride(r)), weighted; or
  float* phi_t;        // (r, BLOCK)
  float* feature_sum;  // (r) sum of phi over the keys, or null; or
  float* partial_sum;  // (r, VL) vectors whose lanes add up to it, or null
  float rescale;       // the factor that the state was multiplied with before this block, because its scale rose
  double log2_decay;   // of the whole block
  bool any;            // a key is visible
};

/// Work space of a block.
struct KeyScratch {
  float *x, *v, *offset, *row_max, *phi, *feature_sum, *work;
  double* weight;
  float *phi_t = nullptr, *x_t = nullptr, *partial_sum = nullptr;  // set where features are wanted as columns
  Prefetcher* prefetcher = nullptr;
};

/// Floats of a KeyScratch for n keys, without phi.
INLINE int64_t key_floats(const LinearCall& c, int64_t n) {
  return n * (row_stride(c.dim) + row_stride(c.value_dim) + 4) + 64 + feature_stride(c.features) + feature_map_floats(c, n);
}

/// A KeyScratch at `at` (key_floats) with features at `phi` (n, feature_stride(r)).
INLINE KeyScratch key_scratch(const LinearCall& c, int64_t n, float* at, float* phi) {
  KeyScratch s;
  s.weight = reinterpret_cast<double*>(at);
  s.x = at + 2 * round_up(n, 16);
  s.v = s.x + n * row_stride(c.dim);
  s.offset = s.v + n * row_stride(c.value_dim);
  s.row_max = s.offset + n;
  s.feature_sum = s.row_max + n;
  s.work = s.feature_sum + feature_stride(c.features);
  s.phi = phi;
  return s;
}

/// s.phi_t (r, BLOCK): features of n <= BLOCK keys as columns, 0 behind the last key. EXP writes them in this layout; the
/// other maps are transposed.
void transposed_features(const LinearCall& c, const KeyBlock& k, int64_t n, const KeyScratch& s) {
  if (c.feature_map != MAP_EXP) {
    apply_feature_map(c, k.x, n, k.offset, s.phi, s.row_max, s.work, {s.prefetcher});
    transpose(s.phi, feature_stride(c.features), n, c.features, s.phi_t, BLOCK);
    return;
  }
  const int64_t columns = round_up(n, VL);
  for (int64_t i = n; i < columns; ++i) k.offset[i] = MASKED;
  const Operand o{c.projection, row_stride(c.dim), 1, s.x_t, BLOCK, c.dim};
  const ExpColumns exp_columns{s.phi_t, BLOCK, k.offset, c.projection_bias, s.row_max, s.partial_sum};
  gemm(c.features, columns, &o, 1, exp_columns, s.prefetcher);
}

/// Which decay a key's weight is divided by, so that the state's decay can be applied to its scale instead.
enum DecayOf { NO_DECAY, OWN_DECAY, CUMULATIVE_DECAY };

/// weight (n): log2-weights of the keys whose row in log_weight and log_decay starts at `at`. squares (n): |x|^2, or unused
/// where norm_coef is 0. mask (n) or null.
void key_log2_weights(const LinearCall& c, int64_t at, int64_t n, const float* squares, const uint8_t* mask, DecayOf decay,
                      double* weight) {
  for (int64_t i = 0; i < n; ++i) weight[i] = c.norm_coef != 0 ? c.norm_const + c.norm_coef * squares[i] : c.norm_const;
  if (c.log_weight) {
    for (int64_t i = 0; i < n; ++i) weight[i] += LOG2E * c.log_weight[at + i];
  }
  if (c.log_decay && decay == CUMULATIVE_DECAY) {
    double decayed = 0;
    for (int64_t i = 0; i < n; ++i) weight[i] -= decayed += LOG2E * c.log_decay[at + i];
  }
  if (c.log_decay && decay == OWN_DECAY) {
    for (int64_t i = 0; i < n; ++i) weight[i] -= LOG2E * c.log_decay[at + i];
  }
  if (mask) {
    for (int64_t i = 0; i < n; ++i) weight[i] = mask[i] ? weight[i] : EMPTY;
  }
}

/// Loads keys and values [t, t + n) of a kv head, x also as columns where EXP needs that.
void load_key_rows(const LinearCall& c, int64_t head, int64_t t, int64_t n, const KeyScratch& s, KeyBlock& k) {
  const int64_t b = head / c.kv_heads, h = head % c.kv_heads;
  const uint8_t* mask = c.mask ? c.mask + b * c.keys + t : nullptr;
  const bool transpose_x = s.phi_t && c.feature_map == MAP_EXP;
  const void* key = token_ptr(c.dtype, c.key, c.key_stride, b, h, t);
  const void* value = token_ptr(c.dtype, c.value, c.value_stride, b, h, t);
  k.x = load_rows(c.dtype, key, c.key_stride[2], c.dim, n, mask, transpose_x, s.x);
  if (transpose_x) transpose(k.x.at, k.x.ld, n, c.dim, s.x_t, BLOCK);
  k.v = load_rows(c.dtype, value, c.value_stride[2], c.value_dim, n, mask, true, s.v);
  k.n = n;
  k.phi = s.phi;
  k.phi_t = s.phi_t;
  k.feature_sum = nullptr;
  k.partial_sum = transpose_x ? s.partial_sum : nullptr;
  k.offset = s.offset;
  k.rescale = 1;
}

/// Computes the block's features relative to log2_scale + raised, and raises until none is too large. Returns `raised`, in
/// whole bits; k.n shrinks where `cut` ends the block early (load_key_block). `first`: the first visible key. `fresh`: the
/// state had no key before. `fixed`: the scale may not move.
double scaled_features(const LinearCall& c, double log2_scale, int64_t first, bool fresh, bool fixed, bool cut,
                       const KeyScratch& s, KeyBlock& k) {
  const int64_t n = k.n, seeing = fresh ? first : 0;  // rows before `seeing` see no key at all
  double raised = 0;
  for (int attempt = 0; attempt < 4; ++attempt) {
    const double reference = k.any ? log2_scale + raised : 0;
    for (int64_t i = 0; i < n; ++i) k.offset[i] = fmax2(float(s.weight[i] - reference), MASKED);
    if (s.phi_t) {
      transposed_features(c, k, n, s);
    } else {
      k.feature_sum = attempt == 0 && !(fresh && c.feature_map == MAP_EXP) ? s.feature_sum : nullptr;
      apply_feature_map(c, k.x, n, k.offset, k.phi, s.row_max, s.work,
                        {s.prefetcher, nullptr, nullptr, false, k.feature_sum});
    }
    if (!c.scaled || !k.any || fixed) break;
    if (c.feature_map == MAP_EXP && k.feature_sum) {
      if (max_element(k.feature_sum, c.features) <= MAX_FEATURE) break;  // positive features: none is larger than the sum
      k.feature_sum = nullptr;
      apply_feature_map(c, k.x, n, k.offset, k.phi, s.row_max, s.work, {s.prefetcher});
    }
    const float highest = max_element(s.row_max, n);
    const bool settle = fresh && attempt == 0;  // the first key sets the scale
    if (highest <= MAX_LOG2 && !settle) break;
    float by = cut ? s.row_max[first] : highest;
    if (!settle || by >= MIN_LOG2) {
      int64_t high = 0;
      while (high < n && !(s.row_max[high] > MAX_LOG2)) ++high;
      if (high == n) break;
      if (cut && high > seeing) {
        k.n = high;
        k.feature_sum = k.partial_sum = nullptr;
        break;
      }
      by = cut ? s.row_max[high] : highest;
    }
    if (!finite(by)) break;  // reported by store_state
    raised += __builtin_floor(by);
  }
  return raised;
}

/// The keys [t, t + n) of a kv head, weighted relative to `state`, whose scale is raised where needed. With `cut`, the
/// block ends before a key that would raise the scale for the rows before it, so that rows do not depend on later keys,
/// visible or not; else the scale rises to the largest key of the block. A `state` without floats keeps its scale.
KeyBlock load_key_block(const LinearCall& c, int64_t head, int64_t t, int64_t n, LinearState state, bool cut,
                        const KeyScratch& s) {
  const uint8_t* mask = c.mask ? c.mask + head / c.kv_heads * c.keys + t : nullptr;
  const int64_t at = head * c.keys + t;
  KeyBlock k;
  load_key_rows(c, head, t, n, s, k);
  if (c.norm_coef != 0) {
    if (s.phi_t && c.feature_map == MAP_EXP) {
      squared_column_norms(s.x_t, BLOCK, n, c.dim, s.row_max);
    } else {
      squared_norms(k.x, n, c.dim, s.row_max);
    }
  }
  key_log2_weights(c, at, n, s.row_max, mask, cut ? CUMULATIVE_DECAY : NO_DECAY, s.weight);
  int64_t first = 0;
  while (first < n && !(s.weight[first] > EMPTY)) ++first;
  k.any = first < n;
  const bool fresh = *state.log2_scale == EMPTY && k.any, fixed = state.floats == 0;
  if (fresh) *state.log2_scale = __builtin_floor(s.weight[first]);
  const double log2_scale = *state.log2_scale;
  const double raised = scaled_features(c, log2_scale, first, fresh, fixed, cut, s, k);
  if (raised != 0) {
    *state.log2_scale = log2_scale + raised;
    if (!fresh) k.rescale = exp2_exact(-raised);  // an empty state needs no rescaling
    scale_state(state, k.rescale);
  }
  k.log2_decay = 0;
  if (cut && c.log_decay) {
    for (int64_t i = 0; i < k.n; ++i) k.log2_decay += LOG2E * c.log_decay[at + i];
  }
  return k;
}

/// Z (feature_stride(r)) += sum of the block's features; `low`: see add_to_sum.
void add_to_Z(const LinearCall& c, const KeyBlock& k, float* Z, int64_t low) {
  const int64_t r = c.features;
  if (k.feature_sum) {
    for (int64_t j = 0; j < r; j += VL) add_to_sum(Z + j, low, load_some(k.feature_sum + j, r - j));
    return;
  }
  if (!k.phi_t) return add_weighted_rows(k.phi, feature_stride(r), k.n, r, nullptr, Z, low);
  if (!k.partial_sum) {
    for (int64_t i = 0; i < r; ++i) memset(k.phi_t + i * BLOCK + k.n, 0, size_t(BLOCK - k.n) * 4);
  }
  for (int64_t j = 0; j < r; j += VL) {
    vec rows[VL];
    for (int i = 0; i < VL; ++i) {
      const int64_t at = imin(j + i, r - 1);
      rows[i] = load(k.partial_sum ? k.partial_sum + at * VL : k.phi_t + at * BLOCK);
      for (int64_t t = VL; t < BLOCK && !k.partial_sum; t += VL) rows[i] += load(k.phi_t + at * BLOCK + t);
    }
    vec term = reduce<false>(rows);
    if (j + VL > r) term = lanes() < splat(float(r - j)) ? term : vec{};  // what is behind the last feature stays 0
    add_to_sum(Z + j, low, term);
  }
}

}  // namespace
