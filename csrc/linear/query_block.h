/// A block of queries: features, denominators and output rows.
#pragma once
#include "linear/key_block.h"

namespace {

/// Rows of a block where the order of tokens does not matter: many, so that the state is read seldom.
constexpr int64_t WIDE_BLOCK = 120;
constexpr int64_t LD_SCORES = BLOCK + 16;
constexpr float TINY = 4.53e-31f;  // smallest() of the torch engine

/// Denominators up to this are not divided by. They are relative to the state's scale, which is at most the weight of the
/// largest key the row sees; exponential features of keys and of queries may each be as small as 2^MIN_LOG2.
INLINE float min_denominator(const LinearCall& c) { return c.feature_map == MAP_EXP ? TINY * 0x1p-16f : TINY; }
static_assert(MIN_LOG2 == -8, "min_denominator() assumes it");

/// Queues the keys and values [t, t + n) of a kv head for prefetch.
void prefetch_keys(const LinearCall& c, int64_t head, int64_t t, int64_t n, Prefetcher& prefetcher) {
  const int64_t b = head / c.kv_heads, h = head % c.kv_heads, size = dtype_size(c.dtype);
  const void* key = token_ptr(c.dtype, c.key, c.key_stride, b, h, t);
  const void* value = token_ptr(c.dtype, c.value, c.value_stride, b, h, t);
  prefetcher.add(key, c.dim * size, c.key_stride[2] * size, n);
  prefetcher.add(value, c.value_dim * size, c.value_stride[2] * size, n);
}

/// Queues the queries [t, t + n) of a query head for prefetch.
void prefetch_queries(const LinearCall& c, int64_t b, int64_t head, int64_t t, int64_t n, Prefetcher& prefetcher) {
  const int64_t size = dtype_size(c.dtype);
  const void* query = token_ptr(c.dtype, c.query, c.query_stride, b, head, t);
  prefetcher.add(query, c.dim * size, c.query_stride[2] * size, n);
}

/// Queues the first n rows of the work that comes next.
void prefetch_hint(const LinearCall& c, const PrefetchHint& hint, int64_t n, Prefetcher& prefetcher) {
  const int64_t groups = c.heads / c.kv_heads, b = hint.head / c.kv_heads;
  if (hint.keys) prefetch_keys(c, hint.head, hint.token, imin(n, c.keys - hint.token), prefetcher);
  if (hint.queries) {
    const int64_t head = hint.head % c.kv_heads * groups + hint.token / c.queries, t = hint.token % c.queries;
    prefetch_queries(c, b, head, t, imin(n, c.queries - t), prefetcher);
  }
}

/// Work space of a block of queries.
struct QueryScratch {
  float *x, *offset, *row_max, *work;
  Prefetcher* prefetcher = nullptr;
  bool large = false;        // exponents were too large as they are: estimate their size from the norms first
  bool settled[WIDE_BLOCK];  // rows whose denominators are in range with their exponents as they are
};

/// Floats of a QueryScratch for n queries.
INLINE int64_t query_floats(const LinearCall& c, int64_t n) {
  return n * (row_stride(c.dim) + 2) + 32 + feature_map_floats(c, n);
}

/// A QueryScratch at `at` (query_floats).
INLINE QueryScratch query_scratch(const LinearCall& c, int64_t n, float* at) {
  QueryScratch s;
  s.x = at;
  s.offset = s.x + n * row_stride(c.dim);
  s.row_max = s.offset + n;
  s.work = s.row_max + n;
  return s;
}

/// How query features are scaled; each row's scale cancels in the division.
/// QUICK: exponents as they are. If the denominators turn out in range, so are the features, which are positive.
/// UNSETTLED: the second attempt. Rows in range stay as they were, because no row may change with its neighbours.
/// CAREFUL: rows are scaled by their largest exponent where it is out of range.
enum Attempt { CAREFUL, QUICK, UNSETTLED };

/// The attempt to start with.
INLINE Attempt first_attempt(const LinearCall& c) { return c.feature_map == MAP_EXP ? QUICK : CAREFUL; }

/// Whether all denominators den (n) are in range for QUICK; notes which are.
bool in_range(const float* den, int64_t n, QueryScratch& s) {
  bool all = true;
  for (int64_t i = 0; i < n; ++i) all &= s.settled[i] = den[i] > 0x1p-60f && den[i] < 0x1p90f;
  return all;
}

/// phi (n, feature_stride(r)) of n queries, rows `stride` numbers apart from `at` on; dots (n) = phi z where z (r) is
/// given. Returns the loaded queries.
Rows query_features(const LinearCall& c, const void* at, int64_t stride, int64_t n, QueryScratch& s, float* phi,
                    const float* z, float* dots, Attempt attempt = CAREFUL) {
  const Rows x = load_rows(c.dtype, at, stride, c.dim, n, nullptr, false, s.x);
  const bool exponential = c.feature_map == MAP_EXP;
  const float spread = exponential ? float(-2.5 * LOG2E * __builtin_sqrt(-2 * LN2 * c.norm_coef)) : 0;
  const auto settled = [&](int64_t i) { return attempt == UNSETTLED && s.settled[i]; };
  if (attempt == UNSETTLED || (attempt == CAREFUL && s.large)) {
    squared_norms(x, n, c.dim, s.offset);
    for (int64_t i = 0; i < n; ++i) {
      const float guess = spread * __builtin_sqrtf(s.offset[i]);
      s.offset[i] = guess < -MAX_LOG2 / 2 && !settled(i) ? guess : 0;
    }
  } else {
    memset(s.offset, 0, size_t(n) * 4);
  }
  apply_feature_map(c, x, n, s.offset, phi, s.row_max, s.work, {s.prefetcher, z, dots, attempt == QUICK});
  if (attempt == QUICK || !exponential) return x;
  const auto fits = [&](int64_t i) { return settled(i) || (s.row_max[i] < MAX_LOG2 && s.row_max[i] > MIN_LOG2); };
  bool all = true;
  for (int64_t i = 0; i < n; ++i) all &= fits(i);
  if (!all) {
    s.large = true;
    for (int64_t i = 0; i < n; ++i) s.offset[i] -= !fits(i) && finite(s.row_max[i]) ? s.row_max[i] : 0;
    apply_feature_map(c, x, n, s.offset, phi, s.row_max, s.work, {s.prefetcher, z, dots});
  }
  return x;
}

/// The same for the queries [t, t + n) of a query head.
Rows query_features(const LinearCall& c, int64_t b, int64_t head, int64_t t, int64_t n, QueryScratch& s, float* phi,
                    const float* z, float* dots, Attempt attempt = CAREFUL) {
  const void* at = token_ptr(c.dtype, c.query, c.query_stride, b, head, t);
  return query_features(c, at, c.query_stride[2], n, s, phi, z, dots, attempt);
}

/// Epilogue: scores (n, LD_SCORES) of queries with the keys up to their own, 0 above the diagonal; row_sum (n, VL) gets
/// vectors whose lanes add up to the sum of each row.
struct CausalScores {
  float* scores;
  const float* first;  // (n) what each row starts from, or null
  float* row_sum;      // or null
  INLINE vec start(int64_t i, int64_t) const { return first ? splat(first[i]) : vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    vec row = {};
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      const int64_t column = j + w * VL;
      if (column + VL - 1 > i) acc[w] = lanes() <= splat(float(i - column)) ? acc[w] : vec{};
      row += acc[w];
      store(scores + i * LD_SCORES + column, acc[w]);
    }
    // A later product with tiles of another height may read past the diagonal's last vector.
    if (j + W * VL < i + TALL) store(scores + i * LD_SCORES + j + W * VL, vec{});
    if (row_sum) store(row_sum + i * VL, j ? load(row_sum + i * VL) + row : row);
  }
};

template <>
constexpr bool narrow<CausalScores> = true;

/// One query head against a block of keys: where its features, scores and denominators go.
struct ScoreBlock {
  float *phi, *scores;   // (n, feature_stride(r)), (n, LD_SCORES)
  float *row_sum, *den;  // (n, VL), (n)
};

/// Features of the queries [t, t + n), their scores with the block's keys phi_t (r, BLOCK) up to their own, and their
/// denominators phi Z + sum of scores. Returns the loaded queries.
Rows causal_scores(const LinearCall& c, int64_t b, int64_t head, int64_t t, int64_t n, const float* phi_t, const float* Z,
                   QueryScratch& queries, const ScoreBlock& to, Attempt attempt) {
  const Rows x = query_features(c, b, head, t, n, queries, to.phi, Z, to.den, attempt);
  const Operand o{to.phi, feature_stride(c.features), 1, phi_t, BLOCK, c.features};
  gemm(n, round_up(n, VL), &o, 1, CausalScores{to.scores, nullptr, to.row_sum}, queries.prefetcher, true);
  float sums[BLOCK];
  reduce_rows<false>(to.row_sum, n, sums);
  for (int64_t i = 0; i < n; ++i) to.den[i] += sums[i];
  return x;
}

/// den (n) = 1 / den, or 0 where den is too small to divide by. Returns how many rows from `from` on were too small.
int64_t invert_denominators(const LinearCall& c, float* den, int64_t n, int64_t from, int32_t& flags) {
  const float least = min_denominator(c);
  int64_t small = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!finite(den[i])) flags |= NOT_FINITE;
    const bool bad = !(__builtin_fabsf(den[i]) > least);
    small += bad && i >= from;
    den[i] = bad ? 0 : 1 / den[i];
  }
  return small;
}

/// Epilogue: out (m, ld) = A B, row i times factor[i]. Adds 0 to `check`, or NaN in a lane that held NaN or infinity.
struct CheckedRows {
  float* out;
  int64_t ld;
  const float* factor;
  vec* check;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    vec bad = *check;
    UNROLL(4)
    for (int w = 0; w < W; ++w) {
      const vec y = acc[w] * factor[i];
      store(out + i * ld + j + w * VL, y);
      bad += y * 0.0f;
    }
    *check = bad;
  }
};

/// out (n, M) = sum of the operands, row i times inverse[i]; by way of `padded` (n, row_stride(M)) where M is ragged.
/// Returns NOT_FINITE if a number of it is NaN or infinite.
int32_t write_output_rows(const LinearCall& c, int64_t n, const Operand* o, int count, const float* inverse, float* out,
                          float* padded, Prefetcher* prefetcher) {
  const int64_t M = c.value_dim;
  vec check = {};
  if (M % VL == 0) {
    gemm(n, M, o, count, CheckedRows{out, M, inverse, &check}, prefetcher);
  } else {
    gemm(n, round_up(M, VL), o, count, CheckedRows{padded, row_stride(M), inverse, &check}, prefetcher);
    unpad_rows(padded, row_stride(M), n, M, out);
  }
  return sum(check) == 0 ? OK : NOT_FINITE;
}

}  // namespace
