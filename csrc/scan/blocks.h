/// Blocks of up to SCAN_SEGMENT tokens by VL channels, brought from the caller's memory into work space and back. In work
/// space a token is one vector, its lanes are channels. Either channels or tokens may be contiguous in the caller's memory:
/// models hold (batch, tokens, channels) and pass a transposed view, so that both orders are common.
#pragma once
#include "core/load_rows.h"
#include "scan/abi.h"

namespace {

constexpr int64_t BLOCK_FLOATS = SCAN_SEGMENT * VL;

/// float32 -> the nearest float16, ties to even.
INLINE uint16_t narrow_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (size < 0x38800000) {  // below 2^-14: adding 1/2 leaves a multiple of 2^-24 in the lowest bits
    float y;
    memcpy(&y, &size, 4);
    y += 0.5f;
    uint32_t low;
    memcpy(&low, &y, 4);
    return uint16_t(sign | (low - 0x3f000000));
  }
  return uint16_t(sign | ((size + 0xfff + ((size >> 13) & 1) - (112u << 23)) >> 13));
}

/// float32 -> the nearest bfloat16, ties to even.
INLINE uint16_t narrow_brain(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/// to (n) <- n numbers that are `stride` apart.
INLINE void widen(int64_t dtype, const void* at, int64_t first, int64_t stride, int64_t n, float* to) {
  if (dtype == FLOAT32) {
    const float* from = static_cast<const float*>(at) + first;
    if (stride == 1) {
      memcpy(to, from, size_t(n) * 4);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
    }
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(at) + first;
  if (dtype == FLOAT16) {
    for (int64_t i = 0; i < n; ++i) to[i] = half_to_float(from[i * stride]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = bfloat16_to_float(from[i * stride]);
  }
}

/// n numbers that are `stride` apart <- from (n).
INLINE void narrow(int64_t dtype, void* at, int64_t first, int64_t stride, int64_t n, const float* from) {
  if (dtype == FLOAT32) {
    float* to = static_cast<float*>(at) + first;
    if (stride == 1) {
      memcpy(to, from, size_t(n) * 4);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i * stride] = from[i];
    }
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(at) + first;
  if (dtype == FLOAT16) {
    for (int64_t i = 0; i < n; ++i) to[i * stride] = narrow_half(from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i * stride] = narrow_brain(from[i]);
  }
}

/// to (tokens, VL) <- channels [c, c + count) of tokens [t, t + tokens) of x (batch, channel, token); other lanes become 0.
void load_block(const Strided& x, int64_t batch, int64_t c, int64_t count, int64_t t, int64_t tokens, float* to) {
  const int64_t first = batch * x.stride[0] + c * x.stride[1] + t * x.stride[2];
  if (x.stride[1] == 1) {
    if (x.dtype == FLOAT32 && count == VL) {
      const float* from = static_cast<const float*>(x.at) + first;
      for (int64_t i = 0; i < tokens; ++i) store(to + i * VL, load(from + i * x.stride[2]));
      return;
    }
    for (int64_t i = 0; i < tokens; ++i) {
      for (int64_t k = count; k < VL; ++k) to[i * VL + k] = 0;
      widen(x.dtype, x.at, first + i * x.stride[2], 1, count, to + i * VL);
    }
    return;
  }
  alignas(64) float rows[BLOCK_FLOATS];  // (VL, SCAN_SEGMENT)
  const int64_t full = round_up(tokens, VL);
  for (int64_t k = 0; k < VL; ++k) {
    float* row = rows + k * SCAN_SEGMENT;
    const int64_t n = k < count ? tokens : 0;
    if (n) widen(x.dtype, x.at, first + k * x.stride[1], x.stride[2], n, row);
    for (int64_t i = n; i < full; ++i) row[i] = 0;
  }
  alignas(64) float turned[BLOCK_FLOATS];
  const bool whole = full == tokens;
  transpose(rows, SCAN_SEGMENT, VL, tokens, whole ? to : turned, VL);
  if (!whole) memcpy(to, turned, size_t(tokens * VL) * 4);
}

/// The memory of a block in SCAN_SEGMENT pieces, prefetched one by one while something else is computed: the hardware does
/// not foresee rows that are pages apart. Piece i is at first + i / PIECES * row + i % PIECES * piece.
struct BlockLines {
  static constexpr int64_t PIECES = SCAN_SEGMENT / VL;
  const char* first = nullptr;  // null: nothing to prefetch
  int64_t row = 0, piece = 0;   // bytes

  BlockLines() = default;
  BlockLines(const Strided& x, int64_t batch, int64_t c, int64_t t) {
    if (!x.at) return;
    const int64_t bytes = dtype_size(int32_t(x.dtype));
    first = static_cast<const char*>(x.at) + (batch * x.stride[0] + c * x.stride[1] + t * x.stride[2]) * bytes;
    const bool tokens_apart = x.stride[1] == 1;  // a piece is the channels of one token, else VL tokens of one channel
    piece = tokens_apart ? x.stride[2] * bytes : VL * bytes;
    row = tokens_apart ? PIECES * piece : x.stride[1] * bytes;
  }
  INLINE void prefetch(int64_t i) const {
    if (first) __builtin_prefetch(first + i / PIECES * row + i % PIECES * piece, 0, 2);
  }
};

/// The inverse of load_block.
void store_block(const Strided& x, int64_t batch, int64_t c, int64_t count, int64_t t, int64_t tokens, const float* from) {
  const int64_t first = batch * x.stride[0] + c * x.stride[1] + t * x.stride[2];
  if (x.stride[1] == 1) {
    if (x.dtype == FLOAT32 && count == VL) {
      float* to = static_cast<float*>(x.at) + first;
      for (int64_t i = 0; i < tokens; ++i) store(to + i * x.stride[2], load(from + i * VL));
      return;
    }
    for (int64_t i = 0; i < tokens; ++i) {
      narrow(x.dtype, x.at, first + i * x.stride[2], 1, count, from + i * VL);
    }
    return;
  }
  alignas(64) float rows[BLOCK_FLOATS];  // (VL, SCAN_SEGMENT)
  transpose(from, VL, tokens, VL, rows, SCAN_SEGMENT);
  for (int64_t k = 0; k < count; ++k) {
    narrow(x.dtype, x.at, first + k * x.stride[1], x.stride[2], tokens, rows + k * SCAN_SEGMENT);
  }
}

/// to (columns, VL) <- x (channels, columns) contiguous, channels [c, c + count), times `factor`; other lanes and the
/// columns up to `padded` become 0.
void load_columns(const float* x, int64_t columns, int64_t c, int64_t count, int64_t padded, float factor, float* to) {
  for (int64_t j = 0; j < padded; ++j) {
    for (int64_t k = 0; k < VL; ++k) to[j * VL + k] = j < columns && k < count ? x[(c + k) * columns + j] * factor : 0;
  }
}

/// x (channels, columns) <- from (columns, VL).
void store_columns(float* x, int64_t columns, int64_t c, int64_t count, const float* from) {
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t j = 0; j < columns; ++j) x[(c + k) * columns + j] = from[j * VL + k];
  }
}

}  // namespace
