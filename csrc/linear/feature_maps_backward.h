/// Backward of the feature maps: gradients of phi (n, feature_stride(r)) to gradients of x (n, D).
#pragma once
#include "linear/feature_maps.h"

namespace {

/// QUADRATIC, one row: dx (D) from grad (r). work (2, feature_stride(D)).
void quadratic_backward(const LinearCall& c, const float* x, float weight, const float* grad, float* dx, float* work) {
  const int64_t D = c.dim;
  float *padded = work, *sum_x = work + feature_stride(D);
  for (int64_t d = 0; d < D; ++d) padded[d] = c.input_scale * x[d];
  memset(padded + D, 0, VL * 4);
  memset(sum_x, 0, size_t(feature_stride(D)) * 4);
  if (c.features > D * (D + 1) / 2) {
    ++grad;
    for (int64_t d = 0; d < D; ++d) sum_x[d] = c.quadratic_low[1] * grad[d];
    grad += D;
  }
  for (int64_t i = 0; i < D; ++i) {
    vec along = {};
    const float factor = c.quadratic_high[1] * padded[i];
    for (int64_t j = i + 1; j < D; j += VL) {
      const vec g = load_some(grad + j - i, D - j);
      along += g * load(padded + j);
      store(sum_x + j, load(sum_x + j) + g * factor);
    }
    sum_x[i] += c.quadratic_high[1] * sum(along) + 2 * c.quadratic_high[0] * padded[i] * grad[0];
    grad += D - i;
  }
  for (int64_t d = 0; d < D; ++d) dx[d] = c.input_scale * weight * sum_x[d];
}

/// EXP and TRIG: dx (n, D) by way of the projection.
void projection_backward(const LinearCall& c, Rows x, int64_t n, const float* phi, float* grad, const float* log_grad,
                         float* dx, float* work) {
  const int64_t r = c.features, ld = feature_stride(r), D = c.dim, lw = row_stride(D);
  if (c.feature_map == MAP_TRIG) {
    const int64_t half = r / 2;
    for (int64_t i = 0; i < n; ++i) {
      float* g = grad + i * ld;
      const float* p = phi + i * ld;
      for (int64_t j = 0; j < half; ++j) g[j] = g[j] * p[half + j] - g[half + j] * p[j];
    }
  }
  const bool direct = D % VL == 0;
  float* to = direct ? dx : work;
  const int64_t ldt = direct ? D : lw;
  const Operand o{grad, ld, 1, c.projection, lw, projected(c)};
  gemm(n, round_up(D, VL), &o, 1, Store<false>{to, ldt});
  const float unit = c.feature_map == MAP_EXP ? 0.69314718f : 1.0f;  // EXP's projection is in units of log2
  const float coef = float(2 * 0.6931471805599453 * c.norm_coef);
  for (int64_t i = 0; i < n; ++i) {
    const float pull = log_grad ? coef * log_grad[i] : 0;
    for (int64_t d = 0; d < D; ++d) dx[i * D + d] = to[i * ldt + d] * unit + pull * x.at[i * x.ld + d];
  }
}

/// dx (n, D) from grad, the gradient of phi; EXP gets it already multiplied with phi. log_grad (n): the gradient of each
/// row's log-weight, or null where the row's own scale cancels (queries). Overwrites grad.
void feature_map_backward(const LinearCall& c, Rows x, int64_t n, const float* offset, const float* phi, float* grad,
                          const float* log_grad, float* dx, float* work) {
  if (c.feature_map == MAP_EXP || c.feature_map == MAP_TRIG) {
    return projection_backward(c, x, n, phi, grad, log_grad, dx, work);
  }
  const int64_t ld = feature_stride(c.features), D = c.dim;
  for (int64_t i = 0; i < n; ++i) {
    const float weight = exp2s(offset[i]);
    if (c.feature_map == MAP_QUADRATIC) {
      quadratic_backward(c, x.at + i * x.ld, weight, grad + i * ld, dx + i * D, work);
      continue;
    }
    for (int64_t d = 0; d < D; d += VL) {
      const vec y = load_some(x.at + i * x.ld + d, D - d);
      vec slope = splat(weight);
      if (c.feature_map == MAP_ELU) slope = y > 0 ? slope : load(phi + i * ld + d);
      if (c.feature_map == MAP_RELU) slope = y > 0 ? slope : vec{};
      store_some(dx + i * D + d, load(grad + i * ld + d) * slope * c.input_scale, D - d);
    }
  }
}

}  // namespace
