/// Entries of a state and rows of work space; slots as the far field of a block.
#pragma once
#include "nearfar/window.h"

namespace {

/// Rows of work space from an entry (E) of a state, padded with 0; a null entry is 0.
inline void unpack_entry(const NearFarCall& c, const float* entry, float* key, float* value) {
  if (entry) {
    load_row(FLOAT32, entry, c.dim, 1, key);
    load_row(FLOAT32, entry + c.dim, c.value_dim, 1, value);
  } else {
    memset(key, 0, size_t(row_stride(c.dim)) * 4);
    memset(value, 0, size_t(row_stride(c.value_dim)) * 4);
  }
}

/// An entry (E) of a state from rows of work space.
inline void pack_entry(const NearFarCall& c, float* entry, const float* key, const float* value) {
  copy_row(entry, key, c.dim);
  copy_row(entry + c.dim, value, c.value_dim);
}

/// Turns the sinks, which lie before the slots in the same rows, and the slots into the keys and biases of the far field of
/// the block at `start`. Sinks that it does not see yet are hidden.
inline void set_far_field(const NearFarCall& c, const Slots& slots, int64_t start, FarField& far) {
  const int64_t n = c.sinks + slots.n, ld = row_stride(c.dim);
  transpose(slots.key - c.sinks * ld, ld, n, c.dim, far.key_t, far.ld);
  far.slots = slots.n;
  for (int64_t i = 0; i < c.sinks; ++i) far.bias[i] = i < start ? 0 : MASKED_LOGIT;
  for (int64_t i = 0; i < slots.n; ++i) far.bias[c.sinks + i] = slots.bias[i] * LOG2E_F;
  for (int64_t i = n; i < round_up(n, VL); ++i) far.bias[i] = MASKED_LOGIT;
}

}  // namespace
