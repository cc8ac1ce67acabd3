/// Forward kernels where the order of tokens does not matter: adding keys to the state, and reading it with queries.
#pragma once
#include "linear/query_block.h"

namespace {

/// S += phi' v, Z += sum of phi, for a block of keys that begins with token t of the call.
void add_keys(const LinearCall& c, const KeyBlock& k, int64_t head, int64_t t, LinearState state, Prefetcher* prefetcher) {
  Operand o{k.phi, 1, feature_stride(c.features), k.v.at, k.v.ld, k.n};
  if (k.phi_t) o.a = k.phi_t, o.row = BLOCK, o.col = 1;
  const int64_t columns = round_up(c.value_dim, VL), ld = row_stride(c.value_dim);
  if (tokens_before(c, head) + t < COMPENSATE_FROM) {  // by position alone: nothing later may change earlier rows
    gemm(c.features, columns, &o, 1, Store<true>{state.S, ld}, prefetcher);
    return add_to_Z(c, k, state.Z, 0);
  }
  gemm(c.features, columns, &o, 1, StoreCompensated{state.S, ld, state.low}, prefetcher);
  add_to_Z(c, k, state.Z, state.low);
}

/// Adds the keys and values [begin, end) of a kv head to the state at `at`.
int32_t update_state(const LinearCall& c, int64_t head, int64_t begin, int64_t end, float* at, PrefetchHint hint) {
  const LinearState state = state_view(c, at);
  const int64_t n = imin(WIDE_BLOCK, end - begin), ld = feature_stride(c.features);
  float* space = scratch(n * ld + key_floats(c, n) + 64);
  float* phi = carve(space, n * ld);
  KeyScratch keys = key_scratch(c, n, space, phi);
  Prefetcher prefetcher;
  keys.prefetcher = &prefetcher;
  for (int64_t t = begin; t < end; t += n) {
    prefetcher.clear();
    prefetch_keys(c, head, t + n, imin(n, end - t - n), prefetcher);
    if (t + n >= end) prefetch_hint(c, hint, n, prefetcher);
    const KeyBlock k = load_key_block(c, head, t, imin(n, end - t), state, false, keys);
    add_keys(c, k, head, t, state, &prefetcher);
  }
  return OK;
}

/// Output rows [begin, end) of the query heads of a kv head, row = group * L + token, from the incoming state. Adds to
/// `guarded` how many denominators were too small.
int32_t read_state(const LinearCall& c, int64_t head, int64_t begin, int64_t end, int64_t* guarded, PrefetchHint hint) {
  const int64_t b = head / c.kv_heads, groups = c.heads / c.kv_heads, first = (head % c.kv_heads) * groups;
  const int64_t n = imin(WIDE_BLOCK, end - begin), ld = feature_stride(c.features), M = c.value_dim;
  float* space = scratch(state_floats(c) + n * (ld + row_stride(M) + 1) + query_floats(c, n) + 128);
  float* copy = carve(space, state_floats(c));
  const float *S = c.S + head * c.features * M, *Z = c.Z + head * c.features;
  if (!same_layout(c) || log2_from_natural(c.log_scale[head]) == EMPTY) {
    load_state(c, head, copy);
    S = state_view(c, copy).S, Z = state_view(c, copy).Z;
  }
  float* phi = carve(space, n * ld);
  float* padded = carve(space, n * row_stride(M));
  float* den = carve(space, n);
  QueryScratch queries = query_scratch(c, n, space);
  Prefetcher prefetcher;
  queries.prefetcher = &prefetcher;
  int32_t flags = OK;
  for (int64_t row = begin; row < end;) {
    const int64_t g = row / c.queries, t = row % c.queries, m = imin(n, imin(end - row, c.queries - t));
    float* out = c.out + ((b * c.heads + first + g) * c.queries + t) * M;
    prefetcher.clear();
    prefetcher.add(out, M * 4, M * 4, m);
    prefetch_queries(c, b, first + g, t + m, imin(n, imin(end - row, c.queries - t) - m), prefetcher);
    if (row + m >= end) prefetch_hint(c, hint, n, prefetcher);
    const Attempt attempt = first_attempt(c);
    query_features(c, b, first + g, t, m, queries, phi, Z, den, attempt);
    if (attempt == QUICK && !in_range(den, m, queries)) {
      query_features(c, b, first + g, t, m, queries, phi, Z, den, UNSETTLED);
    }
    *guarded += invert_denominators(c, den, m, 0, flags);
    const Operand o{phi, ld, 1, S, row_stride(M), c.features};
    flags |= write_output_rows(c, m, &o, 1, den, out, padded, &prefetcher);
    row += m;
  }
  return flags;
}

}  // namespace
