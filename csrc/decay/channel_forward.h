/// The forward pass of a chunk with a decay for each row of S (GLA); core/channel_decay.h has the scores.
#pragma once
#include "core/channel_decay.h"
#include "decay/chunk.h"

namespace {

/// Rows (round_up(n, 16), row_stride(D)) of a chunk in `to`, the rest of them 0.
void copy_chunk(const DecayCall& c, const Chunk& x, const void* base, const int64_t* stride, int64_t head, bool hide,
                float* to) {
  const int64_t ld = row_stride(c.dim), full = round_up(c.dim, 16);
  const Rows from = chunk_rows(c, x, base, stride, head, c.dim, hide, to);
  for (int64_t i = 0; from.at != to && i < x.n; ++i) {
    memcpy(to + i * ld, from.at + i * from.ld, size_t(c.dim) * 4);
    for (int64_t d = c.dim; d < full; ++d) to[i * ld + d] = 0;
  }
  for (int64_t i = x.n; i < round_up(x.n, DECAY_BLOCK); ++i) memset(to + i * ld, 0, size_t(full) * 4);
}

/// The decays of one state head in a chunk, in `space` (channel_decay_floats(CHUNK, row_stride(D))).
ChannelDecay load_chunk_decay(const DecayCall& c, const Chunk& x, int64_t head, float* space) {
  const ChannelDecay d = channel_decay_space(round_up(x.n, DECAY_BLOCK), round_up(c.dim, 16), row_stride(c.dim), space);
  const float* g = c.log_decay + x.batch * c.decay_stride[0] + head * c.decay_stride[1] + x.t * c.decay_stride[2];
  load_channel_decay(d, g, c.decay_stride[2], c.dim, x.n, x.mask);
  multiply_decays(d);
  return d;
}

/// Work space of the per-channel form.
struct ChannelSpace {
  float *decay, *key_decayed, *work;
};

/// Floats of a ChannelSpace; 0 without decays per channel.
INLINE int64_t channel_space_floats(const DecayCall& c) {
  if (!c.per_channel) return 0;
  const int64_t ld = row_stride(c.dim), scores = channel_scores_floats(CHUNK, round_up(c.dim, 16), ld);
  return channel_decay_floats(CHUNK, ld) + CHUNK * ld + imax(scores, (CHUNK + 2 * DECAY_BLOCK) * ld) + 64;
}

/// The space at `at`, which moves behind it; empty without decays per channel.
INLINE ChannelSpace channel_space(const DecayCall& c, float*& at) {
  if (!c.per_channel) return {};
  const int64_t ld = row_stride(c.dim), scores = channel_scores_floats(CHUNK, round_up(c.dim, 16), ld);
  ChannelSpace s;
  s.decay = take_floats(at, channel_decay_floats(CHUNK, ld)), s.key_decayed = take_floats(at, CHUNK * ld);
  s.work = take_floats(at, imax(scores, (CHUNK + 2 * DECAY_BLOCK) * ld));
  return s;
}

/// weights (n, CHUNK_LD): decayed Q K^T, 0 above the diagonal.
void channel_weights(const ChannelDecay& d, const float* query, const float* key, float* weights, float* work) {
  memset(weights, 0, size_t(CHUNK * CHUNK_LD) * 4);
  const float* const left[1] = {query};
  float* const to[1] = {weights};
  channel_scores<1>(d, key, left, to, CHUNK_LD, work);
}

/// C = diag(factor) C + A B.
struct DecayRowsAndAdd {
  float* c;
  int64_t ldc;
  const float* factor;
  INLINE vec start(int64_t, int64_t) const { return vec{}; }
  template <int W>
  INLINE void finish(int64_t i, int64_t j, vec (&acc)[W]) const {
    float* to = c + i * ldc + j;
    UNROLL(4)
    for (int w = 0; w < W; ++w) store(to + w * VL, load(to + w * VL) * factor[i] + acc[w]);
  }
};

}  // namespace
