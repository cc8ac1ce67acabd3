/// The far tokens of a head with recall: blocks of a few tokens in 32, 16 or 8 bits, with bounds of their keys, as they are
/// stored, and as float32 in work space. nearfar/far_cache.py has the same rules.
#pragma once
#include "core/row_ops.h"
#include "core/store_rows.h"
#include "nearfar/abi.h"

namespace {

constexpr int64_t UNIT = 8;            // most tokens of a block
constexpr float LEVELS = 127;          // int8 codes on each side of 0
constexpr float LARGEST_HALF = 65504;  // the largest float16
constexpr float LEAST_RANGE = 1e-12f;  // what codes are divided by is at least this

/// Asks for n floats that will be needed soon.
INLINE void prefetch_floats(const float* at, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(at + i);
}

/// Blocks of far tokens in work space. Keys are columns of UNIT tokens, values rows; what is behind a block's tokens is 0.
struct FarRows {
  int64_t dim, value_dim;
  float *key_t, *value;  // (places, key_floats), (places, UNIT, row_stride(M))

  /// Floats of a block's keys (D, UNIT): a vector may be written behind the last row.
  static int64_t key_floats(int64_t dim) { return round_up(dim, VL) * UNIT + 16; }
  static int64_t value_floats(int64_t value_dim) { return UNIT * row_stride(value_dim); }
  static int64_t floats(int64_t places, int64_t dim, int64_t value_dim) {
    return places * (key_floats(dim) + value_floats(value_dim)) + 32;
  }
  FarRows(int64_t places, int64_t key_dim, int64_t width, float*& at) : dim(key_dim), value_dim(width) {
    key_t = carve(at, places * key_floats(dim)), value = carve(at, places * value_floats(value_dim));
  }
  float* keys(int64_t place) const { return key_t + place * key_floats(dim); }
  float* values(int64_t place) const { return value + place * value_floats(value_dim); }
  void prefetch_keys(int64_t place) const { prefetch_floats(keys(place), dim * UNIT); }
  void prefetch_values(int64_t place) const { prefetch_floats(values(place), value_floats(value_dim)); }
};

/// What is stored of one head.
class FarCache {
 public:
  int64_t dim, value_dim, unit, cells;  // cells: before the call
  const int64_t* slot;                  // (cells)
  const float* log_share;               // (cells)

  FarCache(const NearFarCall& c, int64_t b, int64_t kv)
      : dim(c.dim), value_dim(c.value_dim), unit(c.far->unit), cells(c.far->cells), far(*c.far) {
    const int64_t head = b * far.heads + far.row[kv], size = far.bits / 8;
    entries = static_cast<char*>(far.entries) + head * far.capacity * (dim + value_dim) * size;
    bounds = static_cast<char*>(far.bounds) + head * (far.capacity / unit) * bounds_bytes();
    slot = far.slot + head * cells, log_share = far.log_share + head * cells;
  }

  /// Floats of work space that the functions below need.
  static int64_t floats(int64_t dim, int64_t value_dim) {
    return UNIT * (row_stride(dim) + row_stride(value_dim)) + 4 * row_stride(dim) + 128;
  }

  /// Whether a block has a token, by the log-shares (cells) of all tokens. Mostly its last cell tells.
  INLINE bool alive(const float* shares, int64_t block) const {
    bool any = shares[(block + 1) * unit - 1] > -__builtin_inff();
    for (int64_t i = block * unit; !any && i < (block + 1) * unit; ++i) any = shares[i] > -__builtin_inff();
    return any;
  }

  /// mean, var (row_stride(D)): the bounds of a block, padded with 0.
  void load_bounds(int64_t block, float* mean, float* var) const {
    load_row(bounds_type(), bound(block, 0), dim, 1, mean);
    load_row(bounds_type(), bound(block, dim), dim, 1, var);
    if (far.position >= 0) mean[far.position] = middle(block);
  }

  /// products (2 R, VL), each to be summed over its lanes: R queries x (R, ld) times the means of VL blocks from `first`
  /// on, and their squares (R, ld) times the variances. units: all blocks; behind them, the last one is repeated.
  template <int R>
  INLINE void bound_products(int64_t first, int64_t units, const float* x, const float* squares, int64_t ld,
                             vec (&products)[2 * R][VL]) const {
    for (int k = 0; k < VL; k += 4) {
      const char* from[4];
      for (int i = 0; i < 4; ++i) from[i] = bound(imin(first + k + i, units - 1), 0);
      if (far.bits == 32) {
        sum_bounds<float, R>(from, 0, x, ld, products, k), sum_bounds<float, R>(from, 1, squares, ld, products, k);
      } else {
        sum_bounds<uint16_t, R>(from, 0, x, ld, products, k), sum_bounds<uint16_t, R>(from, 1, squares, ld, products, k);
      }
    }
    for (int64_t k = 0; far.position >= 0 && k < VL; ++k) {
      const int64_t block = imin(first + k, units - 1);
      const char* at = bound(block, far.position);
      const float mean =
          far.bits == 32 ? *reinterpret_cast<const float*>(at) : half_to_float(*reinterpret_cast<const uint16_t*>(at));
      for (int r = 0; r < R; ++r) products[2 * r][k][0] += (middle(block) - mean) * x[r * ld + far.position];
    }
  }

  /// to (FarRows::key_floats): the keys of a block.
  void load_keys(int64_t block, float* to, float* space) const {
    const int64_t ld = row_stride(dim);
    float* keys = carve(space, UNIT * ld);
    if (far.bits == 8) load_key_codes(block, keys);
    for (int64_t i = 0; far.bits > 8 && i < unit; ++i) {
      load_row(entry_type(), entry(block * unit + i, 0), dim, 1, keys + i * ld);
    }
    for (int64_t i = 0; far.position >= 0 && i < unit; ++i) keys[i * ld + far.position] = place(float(block * unit + i));
    memset(keys + unit * ld, 0, size_t((UNIT - unit) * ld) * 4);
    transpose(keys, ld, UNIT, dim, to, UNIT);
  }

  /// to (FarRows::value_floats): the values of a block.
  void load_values(int64_t block, float* to, float* space) const {
    const int64_t lv = row_stride(value_dim);
    if (far.bits == 8) load_value_codes(block, to, space);
    for (int64_t i = 0; far.bits > 8 && i < unit; ++i) {
      load_row(entry_type(), entry(block * unit + i, dim), value_dim, 1, to + i * lv);
    }
    memset(to + unit * lv, 0, size_t((UNIT - unit) * lv) * 4);
  }

  /// Stores a block of keys (unit, row_stride(D)) and values (unit, row_stride(M)), the first `missing` of which are no far
  /// tokens.
  void store_block(int64_t block, const float* keys, const float* values, int64_t missing, float* space) const {
    const int64_t ld = row_stride(dim);
    float *mean = carve(space, ld), *var = carve(space, ld);
    moments(keys + missing * ld, unit - missing, mean, var);
    for (int64_t d = 0; far.bits == 8 && d < dim; ++d) {
      mean[d] = fmax2(-LARGEST_HALF, fmin2(mean[d], LARGEST_HALF)), var[d] = fmin2(var[d], LARGEST_HALF);
    }
    store_rows(bounds_type(), mean, 0, 1, dim, bound(block, 0), 0);
    store_rows(bounds_type(), var, 0, 1, dim, bound(block, dim), 0);
    if (far.bits == 8) key_scale(block, mean, var);
    for (int64_t i = 0; i < unit; ++i) {
      const float *key = keys + i * ld, *value = values + i * row_stride(value_dim);
      const int64_t cell = block * unit + i;
      if (i < missing) {
        memset(entry(cell, 0), 0, size_t((dim + value_dim) * far.bits / 8));
        if (far.bits == 8) memset(bound(block, 2 * dim + i), 0, 2);
      } else if (far.bits == 8) {
        store_codes(block, i, key, value, mean, var);
      } else {
        store_rows(entry_type(), key, 0, 1, dim, entry(cell, 0), 0);
        store_rows(entry_type(), value, 0, 1, value_dim, entry(cell, dim), 0);
      }
    }
  }

 private:
  const FarCacheCall& far;
  char *entries, *bounds;

  static float fmin2(float a, float b) { return a < b ? a : b; }
  int32_t entry_type() const { return far.bits == 32 ? FLOAT32 : FLOAT16; }  // not for 8 bits
  int32_t bounds_type() const { return far.bits == 32 ? FLOAT32 : FLOAT16; }
  int64_t bounds_bytes() const { return (2 * dim + (far.bits == 8 ? unit : 0)) * dtype_size(bounds_type()); }
  /// Number d of a token's entry, and of a block's bounds.
  char* entry(int64_t cell, int64_t d) const { return entries + (cell * (dim + value_dim) + d) * (far.bits / 8); }
  char* bound(int64_t block, int64_t d) const { return bounds + block * bounds_bytes() + d * dtype_size(bounds_type()); }
  /// The same of a token that is stored in 8 bits.
  int8_t* codes(int64_t cell, int64_t d) const { return reinterpret_cast<int8_t*>(entry(cell, d)); }
  /// The coordinate that holds the position of a cell.
  float place(float cell) const { return (cell - float(far.shift)) * far.position_unit; }
  float middle(int64_t block) const { return place(float(block * unit) + float(unit - 1) / 2); }

  /// products[2 r + which][k ..]: those of R rows x (R, ld) with the means, or the variances, of four blocks.
  template <class Number, int R>
  INLINE void sum_bounds(const char* const* from, int which, const float* x, int64_t ld, vec (&products)[2 * R][VL],
                         int k) const {
    vec sums[4][R] = {};
    for (int64_t d = 0; d < dim; d += VL) {
      vec row[R];
      for (int r = 0; r < R; ++r) row[r] = load(x + r * ld + d);
      UNROLL(4)
      for (int i = 0; i < 4; ++i) {
        const vec y = load_some_numbers(reinterpret_cast<const Number*>(from[i]) + which * dim + d, dim - d);
        UNROLL(4)
        for (int r = 0; r < R; ++r) sums[i][r] += y * row[r];
      }
    }
    for (int i = 0; i < 4; ++i) {
      for (int r = 0; r < R; ++r) products[2 * r + which][k + i] = sums[i][r];
    }
  }

  /// mean, var (D) of n keys (row_stride(D)), padded to whole vectors.
  void moments(const float* keys, int64_t n, float* mean, float* var) const {
    const int64_t ld = row_stride(dim);
    for (int64_t d = 0; d < dim; d += VL) {
      vec total = {}, squares = {};
      for (int64_t i = 0; i < n; ++i) total += load(keys + i * ld + d);
      total /= float(n);
      for (int64_t i = 0; i < n; ++i) squares += (load(keys + i * ld + d) - total) * (load(keys + i * ld + d) - total);
      store(mean + d, total), store(var + d, squares / float(n));
    }
  }

  /// mean, radius (row_stride(D)): of the keys of a block in 8 bits, as they are stored.
  void key_scale(int64_t block, float* mean, float* radius) const {
    load_row(FLOAT16, bound(block, 0), dim, 1, mean);
    load_row(FLOAT16, bound(block, dim), dim, 1, radius);
    for (int64_t d = 0; d < dim; d += VL) store(radius + d, sqrtv(load(radius + d) * float(unit - 1)));
  }

  /// Keys (unit, row_stride(D)) of a block from their codes.
  void load_key_codes(int64_t block, float* keys) const {
    const int64_t ld = row_stride(dim);
    const uint16_t* bounds_of = reinterpret_cast<const uint16_t*>(bound(block, 0));
    for (int64_t d = 0; d < dim; d += VL) {
      const vec mean = load_some_numbers(bounds_of + d, dim - d), var = load_some_numbers(bounds_of + dim + d, dim - d);
      const vec step = sqrtv(var * float(unit - 1)) / LEVELS;
      for (int64_t i = 0; i < unit; ++i) {
        store(keys + i * ld + d, load_some_numbers(codes(block * unit + i, d), dim - d) * step + mean);
      }
    }
    for (int64_t i = 0; i < unit; ++i) memset(keys + i * ld + round_up(dim, VL), 0, size_t(ld - round_up(dim, VL)) * 4);
  }

  /// Values (unit, row_stride(M)) of a block from their codes.
  void load_value_codes(int64_t block, float* values, float* space) const {
    const int64_t lv = row_stride(value_dim);
    float* top = carve(space, 16);
    load_row(FLOAT16, bound(block, 2 * dim), unit, 1, top);
    for (int64_t i = 0; i < unit; ++i) {
      const float factor = top[i] / LEVELS;
      for (int64_t d = 0; d < lv; d += VL) {
        store(values + i * lv + d,
              d < value_dim ? load_some_numbers(codes(block * unit + i, dim + d), value_dim - d) * factor : vec{});
      }
    }
  }

  /// The codes of token i of a block with this mean and radius of its keys, and the range of its value.
  void store_codes(int64_t block, int64_t i, const float* key, const float* value, const float* mean,
                   const float* radius) const {
    int8_t* code = codes(block * unit + i, 0);
    for (int64_t d = 0; d < dim; ++d) code[d] = quantized((key[d] - mean[d]) / fmax2(radius[d], LEAST_RANGE));
    float top = 0;
    for (int64_t d = 0; d < value_dim; ++d) top = fmax2(top, __builtin_fabsf(value[d]));
    const uint16_t half = narrow_half(fmin2(top, LARGEST_HALF));
    memcpy(bound(block, 2 * dim + i), &half, 2);
    top = fmax2(half_to_float(half), LEAST_RANGE);
    for (int64_t d = 0; d < value_dim; ++d) code[dim + d] = quantized(value[d] / top);
  }

  /// The code of x in [-1, 1].
  static int8_t quantized(float x) {
    const float code = __builtin_rintf(LEVELS * x);
    return int8_t(code > -LEVELS ? (code < LEVELS ? code : LEVELS) : -LEVELS);  // NaN: -127
  }
};

}  // namespace
