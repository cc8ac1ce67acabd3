/// The causal backward kernel, segment by segment from the end. A segment starts from the checkpoint that the forward pass
/// wrote; its features stay in cache between the recomputed forward sweep (queries) and the sweep back (keys and values).
#pragma once
#include "linear/backward.h"
#include "linear/causal_forward.h"

namespace {

/// What the forward sweep over a segment leaves for the sweep back.
struct Segment {
  float *phi_k, *offset, *rescale;  // (segment, feature_stride(r)), (segment), (blocks)
  float *phi_q, *g, *h;             // for each query head of the group: (segment, ..)
  float *scores, *pairs;            // for each query head: (segment, LD_SCORES); pairs are g_i . v_j + h_i
  int64_t *start, *rows;            // of each block

  /// Floats of work space.
  static int64_t floats(const LinearCall& c, int64_t groups) {
    const int64_t ld = feature_stride(c.features);
    return c.segment * (ld + 6 + groups * (ld + row_stride(c.value_dim) + 1 + 2 * LD_SCORES)) + 256;
  }
  Segment(const LinearCall& c, int64_t groups, float* at) {
    const int64_t n = c.segment, ld = feature_stride(c.features);
    start = reinterpret_cast<int64_t*>(carve(at, 2 * n));
    rows = reinterpret_cast<int64_t*>(carve(at, 2 * n));
    phi_k = carve(at, n * ld);
    offset = carve(at, n);
    rescale = carve(at, n);
    phi_q = carve(at, groups * n * ld);
    g = carve(at, groups * n * row_stride(c.value_dim));
    h = carve(at, groups * n);
    scores = carve(at, groups * n * LD_SCORES);
    pairs = carve(at, groups * n * LD_SCORES);
  }
};

/// Work space of one block of the forward sweep.
struct SweepScratch {
  float *phi_t, *v_t, *row_sum, *den, *grad;
  KeyScratch keys;
  QueryScratch queries;
  Prefetcher prefetcher;

  /// Floats of work space.
  static int64_t floats(const LinearCall& c) {
    const int64_t r = c.features, row = round_up(r, 16) + round_up(c.value_dim, 16) + VL + 1 + feature_stride(r);
    return BLOCK * (row + row_stride(c.dim)) + key_floats(c, BLOCK) + query_floats(c, BLOCK) + 256;
  }
  SweepScratch(const LinearCall& c, float* at) {
    const int64_t r = c.features;
    phi_t = carve(at, BLOCK * round_up(r, 16));
    v_t = carve(at, BLOCK * round_up(c.value_dim, 16));
    row_sum = carve(at, BLOCK * VL);
    den = carve(at, BLOCK);
    grad = carve(at, BLOCK * feature_stride(r));
    keys = key_scratch(c, BLOCK, carve(at, key_floats(c, BLOCK)), nullptr);
    queries = query_scratch(c, BLOCK, at);
    keys.prefetcher = queries.prefetcher = &prefetcher;
  }
};

/// Queues what the block after [t, next) reads, and the gradients that this block writes.
void prefetch_block(const LinearCall& c, int64_t head, int64_t t, int64_t next, int64_t following, bool grad_queries,
                    Prefetcher& prefetcher) {
  const int64_t b = head / c.kv_heads, groups = c.heads / c.kv_heads, first = (head % c.kv_heads) * groups;
  const int64_t now = (b * c.heads + first) * c.queries + t, then = now - t + next, M = c.value_dim;
  prefetcher.clear();
  if (grad_queries) prefetcher.add(c.grad_query + now * c.dim, c.dim * 4, c.dim * 4, next - t);
  prefetch_keys(c, head, next, following, prefetcher);
  prefetch_queries(c, b, first, next, following, prefetcher);
  prefetcher.add(c.out + then * M, M * 4, M * 4, following);
  prefetcher.add(c.grad_out + then * M, M * 4, M * 4, following);
}

/// One query head of the block k: features, scores, denominators, g, h and pairs, at row `row` of the segment; and the
/// gradients of the queries, if wanted.
void query_block_backward(const LinearCall& c, int64_t b, int64_t head, int64_t t, int64_t row, const KeyBlock& k,
                          LinearState state, bool grad_queries, const Segment& s, SweepScratch& w) {
  const int64_t r = c.features, ld = feature_stride(r), M = c.value_dim, lm = row_stride(M);
  const int64_t at = (b * c.heads + head) * c.queries + t;
  float *phi = s.phi_q + row * ld, *g = s.g + row * lm, *h = s.h + row, *pairs = s.pairs + row * LD_SCORES;
  const ScoreBlock to{phi, s.scores + row * LD_SCORES, w.row_sum, w.den};
  const Rows x = causal_scores(c, b, head, t, k.n, w.phi_t, state.Z, w.queries, to, CAREFUL);
  int32_t flags = OK;
  invert_denominators(c, w.den, k.n, 0, flags);
  const bool exponential = c.feature_map == MAP_EXP;
  if (exponential) divide_features(c, k.n, phi, to.scores, w.den);
  output_grads(c, c.grad_out + at * M, c.out + at * M, w.den, k.n, g, h);
  const Operand with_values{g, lm, 1, w.v_t, BLOCK, M};
  gemm(k.n, round_up(k.n, VL), &with_values, 1, CausalScores{pairs, h, nullptr}, &w.prefetcher, true);
  if (grad_queries) {
    const Operand o[2] = {{pairs, LD_SCORES, 1, k.phi, ld, k.n, UP_TO_ROW}, {g, lm, 1, state.S, ld, M}};
    const FeatureGrads end{w.grad, phi, ld, h, state.Z, nullptr, exponential};
    gemm(k.n, round_up(r, VL), o, 2, end, &w.prefetcher);
    feature_map_backward(c, x, k.n, w.queries.offset, phi, w.grad, nullptr, c.grad_query + at * c.dim, w.queries.work);
  }
  if (exponential) limit_features(c, k.n, phi, to.scores, w.den);
}

/// From the first token of a segment to its last: recomputes features and denominators, fills `s`, and computes the
/// gradients of the queries, if wanted. Returns the number of blocks.
int64_t sweep_forward(const LinearCall& c, int64_t head, int64_t begin, int64_t end, LinearState state, const Segment& s,
                      SweepScratch& w, bool grad_queries) {
  const int64_t b = head / c.kv_heads, groups = c.heads / c.kv_heads, first = (head % c.kv_heads) * groups;
  const int64_t r = c.features, ld = feature_stride(r), M = c.value_dim;
  int64_t blocks = 0;
  w.queries.large = false;
  for (int64_t t = begin; t < end; ++blocks) {
    const int64_t local = t - begin, next = imin(end, t - t % BLOCK + BLOCK), following = imin(BLOCK, end - next);
    prefetch_block(c, head, t, next, following, grad_queries, w.prefetcher);
    w.keys.phi = s.phi_k + local * ld;
    w.keys.offset = s.offset + local;
    const KeyBlock k = load_key_block(c, head, t, next - t, state, true, w.keys);
    s.start[blocks] = t;
    s.rows[blocks] = k.n;
    s.rescale[blocks] = k.rescale;
    transpose(k.phi, ld, k.n, r, w.phi_t, BLOCK);
    transpose(k.v.at, k.v.ld, k.n, M, w.v_t, BLOCK);
    for (int64_t g = 0; g < groups; ++g) {
      query_block_backward(c, b, first + g, t, g * c.segment + local, k, state, grad_queries, s, w);
    }
    const Operand o{k.v.at, 1, k.v.ld, k.phi, ld, k.n};
    gemm(M, round_up(r, VL), &o, 1, Store<true>{state.S, ld}, &w.prefetcher);
    add_to_Z(c, k, state.Z, 0);
    if (c.scaled) *state.log2_scale += k.log2_decay;
    t += k.n;
  }
  return blocks;
}

/// From the last block of a segment to its first: gradients of keys and values, if wanted, and of the state before each
/// block, in `grads`. grad_S (padded_S_floats) is work space.
void sweep_back(const LinearCall& c, int64_t head, int64_t begin, int64_t blocks, LinearState grads, const Segment& s,
                const KeyScratch& keys, const KeyGradScratch& grad_scratch, float* grad_S, bool grad_keys) {
  const int64_t groups = c.heads / c.kv_heads, ld = feature_stride(c.features), lm = row_stride(c.value_dim);
  while (blocks-- > 0) {
    const int64_t t = s.start[blocks], n = s.rows[blocks], local = t - begin;
    if (grad_keys) {
      KeyBlock k;
      load_key_rows(c, head, t, n, keys, k);
      k.phi = s.phi_k + local * ld;
      k.offset = s.offset + local;
      transpose_back(c, grads.S, grad_S);
      Operand extra[2 * MAX_GROUPS];
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t row = g * c.segment + local;
        extra[g] = {s.scores + row * LD_SCORES, 1, LD_SCORES, s.g + row * lm, lm, n, FROM_ROW};
        extra[groups + g] = {s.pairs + row * LD_SCORES, 1, LD_SCORES, s.phi_q + row * ld, ld, n, FROM_ROW};
      }
      key_grads(c, head, t, k, grads, grad_S, extra, int(groups), grad_scratch);
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t row = g * c.segment + local;
      add_query_grads(c, s.phi_q + row * ld, s.g + row * lm, s.h + row, n, grads);
    }
    scale_state(grads, s.rescale[blocks]);
    *grads.log2_scale *= s.rescale[blocks];
  }
}

/// Gradients for the tokens [begin, end) of a kv head, which start at a segment; `targets`: GradTargets. grad_state: the
/// gradient of the state behind `end`, and afterwards of the state before `begin`.
void causal_backward(const LinearCall& c, int64_t head, int64_t begin, int64_t end, int32_t targets, float* grad_state) {
  const int64_t groups = c.heads / c.kv_heads, r = c.features, M = c.value_dim;
  const int64_t floats = checkpoint_floats(c), checkpoints = (c.keys + c.segment - 1) / c.segment;
  const int64_t segment_floats = Segment::floats(c, groups), sweep_floats = SweepScratch::floats(c);
  float* space =
      scratch(transposed_floats(c) + padded_S_floats(c) + segment_floats + sweep_floats + key_grad_floats(c, BLOCK) + 256);
  const LinearState grads = transposed_view(c, grad_state);
  const LinearState state = transposed_view(c, carve(space, transposed_floats(c)));
  float* grad_S = carve(space, padded_S_floats(c));
  const Segment segment(c, groups, carve(space, segment_floats));
  SweepScratch sweep(c, carve(space, sweep_floats));
  const KeyGradScratch grad_scratch = key_grad_scratch(c, BLOCK, space);
  for (int64_t last = end; last > begin;) {
    const int64_t start = (last - 1) / c.segment * c.segment;
    const float* from = c.checkpoints + (head * checkpoints + start / c.segment) * floats;
    load_transposed(c, from, from + r * M, state, grad_S);
    *state.log2_scale = checkpoint_log2_scale(c, from);
    const int64_t blocks = sweep_forward(c, head, start, last, state, segment, sweep, targets & GRAD_QUERIES);
    if (last < c.keys) {  // after a split, the forward pass went on from a merged state, whose scale may differ
      const double next = checkpoint_log2_scale(c, from + floats);
      const float factor = *state.log2_scale == EMPTY || next == EMPTY ? 1 : exp2_exact(*state.log2_scale - next);
      scale_state(grads, factor);
      *grads.log2_scale *= factor;
    }
    sweep_back(c, head, start, blocks, grads, segment, sweep.keys, grad_scratch, grad_S, targets & GRAD_KEYS);
    last = start;
  }
}

}  // namespace
