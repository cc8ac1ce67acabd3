// Memory that will be wanted soon: asked for line by line while products run, so that it is in cache when its turn comes.
#pragma once
#include "simd.h"

namespace {

class Ahead {
 public:
  static constexpr int MOST = 32;  // lines that a tile may ask for

  void clear() { count = at = 0; }

  // `rows` of `bytes` each, `stride` bytes apart.
  void want(const void* first, int64_t bytes, int64_t stride, int64_t rows) {
    if (rows <= 0 || count == MOST_STRETCHES) return;
    const char* row = static_cast<const char*>(first);
    stretches[count++] = stride == bytes ? Stretch{row, row, bytes * rows, 0, 1} : Stretch{row, row, bytes, stride, rows};
  }

  // The next lines, at most `most` of them; returns how many.
  INLINE int next(const char** lines, int most) {
    int n = 0;
    while (at < count) {
      Stretch& s = stretches[at];
      const char *line = s.line, *end = s.row + s.bytes;
      for (; line < end && n < most; line += LINE) lines[n++] = line;
      s.line = line;
      if (line < end) break;
      s.line = s.row += s.stride;
      if (--s.rows == 0) ++at;
    }
    return n;
  }

 private:
  static constexpr int64_t LINE = 64;
  static constexpr int MOST_STRETCHES = 8;
  struct Stretch {
    const char *row, *line;
    int64_t bytes, stride, rows;
  };
  Stretch stretches[MOST_STRETCHES];
  int count = 0, at = 0;
};

}  // namespace
