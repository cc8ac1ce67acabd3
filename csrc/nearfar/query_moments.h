/// Statistics of the sampled queries, which decide which slots are merged.
#pragma once
#include "nearfar/merge.h"

namespace {

/// Sampled queries as rows [x, 1]: those of the current block, and [x, 1]' [x, 1] summed over all finished blocks.
struct QueryMoments {
  int64_t dim, rows, ld;
  float *samples, *moments;  // (rows, ld), (D + 1, ld)
  float* added;              // (D + 1, ld)
  float *anchor, *matrix;    // (row_stride(D)), (D, row_stride(D)): mean and covariance

  /// Floats of work space for `rows` samples of a block.
  static int64_t floats(int64_t dim, int64_t rows) {
    return (rows + 2 * (dim + 1)) * feature_stride(dim + 1) + (dim + 1) * row_stride(dim) + 128;
  }
  QueryMoments(int64_t query_dim, int64_t sample_rows, float* at)
      : dim(query_dim), rows(sample_rows), ld(feature_stride(query_dim + 1)) {
    samples = carve(at, rows * ld), moments = carve(at, (dim + 1) * ld), added = carve(at, (dim + 1) * ld);
    anchor = carve(at, row_stride(dim)), matrix = carve(at, dim * row_stride(dim));
    clear_samples();
    memset(moments, 0, size_t((dim + 1) * ld) * 4);
  }

  /// Starts a block without samples.
  void clear_samples() const { memset(samples, 0, size_t(rows * ld) * 4); }

  /// Loads contiguous moments (D + 1, D + 1).
  void load_moments(const float* from) const {
    for (int64_t i = 0; i <= dim; ++i) copy_row(moments + i * ld, from + i * (dim + 1), dim + 1);
  }
  /// Writes contiguous moments (D + 1, D + 1).
  void store_moments(float* to) const { unpad_rows(moments, ld, dim + 1, dim + 1, to); }

  /// Adds the block's samples to the moments. Block by block, so that the sum does not depend on how calls are split.
  void finish_block() const {
    const Operand o{samples, 1, ld, samples, ld, rows};
    gemm(dim + 1, round_up(dim + 1, VL), &o, 1, Store<false>{added, ld});
    for (int64_t i = 0; i <= dim; ++i) add_row(moments + i * ld, added + i * ld, 1, round_up(dim + 1, VL));
  }

  /// Computes mean and covariance of the queries so far; 0 and the identity if there are none.
  void update_metric() const {
    const float count = moments[dim * ld + dim], share = 1 / fmax2(count, 1);
    const int64_t lw = row_stride(dim);
    memset(anchor, 0, size_t(lw) * 4);
    for (int64_t d = 0; d < dim; ++d) anchor[d] = moments[dim * ld + d] * share;
    float trace = 0;
    for (int64_t i = 0; i < dim; ++i) {
      float* row = matrix + i * lw;
      for (int64_t j = 0; j < lw; ++j) row[j] = j < dim ? moments[i * ld + j] * share - anchor[i] * anchor[j] : 0;
      trace += row[i];
    }
    const float ridge = count > 0 ? 1e-4f * fmax2(trace / float(dim), 1e-12f) : 1;
    for (int64_t i = 0; i < dim; ++i) matrix[i * lw + i] += ridge;
  }
};

}  // namespace
