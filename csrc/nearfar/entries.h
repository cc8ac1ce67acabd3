/// Entries of a state and rows of work space; slots as the far field of a block.
#pragma once
#include "core/store_rows.h"
#include "nearfar/window.h"

namespace {

/// Consecutive entries of a state, a scaled key (D) beside a value (M) each, in the type that the state stores.
struct StoredEntries {
  char* at;
  int64_t dim, value_dim;
  int32_t dtype;

  StoredEntries(const NearFarCall& c, const void* base, int64_t first_number, int64_t stored)
      : at(static_cast<char*>(const_cast<void*>(base)) + first_number * dtype_size(int32_t(stored))),
        dim(c.dim),
        value_dim(c.value_dim),
        dtype(int32_t(stored)) {}

  /// Number d of entry i.
  INLINE char* number(int64_t i, int64_t d) const { return at + (i * (dim + value_dim) + d) * dtype_size(dtype); }

  /// Rows of work space from entry i, padded with 0.
  void load(int64_t i, float* key, float* value) const {
    load_row(dtype, number(i, 0), dim, 1, key);
    load_row(dtype, number(i, dim), value_dim, 1, value);
  }
  /// Entry i from rows of work space.
  void store(int64_t i, const float* key, const float* value) const {
    store_rows(dtype, key, 0, 1, dim, number(i, 0), 0);
    store_rows(dtype, value, 0, 1, value_dim, number(i, dim), 0);
  }
  /// Entry i becomes 0.
  void clear(int64_t i) const { memset(number(i, 0), 0, size_t((dim + value_dim) * dtype_size(dtype))); }
};

/// Rows of work space become 0.
inline void clear_rows(const NearFarCall& c, float* key, float* value) {
  memset(key, 0, size_t(row_stride(c.dim)) * 4);
  memset(value, 0, size_t(row_stride(c.value_dim)) * 4);
}

/// The sinks of a head, in a call's state before or after it.
INLINE StoredEntries sinks_of(const NearFarCall& c, const void* sink, int64_t head) {
  return {c, sink, head * c.sinks * (c.dim + c.value_dim), c.entry_dtype};
}
/// Its near tokens, with the stride of batch entries and heads.
INLINE StoredEntries near_of(const NearFarCall& c, const void* near, const int64_t* stride, int64_t head) {
  return {c, near, head / c.kv_heads * stride[0] + head % c.kv_heads * stride[1], c.entry_dtype};
}
/// The slots of all batch entries and heads.
INLINE StoredEntries slots_of(const NearFarCall& c, const void* slot) { return {c, slot, 0, c.entry_dtype}; }

/// Loads a new token of a head as the state will store it: rows (row_stride(D)) and (row_stride(M)), the key scaled.
INLINE void load_token(const NearFarCall& c, int64_t head, int64_t t, float* key, float* value) {
  const int64_t b = head / c.kv_heads, kv = head % c.kv_heads;
  load_row(c.dtype, token_ptr(c.dtype, c.key, c.key_stride, b, kv, t), c.dim, c.sqrt_scale, key);
  load_row(c.dtype, token_ptr(c.dtype, c.value, c.value_stride, b, kv, t), c.value_dim, 1, value);
  if (c.entry_dtype == FLOAT16) round_to_half(key, c.dim), round_to_half(value, c.value_dim);
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
