/// A layer of the delta rule between its projections, in one pass over the tokens: convolution, silu, gates, the rule, and
/// the gated norm. Value heads that share a key head and decay as a whole (Qwen's gated delta net) are computed together,
/// so that their keys and queries are prepared once; heads with a decay of each channel (KDA) one by one.
#pragma once
#include "core/convolve_rows.h"
#include "delta/gates.h"

namespace {

/// Tokens of a chunk: with 64, products within a chunk take longer than the passes over the state that it saves. Measured
/// at D = M = 128.
constexpr int64_t LAYER_CHUNK = 32;
/// With a decay of each channel, products across blocks cost more. 2048 tokens of 12 heads of 64 take 34 to 36 ms with
/// chunks of 16, 40 to 47 with 32 and 47 to 52 with 64; of 8 heads of 128, 62 to 70, 62 to 82 and 72 to 89.
constexpr int64_t CHANNEL_CHUNK = 16;

/// x_i *= scale / sqrt(|x_i|^2 + 1e-6).
void normalize_rows(float* x, int64_t ld, int64_t n, int64_t dim, float scale) {
  for (int64_t i = 0; i < n; ++i) {
    float* const row = x + i * ld;
    vec squares = {};
    for (int64_t d = 0; d < dim; d += VL) squares += load(row + d) * load(row + d);
    const float factor = scale / __builtin_sqrtf(sum(squares) + 1e-6f);
    for (int64_t d = 0; d < dim; d += VL) store(row + d, load(row + d) * factor);
  }
}

/// F = key_scores o L strictly below the diagonal, P = query_scores o L on and below it, L_ij = exp(G_i - G_j).
void decay_scores(const HeadDecay& d, int64_t padded, const float* key_scores, const float* query_scores, float* F,
                  float* P) {
  const vec lane = lanes();
  for (int64_t i = 0; i < padded; ++i) {
    for (int64_t j = 0; j <= i; j += VL) {
      const int64_t at = i * LD_SCORE + j;
      const vec x = (d.high[i] - load(d.high + j)) + (d.low[i] - load(d.low + j));
      const vec y = exp_decay(x > 0.0f ? vec{} : x), here = splat(float(i - j));
      store(F + at, lane < here ? load(key_scores + at) * y : vec{});
      store(P + at, lane <= here ? load(query_scores + at) * y : vec{});
    }
  }
}

/// out (n, M) <- norm(O) weight act(gate), norm over the columns of a head.
void write_normalized(const DeltaCall& c, const DeltaLayer& layer, const Place& at, int64_t t, int64_t n, const Space& s) {
  const int64_t M = c.value_dim, *stride = layer.gate_stride;
  const float* gate = layer.gate + at.p.batch * stride[0] + at.p.head * stride[1] + t * stride[2];
  float* to = static_cast<float*>(at.out(0, t));
  for (int64_t i = 0; i < n; ++i, gate += stride[2], to += c.out_stride[2]) {
    const float* row = s.O + i * s.ld;
    vec squares = {};
    for (int64_t m = 0; m < M; m += VL) squares += load(row + m) * load(row + m);
    const vec factor = splat(1.0f / __builtin_sqrtf(sum(squares) / float(M) + layer.eps));
    for (int64_t m = 0; m < M; m += VL) {
      const vec z = load(gate + m), act = layer.sigmoid ? sigmoid(z) : z * sigmoid(z);
      store(to + m, load(row + m) * factor * load(layer.norm_weight + m) * act);
    }
  }
}

/// The filter of a layer's channels from `channel` on, with the history of the sequence.
RowFilter layer_filter(const DeltaLayer& layer, const Place& at, const float* weight, const float* history,
                       int64_t channel) {
  const int64_t older = at.p.batch * (layer.width - 1) * layer.channels;  // where the history of this sequence begins
  return {layer.width, layer.channels, weight + channel, nullptr, history ? history + older + channel : nullptr};
}

/// Keys, values, beta and decays of at most n tokens from t on, for `count` heads that share their keys. Returns how many
/// tokens: fewer than n if one of them is not finite.
template <class Places>
int64_t load_layer_chunk(const DeltaCall& c, const DeltaLayer& layer, const Places& place, int64_t count, int64_t t,
                         int64_t n, Space* spaces) {
  const int64_t D = c.dim, M = c.value_dim;
  Space& s = spaces[0];
  const Place at = place(0);
  for (int64_t whole = 0; whole != n;) {  // again with fewer tokens, if one is not finite
    const int64_t padded = round_up(n, BLOCK);
    convolve_rows(layer_filter(layer, at, layer.key_filter, layer.key_history, at.key_head() * D), at.key(0),
                  c.key_stride[2], t, D, n, padded, s.K, s.ld_key);
    normalize_rows(s.K, s.ld_key, n, D, 1.0f);
    whole = n;
    for (int64_t h = 0; h < count; ++h) {
      const Place own = place(h);
      convolve_rows(layer_filter(layer, own, layer.value_filter, layer.value_history, own.p.head * M), own.value(0),
                    c.value_stride[2], t, M, n, padded, spaces[h].U, s.ld);
      load_gates(c, layer, own, t, n, padded, spaces[h]);
      const int64_t finite = finite_tokens(c, n, spaces[h]);
      if (finite > 0) whole = imin(whole, finite);
    }
    if (whole != n) n = whole, whole = 0;
  }
  return n;
}

/// One head of a chunk. key_scores, query_scores: without decay; of a head with a decay of each channel unused.
void layer_head(const DeltaCall& c, const DeltaLayer& layer, const Place& at, int64_t t, int64_t n, int64_t padded,
                const float* key_scores, const float* query_scores, Space& s, Prefetcher* ahead) {
  if (c.channels) {
    finish_channel_decay(s);
    chunk_scores(c, padded, s);
  } else {
    for (int64_t d = 0; d < s.full; ++d) s.decay[d] = s.head.total;
    decay_scores(s.head, padded, key_scores, query_scores, s.F, s.P);
  }
  invert_blocks<WRITES>(s.F, s.beta, padded, s.X);
  subtract_read(c, padded, s, s.U, ahead);
  solve_writes(s.F, s.X, padded, s.columns, s.U, s.ld, s.rest);
  float* const faded = s.key_in;  // queries as they read the incoming state
  if (c.channels) {
    decay_from_start(s.channel, s.Q, faded);
  } else {
    for (int64_t i = 0; i < padded; ++i) {
      for (int64_t d = 0; d < s.full; d += VL) {
        store(faded + i * s.ld_key + d, load(s.Q + i * s.ld_key + d) * s.head.from_start[i]);
      }
    }
  }
  const Operand o[2] = {{faded, s.ld_key, 1, s.S, s.ld, s.full}, {s.P, LD_SCORE, 1, s.U, s.ld, padded, UP_TO_ROW}};
  gemm(n, s.columns, o, 2, StoreRows{s.O, s.ld, nullptr}, ahead);
  write_normalized(c, layer, at, t, n, s);
  update_state(c, padded, s, ahead);
}

/// One part of a layer; begin is a multiple of 64.
void forward_layer(const DeltaCall& c, const DeltaLayer& layer, const LayerPart& part) {
  const int64_t count = part.count, M = c.value_dim, D = c.dim, ld = row_stride(M), state = round_up(D, 16) * ld;
  const int64_t own = state + CHUNK * ld + CHUNK + 64, scores = CHUNK * LD_SCORE;
  float* space = scratch(space_floats(c, M) + (count - 1) * own + 2 * scores + 64);
  Space spaces[MOST_SHARED];
  Space& s = spaces[0] = make_space(c, M, space);
  float *key_scores = carve(space, scores), *query_scores = carve(space, scores);
  const auto place = [&](int64_t h) { return Place(c, DeltaPart{part.batch, 0, part.first + h, 0, M}); };
  for (int64_t h = 0; h < count; ++h) {
    Space& mine = spaces[h];
    if (h > 0) mine = s, mine.U = carve(space, CHUNK * ld), mine.S = carve(space, state), mine.beta = carve(space, CHUNK);
    const float* before = part.begin > 0 ? c.state_new : c.state;
    load_state(mine, place(h), before ? before + place(h).state_at() : nullptr, mine.S);
  }
  const Place at = place(0);
  const RowFilter query_filter = layer_filter(layer, at, layer.query_filter, layer.query_history, at.query_head(0) * D);
  const int64_t chunk = c.channels ? CHANNEL_CHUNK : LAYER_CHUNK;
  Prefetcher ahead;
  for (int64_t t = part.begin, n; t < part.end; t += n) {
    n = load_layer_chunk(c, layer, place, count, t, imin(chunk - t % chunk, part.end - t), spaces);
    const int64_t padded = round_up(n, BLOCK);
    convolve_rows(query_filter, at.query(0, 0), c.query_stride[2], t, D, n, padded, s.Q, s.ld_key);
    normalize_rows(s.Q, s.ld_key, n, D, c.scale);
    if (!c.channels) {
      transpose(s.K, s.ld_key, padded, s.full, s.key_t, LD_SCORE);
      const Operand keys{s.K, s.ld_key, 1, s.key_t, LD_SCORE, s.full}, queries{s.Q, s.ld_key, 1, s.key_t, LD_SCORE, s.full};
      gemm(padded, padded, &keys, 1, Store<false>{key_scores, LD_SCORE}, nullptr, true);
      gemm(padded, padded, &queries, 1, Store<false>{query_scores, LD_SCORE}, nullptr, true);
    }
    for (int64_t h = 0; h < count; ++h) {
      ask_for_chunk(c, place(h), t + n, ahead, chunk);
      layer_head(c, layer, place(h), t, n, padded, key_scores, query_scores, spaces[h], &ahead);
    }
  }
  for (int64_t h = 0; h < count; ++h) store_state(spaces[h], place(h), spaces[h].S, c.state_new + place(h).state_at());
}

}  // namespace
