/// Backward kernels. Features are recomputed block by block; nothing of size tokens x features is kept.
///
/// With num_i and den_i the numerator and denominator of an output row, g_i = d out_i / den_i and
/// h_i = -(d out_i . out_i) / den_i:
///   d phi(q_i) = S_i g_i + Z_i h_i,          d phi(k_j) = (sum of later phi(q_i) g_i') v_j + sum of later phi(q_i) h_i,
///   d v_j      = (sum of later phi(q_i) g_i')' phi(k_j).
/// States, and gradients of states, are held transposed here, S (M, feature_stride(r)): products then run along the
/// features. The log2_scale of a gradient is a factor: what the gradient of a later state is multiplied with.
#pragma once
#include "linear/feature_maps_backward.h"
#include "linear/forward.h"

namespace {

constexpr int64_t MAX_GROUPS = 64;  // query heads of a kv head; engines/native/ffi.py has the same number

/// Floats of a transposed state.
INLINE int64_t transposed_floats(const LinearCall& c) {
  return 16 + feature_stride(c.features) * (1 + round_up(c.value_dim, 16));
}

/// The transposed state at `at` (transposed_floats).
INLINE LinearState transposed_view(const LinearCall& c, float* at) {
  return {reinterpret_cast<double*>(at), at + 16, at + 16 + feature_stride(c.features), transposed_floats(c) - 16};
}

/// Floats of S (r, row_stride(M)) with rows rounded up to whole vectors.
INLINE int64_t padded_S_floats(const LinearCall& c) { return round_up(c.features, 16) * row_stride(c.value_dim); }

/// The transposed state from contiguous S (r, M) and Z (r), by way of `space` (padded_S_floats).
void load_transposed(const LinearCall& c, const float* S, const float* Z, LinearState to, float* space) {
  const int64_t r = c.features, M = c.value_dim, ld = row_stride(M);
  memset(to.Z, 0, size_t(to.floats) * 4);
  memcpy(to.Z, Z, size_t(r) * 4);
  for (int64_t i = 0; i < r; ++i) {
    memset(space + i * ld, 0, size_t(ld) * 4);
    memcpy(space + i * ld, S + i * M, size_t(M) * 4);
  }
  transpose(space, ld, r, M, to.S, feature_stride(r));
}

/// S (r, row_stride(M)) from S_t (M, feature_stride(r)).
void transpose_back(const LinearCall& c, const float* S_t, float* S) {
  transpose(S_t, feature_stride(c.features), c.value_dim, c.features, S, row_stride(c.value_dim));
}

/// The gradient of the outgoing state, 0 where the caller has none.
void load_grad_state(const LinearCall& c, int64_t head, float* at) {
  const int64_t r = c.features;
  const LinearState s = transposed_view(c, at);
  *s.log2_scale = 1;
  if (c.grad_S_new) {
    const float *S = c.grad_S_new + head * r * c.value_dim, *Z = c.grad_Z_new + head * r;
    load_transposed(c, S, Z, s, scratch(padded_S_floats(c)));
  } else {
    memset(s.Z, 0, size_t(s.floats) * 4);
  }
}

/// Writes the gradient of the incoming state.
void store_grad_state(const LinearCall& c, int64_t head, const float* at) {
  const int64_t r = c.features, M = c.value_dim;
  const LinearState s = transposed_view(c, const_cast<float*>(at));
  float* S = scratch(padded_S_floats(c));
  transpose_back(c, s.S, S);
  unpad_rows(S, row_stride(M), r, M, c.grad_S + head * r * M);
  memcpy(c.grad_Z + head * r, s.Z, size_t(r) * 4);
}

/// Epilogue: gradients of features, those of EXP already times the feature. Row i starts from h_i z, or from z.
struct FeatureGrads {
  float* to;
  const float* phi;
  int64_t ld;
  const float *h, *z;
  float* log_grad;  // (n, VL): vectors whose lanes add up to the row's feature . gradient, or null
  bool times_phi;
  INLINE vec start(int64_t i, int64_t j) const { return h ? load(z + j) * h[i] : load(z + j); }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    vec row = {};
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      const vec both = acc[w] * load(phi + i * ld + j + w * VL);
      row += both;
      store(to + i * ld + j + w * VL, times_phi ? both : acc[w]);
    }
    if (log_grad) store(log_grad + i * VL, j ? load(log_grad + i * VL) + row : row);
  }
};

/// g (n, row_stride(M)) and h (n) from grad, out (n, M) and inverse denominators (n).
void output_grads(const LinearCall& c, const float* grad, const float* out, const float* inverse, int64_t n, float* g,
                  float* h) {
  const int64_t M = c.value_dim, ld = row_stride(M);
  for (int64_t i = 0; i < n; ++i) {
    vec along = {};
    for (int64_t m = 0; m < M; m += VL) {
      const vec d = load_some(grad + i * M + m, M - m);
      along += d * load_some(out + i * M + m, M - m);
      store(g + i * ld + m, d * inverse[i]);
    }
    h[i] = inverse[i] == 0 ? 0 : -sum(along) * inverse[i];
  }
}

/// Row i of x (n, ld) times factor[i], for `width` columns.
inline void scale_rows_by(float* x, int64_t ld, int64_t width, int64_t n, const float* factor) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < width; j += VL) store(x + i * ld + j, load(x + i * ld + j) * factor[i]);
  }
}

/// Exponential features have denominators down to the smallest floats. Their inverses go into the features (n, ld) and the
/// scores (n, LD_SCORES, or null) instead of g and h, whose products with the state and the values would be infinite.
/// `inverse` becomes 1, or 0 for rows that were not divided.
inline void divide_features(const LinearCall& c, int64_t n, float* phi, float* scores, float* inverse) {
  scale_rows_by(phi, feature_stride(c.features), round_up(c.features, VL), n, inverse);
  if (scores) scale_rows_by(scores, LD_SCORES, round_up(n, VL), n, inverse);
  for (int64_t i = 0; i < n; ++i) inverse[i] = inverse[i] != 0;
}

/// Divided features beyond 1e30 are scaled down to that, with their scores: the gradient of the state sums over many rows,
/// and an infinite one would be NaN for every key. `factor` (n) is work space.
inline void limit_features(const LinearCall& c, int64_t n, float* phi, float* scores, float* factor) {
  constexpr float MOST = 1e30f;
  const int64_t ld = feature_stride(c.features);
  bool any = false;
  for (int64_t i = 0; i < n; ++i) {
    const float most = max_element(phi + i * ld, c.features);  // exponential features are positive
    factor[i] = most > MOST ? MOST / most : 1;
    any |= most > MOST;
  }
  if (!any) return;
  scale_rows_by(phi, ld, round_up(c.features, VL), n, factor);
  if (scores) scale_rows_by(scores, LD_SCORES, round_up(n, VL), n, factor);
}

/// to.S += g' phi, to.Z += h' phi: the part of n queries in the gradient of the state.
void add_query_grads(const LinearCall& c, const float* phi, const float* g, const float* h, int64_t n, LinearState to) {
  const int64_t ld = feature_stride(c.features);
  const Operand o{g, 1, row_stride(c.value_dim), phi, ld, n};
  gemm(c.value_dim, round_up(c.features, VL), &o, 1, Store<true>{to.S, ld});
  add_weighted_rows(phi, ld, n, c.features, h, to.Z);
}

/// Work space of key_grads.
struct KeyGradScratch {
  float *grad, *log_sums, *log_grad, *padded, *work;
};

/// Floats of a KeyGradScratch for n keys.
INLINE int64_t key_grad_floats(const LinearCall& c, int64_t n) {
  const int64_t row = feature_stride(c.features) + VL + 1 + row_stride(c.value_dim) + row_stride(c.dim);
  return n * row + 64 + feature_map_floats(c, n);
}

/// A KeyGradScratch at `at` (key_grad_floats).
INLINE KeyGradScratch key_grad_scratch(const LinearCall& c, int64_t n, float* at) {
  KeyGradScratch s;
  s.grad = carve(at, n * feature_stride(c.features));
  s.log_sums = carve(at, n * VL);
  s.log_grad = carve(at, n);
  s.padded = carve(at, n * row_stride(c.value_dim));
  s.work = at;
  return s;
}

/// Gradients of a block's keys and values from the gradient of the state, as `grads` (transposed) and `grad_S`
/// (r, row_stride(M)). `extra`: what queries of the same block add, operands for the values in extra[0 .. count), for the
/// features in extra[count .. 2 count).
void key_grads(const LinearCall& c, int64_t head, int64_t t, const KeyBlock& k, LinearState grads, const float* grad_S,
               const Operand* extra, int count, const KeyGradScratch& s) {
  const int64_t r = c.features, ld = feature_stride(r), M = c.value_dim, lm = row_stride(M), at = head * c.keys + t;
  Operand o[MAX_GROUPS + 1];
  o[0] = {k.phi, ld, 1, grad_S, lm, r};
  for (int i = 0; i < count; ++i) o[i + 1] = extra[i];
  float* grad_v = c.grad_value + at * M;
  if (M % VL == 0) {
    gemm(k.n, M, o, count + 1, Store<false>{grad_v, M});
  } else {
    gemm(k.n, round_up(M, VL), o, count + 1, Store<false>{s.padded, lm});
    unpad_rows(s.padded, lm, k.n, M, grad_v);
  }
  o[0] = {k.v.at, k.v.ld, 1, grads.S, ld, M};
  for (int i = 0; i < count; ++i) o[i + 1] = extra[count + i];
  const FeatureGrads end{s.grad, k.phi, ld, nullptr, grads.Z, s.log_sums, c.feature_map == MAP_EXP};
  gemm(k.n, round_up(r, VL), o, count + 1, end);
  reduce_rows<false>(s.log_sums, k.n, s.log_grad);
  if (c.grad_log_weight) memcpy(c.grad_log_weight + at, s.log_grad, size_t(k.n) * 4);
  feature_map_backward(c, k.x, k.n, k.offset, k.phi, s.grad, s.log_grad, c.grad_key + at * c.dim, s.work);
}

/// Gradients of the keys and values [begin, end) of a kv head from the gradient of the outgoing state.
void update_state_backward(const LinearCall& c, int64_t head, int64_t begin, int64_t end) {
  const int64_t n = imin(WIDE_BLOCK, end - begin), ld = feature_stride(c.features), r = c.features;
  float* space =
      scratch(transposed_floats(c) + padded_S_floats(c) + n * ld + key_floats(c, n) + key_grad_floats(c, n) + 256);
  const LinearState grads = transposed_view(c, carve(space, transposed_floats(c)));
  float* grad_S = carve(space, padded_S_floats(c));
  load_transposed(c, c.grad_S_new + head * r * c.value_dim, c.grad_Z_new + head * r, grads, grad_S);
  transpose_back(c, grads.S, grad_S);
  float* phi = carve(space, n * ld);
  const KeyScratch keys = key_scratch(c, n, carve(space, key_floats(c, n)), phi);
  const KeyGradScratch grad_scratch = key_grad_scratch(c, n, space);
  double log2_scale = log2_from_natural(c.log_scale_new[head]);
  const LinearState fixed = {&log2_scale, nullptr, nullptr, 0};
  for (int64_t t = begin; t < end; t += n) {
    const KeyBlock k = load_key_block(c, head, t, imin(n, end - t), fixed, false, keys);
    key_grads(c, head, t, k, grads, grad_S, nullptr, 0, grad_scratch);
  }
}

/// Gradients of the query rows [begin, end) of a kv head, row = group * L + token; adds to the gradient of the state.
void read_state_backward(const LinearCall& c, int64_t head, int64_t begin, int64_t end, float* grad_state) {
  const int64_t b = head / c.kv_heads, groups = c.heads / c.kv_heads, first = (head % c.kv_heads) * groups;
  const int64_t n = imin(WIDE_BLOCK, end - begin), r = c.features, ld = feature_stride(r), M = c.value_dim;
  const LinearState grads = transposed_view(c, grad_state);
  float* space = scratch(transposed_floats(c) + padded_S_floats(c) + n * (2 * ld + row_stride(M) + 2) + query_floats(c, n) +
                         n * row_stride(c.dim) + 256);
  const LinearState state = transposed_view(c, carve(space, transposed_floats(c)));
  load_transposed(c, c.S + head * r * M, c.Z + head * r, state, carve(space, padded_S_floats(c)));
  float* phi = carve(space, n * ld);
  float* grad = carve(space, n * ld);
  float* g = carve(space, n * row_stride(M));
  float* h = carve(space, n);
  float* den = carve(space, n);
  QueryScratch queries = query_scratch(c, n, space);
  for (int64_t row = begin; row < end;) {
    const int64_t group = row / c.queries, t = row % c.queries, m = imin(n, imin(end - row, c.queries - t));
    const int64_t at = (b * c.heads + first + group) * c.queries + t;
    const Rows x = query_features(c, b, first + group, t, m, queries, phi, state.Z, den);
    int32_t flags = OK;
    invert_denominators(c, den, m, 0, flags);
    const bool exponential = c.feature_map == MAP_EXP;
    if (exponential) divide_features(c, m, phi, nullptr, den);
    output_grads(c, c.grad_out + at * M, c.out + at * M, den, m, g, h);
    const Operand o{g, row_stride(M), 1, state.S, ld, M};
    gemm(m, round_up(r, VL), &o, 1, FeatureGrads{grad, phi, ld, h, state.Z, nullptr, exponential});
    feature_map_backward(c, x, m, queries.offset, phi, grad, nullptr, c.grad_query + at * c.dim, queries.work);
    if (exponential) limit_features(c, m, phi, nullptr, den);
    add_query_grads(c, phi, g, h, m, grads);
    row += m;
  }
}

}  // namespace
