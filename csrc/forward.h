// Forward passes over one kv head: adding keys, reading queries, and both in causal order.
#pragma once
#include "keys.h"

namespace {

constexpr int64_t WIDE_BLOCK = 120;  // rows where order does not matter: many, so that sums are touched seldom
constexpr int64_t LD_SCORES = BLOCK + 16;
constexpr float TINY = 4.53e-31f;  // sums/chunks.py: smallest()

INLINE float* take(float*& at, int64_t floats) {
  float* p = at;
  at += round_up(floats, 16);
  return p;
}

void want_keys(const Call& c, int64_t head, int64_t t, int64_t n, Ahead& ahead) {
  const int64_t b = head / c.kv_heads, h = head % c.kv_heads, size = number_bytes(c);
  ahead.want(token(c, c.key, c.key_stride, b, h, t), c.dim * size, c.key_stride[2] * size, n);
  ahead.want(token(c, c.value, c.value_stride, b, h, t), c.value_dim * size, c.value_stride[2] * size, n);
}

void want_queries(const Call& c, int64_t b, int64_t head, int64_t t, int64_t n, Ahead& ahead) {
  const int64_t size = number_bytes(c);
  ahead.want(token(c, c.query, c.query_stride, b, head, t), c.dim * size, c.query_stride[2] * size, n);
}

// The first n rows of what comes after this piece.
void want_soon(const Call& c, const Soon& s, int64_t n, Ahead& ahead) {
  const int64_t groups = c.heads / c.kv_heads, b = s.head / c.kv_heads;
  if (s.keys) want_keys(c, s.head, s.token, imin(n, c.keys - s.token), ahead);
  if (s.queries) {
    const int64_t head = s.head % c.kv_heads * groups + s.token / c.queries, t = s.token % c.queries;
    want_queries(c, b, head, t, imin(n, c.queries - t), ahead);
  }
}

// S += phi' v, Z += phi.
void add_keys(const Call& c, const Keys& k, Sums sums, Ahead* ahead) {
  Operand o{k.phi, 1, lead(c.features), k.v.at, k.v.ld, k.n};
  if (k.turned) o.a = k.turned, o.row = BLOCK, o.col = 1;
  product(c.features, round_up(c.value_dim, VL), &o, 1, Store<true>{sums.S, wide(c.value_dim)}, ahead);
  add_to_Z(c, k, sums.Z);
}

// Features of n queries, each row near 1 in size: its scale cancels in the division.
struct QuerySpace {
  float *x, *offset, *tops, *work;
  Ahead* ahead = nullptr;
  bool large = false;  // some exponents were too large as they are: guess their size from the norms
};

INLINE int64_t query_floats(const Call& c, int64_t n) { return n * (wide(c.dim) + 2) + 32 + map_work(c, n); }

INLINE QuerySpace query_space(const Call& c, int64_t n, float* at) {
  QuerySpace s;
  s.x = at;
  s.offset = s.x + n * wide(c.dim);
  s.tops = s.offset + n;
  s.work = s.tops + n;
  return s;
}

// Whether nobody has to look for the largest exponents: if the denominators `fit` in the end, so do positive features.
INLINE bool may_be_quick(const Call& c, const QuerySpace& s) { return c.map == MAP_EXP && !s.large; }

bool fit(const float* den, int64_t n) {
  bool all = true;
  for (int64_t i = 0; i < n; ++i) all &= den[i] > 0x1p-60f && den[i] < 0x1p90f;
  return all;
}

// dots[i] = phi_i . z, where z is given. With `quick` exponents may come out too large or too small.
Rows take_queries(const Call& c, const void* at, int64_t stride, int64_t n, QuerySpace& s, float* phi, const float* z,
                  float* dots, bool quick = false) {
  const Rows x = rows(c, at, stride, c.dim, n, nullptr, false, s.x);
  const float spread = c.map == MAP_EXP ? float(-2.5 * LOG2E * __builtin_sqrt(-2 * LN2 * c.square)) : 0;
  if (s.large && spread != 0) {
    square_sums(x, n, c.dim, s.offset);
    for (int64_t i = 0; i < n; ++i) {
      const float guess = spread * __builtin_sqrtf(s.offset[i]);
      s.offset[i] = guess < -HIGHEST / 2 ? guess : 0;
    }
  } else {
    memset(s.offset, 0, size_t(n) * 4);
  }
  features(c, x, n, s.offset, phi, s.tops, s.work, {s.ahead, z, dots, quick});
  if (quick || c.map != MAP_EXP) return x;
  const auto fits = [&](int64_t i) { return s.tops[i] < HIGHEST && s.tops[i] > -HIGHEST; };
  bool all = true;
  for (int64_t i = 0; i < n; ++i) all &= fits(i);
  if (!all) {  // take the largest exponent itself, and only there: other rows must not change with their neighbours
    s.large = true;
    for (int64_t i = 0; i < n; ++i) s.offset[i] -= !fits(i) && finite(s.tops[i]) ? s.tops[i] : 0;
    features(c, x, n, s.offset, phi, s.tops, s.work, {s.ahead, z, dots});
  }
  return x;
}

Rows take_queries(const Call& c, int64_t b, int64_t head, int64_t t, int64_t n, QuerySpace& s, float* phi,
                  const float* z, float* dots, bool quick = false) {
  return take_queries(c, token(c, c.query, c.query_stride, b, head, t), c.query_stride[2], n, s, phi, z, dots, quick);
}

// Scores of queries with the keys up to their own, and their sum added to the denominators.
struct Lower {
  float* scores;
  const float* first;  // (n) what each row starts from, or null
  float* total;        // (n, VL) or null
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
    // Whoever takes these rows in tiles of other heights may look past the diagonal's last vector.
    if (j + W * VL < i + TALL) store(scores + i * LD_SCORES + j + W * VL, vec{});
    if (total) store(total + i * VL, j ? load(total + i * VL) + row : row);
  }
};

template <>
constexpr bool narrow<Lower> = true;

void add_totals(const float* total, int64_t n, float* den) {
  float sums[BLOCK];
  reduce_rows<false>(total, n, sums);
  for (int64_t i = 0; i < n; ++i) den[i] += sums[i];
}

// Numerators times 1 / denominator.
struct Divide {
  float* out;
  int64_t ld;
  const float* inverse;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(out + i * ld + j + w * VL, acc[w] * inverse[i]);
  }
};

// 1 / den in place, 0 where den cannot be divided by. Returns how many of the rows from `from` on were such.
int64_t invert(float* den, int64_t n, int64_t from, int32_t& flags) {
  int64_t small = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!finite(den[i])) flags |= NOT_FINITE;
    const bool bad = !(__builtin_fabsf(den[i]) > TINY);
    small += bad && i >= from;
    den[i] = bad ? 0 : 1 / den[i];
  }
  return small;
}

void write_rows(const Call& c, int64_t n, const Operand* o, int count, const float* inverse, float* out, float* space,
                Ahead* ahead) {
  const int64_t M = c.value_dim;
  if (M % VL == 0) {
    product(n, M, o, count, Divide{out, M, inverse}, ahead);
  } else {
    product(n, round_up(M, VL), o, count, Divide{space, wide(M), inverse}, ahead);
    copy_out(space, wide(M), n, M, out);
  }
}

int32_t absorb(const Call& c, int64_t head, int64_t begin, int64_t end, float* at, Soon soon) {
  const Sums sums = view(c, at);
  const int64_t n = imin(WIDE_BLOCK, end - begin), ld = lead(c.features);
  float* space = scratch(n * ld + key_floats(c, n) + 64);
  float* phi = take(space, n * ld);
  KeySpace keys = key_space(c, n, space, phi);
  Ahead ahead;
  keys.ahead = &ahead;
  for (int64_t t = begin; t < end; t += n) {
    ahead.clear();
    want_keys(c, head, t + n, imin(n, end - t - n), ahead);
    if (t + n >= end) want_soon(c, soon, n, ahead);
    const Keys k = take_keys(c, head, t, imin(n, end - t), sums, false, keys);
    add_keys(c, k, sums, &ahead);
  }
  return OK;
}

// Queries [begin, end) of the query heads of a kv head, counted head by head: row = group * L + token.
int32_t read(const Call& c, int64_t head, int64_t begin, int64_t end, int64_t* guarded, Soon soon) {
  const int64_t b = head / c.kv_heads, groups = c.heads / c.kv_heads, first = (head % c.kv_heads) * groups;
  const int64_t n = imin(WIDE_BLOCK, end - begin), ld = lead(c.features), M = c.value_dim;
  float* space = scratch(sums_floats(c) + n * (ld + wide(M) + 1) + query_floats(c, n) + 128);
  float* copy = take(space, sums_floats(c));
  const float *S = c.S + head * c.features * M, *Z = c.Z + head * c.features;
  if (!same_layout(c) || read_level(c.scale[head]) == EMPTY) {
    load_sums(c, head, copy);
    S = view(c, copy).S, Z = view(c, copy).Z;
  }
  float* phi = take(space, n * ld);
  float* spill = take(space, n * wide(M));
  float* den = take(space, n);
  QuerySpace queries = query_space(c, n, space);
  Ahead ahead;
  queries.ahead = &ahead;
  int32_t flags = OK;
  for (int64_t row = begin; row < end;) {
    const int64_t g = row / c.queries, t = row % c.queries, m = imin(n, imin(end - row, c.queries - t));
    float* out = c.out + ((b * c.heads + first + g) * c.queries + t) * M;
    ahead.clear();
    ahead.want(out, M * 4, M * 4, m);
    want_queries(c, b, first + g, t + m, imin(n, imin(end - row, c.queries - t) - m), ahead);
    if (row + m >= end) want_soon(c, soon, n, ahead);
    const bool quick = may_be_quick(c, queries);
    take_queries(c, b, first + g, t, m, queries, phi, Z, den, quick);
    if (quick && !fit(den, m)) take_queries(c, b, first + g, t, m, queries, phi, Z, den);
    *guarded += invert(den, m, 0, flags);
    const Operand o{phi, ld, 1, S, wide(M), c.features};
    write_rows(c, m, &o, 1, den, out, spill, &ahead);
    row += m;
  }
  return flags;
}

int64_t count_visible(const Call& c, int64_t b, int64_t t, int64_t n, int64_t& first) {
  first = 0;
  if (!c.mask) return n;
  const uint8_t* mask = c.mask + b * c.keys + t;
  int64_t count = 0;
  while (first < n && !mask[first]) ++first;
  for (int64_t i = 0; i < n; ++i) count += mask[i];
  return count;
}

// Tokens [begin, end) in order. `guarded` null: keys only. `seen`: visible keys before, so that rows without any key
// are not counted as guarded.
int32_t causal(const Call& c, int64_t head, int64_t begin, int64_t end, float* at, int64_t* guarded, int64_t seen,
               Soon soon) {
  const Sums sums = view(c, at);
  const int64_t b = head / c.kv_heads, groups = c.heads / c.kv_heads, first = (head % c.kv_heads) * groups;
  const int64_t r = c.features, ld = lead(r), M = c.value_dim;
  const int64_t mark = r * (M + 1) + 1, marks = c.segment ? (c.keys + c.segment - 1) / c.segment : 0;
  float* space = scratch(BLOCK * (2 * ld + round_up(r, VL) + round_up(c.dim, VL) + LD_SCORES + wide(M) + 2 * VL) +
                         r * VL + key_floats(c, BLOCK) + query_floats(c, BLOCK) + 256);
  float* phi_k = take(space, BLOCK * ld);
  float* phi_q = take(space, BLOCK * ld);
  float* phi_t = take(space, round_up(r, VL) * BLOCK);
  float* x_t = take(space, round_up(c.dim, VL) * BLOCK);
  float* sums_k = take(space, r * VL);
  float* scores = take(space, BLOCK * LD_SCORES);
  float* spill = take(space, BLOCK * wide(M));
  float* total = take(space, BLOCK * VL);
  float* den = take(space, BLOCK);
  KeySpace keys = key_space(c, BLOCK, take(space, key_floats(c, BLOCK)), phi_k);
  QuerySpace queries = query_space(c, BLOCK, space);
  Ahead ahead;
  keys.ahead = queries.ahead = &ahead;
  if (guarded) keys.turned = phi_t, keys.x_turned = x_t, keys.sums = sums_k;
  int32_t flags = OK;
  for (int64_t t = begin; t < end;) {
    if (guarded && c.marks && t % c.segment == 0) {
      float* to = c.marks + (head * marks + t / c.segment) * mark;
      pack(c, sums, to, to + r * M);
      to[mark - 1] = float(*sums.level);
    }
    const bool empty = seen == 0 && !(c.tokens && c.tokens[head]) && t == begin;
    ahead.clear();
    const int64_t next = imin(end, t - t % BLOCK + BLOCK), following = imin(BLOCK, end - next);
    if (guarded) ahead.want(c.out + ((b * c.heads + first) * c.queries + t) * M, M * 4, M * 4, next - t);
    want_keys(c, head, next, following, ahead);
    if (guarded) want_queries(c, b, first, next, following, ahead);
    if (next == end) want_soon(c, soon, BLOCK, ahead);
    const Keys k = take_keys(c, head, t, next - t, sums, true, keys);
    int64_t visible_from;
    const int64_t visible = count_visible(c, b, t, k.n, visible_from);
    if (guarded) {
      const int64_t columns = round_up(k.n, VL);
      for (int64_t g = 0; g < groups; ++g) {
        const auto denominators = [&](bool quick) {
          take_queries(c, b, first + g, t, k.n, queries, phi_q, sums.Z, den, quick);
          const Operand pairs{phi_q, ld, 1, phi_t, BLOCK, r};
          product(k.n, columns, &pairs, 1, Lower{scores, nullptr, total}, &ahead, true);
          add_totals(total, k.n, den);
        };
        const bool quick = may_be_quick(c, queries);
        denominators(quick);
        if (quick && !fit(den, k.n)) denominators(false);
        *guarded += invert(den, k.n, seen ? 0 : visible_from, flags);
        const Operand parts[2] = {{scores, LD_SCORES, 1, k.v.at, k.v.ld, k.n, UP_TO_ROW},
                                  {phi_q, ld, 1, sums.S, wide(M), r}};
        write_rows(c, k.n, parts, empty ? 1 : 2, den, c.out + ((b * c.heads + first + g) * c.queries + t) * M, spill,
                   &ahead);
      }
    }
    add_keys(c, k, sums, &ahead);
    if (c.scaled) *sums.level += k.log2_decay;
    seen += visible;
    t += k.n;
  }
  return flags;
}

}  // namespace
