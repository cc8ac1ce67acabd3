// The causal backward pass, segment by segment from the end. A segment starts from sums the forward pass has left in
// `marks`; its features stay in cache between the sweep forward (queries) and the sweep back (keys and values).
#pragma once
#include "backward.h"

namespace {

enum Parts { QUERIES = 1, KEYS = 2 };

struct Segment {
  float *phi_k, *offset, *lowered;  // (segment, lead(r)), (segment), (blocks)
  float *phi_q, *g, *h;             // for each query head of the group: (segment, ..)
  float *scores, *pairs;            // for each query head: (segment, LD_SCORES); pairs are g_i . v_j + h_i
  int64_t *start, *rows;            // of each block
};

INLINE int64_t segment_floats(const Call& c, int64_t groups) {
  const int64_t ld = lead(c.features);
  return c.segment * (ld + 6 + groups * (ld + wide(c.value_dim) + 1 + 2 * LD_SCORES)) + 256;
}

INLINE Segment segment_space(const Call& c, int64_t groups, float* at) {
  const int64_t n = c.segment, ld = lead(c.features);
  Segment s;
  s.start = reinterpret_cast<int64_t*>(take(at, 2 * n));
  s.rows = reinterpret_cast<int64_t*>(take(at, 2 * n));
  s.phi_k = take(at, n * ld);
  s.offset = take(at, n);
  s.lowered = take(at, n);
  s.phi_q = take(at, groups * n * ld);
  s.g = take(at, groups * n * wide(c.value_dim));
  s.h = take(at, groups * n);
  s.scores = take(at, groups * n * LD_SCORES);
  s.pairs = take(at, groups * n * LD_SCORES);
  return s;
}

struct SweepSpace {
  float *phi_t, *v_t, *total, *den, *grad;
  KeySpace keys;
  QuerySpace queries;
};

// From the first token to the last: features, denominators, g and h, and the gradients of the queries.
int64_t sweep_forward(const Call& c, int64_t head, int64_t begin, int64_t end, Sums sums, const Segment& s,
                      const SweepSpace& w, bool want) {
  const int64_t b = head / c.kv_heads, groups = c.heads / c.kv_heads, first = (head % c.kv_heads) * groups;
  const int64_t r = c.features, ld = lead(r), M = c.value_dim, lm = wide(M), full = round_up(r, VL);
  int64_t blocks = 0;
  Ahead ahead;
  QuerySpace query_space = w.queries;
  query_space.ahead = &ahead;
  for (int64_t t = begin; t < end; ++blocks) {
    const int64_t local = t - begin, next = imin(end, t - t % BLOCK + BLOCK), following = imin(BLOCK, end - next);
    const int64_t now = (b * c.heads + first) * c.queries + t, then = now - t + next;
    ahead.clear();
    if (want) ahead.want(c.grad_query + now * c.dim, c.dim * 4, c.dim * 4, next - t);
    want_keys(c, head, next, following, ahead);
    want_queries(c, b, first, next, following, ahead);
    ahead.want(c.out + then * M, M * 4, M * 4, following);
    ahead.want(c.grad_out + then * M, M * 4, M * 4, following);
    KeySpace space = w.keys;
    space.ahead = &ahead;
    space.phi = s.phi_k + local * ld;
    space.offset = s.offset + local;
    const Keys k = take_keys(c, head, t, next - t, sums, true, space);
    s.start[blocks] = t;
    s.rows[blocks] = k.n;
    s.lowered[blocks] = k.lowered;
    const int64_t columns = round_up(k.n, VL);
    transpose(k.phi, ld, k.n, r, w.phi_t, BLOCK);
    transpose(k.v.at, k.v.ld, k.n, M, w.v_t, BLOCK);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t row = group * c.segment + local, at = (b * c.heads + first + group) * c.queries + t;
      float *phi = s.phi_q + row * ld, *g = s.g + row * lm, *h = s.h + row;
      float *scores = s.scores + row * LD_SCORES, *pairs = s.pairs + row * LD_SCORES;
      const Rows x = take_queries(c, b, first + group, t, k.n, query_space, phi, sums.Z, w.den);
      const Operand meet{phi, ld, 1, w.phi_t, BLOCK, r};
      product(k.n, columns, &meet, 1, Lower{scores, nullptr, w.total}, &ahead, true);
      add_totals(w.total, k.n, w.den);
      int32_t flags = OK;
      invert(w.den, k.n, 0, flags);
      output_grads(c, c.grad_out + at * M, c.out + at * M, w.den, k.n, g, h);
      const Operand with_values{g, lm, 1, w.v_t, BLOCK, M};
      product(k.n, columns, &with_values, 1, Lower{pairs, h, nullptr}, &ahead, true);
      if (!want) continue;
      const Operand o[2] = {{pairs, LD_SCORES, 1, k.phi, ld, k.n, UP_TO_ROW}, {g, lm, 1, sums.S, ld, M}};
      product(k.n, full, o, 2, GradRows{w.grad, phi, ld, h, sums.Z, nullptr, c.map == MAP_EXP}, &ahead);
      features_backward(c, x, k.n, w.queries.offset, phi, w.grad, nullptr, c.grad_query + at * c.dim, w.queries.work);
    }
    const Operand o{k.v.at, 1, k.v.ld, k.phi, ld, k.n};
    product(M, full, &o, 1, Store<true>{sums.S, ld}, &ahead);
    add_to_Z(c, k, sums.Z);
    if (c.scaled) *sums.level += k.log2_decay;
    t += k.n;
  }
  return blocks;
}

// From the last token to the first: gradients of keys and values, and of the sums before each block.
void sweep_back(const Call& c, int64_t head, int64_t begin, int64_t blocks, Sums grads, const Segment& s,
                const KeySpace& space, const KeyGradSpace& grad_space, float* grad_S, bool want) {
  const int64_t b = head / c.kv_heads, hk = head % c.kv_heads, groups = c.heads / c.kv_heads;
  const int64_t ld = lead(c.features), M = c.value_dim, lm = wide(M);
  while (blocks-- > 0) {
    const int64_t t = s.start[blocks], n = s.rows[blocks], local = t - begin;
    if (want) {
      const uint8_t* mask = c.mask ? c.mask + b * c.keys + t : nullptr;
      Keys k;
      k.n = n;
      k.x = rows(c, token(c, c.key, c.key_stride, b, hk, t), c.key_stride[2], c.dim, n, mask, false, space.x);
      k.v = rows(c, token(c, c.value, c.value_stride, b, hk, t), c.value_stride[2], M, n, mask, true, space.v);
      k.phi = s.phi_k + local * ld;
      k.offset = s.offset + local;
      turn_back(c, grads.S, grad_S);
      Operand extra[2 * MOST_GROUPS];
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t row = g * c.segment + local;
        extra[g] = {s.scores + row * LD_SCORES, 1, LD_SCORES, s.g + row * lm, lm, n, FROM_ROW};
        extra[groups + g] = {s.pairs + row * LD_SCORES, 1, LD_SCORES, s.phi_q + row * ld, ld, n, FROM_ROW};
      }
      key_grads(c, head, t, k, grads, grad_S, extra, int(groups), grad_space);
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t row = g * c.segment + local;
      add_grads(c, s.phi_q + row * ld, s.g + row * lm, s.h + row, n, grads);
    }
    scale_sums(grads, s.lowered[blocks]);
    *grads.level *= s.lowered[blocks];
  }
}

void causal_backward(const Call& c, int64_t head, int64_t begin, int64_t end, int32_t parts, float* grad_sums) {
  const int64_t groups = c.heads / c.kv_heads, r = c.features, ld = lead(r), M = c.value_dim;
  const int64_t mark = r * (M + 1) + 1, marks = (c.keys + c.segment - 1) / c.segment;
  const int64_t rows_of_values = round_up(M, 16);
  float* space = scratch(turned_floats(c) + turn_floats(c) + segment_floats(c, groups) +
                         BLOCK * (round_up(r, 16) + rows_of_values + VL + 1 + ld) + key_floats(c, BLOCK) +
                         query_floats(c, BLOCK) + BLOCK * wide(c.dim) + key_grad_floats(c, BLOCK) + 512);
  const Sums grads = turned_view(c, grad_sums), sums = turned_view(c, take(space, turned_floats(c)));
  float* grad_S = take(space, turn_floats(c));
  const Segment segment = segment_space(c, groups, take(space, segment_floats(c, groups)));
  SweepSpace w;
  w.phi_t = take(space, BLOCK * round_up(r, 16));
  w.v_t = take(space, BLOCK * rows_of_values);
  w.total = take(space, BLOCK * VL);
  w.den = take(space, BLOCK);
  w.grad = take(space, BLOCK * ld);
  w.keys = key_space(c, BLOCK, take(space, key_floats(c, BLOCK)), nullptr);
  w.queries = query_space(c, BLOCK, take(space, query_floats(c, BLOCK) + BLOCK * wide(c.dim)));
  const KeyGradSpace grad_space = key_grad_space(c, BLOCK, space);
  for (int64_t last = end; last > begin;) {
    const int64_t start = (last - 1) / c.segment * c.segment;
    const float* from = c.marks + (head * marks + start / c.segment) * mark;
    turn(c, from, from + r * M, sums, grad_S);
    *sums.level = from[mark - 1];
    const int64_t blocks = sweep_forward(c, head, start, last, sums, segment, w, parts & QUERIES);
    if (last < c.keys) {  // stretches that ran side by side start from merged sums, whose level may be another
      const double next = from[2 * mark - 1];
      const float factor = *sums.level == EMPTY || next == EMPTY ? 1 : exp2s(float(*sums.level - next));
      scale_sums(grads, factor);
      *grads.level *= factor;
    }
    sweep_back(c, head, start, blocks, grads, segment, w.keys, grad_space, grad_S, parts & KEYS);
    last = start;
  }
}

}  // namespace
