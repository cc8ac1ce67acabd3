// Memory that will be wanted soon: asked for line by line while products run, so that it is in cache when its turn comes.
#pragma once
#include "simd.h"

namespace {

// Lines of memory at equal distances.
struct Lines {
  const char* at;
  int64_t apart;
  INLINE void ask() {
    __builtin_prefetch(at, 0, 2);
    at += apart;
  }
};

class Ahead {
 public:
  void clear() { count = now = 0; }

  // `rows` of `bytes` each, `stride` bytes apart.
  void want(const void* first, int64_t bytes, int64_t stride, int64_t rows) {
    if (rows <= 0 || count == MOST) return;
    const char* at = static_cast<const char*>(first);
    const int64_t lines = (bytes + LINE - 1) / LINE;
    stretches[count++] = stride == bytes ? Stretch{at, LINE, (bytes * rows + LINE - 1) / LINE, 1, 0, 0}
                                         : Stretch{at, stride, rows, lines, 0, 0};
  }

  // The next lines. A caller who asks for more of them than `most` gets what lies behind.
  INLINE Lines next(int64_t most, const void* any) {
    if (now == count) return {static_cast<const char*>(any), 0};
    Stretch& s = stretches[now];
    const Lines lines{s.first + s.column * LINE + s.asked * s.apart, s.apart};
    s.asked += most;
    if (s.asked >= s.lines) {  // strided rows are gone through once for each line of a row
      s.asked = 0;
      if (++s.column == s.columns) ++now;
    }
    return lines;
  }

 private:
  static constexpr int64_t LINE = 64;
  static constexpr int MOST = 8;
  struct Stretch {
    const char* first;
    int64_t apart, lines, columns, asked, column;
  };
  Stretch stretches[MOST];
  int count = 0, now = 0;
};

}  // namespace
