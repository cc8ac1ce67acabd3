/// The delta rule over the tokens of one head, chunk by chunk.
///
/// With S the chunk's incoming state, u_i = beta_i (v_i - k_i^T S_(i-1) exp(g_i)) solves
///   u_i = beta_i (v_i - exp(G_i) k_i^T S - sum_(j<i) F_ij u_j),   F_ij = (k_i . k_j) exp(G_i - G_j);
/// then out = exp(G) q S + P U with P_ij = (q_i . k_j) exp(G_i - G_j), j <= i, and S <- exp(G_n) S + (exp(G_n - G) k)^T U.
#pragma once
#include "core/store_rows.h"
#include "delta/triangular.h"

namespace {

/// Work space of one head. C = 64, ld_key = row_stride(D), ld = row_stride(columns).
struct Space {
  int64_t dim, full, ld_key, columns, ld;  // full, columns: rounded up to 16
  float *K, *Q, *key_in;  // (C, ld_key): keys, queries; keys as they read the incoming state (decay of channels only)
  float* key_t;           // (full, LD_SCORE): keys by columns; or work space of channel_scores
  float *F, *P, *L;       // (C, LD_SCORE)
  float* X;               // (C, 16): inverted diagonal blocks
  float *U, *O;           // (C, ld)
  float* rest;            // (16, ld)
  float* S;               // (full, ld)
  float* beta;            // (C)
  float* decay;           // (full): of the state's rows over the chunk
  ChannelDecay channel;
  HeadDecay head;
};

/// Floats of a Space for so many value columns.
int64_t space_floats(const DeltaCall& c, int64_t columns) {
  const int64_t full = round_up(c.dim, 16), ld_key = row_stride(c.dim), ld = row_stride(columns), C = CHUNK;
  return 3 * C * ld_key + imax(full * LD_SCORE, channel_scores_floats(C, full, ld_key)) + 3 * C * LD_SCORE + C * BLOCK +
         (2 * C + BLOCK + full) * ld + C + full + (c.channels ? channel_decay_floats(C, ld_key) : 0) + 16 * 16;
}

/// The space at `at`, which moves behind it.
Space make_space(const DeltaCall& c, int64_t columns, float*& at) {
  const int64_t full = round_up(c.dim, 16), ld_key = row_stride(c.dim), ld = row_stride(columns), C = CHUNK;
  Space s;
  s.dim = c.dim, s.full = full, s.ld_key = ld_key, s.columns = round_up(columns, 16), s.ld = ld;
  s.K = carve(at, C * ld_key), s.Q = carve(at, C * ld_key), s.key_in = carve(at, C * ld_key);
  s.key_t = carve(at, imax(full * LD_SCORE, channel_scores_floats(C, full, ld_key)));
  s.F = carve(at, C * LD_SCORE), s.P = carve(at, C * LD_SCORE), s.L = carve(at, C * LD_SCORE);
  memset(s.F, 0, size_t(2 * C * LD_SCORE) * 4);  // right of the diagonal they stay 0
  s.X = carve(at, C * BLOCK), s.U = carve(at, C * ld), s.O = carve(at, C * ld), s.rest = carve(at, BLOCK * ld);
  s.S = carve(at, full * ld), s.beta = carve(at, C), s.decay = carve(at, full);
  s.channel.a = c.channels ? carve(at, channel_decay_floats(C, ld_key)) : nullptr;
  return s;
}

/// Where one part of a call reads and writes.
struct Place {
  const DeltaCall& c;
  DeltaPart p;
  int64_t first, last;  // tokens of the sequence
  Place(const DeltaCall& call, const DeltaPart& part)
      : c(call), p(part), first(c.bounds[p.sequence]), last(c.bounds[p.sequence + 1]) {}
  int64_t groups() const { return c.query_heads > c.heads ? c.query_heads / c.heads : 1; }
  int64_t out_head(int64_t group) const { return p.head * groups() + group; }
  int64_t query_head(int64_t group) const { return out_head(group) * c.query_heads / (c.heads * groups()); }
  const void* query(int64_t group, int64_t t) const {
    return token_ptr(c.dtype, c.query, c.query_stride, p.batch, query_head(group), t);
  }
  int64_t key_head() const { return p.head * c.key_heads / c.heads; }
  const void* key(int64_t t) const { return token_ptr(c.dtype, c.key, c.key_stride, p.batch, key_head(), t); }
  /// The value of a token, from the part's first column on.
  const void* value(int64_t t) const {
    const char* row = static_cast<const char*>(token_ptr(c.dtype, c.value, c.value_stride, p.batch, p.head, t));
    return row + p.begin * dtype_size(c.dtype);
  }
  const float* beta(int64_t t) const {
    return c.beta + p.batch * c.beta_stride[0] + p.head * c.beta_stride[1] + t * c.beta_stride[2];
  }
  /// The log decay of a token: one number, or (D); null without decay.
  const float* log_decay(int64_t t) const {
    if (!c.log_decay) return nullptr;
    return c.log_decay + p.batch * c.decay_stride[0] + p.head * c.decay_stride[1] + t * c.decay_stride[2];
  }
  const uint8_t* mask(int64_t t) const { return c.mask ? c.mask + p.batch * c.tokens + t : nullptr; }
  int64_t state_at() const { return ((p.batch * c.sequences + p.sequence) * c.heads + p.head) * c.dim * c.value_dim; }
  /// The output of a token for a query head of the group, from the part's first column on.
  void* out(int64_t group, int64_t t) const {
    const void* row = token_ptr(c.dtype, c.out, c.out_stride, p.batch, out_head(group), t);
    return static_cast<char*>(const_cast<void*>(row)) + p.begin * dtype_size(c.dtype);
  }
  /// The state where segment s >= 1 of this sequence starts, among the head's checkpoints.
  float* checkpoint(int64_t s) const {
    int64_t before = 0, all = 0;
    for (int64_t i = 0; i < c.sequences; ++i) {
      const int64_t count = checkpoint_count(c.bounds[i + 1] - c.bounds[i]);
      if (i < p.sequence) before += count;
      all += count;
    }
    return c.checkpoints + ((p.batch * c.heads + p.head) * all + before + s - 1) * c.dim * c.value_dim;
  }
};

/// Columns of a state (D, M) to work space (full, ld), padded with 0; null counts as zeros.
void load_state(const Space& s, const Place& at, const float* state, float* to) {
  const int64_t M = at.c.value_dim, columns = at.p.end - at.p.begin;
  memset(to, 0, size_t(s.full * s.ld) * 4);
  for (int64_t d = 0; state && d < s.dim; ++d) memcpy(to + d * s.ld, state + d * M + at.p.begin, size_t(columns) * 4);
}

/// state (D, M): the part's columns of `from` (D, s.ld).
void store_state(const Space& s, const Place& at, const float* from, float* state) {
  const int64_t M = at.c.value_dim, columns = at.p.end - at.p.begin;
  for (int64_t d = 0; d < s.dim; ++d) memcpy(state + d * M + at.p.begin, from + d * s.ld, size_t(columns) * 4);
}

/// What follows from the decays of each channel, once they are loaded: their products, the keys as they read the incoming
/// state, and the decay of the state.
void finish_channel_decay(Space& s) {
  multiply_decays(s.channel);
  decay_from_start(s.channel, s.K, s.key_in);
  memcpy(s.decay, s.channel.total, size_t(s.full) * 4);
}

/// Keys, values (to `values`, unless null), beta and decays of tokens [t, t + n). Returns n rounded up to 16, to which rows
/// are padded.
int64_t prepare_chunk(const DeltaCall& c, const Place& at, int64_t t, int64_t n, float* inverse, float* values, Space& s) {
  const int64_t padded = round_up(n, BLOCK);
  const uint8_t* mask = at.mask(t);
  load_chunk(c.dtype, at.key(t), c.key_stride[2], c.dim, n, padded, mask, 1.0f, c.normalize ? inverse : nullptr, s.K,
             s.ld_key);
  if (values) {
    const int64_t columns = at.p.end - at.p.begin;
    load_chunk(c.dtype, at.value(t), c.value_stride[2], columns, n, padded, mask, 1.0f, nullptr, values, s.ld);
  }
  const float* beta = at.beta(t);
  for (int64_t i = 0; i < padded; ++i) s.beta[i] = i < n && (!mask || mask[i]) ? beta[i * c.beta_stride[2]] : 0;
  if (c.channels) {
    s.channel = channel_decay_space(padded, s.full, s.ld_key, s.channel.a);
    load_channel_decay(s.channel, at.log_decay(t), c.decay_stride[2], c.dim, n, mask);
    finish_channel_decay(s);
  } else {
    load_head_decay(at.log_decay(t), c.decay_stride[2], n, padded, mask, s.head);
    pair_decays(s.head, padded, s.L);
    transpose(s.K, s.ld_key, padded, s.full, s.key_t, LD_SCORE);
    for (int64_t d = 0; d < s.full; ++d) s.decay[d] = s.head.total;
  }
  return padded;
}

/// The number of tokens before the first one that is not finite. Products multiply later tokens by 0 inside a tile, which
/// would carry a NaN to earlier rows: such a token must start a chunk of its own.
int64_t finite_tokens(const DeltaCall& c, int64_t n, const Space& s) {
  const auto zeros = [&](int64_t i) {
    vec x = splat(s.beta[i] * 0);
    for (int64_t d = 0; d < s.full; d += VL) x += load(s.K + i * s.ld_key + d) * 0.0f;
    for (int64_t j = 0; j < s.columns; j += VL) x += load(s.U + i * s.ld + j) * 0.0f;
    if (!c.channels) return x + splat(s.head.from_start[i] * 0);
    for (int64_t d = 0; d < s.full; d += VL) x += load(s.channel.a + i * s.ld_key + d) * 0.0f;
    return x;
  };
  vec all = {};
  for (int64_t i = 0; i < n; ++i) all += zeros(i);
  if (sum(all) == 0) return n;
  int64_t i = 0;
  while (i < n && sum(zeros(i)) == 0) ++i;
  return i;
}

/// F (strictly lower) of keys, and P of queries, which must be in Q.
void chunk_scores(const DeltaCall& c, int64_t padded, Space& s) {
  if (c.channels) {
    const float* const left[2] = {s.K, s.Q};
    float* const score[2] = {s.F, s.P};
    channel_scores<2>(s.channel, s.K, left, score, LD_SCORE, s.key_t);
    for (int64_t i = 0; i < padded; ++i) s.F[i * LD_SCORE + i] = 0;
  } else {
    const Operand keys{s.K, s.ld_key, 1, s.key_t, LD_SCORE, s.full};
    const Operand queries{s.Q, s.ld_key, 1, s.key_t, LD_SCORE, s.full};
    gemm(padded, padded, &keys, 1, DecayedScores{s.F, s.L, 1}, nullptr, true);
    gemm(padded, padded, &queries, 1, DecayedScores{s.P, s.L, 0}, nullptr, true);
  }
}

/// F of keys alone (strict), or P of queries alone.
void one_score(const DeltaCall& c, int64_t padded, const float* x, int64_t strict, float* to, Space& s) {
  if (c.channels) {
    const float* const left[1] = {x};
    float* const score[1] = {to};
    channel_scores<1>(s.channel, s.K, left, score, LD_SCORE, s.key_t);
    for (int64_t i = 0; strict && i < padded; ++i) to[i * LD_SCORE + i] = 0;
  } else {
    const Operand o{x, s.ld_key, 1, s.key_t, LD_SCORE, s.full};
    gemm(padded, padded, &o, 1, DecayedScores{to, s.L, strict}, nullptr, true);
  }
}

/// s.Q (n, D): the scaled queries of n tokens from t on, padded with 0; inverse (n): their inverse norms if normalized.
void load_queries(const DeltaCall& c, const Place& at, int64_t group, int64_t t, int64_t n, float* inverse, Space& s) {
  load_chunk(c.dtype, at.query(group, t), c.query_stride[2], c.dim, n, round_up(n, BLOCK), nullptr, c.scale,
             c.normalize ? inverse : nullptr, s.Q, s.ld_key);
}

/// R (C, columns) <- R - k^T S, S the incoming state as each token finds it: the values less what is read of them.
void subtract_read(const DeltaCall& c, int64_t padded, const Space& s, float* R, Prefetcher* ahead) {
  const Operand o{c.channels ? s.key_in : s.K, s.ld_key, 1, s.S, s.ld, s.full};
  gemm(padded, s.columns, &o, 1, Residual{R, R, s.ld, c.channels ? nullptr : s.head.from_start}, ahead);
}

/// out rows of one group, from P, Q, U and the incoming state.
void write_out(const DeltaCall& c, const Place& at, int64_t group, int64_t t, int64_t n, int64_t padded, Space& s,
               Prefetcher* ahead) {
  if (c.channels) {
    decay_from_start(s.channel, s.Q, s.Q);
  } else {
    scale_rows(s.Q, s.ld_key, padded, s.full, s.head.from_start);
  }
  const Operand o[2] = {{s.Q, s.ld_key, 1, s.S, s.ld, s.full}, {s.P, LD_SCORE, 1, s.U, s.ld, padded, UP_TO_ROW}};
  const int64_t columns = at.p.end - at.p.begin;
  if (c.dtype == FLOAT32 && columns % VL == 0) {
    gemm(n, columns, o, 2, StoreRows{static_cast<float*>(at.out(group, t)), c.out_stride[2], nullptr}, ahead);
  } else {
    gemm(n, s.columns, o, 2, StoreRows{s.O, s.ld, nullptr}, ahead);
    store_rows(c.dtype, s.O, s.ld, n, columns, at.out(group, t), c.out_stride[2]);
  }
}

/// S <- decay S + keys^T U. Leaves K and U multiplied by the decays to the end of the chunk.
void update_state(const DeltaCall& c, int64_t padded, Space& s, Prefetcher* ahead) {
  if (c.channels) {
    decay_to_end(s.channel, s.K, s.K);
  } else {
    scale_rows(s.U, s.ld, padded, s.columns, s.head.to_end);
  }
  const Operand o{s.K, 1, s.ld_key, s.U, s.ld, padded};
  gemm(s.full, s.columns, &o, 1, DecayAdd{s.S, s.ld, s.decay}, ahead);
}

/// Asks for the rows of the chunk of at most `most` tokens that starts at t.
void ask_for_chunk(const DeltaCall& c, const Place& at, int64_t t, Prefetcher& ahead, int64_t most = CHUNK) {
  ahead.clear();
  const int64_t n = imin(most, at.last - t), bytes = dtype_size(c.dtype);
  if (n <= 0) return;
  ahead.add(at.key(t), c.dim * bytes, c.key_stride[2] * bytes, n);
  ahead.add(at.value(t), (at.p.end - at.p.begin) * bytes, c.value_stride[2] * bytes, n);
  for (int64_t g = 0; g < imin(4, at.groups()); ++g) {
    ahead.add(at.query(g, t), c.dim * bytes, c.query_stride[2] * bytes, n);
  }
  if (c.channels) ahead.add(at.log_decay(t), c.dim * 4, c.decay_stride[2] * 4, n);
}

/// All tokens of one part.
void forward(const DeltaCall& c, const DeltaPart& part) {
  const Place at(c, part);
  float* space = scratch(space_floats(c, part.end - part.begin));
  Space s = make_space(c, part.end - part.begin, space);
  load_state(s, at, c.state ? c.state + at.state_at() : nullptr, s.S);
  Prefetcher ahead;
  float inverse[CHUNK];
  for (int64_t t = at.first, n; t < at.last; t += n) {
    const int64_t done = t - at.first;
    if (c.checkpoints && done > 0 && done % SEGMENT == 0) store_state(s, at, s.S, at.checkpoint(done / SEGMENT));
    n = imin(CHUNK - done % CHUNK, at.last - t);
    int64_t padded = prepare_chunk(c, at, t, n, inverse, s.U, s);
    const int64_t whole = finite_tokens(c, n, s);
    if (whole > 0 && whole < n) padded = prepare_chunk(c, at, t, n = whole, inverse, s.U, s);
    load_queries(c, at, 0, t, n, inverse, s);
    chunk_scores(c, padded, s);
    ask_for_chunk(c, at, t + n, ahead);
    invert_blocks<WRITES>(s.F, s.beta, padded, s.X);
    subtract_read(c, padded, s, s.U, &ahead);
    solve_writes(s.F, s.X, padded, s.columns, s.U, s.ld, s.rest);
    for (int64_t g = 0; g < at.groups(); ++g) {
      if (g > 0) {
        load_queries(c, at, g, t, n, inverse, s);
        one_score(c, padded, s.Q, 0, s.P, s);
      }
      write_out(c, at, g, t, n, padded, s, &ahead);
    }
    update_state(c, padded, s, &ahead);
  }
  if (c.state_new) store_state(s, at, s.S, c.state_new + at.state_at());
}

}  // namespace
