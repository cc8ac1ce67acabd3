/// How a backward call is split. Heads of one group add to the same gradients of queries or keys, so that a group is one
/// piece of work; with few groups, the segments between checkpoints are pieces of their own.
#pragma once
#include "decay/calls.h"

namespace {

/// One segment of one sequence, for all heads.
struct Segment {
  int64_t entry, batch, first, begin, end, index;  // entry: of the states (B n); index: of the checkpoints
};

/// The segments of all sequences, in the order of their checkpoints.
inline std::vector<Segment> all_segments(const DecayCall& c) {
  std::vector<Segment> all;
  for (int64_t entry = 0; entry < c.batch * c.sequences; ++entry) {
    const int64_t first = c.bounds[entry % c.sequences], end = c.bounds[entry % c.sequences + 1];
    for (int64_t t = first; t < end; t += c.segment) {
      all.push_back({entry, entry / c.sequences, first, t, std::min(end, t + c.segment), int64_t(all.size())});
    }
  }
  return all;
}

/// The part of a call that computes `heads` heads of a segment, from its checkpoint (heads, D, M).
inline DecayPart segment_part(const DecayCall& c, const Segment& s, int64_t head, int64_t heads) {
  DecayPart part{s.batch, s.first, s.begin, s.end, head, heads, nullptr, nullptr, nullptr, true};
  part.state = c.checkpoints + (s.index * c.heads + head) * c.dim * c.value_dim;
  return part;
}

/// Every group goes through its sequence from the last segment to the first. grads: (B n, H, D, M), of the final states
/// at first and of the initial ones in the end.
inline void backward_groups(const DecayCall& c, const std::vector<Segment>& segments, int64_t groups, float* grads) {
  const int64_t heads = c.heads / groups;
  parallel_for(c.batch * c.sequences * groups, c.threads, [&](int64_t i) {
    const int64_t entry = i / groups, head = i % groups * heads;
    for (auto s = segments.rbegin(); s != segments.rend(); ++s) {
      if (s->entry != entry) continue;
      DecayPart part = segment_part(c, *s, head, heads);
      part.state_new = grads + (entry * c.heads + head) * c.dim * c.value_dim;
      part.grad_state = part.state_new;
      decay_kernels().backward(c, part);
    }
  });
}

/// All segments at once: first what each adds to the gradient of the state before it, then the gradient of the state after
/// each, then the segments. grads: as above.
inline void backward_segments(const DecayCall& c, const std::vector<Segment>& segments, int64_t groups, float* grads) {
  const int64_t size = c.dim * c.value_dim, all = int64_t(segments.size()), heads = c.heads / groups;
  std::unique_ptr<float[]> after(new float[size_t(all * c.heads * size)]);  // of the state after each segment
  parallel_for(all * c.heads, c.threads, [&](int64_t i) {
    DecayPart part = segment_part(c, segments[size_t(i / c.heads)], i % c.heads, 1);
    part.state_new = after.get() + i * size;
    decay_kernels().backward_state(c, part);
  });
  parallel_for(c.heads, c.threads, [&](int64_t head) {
    std::vector<double> factors(size_t(c.per_channel ? c.dim : 1));
    std::vector<float> local(static_cast<size_t>(size));
    for (auto s = segments.rbegin(); s != segments.rend(); ++s) {
      float *at = after.get() + (s->index * c.heads + head) * size, *running = grads + (s->entry * c.heads + head) * size;
      std::memcpy(local.data(), at, size_t(size) * 4);
      std::memcpy(at, running, size_t(size) * 4);
      total_decay(c, s->batch, head, s->begin, s->end, factors);
      join_states(c, factors, running, local.data());
    }
  });
  parallel_for(all * groups, c.threads, [&](int64_t i) {
    const int64_t head = i % groups * heads;
    DecayPart part = segment_part(c, segments[size_t(i / groups)], head, heads);
    part.grad_state = after.get() + ((i / groups) * c.heads + head) * size;
    decay_kernels().backward(c, part);
  });
}

/// All gradients of a call, from its last segments to its first. Returns flags.
inline int32_t backward_call(const DecayCall& c) {
  const int64_t groups = std::gcd(c.query_heads, c.key_heads), entries = c.batch * c.sequences;
  const int64_t floats = entries * c.heads * c.dim * c.value_dim;
  std::unique_ptr<float[]> own;
  if (!c.grad_state) own.reset(new float[size_t(floats)]);
  float* grads = c.grad_state ? c.grad_state : own.get();
  if (c.grad_state_new) {
    std::memcpy(grads, c.grad_state_new, size_t(floats) * 4);
  } else {
    std::memset(grads, 0, size_t(floats) * 4);
  }
  const std::vector<Segment> segments = all_segments(c);
  if (entries * groups >= 2 * c.threads || c.threads == 1) {
    backward_groups(c, segments, groups, grads);
  } else {
    backward_segments(c, segments, groups, grads);
  }
  return OK;
}

}  // namespace
