/// The entry points of the selective scan and the causal convolution: ranges of channels go to threads.
#include "core/threads.h"
#include "scan/abi.h"

namespace {

constexpr int64_t LANES = 16;  // ranges of channels are multiples of the longest vector

/// How many ranges each of `lines` lines of `channels` channels is cut into: about four for each thread, but at most 64
/// channels wide where there are enough, because what a range works on must stay in cache.
int64_t ranges(int64_t lines, int64_t channels, int64_t threads) {
  const int64_t most = (channels + LANES - 1) / LANES, wide = (channels + 63) / 64;
  const int64_t wanted = threads > 1 && lines ? (4 * threads + lines - 1) / lines : 1;
  const int64_t count = wanted > wide ? wanted : wide;
  return count < most ? count : most;
}

/// Where range i of `count` starts.
int64_t range_bound(int64_t channels, int64_t i, int64_t count) {
  const int64_t at = (channels + LANES - 1) / LANES * i / count * LANES;
  return at < channels ? at : channels;
}

/// Runs work(batch, begin, end, range) for every range of channels of every group of every batch entry.
template <class Work>
int32_t run_ranges(int64_t batch, int64_t groups, int64_t channels, int64_t count, int64_t threads, const Work& work) {
  try {
    const int64_t each = channels / groups;
    parallel_for(batch * groups * count, threads, [&](int64_t i) {
      const int64_t line = i / count, group = line % groups, begin = range_bound(each, i % count, count);
      const int64_t end = range_bound(each, i % count + 1, count);
      if (begin < end) work(line / groups, group * each + begin, group * each + end, i % count);
    });
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
  return OK;
}

/// Waking threads takes longer than a little work; `cost` is about a nanosecond.
int64_t threads_for(int64_t threads, int64_t cost) { return cost > 50000 ? threads : 1; }

/// Runs work(batch, first channel, last channel, part) over all channels. Returns flags.
template <class Work>
int32_t run_scan(const ScanCall& c, const Work& work) {
  const int64_t threads = threads_for(c.threads, c.batch * c.channels * c.tokens * c.states / 4);
  const int64_t count = ranges(c.batch * c.groups, c.channels / c.groups, threads);
  return run_ranges(c.batch, c.groups, c.channels, count, threads, work);
}

}  // namespace

EXPORT int64_t linattn_scan_call_size() { return sizeof(ScanCall); }
EXPORT int64_t linattn_conv_call_size() { return sizeof(ConvCall); }

/// out (B, C, T) and the final states (B, C, N) of a selective scan. Returns flags.
EXPORT int32_t linattn_scan(const ScanCall* c) {
  return run_scan(*c,
                  [&](int64_t batch, int64_t begin, int64_t end, int64_t) { scan_kernels().scan(*c, batch, begin, end); });
}

/// One token; the new state may be written over the old one.
EXPORT int32_t linattn_scan_step(const ScanCall* c) {
  return run_scan(
      *c, [&](int64_t batch, int64_t begin, int64_t end, int64_t) { scan_kernels().scan_step(*c, batch, begin, end); });
}

/// The gradients of all inputs of a selective scan. Returns flags.
EXPORT int32_t linattn_scan_backward(const ScanCall* c) {
  return run_ranges(c->batch, c->groups, c->channels, c->parts, c->threads,
                    [&](int64_t batch, int64_t begin, int64_t end, int64_t part) {
                      scan_kernels().scan_backward(*c, batch, begin, end, part);
                    });
}

/// out (B, C, T) and the last inputs (B n, C, width - 1) of a causal convolution. Returns flags.
EXPORT int32_t linattn_conv(const ConvCall* c) {
  const int64_t threads = threads_for(c->threads, c->batch * c->channels * c->tokens);
  return run_ranges(
      c->batch, 1, c->channels, ranges(c->batch, c->channels, threads), threads,
      [&](int64_t batch, int64_t begin, int64_t end, int64_t) { scan_kernels().conv(*c, batch, begin, end); });
}

/// The gradients of all inputs of a causal convolution. Returns flags.
EXPORT int32_t linattn_conv_backward(const ConvCall* c) {
  const int64_t threads = threads_for(c->threads, 2 * c->batch * c->channels * c->tokens);
  return run_ranges(
      c->batch, 1, c->channels, ranges(c->batch, c->channels, threads), threads,
      [&](int64_t batch, int64_t begin, int64_t end, int64_t) { scan_kernels().conv_backward(*c, batch, begin, end); });
}
