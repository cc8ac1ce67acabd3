/// What a prefill unpacks of the far tokens: as much as fits, so that work space does not grow with them.
#pragma once
#include "nearfar/far_cache.h"

namespace {

constexpr int64_t MOST_BLOCKS = 8192, MOST_FLOATS = 1 << 23;  // that stay unpacked

/// Blocks that stay unpacked, of `units`.
inline int64_t unpacked_blocks(int64_t units, int64_t dim, int64_t value_dim) {
  const int64_t block = FarRows::key_floats(dim) + FarRows::value_floats(value_dim);
  return imin(units, imax(64, imin(MOST_BLOCKS, MOST_FLOATS / block)));
}

/// Keys and values of blocks, unpacked when they are needed. Blocks that are `places` apart share a place.
class UnpackedBlocks {
 public:
  /// Floats of work space.
  static int64_t floats(int64_t places, int64_t dim, int64_t value_dim) {
    return FarRows::floats(places, dim, value_dim) + 2 * places + 32 + FarCache::floats(dim, value_dim);
  }

  UnpackedBlocks(const FarCache& from, int64_t count, float*& at)
      : cache(from), rows(count, from.dim, from.value_dim, at), places(count) {
    key_block = reinterpret_cast<int32_t*>(carve(at, places)), value_block = reinterpret_cast<int32_t*>(carve(at, places));
    space = carve(at, FarCache::floats(cache.dim, cache.value_dim));
    for (int64_t i = 0; i < places; ++i) key_block[i] = value_block[i] = -1;
  }

  /// The keys, and the values, of a block as in FarRows, until another block is asked for.
  const float* keys(int64_t block) const {
    const int64_t at = block % places;
    if (key_block[at] != block) cache.load_keys(block, rows.keys(at), space), key_block[at] = int32_t(block);
    return rows.keys(at);
  }
  /// The values (UNIT, row_stride(M)) of a block.
  const float* values(int64_t block) const {
    const int64_t at = block % places;
    if (value_block[at] != block) cache.load_values(block, rows.values(at), space), value_block[at] = int32_t(block);
    return rows.values(at);
  }
  void prefetch_keys(int64_t block) const { rows.prefetch_keys(block % places); }
  void prefetch_values(int64_t block) const { rows.prefetch_values(block % places); }

  /// A block is stored anew.
  void forget(int64_t block) const {
    const int64_t at = block % places;
    if (key_block[at] == block) key_block[at] = -1;
    if (value_block[at] == block) value_block[at] = -1;
  }

 private:
  const FarCache& cache;
  const FarRows rows;
  const int64_t places;
  int32_t *key_block, *value_block;  // (places): which block is there, or -1
  float* space;
};

/// Bounds of blocks as columns of panels. The first panels stay unpacked; the others are unpacked when they are asked for.
class BoundPanels {
 public:
  static constexpr int64_t PANEL = 64;  // blocks of a panel

  static int64_t floats(int64_t panels, int64_t dim) {
    return 2 * (panels + 1) * PANEL * round_up(dim, VL) + 2 * PANEL * row_stride(dim) + 64;
  }

  BoundPanels(const FarCache& from, int64_t count, float*& at)
      : cache(from), kept(count), size(PANEL * round_up(from.dim, VL)) {
    means = carve(at, (kept + 1) * size), vars = carve(at, (kept + 1) * size);
    mean_rows = carve(at, PANEL * row_stride(cache.dim)), var_rows = carve(at, PANEL * row_stride(cache.dim));
    memset(means, 0, size_t((kept + 1) * size) * 4), memset(vars, 0, size_t((kept + 1) * size) * 4);
  }

  /// A block was stored.
  void add(int64_t block) const {
    if (block / PANEL >= kept) return;
    cache.load_bounds(block, mean_rows, var_rows);
    const int64_t at = block / PANEL * size + block % PANEL;
    for (int64_t d = 0; d < cache.dim; ++d) means[at + d * PANEL] = mean_rows[d], vars[at + d * PANEL] = var_rows[d];
  }

  /// mean, var: (D, PANEL) of the blocks from `first` on, until the next call. log_share (cells): tells which of the first
  /// `units` blocks have a token; the bounds of the others are 0.
  void get(int64_t first, int64_t units, const float* log_share, const float*& mean, const float*& var) const {
    const int64_t panel = imin(first / PANEL, kept), ld = row_stride(cache.dim);
    mean = means + panel * size, var = vars + panel * size;
    if (panel < kept) return;
    for (int64_t j = 0; j < PANEL; ++j) {
      if (first + j < units && cache.alive(log_share, first + j)) {
        cache.load_bounds(first + j, mean_rows + j * ld, var_rows + j * ld);
      } else {
        memset(mean_rows + j * ld, 0, size_t(ld) * 4), memset(var_rows + j * ld, 0, size_t(ld) * 4);
      }
    }
    transpose(mean_rows, ld, PANEL, cache.dim, means + panel * size, PANEL);
    transpose(var_rows, ld, PANEL, cache.dim, vars + panel * size, PANEL);
  }

 private:
  const FarCache& cache;
  const int64_t kept, size;     // panels that stay, and the floats of one
  float *means, *vars;          // (kept + 1, D, PANEL): the last one is for others
  float *mean_rows, *var_rows;  // (PANEL, row_stride(D))
};

}  // namespace
