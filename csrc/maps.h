// Feature maps of a block of tokens: x (n x D) -> phi (n x lead(r)), every row times 2^offset.
#pragma once
#include "gemm.h"
#include "tokens.h"

namespace {

constexpr float HIDDEN = -1e30f;  // the offset of a masked key: 2^HIDDEN = 0

// Reads whole vectors: both must be padded with 0.
float dot(const float* a, const float* b, int64_t n) {
  n = round_up(n, VL);
  vec s = {}, t = {};
  int64_t i = 0;
  for (; i + 2 * VL <= n; i += 2 * VL) {
    s += load(a + i) * load(b + i);
    t += load(a + i + VL) * load(b + i + VL);
  }
  if (i < n) s += load(a + i) * load(b + i);
  return sum(s + t);
}

// z += sum over rows of weight_i phi_i; weight null counts as 1.
template <int W>
INLINE void add_columns(const float* phi, int64_t ld, int64_t n, const float* weight, float* z) {
  vec s[W];
  UNROLL(8)
  for (int w = 0; w < W; ++w) s[w] = load(z + w * VL);
  for (int64_t i = 0; i < n; ++i) {
    const float by = weight ? weight[i] : 1;
    UNROLL(8)
    for (int w = 0; w < W; ++w) s[w] += load(phi + i * ld + w * VL) * by;
  }
  UNROLL(8)
  for (int w = 0; w < W; ++w) store(z + w * VL, s[w]);
}

void add_rows(const float* phi, int64_t ld, int64_t n, int64_t r, const float* weight, float* z) {
  int64_t j = 0;
  for (; j + 8 * VL <= r; j += 8 * VL) add_columns<8>(phi + j, ld, n, weight, z + j);
  for (; j < r; j += VL) add_columns<1>(phi + j, ld, n, weight, z + j);
}

INLINE int64_t projected(const Call& c) { return c.map == MAP_TRIG ? c.features / 2 : c.features; }

// Floats of work space that `features` and `features_backward` need for n rows.
INLINE int64_t map_work(const Call& c, int64_t n) { return n * (lead(projected(c)) + 2 * VL) + 2 * lead(c.dim); }

// What else a caller may want of features while they are in registers.
struct Beside {
  Ahead* ahead = nullptr;
  const float* z = nullptr;  // dots[i] = phi_i . z
  float* dots = nullptr;
  bool only_dots = false;    // and no largest exponents
  float* columns = nullptr;  // sums over the rows, one for each feature; and no largest exponents
};
enum Want { TOPS, DOTS_AND_TOPS, DOTS, COLUMNS };

// Exponents come out of the product, go through 2^x in registers, and leave their largest of each row behind, or sums.
template <bool BIASED, Want WANT>
struct ExpRows {
  static constexpr bool LARGEST = WANT == TOPS || WANT == DOTS_AND_TOPS, ADDED = WANT == DOTS || WANT == DOTS_AND_TOPS;
  float* phi;
  int64_t ld;
  const float *offset, *bias;
  float* tops;  // (n, VL)
  const float* z;
  float* dots;  // (n, VL)
  float* columns;
  INLINE vec start(int64_t i, int64_t j) const { return BIASED ? splat(offset[i]) + load(bias + j) : splat(offset[i]); }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    if (LARGEST) {
      vec m = j ? load(tops + i * VL) : acc[0];
      UNROLL(4)
      for (int w = 0; w < W; ++w) m = vmax(m, acc[w]);
      store(tops + i * VL, m);
    }
    exp2_all(acc);
    vec dot = {};
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      if (ADDED) dot += acc[w] * load(z + j + w * VL);
      store(phi + i * ld + j + w * VL, acc[w]);
    }
    if (ADDED) store(dots + i * VL, j ? load(dots + i * VL) + dot : dot);
  }
  template <int R, int W>
  INLINE void after(int64_t i0, int64_t j, const vec (&acc)[R][W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      vec s = i0 ? load(columns + j + w * VL) : vec{};
      UNROLL(8)
      for (int i = 0; i < R; ++i) s += acc[i][w];
      store(columns + j + w * VL, s);
    }
  }
};

template <bool BIASED>
constexpr bool sees_after<ExpRows<BIASED, COLUMNS>> = true;

// The same with a row for each feature and a column for each token.
struct ExpColumns {
  float* phi;
  int64_t ld;
  const float *offset, *bias;
  float* tops;  // (columns)
  float* sums;  // (rows, VL), of each feature
  INLINE vec start(int64_t i, int64_t j) const { return bias ? load(offset + j) + bias[i] : load(offset + j); }
  template <int R, int W>
  INLINE void before(int64_t i0, int64_t j, const vec (&acc)[R][W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      vec m = acc[0][w];
      UNROLL(8)
      for (int i = 1; i < R; ++i) m = vmax(m, acc[i][w]);
      store(tops + j + w * VL, i0 ? vmax(load(tops + j + w * VL), m) : m);
    }
  }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    exp2_all(acc);
    vec s = j ? load(sums + i * VL) : vec{};
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      store(phi + i * ld + j + w * VL, acc[w]);
      s += acc[w];
    }
    store(sums + i * VL, s);
  }
};

template <>
constexpr bool narrow<ExpColumns> = true;
template <>
constexpr bool sees_before<ExpColumns> = true;

// sin and cos to about 1e-7 for |x| up to some thousands.
INLINE void sincos(vec x, vec& s, vec& c) {
  const vec t = x * 0.63661977f;
  const ivec n = __builtin_convertvector(t + (t > 0 ? splat(0.5f) : splat(-0.5f)), ivec);
  const vec q = __builtin_convertvector(n, vec);
  vec y = x - q * 1.5707855f;
  y = y - q * 1.0804334e-05f;
  y = y - q * 6.0770999e-11f;
  const vec z = y * y;
  const vec sine = y + y * z * (-1.6666654e-1f + z * (8.3321608e-3f + z * -1.9515296e-4f));
  const vec cosine = 1.0f - 0.5f * z + z * z * (4.1666645e-2f + z * (-1.3887316e-3f + z * 2.4433157e-5f));
  const ivec odd = (n & 1) != 0;
  const vec a = odd ? cosine : sine, b = odd ? sine : cosine;
  s = (n & 2) != 0 ? -a : a;
  c = ((n + 1) & 2) != 0 ? -b : b;
}

void quadratic_row(const Call& c, const float* x, float weight, float* phi, float* padded) {
  const int64_t D = c.dim;
  for (int64_t d = 0; d < D; ++d) padded[d] = c.root * x[d];
  memset(padded + D, 0, VL * 4);
  if (c.features > D * (D + 1) / 2) {
    *phi++ = c.low[0] * weight;
    for (int64_t d = 0; d < D; d += VL) store(phi + d, load(padded + d) * (c.low[1] * weight));
    phi += D;
  }
  for (int64_t i = 0; i < D; ++i) {
    const float factor = c.high[1] * weight * padded[i];
    for (int64_t j = i; j < D; j += VL) store(phi + j - i, load(padded + j) * factor);
    phi[0] = c.high[0] * weight * padded[i] * padded[i];
    phi += D - i;
  }
}

template <Want WANT>
void exp_features(const Call& c, Rows x, int64_t n, const float* offset, float* phi, float* tops, float* work,
                  const Beside& b) {
  const int64_t ld = lead(c.features), full = round_up(c.features, 16);
  const Operand o{x.at, x.ld, 1, c.weight_t, ld, c.dim};
  float* dots = work + n * VL;
  if (c.bias) {
    product(n, full, &o, 1, ExpRows<true, WANT>{phi, ld, offset, c.bias, work, b.z, dots, b.columns}, b.ahead);
  } else {
    product(n, full, &o, 1, ExpRows<false, WANT>{phi, ld, offset, nullptr, work, b.z, dots, b.columns}, b.ahead);
  }
  if (WANT == DOTS || WANT == DOTS_AND_TOPS) reduce_rows<false>(dots, n, b.dots);
  if (WANT == TOPS || WANT == DOTS_AND_TOPS) reduce_rows<true>(work, n, tops);
}

// tops[i]: the log2 of the largest feature of row i, where the map is exponential and `b` does not forgo it; else offset[i].
void features(const Call& c, Rows x, int64_t n, const float* offset, float* phi, float* tops, float* work,
              const Beside& b = {}) {
  const int64_t r = c.features, ld = lead(r), full = round_up(r, 16);
  if (c.map == MAP_EXP) {
    if (b.z && b.only_dots) return exp_features<DOTS>(c, x, n, offset, phi, tops, work, b);
    if (b.z) return exp_features<DOTS_AND_TOPS>(c, x, n, offset, phi, tops, work, b);
    if (b.columns) return exp_features<COLUMNS>(c, x, n, offset, phi, tops, work, b);
    return exp_features<TOPS>(c, x, n, offset, phi, tops, work, b);
  }
  for (int64_t i = 0; i < n; ++i) tops[i] = offset[i];
  if (c.map == MAP_TRIG) {
    const int64_t half = r / 2, la = lead(half);
    float* angles = work;
    const Operand o{x.at, x.ld, 1, c.weight_t, la, c.dim};
    product(n, round_up(half, 16), &o, 1, Store<false>{angles, la}, b.ahead);
    for (int64_t i = 0; i < n; ++i) {
      const float weight = exp2s(offset[i]) * c.root;  // root = sqrt(1 / frequencies)
      for (int64_t j = 0; j < half; j += VL) {
        vec s, k;
        sincos(load(angles + i * la + j), s, k);
        store_some(phi + i * ld + j, s * weight, half - j);
        store_some(phi + i * ld + half + j, k * weight, half - j);
      }
    }
  } else if (c.map == MAP_QUADRATIC) {
    for (int64_t i = 0; i < n; ++i) quadratic_row(c, x.at + i * x.ld, exp2s(offset[i]), phi + i * ld, work);
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const float weight = exp2s(offset[i]);
      for (int64_t d = 0; d < r; d += VL) {
        vec y = load_some(x.at + i * x.ld + d, r - d) * c.root;
        if (c.map == MAP_ELU) y = y > 0 ? y + 1 : exp2v((y > 0 ? vec{} : y) * 1.44269504f);
        if (c.map == MAP_RELU) y = y > 0 ? y : vec{} * y;  // keeps NaN
        store_some(phi + i * ld + d, y * weight, r - d);
      }
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t d = r; d < full; ++d) phi[i * ld + d] = 0;
    if (b.z) b.dots[i] = dot(phi + i * ld, b.z, r);
  }
  if (b.columns) {
    memset(b.columns, 0, size_t(full) * 4);
    add_rows(phi, ld, n, r, nullptr, b.columns);
  }
}

void quadratic_row_backward(const Call& c, const float* x, float weight, const float* grad, float* dx, float* padded) {
  const int64_t D = c.dim;
  float* sum_x = padded + lead(D);
  for (int64_t d = 0; d < D; ++d) padded[d] = c.root * x[d];
  memset(padded + D, 0, VL * 4);
  memset(sum_x, 0, size_t(lead(D)) * 4);
  if (c.features > D * (D + 1) / 2) {
    ++grad;
    for (int64_t d = 0; d < D; ++d) sum_x[d] = c.low[1] * grad[d];
    grad += D;
  }
  for (int64_t i = 0; i < D; ++i) {
    vec dot = {};
    const float factor = c.high[1] * padded[i];
    for (int64_t j = i + 1; j < D; j += VL) {
      const vec g = load_some(grad + j - i, D - j);
      dot += g * load(padded + j);
      store(sum_x + j, load(sum_x + j) + g * factor);
    }
    sum_x[i] += c.high[1] * sum(dot) + 2 * c.high[0] * padded[i] * grad[0];
    grad += D - i;
  }
  for (int64_t d = 0; d < D; ++d) dx[d] = c.root * weight * sum_x[d];
}

// dx (n x D, rows D apart) from grad, the gradient of phi, which EXP gets already times phi. `log_grad` is the gradient
// of each row's log-weight, or null where the row's own scale cancels (queries).
void features_backward(const Call& c, Rows x, int64_t n, const float* offset, const float* phi, float* grad,
                       const float* log_grad, float* dx, float* work) {
  const int64_t r = c.features, ld = lead(r), D = c.dim;
  if (c.map == MAP_EXP || c.map == MAP_TRIG) {
    if (c.map == MAP_TRIG) {
      const int64_t half = r / 2;
      for (int64_t i = 0; i < n; ++i) {
        float* g = grad + i * ld;
        const float* p = phi + i * ld;
        for (int64_t j = 0; j < half; ++j) g[j] = g[j] * p[half + j] - g[half + j] * p[j];
      }
    }
    const int64_t lw = wide(D);
    const bool direct = D % VL == 0;
    float* to = direct ? dx : work;
    const int64_t ldt = direct ? D : lw;
    const Operand o{grad, ld, 1, c.weight, lw, projected(c)};
    product(n, round_up(D, VL), &o, 1, Store<false>{to, ldt});
    const float unit = c.map == MAP_EXP ? 0.69314718f : 1.0f;  // EXP's weight is in units of log2
    const float square = float(2 * 0.6931471805599453 * c.square);
    for (int64_t i = 0; i < n; ++i) {
      const float pull = log_grad ? square * log_grad[i] : 0;
      for (int64_t d = 0; d < D; ++d) dx[i * D + d] = to[i * ldt + d] * unit + pull * x.at[i * x.ld + d];
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float weight = exp2s(offset[i]);
    if (c.map == MAP_QUADRATIC) {
      quadratic_row_backward(c, x.at + i * x.ld, weight, grad + i * ld, dx + i * D, work);
      continue;
    }
    for (int64_t d = 0; d < D; d += VL) {
      const vec y = load_some(x.at + i * x.ld + d, D - d);
      vec slope = splat(weight);
      if (c.map == MAP_ELU) slope = y > 0 ? slope : load(phi + i * ld + d);
      if (c.map == MAP_RELU) slope = y > 0 ? slope : vec{};
      store_some(dx + i * D + d, load(grad + i * ld + d) * slope * c.root, D - d);
    }
  }
}

}  // namespace
