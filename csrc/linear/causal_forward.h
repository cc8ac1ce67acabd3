/// The causal forward kernel: block by block, queries meet the keys of their own block directly and all earlier ones
/// through the state.
#pragma once
#include "linear/forward.h"

namespace {

/// Work space of a causal forward pass.
struct CausalScratch {
  float *phi_k, *phi_t, *x_t, *partial_sum, *padded;
  ScoreBlock score;
  KeyScratch keys;
  QueryScratch queries;
  Prefetcher prefetcher;

  /// Floats of work space.
  static int64_t floats(const LinearCall& c) {
    const int64_t r = c.features, row = 2 * feature_stride(r) + round_up(r, VL) + round_up(c.dim, VL) + LD_SCORES;
    return BLOCK * (row + row_stride(c.value_dim) + 2 * VL) + r * VL + key_floats(c, BLOCK) + query_floats(c, BLOCK) + 256;
  }

  /// `outputs`: queries are read too, so that features of keys are wanted as columns.
  CausalScratch(const LinearCall& c, bool outputs, float* space) {
    const int64_t r = c.features, ld = feature_stride(r);
    phi_k = carve(space, BLOCK * ld);
    score.phi = carve(space, BLOCK * ld);
    phi_t = carve(space, round_up(r, VL) * BLOCK);
    x_t = carve(space, round_up(c.dim, VL) * BLOCK);
    partial_sum = carve(space, r * VL);
    score.scores = carve(space, BLOCK * LD_SCORES);
    padded = carve(space, BLOCK * row_stride(c.value_dim));
    score.row_sum = carve(space, BLOCK * VL);
    score.den = carve(space, BLOCK);
    keys = key_scratch(c, BLOCK, carve(space, key_floats(c, BLOCK)), phi_k);
    queries = query_scratch(c, BLOCK, space);
    keys.prefetcher = queries.prefetcher = &prefetcher;
    if (outputs) keys.phi_t = phi_t, keys.x_t = x_t, keys.partial_sum = partial_sum;
  }
};

/// The number of visible keys among [t, t + n), and the first of them in `first`.
int64_t count_visible(const LinearCall& c, int64_t b, int64_t t, int64_t n, int64_t& first) {
  first = 0;
  if (!c.mask) return n;
  const uint8_t* mask = c.mask + b * c.keys + t;
  int64_t count = 0;
  while (first < n && !mask[first]) ++first;
  for (int64_t i = 0; i < n; ++i) count += mask[i];
  return count;
}

/// Writes the state before token t as a checkpoint for the backward pass.
void write_checkpoint(const LinearCall& c, int64_t head, int64_t t, LinearState state) {
  const int64_t floats = checkpoint_floats(c), count = (c.keys + c.segment - 1) / c.segment;
  float* to = c.checkpoints + (head * count + t / c.segment) * floats;
  pack_state(c, state, to, to + c.features * c.value_dim);
  memcpy(to + floats - 2, state.log2_scale, 8);
}

/// Output rows [t, t + k.n) of one query head. `empty`: the state before the block has no key. `unseen`: rows before it see
/// no key, and are legitimately 0. Returns how many other denominators were too small.
int64_t causal_block(const LinearCall& c, int64_t b, int64_t head, int64_t t, const KeyBlock& k, LinearState state,
                     bool empty, int64_t unseen, CausalScratch& s, int32_t& flags) {
  const int64_t M = c.value_dim;
  const Attempt attempt = first_attempt(c);
  causal_scores(c, b, head, t, k.n, k.phi_t, state.Z, s.queries, s.score, attempt);
  if (attempt == QUICK && !in_range(s.score.den, k.n, s.queries)) {
    causal_scores(c, b, head, t, k.n, k.phi_t, state.Z, s.queries, s.score, UNSETTLED);
  }
  const int64_t guarded = invert_denominators(c, s.score.den, k.n, unseen, flags);
  const Operand parts[2] = {{s.score.scores, LD_SCORES, 1, k.v.at, k.v.ld, k.n, UP_TO_ROW},
                            {s.score.phi, feature_stride(c.features), 1, state.S, row_stride(M), c.features}};
  float* out = c.out + ((b * c.heads + head) * c.queries + t) * M;
  flags |= write_output_rows(c, k.n, parts, empty ? 1 : 2, s.score.den, out, s.padded, &s.prefetcher);
  return guarded;
}

/// Tokens [begin, end) of a kv head in order: updates the state at `at` and, unless `guarded` is null, writes the outputs
/// and adds to `guarded` how many denominators were too small. `seen`: visible keys before `begin`; rows that see no key
/// are legitimately 0 and not counted.
int32_t causal_forward(const LinearCall& c, int64_t head, int64_t begin, int64_t end, float* at, int64_t* guarded,
                       int64_t seen, PrefetchHint hint) {
  const LinearState state = state_view(c, at);
  const int64_t b = head / c.kv_heads, groups = c.heads / c.kv_heads, first = (head % c.kv_heads) * groups;
  const int64_t M = c.value_dim;
  CausalScratch s(c, guarded != nullptr, scratch(CausalScratch::floats(c)));
  int32_t flags = OK;
  for (int64_t t = begin; t < end;) {
    if (guarded && c.checkpoints && t % c.segment == 0) write_checkpoint(c, head, t, state);
    const bool empty = seen == 0 && !(c.tokens && c.tokens[head]) && t == begin;
    const int64_t next = imin(end, t - t % BLOCK + BLOCK), following = imin(BLOCK, end - next);
    s.prefetcher.clear();
    if (guarded) s.prefetcher.add(c.out + ((b * c.heads + first) * c.queries + t) * M, M * 4, M * 4, next - t);
    prefetch_keys(c, head, next, following, s.prefetcher);
    if (guarded) prefetch_queries(c, b, first, next, following, s.prefetcher);
    if (next == end) prefetch_hint(c, hint, BLOCK, s.prefetcher);
    const KeyBlock k = load_key_block(c, head, t, next - t, state, true, s.keys);
    int64_t visible_from;
    const int64_t visible = count_visible(c, b, t, k.n, visible_from);
    for (int64_t g = 0; guarded && g < groups; ++g) {
      *guarded += causal_block(c, b, first + g, t, k, state, empty, seen ? 0 : visible_from, s, flags);
    }
    add_keys(c, k, head, t, state, &s.prefetcher);
    if (c.scaled) *state.log2_scale += k.log2_decay;
    seen += visible;
    t += k.n;
  }
  return flags;
}

}  // namespace
