/// How a call of the decayed sums is split: over batch entries, sequences and heads, and where those are fewer than
/// threads, over parts of each sequence.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "core/partition.h"
#include "decay/abi.h"

namespace {

constexpr int64_t PART_UNIT = 256;  // parts of a sequence are multiples of it, or of the distance of checkpoints

/// Heads that share queries or keys are a group. Each line of work is one sequence and a subset of one group's heads.
struct WorkLines {
  const DecayCall& c;
  int64_t groups, subsets;
  std::vector<int64_t> segments;  // (n + 1): checkpoints before each sequence of a batch entry

  explicit WorkLines(const DecayCall& call) : c(call), groups(std::gcd(call.query_heads, call.key_heads)) {
    const int64_t independent = c.batch * c.sequences * groups, most = c.heads / groups;
    const int64_t wanted = (2 * c.threads + independent - 1) / (independent ? independent : 1);
    subsets = wanted < most ? wanted : most;
    segments.push_back(0);
    for (int64_t i = 0; i < c.sequences; ++i) {
      const int64_t tokens = c.bounds[i + 1] - c.bounds[i];
      segments.push_back(segments.back() + (c.segment ? (tokens + c.segment - 1) / c.segment : 0));
    }
  }

  int64_t count() const { return c.batch * c.sequences * groups * subsets; }
  int64_t state_size() const { return c.dim * c.value_dim; }

  /// The whole of line i; its states are the caller's.
  DecayPart operator[](int64_t i) const {
    const int64_t subset = i % subsets, group = i / subsets % groups, entry = i / subsets / groups;
    const int64_t sequence = entry % c.sequences, batch = entry / c.sequences, heads = c.heads / groups;
    const int64_t head = group * heads + heads * subset / subsets, end = group * heads + heads * (subset + 1) / subsets;
    const int64_t at = (entry * c.heads + head) * state_size();
    const int64_t mark = batch * segments.back() + segments[size_t(sequence)];
    DecayPart part{
        batch, c.bounds[sequence], c.bounds[sequence], c.bounds[sequence + 1], head, end - head, nullptr, nullptr, nullptr,
        true};
    part.state = c.state ? c.state + at : nullptr;
    part.state_new = c.state_new ? c.state_new + at : nullptr;
    part.checkpoints = c.checkpoints ? c.checkpoints + mark * c.heads * state_size() : nullptr;
    return part;
  }
};

/// factors (D, or 1): what tokens [begin, end) leave of a state.
inline void total_decay(const DecayCall& c, int64_t batch, int64_t head, int64_t begin, int64_t end,
                        std::vector<double>& factors) {
  std::fill(factors.begin(), factors.end(), 0.0);
  for (int64_t t = begin; c.log_decay && t < end; ++t) {
    if (c.mask && !c.mask[batch * c.tokens + t]) continue;
    const float* g = c.log_decay + batch * c.decay_stride[0] + head * c.decay_stride[1] + t * c.decay_stride[2];
    for (size_t d = 0; d < factors.size(); ++d) factors[d] += double(g[d]);
  }
  for (double& x : factors) x = std::exp(x);
}

/// into = factors into + later, of one head.
inline void join_states(const DecayCall& c, const std::vector<double>& factors, float* into, const float* later) {
  for (int64_t d = 0; d < c.dim; ++d) {
    const float factor = float(factors[factors.size() > 1 ? size_t(d) : 0]);
    for (int64_t m = d * c.value_dim; m < (d + 1) * c.value_dim; ++m) into[m] = into[m] * factor + later[m];
  }
}

/// Fewer lines than threads: first the states that each part of a line leaves by itself, then what comes before each
/// part, then the outputs.
inline void forward_parts(const DecayCall& c, const WorkLines& lines, int64_t parts, int64_t unit) {
  const int64_t size = lines.state_size(), line_size = c.heads * size;
  std::unique_ptr<float[]> states(new float[size_t(lines.count() * parts * line_size)]);
  const auto part_of = [&](int64_t i, bool outputs) {
    DecayPart part = lines[i / parts];
    const int64_t first = part.begin, tokens = part.end - part.begin;
    part.begin = first + split_begin(tokens, i % parts, parts, unit),
    part.end = first + split_begin(tokens, i % parts + 1, parts, unit);
    part.outputs = outputs;
    if (!outputs) part.checkpoints = nullptr;
    return part;
  };
  parallel_for(lines.count() * parts, c.threads, [&](int64_t i) {
    DecayPart part = part_of(i, false);
    if (i % parts == parts - 1) return;
    part.state = nullptr, part.state_new = states.get() + i * line_size;
    decay_kernels().forward(c, part);
  });
  for (int64_t line = 0; line < lines.count(); ++line) {
    const DecayPart whole = lines[line];
    std::vector<double> factors(size_t(c.per_channel ? c.dim : 1));
    std::vector<float> running(static_cast<size_t>(size)), local(static_cast<size_t>(size));
    for (int64_t i = 0; i < whole.heads; ++i) {
      std::fill(running.begin(), running.end(), 0.0f);
      if (whole.state) std::memcpy(running.data(), whole.state + i * size, size_t(size) * 4);
      for (int64_t p = 0; p < parts; ++p) {
        float* at = states.get() + (line * parts + p) * line_size + i * size;
        if (p < parts - 1) std::memcpy(local.data(), at, size_t(size) * 4);
        std::memcpy(at, running.data(), size_t(size) * 4);
        const DecayPart part = part_of(line * parts + p, false);
        if (p == parts - 1) break;
        total_decay(c, part.batch, part.head + i, part.begin, part.end, factors);
        join_states(c, factors, running.data(), local.data());
      }
    }
  }
  parallel_for(lines.count() * parts, c.threads, [&](int64_t i) {
    DecayPart part = part_of(i, true);
    part.state = states.get() + i * line_size;
    if (i % parts != parts - 1) part.state_new = nullptr;
    decay_kernels().forward(c, part);
  });
}

/// out (B, max(Hq, H), T, M) and the final states (B n, H, D, M) of a call. Returns flags.
inline int32_t forward_call(const DecayCall& c) {
  const WorkLines lines(c);
  use_large_pages(static_cast<float*>(c.out),
                  c.batch * std::max(c.query_heads, c.heads) * c.tokens * c.value_dim * (c.dtype ? 2 : 4) / 4);
  int64_t longest = 0;
  for (int64_t i = 0; i < c.sequences; ++i) longest = std::max(longest, c.bounds[i + 1] - c.bounds[i]);
  const int64_t unit = c.segment ? c.segment : PART_UNIT, parts = split_count(lines.count(), longest, c.threads, unit);
  if (parts > 1) {
    forward_parts(c, lines, parts, unit);
  } else {
    parallel_for(lines.count(), c.threads, [&](int64_t i) { decay_kernels().forward(c, lines[i]); });
  }
  return OK;
}

/// One token: out (B, max(Hq, H), 1, M) and the new states (B, H, D, M). Returns flags.
inline int32_t decode_call(const DecayCall& c) {
  const int64_t work = c.batch * c.heads * c.dim * c.value_dim;
  const int64_t threads = work > 200000 ? c.threads : 1;  // waking threads takes longer than a small step
  const int64_t heads = c.batch * c.heads, some = threads > 1 ? (heads + 4 * threads - 1) / (4 * threads) : heads;
  parallel_for((heads + some - 1) / some, threads, [&](int64_t i) {
    for (int64_t h = i * some; h < heads && h < (i + 1) * some; ++h) decay_kernels().decode(c, h / c.heads, h % c.heads);
  });
  return OK;
}

}  // namespace
