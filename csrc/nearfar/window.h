/// The near field of near/far attention: the last tokens of a head as rows and as columns, and one softmax over them and
/// the far field.
#pragma once
#include "nearfar/merge.h"
#include "nearfar/scores.h"

namespace {

constexpr int64_t SPARE_BLOCKS = 4;     // blocks appended behind the window before everything is moved to the front
constexpr float MASKED_LOGIT = -1e30f;  // finite, so that it can be subtracted

/// The tokens at the positions from `base` on: scaled keys, values, and the keys as columns.
struct Window {
  int64_t dim, value_dim, rows, base;
  float *key, *value, *key_t;  // (rows, row_stride(D)), (rows, row_stride(M)), (D, ld())

  /// Floats of work space for `rows` tokens.
  static int64_t floats(int64_t dim, int64_t value_dim, int64_t rows) {
    return rows * (row_stride(dim) + row_stride(value_dim)) + round_up(dim, VL) * (feature_stride(rows) + 16) + 64;
  }
  Window(const NearFarCall& c, int64_t capacity, int64_t first, float* at)
      : Window(c.dim, c.value_dim, capacity, first, at) {}
  Window(int64_t key_dim, int64_t value_dim_of_rows, int64_t capacity, int64_t first, float* at)
      : dim(key_dim), value_dim(value_dim_of_rows), rows(capacity), base(first) {
    key = carve(at, rows * row_stride(dim));
    value = carve(at, rows * row_stride(value_dim));
    key_t = carve(at, round_up(dim, VL) * ld());
  }
  /// Floats between two rows of key_t: a vector may be written behind the last column.
  INLINE int64_t ld() const { return feature_stride(rows) + 16; }
  /// The rows of the token at a position.
  INLINE float* key_at(int64_t position) const { return key + (position - base) * row_stride(dim); }
  INLINE float* value_at(int64_t position) const { return value + (position - base) * row_stride(value_dim); }

  /// Updates the columns of n tokens.
  void transpose_keys(int64_t position, int64_t n) const {
    transpose(key_at(position), row_stride(dim), n, dim, key_t + position - base, ld());
  }

  /// Moves the `kept` tokens from `first` on to the front and drops all others.
  void keep(int64_t first, int64_t kept) {
    const int64_t dropped = first - base;
    memmove(key, key_at(first), size_t(kept * row_stride(dim)) * 4);
    memmove(value, value_at(first), size_t(kept * row_stride(value_dim)) * 4);
    for (int64_t d = 0; d < round_up(dim, VL); ++d) {
      memmove(key_t + d * ld(), key_t + d * ld() + dropped, size_t(kept) * 4);
    }
    base = first;
  }
};

/// Sinks, then slots, as the queries of a block see them.
struct FarField {
  int64_t sinks, slots;
  float *key_t, *bias, *value;  // (D, ld), (ld) in units of log2, (sinks + slots, row_stride(M))
  int64_t ld;
};

/// Epilogue: to (m, ld) = A B + bias.
struct AddBias {
  float* to;
  int64_t ld;
  const float* bias;
  INLINE vec start(int64_t, int64_t j) const { return load(bias + j); }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(to + i * ld + j + w * VL, acc[w]);
  }
};

/// Logits row (n), in units of log2, become unnormalised weights, followed by at least VL zeros. Returns 1 / their sum.
/// top: the logit that has the weight 1.
float softmax(float* row, int64_t n, float* top) {
  const int64_t full = n / VL * VL;
  const auto inside = lanes() < splat(float(n - full));
  vec high = inside ? load(row + full) : splat(MASKED_LOGIT), total = {};
  for (int64_t j = 0; j < full; j += VL) high = vmax(load(row + j), high);
  *top = max_lane(high);
  const vec m = splat(*top);
  for (int64_t j = 0; j < full; j += VL) {
    const vec e = exp2v(load(row + j) - m);
    store(row + j, e);
    total += e;
  }
  const vec e = inside ? exp2v(load(row + full) - m) : vec{};
  store(row + full, e);
  static_assert(MR <= VL + 2, "a tile reads at most MR - 1 weights behind a row's own, and these must be 0");
  store(row + full + VL, vec{});
  return 1 / sum(total + e);
}

/// Of a query head of a call.
INLINE Scores scores_of(const NearFarCall& c, int64_t query_head) {
  return {c.logit_cap * LOG2E_F, c.band ? c.band + query_head * c.reach : nullptr, c.reach};
}

/// Work space of a block of queries.
struct AttendScratch {
  float *query, *logits, *factor, *rows;  // (n, row_stride(D)), (n, ld), (n), (n, row_stride(M))
  float* top;                             // (n): the largest logit of each row
  int64_t ld;

  /// Logits of a row: `far` and `near` columns, with slack for whole vectors.
  static int64_t width(int64_t far, int64_t near) { return feature_stride(far + near + 48); }
  /// Floats of work space for n queries.
  static int64_t floats(int64_t n, int64_t dim, int64_t value_dim, int64_t far, int64_t near) {
    return n * (row_stride(dim) + width(far, near) + row_stride(value_dim) + 2) + 128;
  }
  AttendScratch(int64_t n, int64_t dim, int64_t value_dim, int64_t far, int64_t near, float* at) : ld(width(far, near)) {
    query = carve(at, n * row_stride(dim)), logits = carve(at, n * ld);
    factor = carve(at, n), rows = carve(at, n * row_stride(value_dim)), top = carve(at, n);
  }
};

/// s.logits (n, ld): logits of queries with the `columns` of the far field; sinks still without their biases.
void far_logits(const Operand& to_far, const FarField& far, const Scores& scores, int64_t n, int64_t columns,
                const AttendScratch& s) {
  if (scores.cap == 0) return gemm(n, columns, &to_far, 1, AddBias{s.logits, s.ld, far.bias});
  gemm(n, columns, &to_far, 1, Store<false>{s.logits, s.ld});
  for (int64_t i = 0; i < n; ++i) {
    cap_row(s.logits + i * s.ld, columns, scores.cap);
    add_row(s.logits + i * s.ld, far.bias, 1, columns);
  }
}

/// Turns scores row (n) of a query at `position` with the near keys from `first` on into logits.
INLINE void near_logits(const Scores& scores, int64_t position, int64_t first, int64_t n, float* row) {
  if (scores.cap > 0) cap_row(row, n, scores.cap);
  if (scores.band) add_band(scores, position, first, n, row);
}

/// NOT_FINITE if one of n rows (row_stride(M)) holds NaN or infinity.
inline int32_t check_rows(const float* rows, int64_t n, int64_t value_dim) {
  vec bad = {};  // NaN where an output is not finite
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < round_up(value_dim, VL); j += VL) bad += load(rows + i * row_stride(value_dim) + j) * 0.0f;
  }
  return sum(bad) == 0 ? OK : NOT_FINITE;
}

/// s.logits (n, ld), s.factor (n): unnormalised weights of the queries s.query (n, row_stride(D)), in units of log2, at the
/// positions from `first` on, over the far field, the near keys from `low` on and those up to their own position; and
/// 1 / their sums.
void attention_weights(const Window& window, const FarField& far, const Scores& scores, int64_t low, int64_t first,
                       int64_t n, const AttendScratch& s) {
  const int64_t D = window.dim, ld = row_stride(D), before = first - low;
  const int64_t far_columns = round_up(far.sinks + far.slots, VL);
  float* near = s.logits + far_columns;
  const Operand to_far{s.query, ld, 1, far.key_t, far.ld, D};
  const Operand to_before{s.query, ld, 1, window.key_t + low - window.base, window.ld(), D};
  const Operand to_own{s.query, ld, 1, window.key_t + first - window.base, window.ld(), D};
  far_logits(to_far, far, scores, n, far_columns, s);
  gemm(n, round_up(before, VL), &to_before, 1, Store<false>{near, s.ld});
  gemm(n, round_up(n, VL), &to_own, 1, Store<false>{near + before, s.ld}, nullptr, true);
  for (int64_t i = 0; i < n; ++i) {
    float* row = s.logits + i * s.ld;
    near_logits(scores, first + i, low, before + i + 1, row + far_columns);
    if (scores.band) add_band(scores, first + i, 0, far.sinks, row);
    s.factor[i] = softmax(row, far_columns + before + i + 1, s.top + i);
  }
}

/// s.rows (n, row_stride(M)): the attention of the same queries. Returns flags.
int32_t attend(const Window& window, const FarField& far, const Scores& scores, int64_t low, int64_t first, int64_t n,
               const AttendScratch& s) {
  const int64_t before = first - low, lv = row_stride(window.value_dim);
  const float* near = s.logits + round_up(far.sinks + far.slots, VL);
  attention_weights(window, far, scores, low, first, n, s);
  const Operand parts[3] = {{near + before, s.ld, 1, window.value_at(first), lv, n, UP_TO_ROW},
                            {near, s.ld, 1, window.value_at(low), lv, before},
                            {s.logits, s.ld, 1, far.value, lv, far.sinks + far.slots}};
  gemm(n, round_up(window.value_dim, VL), parts, 3, ScaleRows{s.rows, lv, s.factor});
  return check_rows(s.rows, n, window.value_dim);
}

}  // namespace
