/// Software prefetch, interleaved with the matrix products: the next block's rows are in cache when they are needed.
#pragma once
#include "core/simd.h"

namespace {

/// Cache lines `step` bytes apart.
struct PrefetchLines {
  const char* at;
  int64_t step;
  /// Prefetches the next line.
  INLINE void prefetch() {
    __builtin_prefetch(at, 0, 2);
    at += step;
  }
};

/// A queue of memory ranges to prefetch. Products take a few lines at a time, because many at once would delay their own
/// loads.
class Prefetcher {
 public:
  /// Empties the queue.
  void clear() { count = current = 0; }

  /// Queues `rows` rows of `bytes` bytes each, `stride` bytes apart.
  void add(const void* first, int64_t bytes, int64_t stride, int64_t rows) {
    if (rows <= 0 || count == MAX_RANGES) return;
    const char* at = static_cast<const char*>(first);
    const int64_t lines = (bytes + LINE - 1) / LINE;
    ranges[count++] =
        stride == bytes ? Range{at, LINE, (bytes * rows + LINE - 1) / LINE, 1, 0, 0} : Range{at, stride, rows, lines, 0, 0};
  }

  /// The next lines, of which the caller will prefetch up to `most`. `any` is a valid address for an empty queue.
  INLINE PrefetchLines next(int64_t most, const void* any) {
    if (current == count) return {static_cast<const char*>(any), 0};
    Range& r = ranges[current];
    const PrefetchLines lines{r.first + r.column * LINE + r.taken * r.step, r.step};
    r.taken += most;
    if (r.taken >= r.lines) {  // strided rows: one pass over the rows for each line of a row
      r.taken = 0;
      if (++r.column == r.columns) ++current;
    }
    return lines;
  }

 private:
  static constexpr int64_t LINE = 64;
  static constexpr int MAX_RANGES = 8;
  struct Range {
    const char* first;
    int64_t step, lines, columns, taken, column;
  };
  Range ranges[MAX_RANGES];
  int count = 0, current = 0;
};

}  // namespace
