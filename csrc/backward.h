// Backward passes. Features are computed again, block by block; nothing of size tokens x features is kept.
//
// With num_i and den_i the two parts of an output row, g_i = d out_i / den_i and h_i = -(d out_i . out_i) / den_i:
//   d phi(q_i) = S_i g_i + Z_i h_i,          d phi(k_j) = (sum of later phi(q_i) g_i') v_j + sum of later phi(q_i) h_i,
//   d v_j      = (sum of later phi(q_i) g_i')' phi(k_j).
// Sums, and sums of gradients, are held transposed here, (M, lead(r)): products then run along the features.
#pragma once
#include "forward.h"

namespace {

INLINE int64_t turned_floats(const Call& c) { return 16 + lead(c.features) * (1 + round_up(c.value_dim, 16)); }

INLINE Sums turned_view(const Call& c, float* at) {
  return {reinterpret_cast<double*>(at), at + 16, at + 16 + lead(c.features), turned_floats(c) - 16};
}

// (r, M) -> (M, lead(r)), by way of `space` (r, wide(M)).
void turn(const Call& c, const float* S, const float* Z, Sums to, float* space) {
  const int64_t r = c.features, M = c.value_dim, ld = wide(M);
  memset(to.Z, 0, size_t(to.floats) * 4);
  memcpy(to.Z, Z, size_t(r) * 4);
  for (int64_t i = 0; i < r; ++i) {
    memset(space + i * ld, 0, size_t(ld) * 4);
    memcpy(space + i * ld, S + i * M, size_t(M) * 4);
  }
  transpose(space, ld, r, M, to.S, lead(r));
}

// (M, lead(r)) -> (r, wide(M)).
void turn_back(const Call& c, const float* turned, float* S) {
  transpose(turned, lead(c.features), c.value_dim, c.features, S, wide(c.value_dim));
}

INLINE int64_t turn_floats(const Call& c) { return round_up(c.features, 16) * wide(c.value_dim); }

// `level` of summed gradients: what gradients of later sums must be multiplied with to be added here.
void load_grad(const Call& c, int64_t head, float* at) {
  const int64_t r = c.features;
  const Sums s = turned_view(c, at);
  *s.level = 1;
  if (c.grad_S_new) {
    turn(c, c.grad_S_new + head * r * c.value_dim, c.grad_Z_new + head * r, s, scratch(turn_floats(c)));
  } else {
    memset(s.Z, 0, size_t(s.floats) * 4);
  }
}

void store_grad(const Call& c, int64_t head, const float* at) {
  const int64_t r = c.features, M = c.value_dim;
  const Sums s = turned_view(c, const_cast<float*>(at));
  float* S = scratch(turn_floats(c));
  turn_back(c, s.S, S);
  copy_out(S, wide(M), r, M, c.grad_S + head * r * M);
  memcpy(c.grad_Z + head * r, s.Z, size_t(r) * 4);
}

// Gradients of features; those of an exponential map already times the feature. Each row starts from h_i z.
struct GradRows {
  float* to;
  const float* phi;
  int64_t ld;
  const float *h, *z;
  float* log_grad;  // (n, VL): sums over the row of feature times gradient, or null
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

// g and h of n rows.
void output_grads(const Call& c, const float* grad, const float* out, const float* inverse, int64_t n, float* g, float* h) {
  const int64_t M = c.value_dim, ld = wide(M);
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

// sums of phi(q) g' and phi(q) h over a block's rows.
void add_grads(const Call& c, const float* phi, const float* g, const float* h, int64_t n, Sums to) {
  const int64_t ld = lead(c.features);
  const Operand o{g, 1, wide(c.value_dim), phi, ld, n};
  product(c.value_dim, round_up(c.features, VL), &o, 1, Store<true>{to.S, ld});
  add_rows(phi, ld, n, c.features, h, to.Z);
}

// Gradients of a block's keys and values. `extra` adds what queries of the same block contribute: operands for the
// values in extra[0 .. count), for the features in extra[count .. 2 count).
constexpr int64_t MOST_GROUPS = 64;

struct KeyGradSpace {
  float *grad, *log_sums, *log_grad, *spill, *work;
};

INLINE int64_t key_grad_floats(const Call& c, int64_t n) {
  return n * (lead(c.features) + VL + 1 + wide(c.value_dim)) + 64 + map_work(c, n) + n * wide(c.dim);
}

INLINE KeyGradSpace key_grad_space(const Call& c, int64_t n, float* at) {
  KeyGradSpace s;
  s.grad = take(at, n * lead(c.features));
  s.log_sums = take(at, n * VL);
  s.log_grad = take(at, n);
  s.spill = take(at, n * wide(c.value_dim));
  s.work = at;
  return s;
}

void key_grads(const Call& c, int64_t head, int64_t t, const Keys& k, Sums grads, const float* grad_S,
               const Operand* extra, int count, const KeyGradSpace& s) {
  const int64_t r = c.features, ld = lead(r), M = c.value_dim, full = round_up(r, VL), columns = round_up(M, VL);
  Operand o[MOST_GROUPS + 1];
  o[0] = {k.phi, ld, 1, grad_S, wide(M), r};
  for (int i = 0; i < count; ++i) o[i + 1] = extra[i];
  float* grad_v = c.grad_value + (head * c.keys + t) * M;
  if (M % VL == 0) {
    product(k.n, columns, o, count + 1, Store<false>{grad_v, M});
  } else {
    product(k.n, columns, o, count + 1, Store<false>{s.spill, wide(M)});
    copy_out(s.spill, wide(M), k.n, M, grad_v);
  }
  o[0] = {k.v.at, k.v.ld, 1, grads.S, ld, M};
  for (int i = 0; i < count; ++i) o[i + 1] = extra[count + i];
  product(k.n, full, o, count + 1, GradRows{s.grad, k.phi, ld, nullptr, grads.Z, s.log_sums, c.map == MAP_EXP});
  reduce_rows<false>(s.log_sums, k.n, s.log_grad);
  if (c.grad_log) memcpy(c.grad_log + head * c.keys + t, s.log_grad, size_t(k.n) * 4);
  features_backward(c, k.x, k.n, k.offset, k.phi, s.grad, s.log_grad, c.grad_key + (head * c.keys + t) * c.dim, s.work);
}

void absorb_backward(const Call& c, int64_t head, int64_t begin, int64_t end) {
  const int64_t n = imin(WIDE_BLOCK, end - begin), ld = lead(c.features), r = c.features;
  float* space = scratch(turned_floats(c) + turn_floats(c) + n * ld + key_floats(c, n) + key_grad_floats(c, n) + 256);
  const Sums grads = turned_view(c, take(space, turned_floats(c)));
  float* grad_S = take(space, turn_floats(c));
  turn(c, c.grad_S_new + head * r * c.value_dim, c.grad_Z_new + head * r, grads, grad_S);
  turn_back(c, grads.S, grad_S);
  float* phi = take(space, n * ld);
  const KeySpace keys = key_space(c, n, take(space, key_floats(c, n)), phi);
  const KeyGradSpace grad_space = key_grad_space(c, n, space);
  double level = c.scaled ? read_level(c.scale_new[head]) : 0;
  const Sums fixed = {&level, nullptr, nullptr, 0};
  for (int64_t t = begin; t < end; t += n) {
    const Keys k = take_keys(c, head, t, imin(n, end - t), fixed, false, keys);
    key_grads(c, head, t, k, grads, grad_S, nullptr, 0, grad_space);
  }
}

void read_backward(const Call& c, int64_t head, int64_t begin, int64_t end, float* grad_sums) {
  const int64_t b = head / c.kv_heads, groups = c.heads / c.kv_heads, first = (head % c.kv_heads) * groups;
  const int64_t n = imin(WIDE_BLOCK, end - begin), r = c.features, ld = lead(r), M = c.value_dim;
  const Sums grads = turned_view(c, grad_sums);
  float* space = scratch(turned_floats(c) + turn_floats(c) + n * (2 * ld + wide(M) + 2) + query_floats(c, n) +
                         n * wide(c.dim) + 256);
  const Sums sums = turned_view(c, take(space, turned_floats(c)));
  turn(c, c.S + head * r * M, c.Z + head * r, sums, take(space, turn_floats(c)));
  float* phi = take(space, n * ld);
  float* grad = take(space, n * ld);
  float* g = take(space, n * wide(M));
  float* h = take(space, n);
  float* den = take(space, n);
  QuerySpace queries = query_space(c, n, space);
  for (int64_t row = begin; row < end;) {
    const int64_t group = row / c.queries, t = row % c.queries, m = imin(n, imin(end - row, c.queries - t));
    const int64_t at = (b * c.heads + first + group) * c.queries + t;
    const Rows x = take_queries(c, b, first + group, t, m, queries, phi, sums.Z, den);
    int32_t flags = OK;
    invert(den, m, 0, flags);
    output_grads(c, c.grad_out + at * M, c.out + at * M, den, m, g, h);
    const Operand o{g, wide(M), 1, sums.S, ld, M};
    product(m, round_up(r, VL), &o, 1, GradRows{grad, phi, ld, h, sums.Z, nullptr, c.map == MAP_EXP});
    features_backward(c, x, m, queries.offset, phi, grad, nullptr, c.grad_query + at * c.dim, queries.work);
    add_grads(c, phi, g, h, m, grads);
    row += m;
  }
}

}  // namespace
