// The near field of near/far attention: the last tokens of a head as rows and as columns, and one softmax over them and
// the far field.
#pragma once
#include "slots.h"

namespace {

constexpr int64_t SPAN = 4;         // blocks that are laid behind the window before everything is moved back
constexpr float NEVER = -1e30f;     // a logit that no query should see; finite, so that it can be subtracted

// A row of tokens widened and multiplied, padded with 0.
void widen_row(int32_t dtype, const void* base, int64_t at, int64_t dim, float factor, float* to) {
  if (dtype == FLOAT32) {
    const float* from = static_cast<const float*>(base) + at;
    for (int64_t d = 0; d < dim; ++d) to[d] = from[d] * factor;
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(base) + at;
    if (dtype == FLOAT16) {
      for (int64_t d = 0; d < dim; ++d) to[d] = widen_half(from[d]) * factor;
    } else {
      for (int64_t d = 0; d < dim; ++d) to[d] = widen_brain(from[d]) * factor;
    }
  }
  for (int64_t d = dim; d < wide(dim); ++d) to[d] = 0;
}

// Tokens at the positions from `base` on: scaled keys, values, and the keys as columns.
struct History {
  int64_t dim, value_dim, rows, base;
  float *key, *value, *turned;

  static int64_t floats(int64_t dim, int64_t value_dim, int64_t rows) {
    return rows * (wide(dim) + wide(value_dim)) + round_up(dim, VL) * (lead(rows) + 16) + 64;
  }
  History(int64_t dim, int64_t value_dim, int64_t rows, int64_t base, float* at)
      : dim(dim), value_dim(value_dim), rows(rows), base(base) {
    key = take(at, rows * wide(dim));
    value = take(at, rows * wide(value_dim));
    turned = take(at, round_up(dim, VL) * ld());
  }
  INLINE int64_t ld() const { return lead(rows) + 16; }  // a vector may be written behind the last column
  INLINE float* key_at(int64_t position) const { return key + (position - base) * wide(dim); }
  INLINE float* value_at(int64_t position) const { return value + (position - base) * wide(value_dim); }

  void turn(int64_t position, int64_t n) const {
    transpose(key_at(position), wide(dim), n, dim, turned + position - base, ld());
  }

  // Makes room: of all tokens only `kept` stay, those from `first` on.
  void forget(int64_t first, int64_t kept) {
    const int64_t gone = first - base;
    memmove(key, key_at(first), size_t(kept * wide(dim)) * 4);
    memmove(value, value_at(first), size_t(kept * wide(value_dim)) * 4);
    for (int64_t d = 0; d < round_up(dim, VL); ++d) {
      memmove(turned + d * ld(), turned + d * ld() + gone, size_t(kept) * 4);
    }
    base = first;
  }
};

// Sinks and slots, as the queries of a block see them.
struct Far {
  int64_t sinks, n;  // rows: sinks, then slots
  float *turned, *bias, *value;
  int64_t ld;
};

struct WithBias {
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

// Logits in units of log2 become weights, up to the factor that is returned; 0 behind the first n.
float soften(float* row, int64_t n) {
  const int64_t whole = n / VL * VL;
  const auto inside = lanes() < splat(float(n - whole));
  vec high = inside ? load(row + whole) : splat(NEVER), total = {};
  for (int64_t j = 0; j < whole; j += VL) high = vmax(load(row + j), high);
  const vec m = splat(top(high));
  for (int64_t j = 0; j < whole; j += VL) {
    const vec e = exp2v(load(row + j) - m);
    store(row + j, e);
    total += e;
  }
  const vec e = inside ? exp2v(load(row + whole) - m) : vec{};
  store(row + whole, e);
  store(row + whole + VL, vec{});
  return 1 / sum(total + e);
}

struct LookSpace {
  float *query, *logits, *factor, *rows;
  int64_t ld;

  static int64_t width(int64_t far, int64_t near) { return lead(far + near + 48); }
  static int64_t floats(int64_t n, int64_t dim, int64_t value_dim, int64_t far, int64_t near) {
    return n * (wide(dim) + width(far, near) + wide(value_dim) + 1) + 128;
  }
  LookSpace(int64_t n, int64_t dim, int64_t value_dim, int64_t far, int64_t near, float* at) : ld(width(far, near)) {
    query = take(at, n * wide(dim)), logits = take(at, n * ld);
    factor = take(at, n), rows = take(at, n * wide(value_dim));
  }
};

// n queries (in s.query, in units of log2) at the positions from `first` on see the far field, the near keys from `low`
// on and those up to their own. Leaves the rows in s.rows.
int32_t look(const History& h, const Far& far, int64_t low, int64_t first, int64_t n, const LookSpace& s) {
  const int64_t D = h.dim, ld = wide(D), before = first - low;
  const int64_t far_columns = round_up(far.sinks + far.n, VL);
  float* near = s.logits + far_columns;
  const Operand to_far{s.query, ld, 1, far.turned, far.ld, D};
  const Operand to_before{s.query, ld, 1, h.turned + low - h.base, h.ld(), D};
  const Operand to_own{s.query, ld, 1, h.turned + first - h.base, h.ld(), D};
  product(n, far_columns, &to_far, 1, WithBias{s.logits, s.ld, far.bias});
  product(n, round_up(before, VL), &to_before, 1, Store<false>{near, s.ld});
  product(n, round_up(n, VL), &to_own, 1, Store<false>{near + before, s.ld}, nullptr, true);
  for (int64_t i = 0; i < n; ++i) s.factor[i] = soften(s.logits + i * s.ld, far_columns + before + i + 1);
  const int64_t lv = wide(h.value_dim);
  const Operand parts[3] = {{near + before, s.ld, 1, h.value_at(first), lv, n, UP_TO_ROW},
                            {near, s.ld, 1, h.value_at(low), lv, before},
                            {s.logits, s.ld, 1, far.value, lv, far.sinks + far.n}};
  product(n, round_up(h.value_dim, VL), parts, 3, Divide{s.rows, lv, s.factor});
  vec odd = {};
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < round_up(h.value_dim, VL); j += VL) odd += load(s.rows + i * lv + j) * 0.0f;
  }
  return sum(odd) == 0 ? OK : NOT_FINITE;
}

}  // namespace
