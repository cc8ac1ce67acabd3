/// Statistics of the sampled queries, which decide which slots are merged.
#pragma once
#include "nearfar/merge.h"

namespace {

/// Sampled queries as rows [x, 1]: those of the current block, and the sums of [x, 1] and of its squares over all finished
/// blocks.
struct QueryMoments {
  int64_t dim, rows, ld;
  float *samples, *moments;   // (rows, ld), (2, ld)
  float *anchor, *deviation;  // (row_stride(D)): mean and standard deviation

  /// Floats of work space for `rows` samples of a block.
  static int64_t floats(int64_t dim, int64_t rows) {
    return (rows + 2) * feature_stride(dim + 1) + 2 * row_stride(dim) + 128;
  }
  QueryMoments(int64_t query_dim, int64_t sample_rows, float* at)
      : dim(query_dim), rows(sample_rows), ld(feature_stride(query_dim + 1)) {
    samples = carve(at, rows * ld), moments = carve(at, 2 * ld);
    anchor = carve(at, row_stride(dim)), deviation = carve(at, row_stride(dim));
    clear_samples();
    memset(moments, 0, size_t(2 * ld) * 4);
  }

  /// Starts a block without samples.
  void clear_samples() const { memset(samples, 0, size_t(rows * ld) * 4); }

  /// Loads contiguous moments (2, D + 1).
  void load_moments(const float* from) const {
    for (int64_t i = 0; i < 2; ++i) copy_row(moments + i * ld, from + i * (dim + 1), dim + 1);
  }
  /// Writes contiguous moments (2, D + 1).
  void store_moments(float* to) const { unpad_rows(moments, ld, 2, dim + 1, to); }

  /// Adds the block's samples to the moments. Block by block, so that the sum does not depend on how calls are split.
  void finish_block() const {
    for (int64_t d = 0; d < round_up(dim + 1, VL); d += VL) {
      vec sum = {}, squares = {};
      for (int64_t i = 0; i < rows; ++i) {
        const vec x = load(samples + i * ld + d);
        sum += x, squares += x * x;
      }
      store(moments + d, load(moments + d) + sum);
      store(moments + ld + d, load(moments + ld + d) + squares);
    }
  }

  /// Computes mean and deviation of the queries so far; 0 and 1 if there are none.
  void update_metric() const {
    const float count = moments[dim], each = 1 / fmax2(count, 1);
    memset(anchor, 0, size_t(row_stride(dim)) * 4), memset(deviation, 0, size_t(row_stride(dim)) * 4);
    float total = 0;
    for (int64_t d = 0; d < dim; ++d) {
      anchor[d] = moments[d] * each;
      deviation[d] = fmax2(moments[ld + d] * each - anchor[d] * anchor[d], 0);
      total += deviation[d];
    }
    const float ridge = count > 0 ? 1e-4f * fmax2(total / float(dim), 1e-12f) : 1;
    for (int64_t d = 0; d < dim; ++d) deviation[d] = __builtin_sqrtf(deviation[d] + ridge);
  }
};

}  // namespace
