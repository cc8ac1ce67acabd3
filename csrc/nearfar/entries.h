/// Entries of a state and rows of work space; slots as the far field of a block.
#pragma once
#include "nearfar/entry_codes.h"
#include "nearfar/window.h"

namespace {

/// Numbers between two entries of a state: E = D + M, and behind codes the steps of key and value.
INLINE int64_t entry_width(const NearFarCall& c) {
  return c.dim + c.value_dim + (c.entry_dtype == CODES ? steps_bytes(c.dim) + steps_bytes(c.value_dim) : 0);
}

/// Consecutive entries of a state, a scaled key (D) beside a value (M) each, in the type that the state stores.
struct StoredEntries {
  char* at;
  int64_t dim, value_dim, bytes;  // bytes: of an entry
  int32_t dtype;

  StoredEntries(const NearFarCall& c, const void* base, int64_t first_number)
      : at(static_cast<char*>(const_cast<void*>(base)) + first_number * entry_size(c)),
        dim(c.dim),
        value_dim(c.value_dim),
        bytes(entry_width(c) * entry_size(c)),
        dtype(int32_t(c.entry_dtype)) {}

  /// Bytes of one number.
  static int64_t entry_size(const NearFarCall& c) {
    return c.entry_dtype == CODES ? 1 : dtype_size(int32_t(c.entry_dtype));
  }

  /// The key, the value and, in 8 bits, the steps of entry i.
  INLINE char* key(int64_t i) const { return at + i * bytes; }
  INLINE char* value(int64_t i) const { return key(i) + (dtype == CODES ? dim : dim * dtype_size(dtype)); }
  INLINE char* key_steps(int64_t i) const { return key(i) + dim + value_dim; }
  INLINE char* value_steps(int64_t i) const { return key_steps(i) + steps_bytes(dim); }

  /// Rows of work space from entry i, padded with 0.
  void load(int64_t i, float* key_row, float* value_row) const {
    if (dtype == CODES) {
      load_codes(key(i), key_steps(i), dim, key_row);
      load_codes(value(i), value_steps(i), value_dim, value_row);
    } else {
      load_row(dtype, key(i), dim, 1, key_row);
      load_row(dtype, value(i), value_dim, 1, value_row);
    }
  }
  /// Entry i from rows of work space.
  void store(int64_t i, const float* key_row, const float* value_row) const {
    if (dtype == CODES) {
      store_codes(key_row, dim, key(i), key_steps(i));
      store_codes(value_row, value_dim, value(i), value_steps(i));
    } else {
      store_rows(dtype, key_row, 0, 1, dim, key(i), 0);
      store_rows(dtype, value_row, 0, 1, value_dim, value(i), 0);
    }
  }
  /// Entry i becomes 0.
  void clear(int64_t i) const { memset(key(i), 0, size_t(bytes)); }
};

/// Rows of work space become 0.
inline void clear_rows(const NearFarCall& c, float* key, float* value) {
  memset(key, 0, size_t(row_stride(c.dim)) * 4);
  memset(value, 0, size_t(row_stride(c.value_dim)) * 4);
}

/// The sinks of a head, in a call's state before or after it.
INLINE StoredEntries sinks_of(const NearFarCall& c, const void* sink, int64_t head) {
  return {c, sink, head * c.sinks * entry_width(c)};
}
/// Its near tokens, with the stride of batch entries and heads.
INLINE StoredEntries near_of(const NearFarCall& c, const void* near, const int64_t* stride, int64_t head) {
  return {c, near, head / c.kv_heads * stride[0] + head % c.kv_heads * stride[1]};
}
/// The slots of all batch entries and heads.
INLINE StoredEntries slots_of(const NearFarCall& c, const void* slot) { return {c, slot, 0}; }

/// Rounds rows of work space, (D) and (M), to what an entry of the state holds.
INLINE void round_entry(const NearFarCall& c, float* key, float* value) {
  round_row(c.entry_dtype, key, c.dim), round_row(c.entry_dtype, value, c.value_dim);
}

/// Loads a new token of a head as the state will store it: rows (row_stride(D)) and (row_stride(M)), the key scaled.
INLINE void load_token(const NearFarCall& c, int64_t head, int64_t t, float* key, float* value) {
  const int64_t b = head / c.kv_heads, kv = head % c.kv_heads;
  load_row(c.dtype, token_ptr(c.dtype, c.key, c.key_stride, b, kv, t), c.dim, c.sqrt_scale, key);
  load_row(c.dtype, token_ptr(c.dtype, c.value, c.value_stride, b, kv, t), c.value_dim, 1, value);
  round_entry(c, key, value);
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
