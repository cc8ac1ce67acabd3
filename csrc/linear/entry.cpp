/// The entry points of linear attention. Each returns flags (core/abi.h).
#include "linear/backward_calls.h"
#include "linear/forward_calls.h"

namespace {

/// Runs `body` unless there is nothing to do; NO_MEMORY where it throws std::bad_alloc.
template <class Body>
int32_t run_call(const LinearCall& c, const Body& body) {
  if (c.batch * c.kv_heads == 0) return OK;
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

}  // namespace

/// The size of a LinearCall, which callers compare with their own.
EXPORT int64_t linattn_linear_call_size() { return sizeof(LinearCall); }

/// Non-causal: adds keys and values to the state.
EXPORT int32_t linattn_linear_update_state(const LinearCall* c) {
  return run_call(*c, [&] { return update_state(*c); });
}

/// Non-causal: outputs of queries from a state.
EXPORT int32_t linattn_linear_read_state(const LinearCall* c) {
  return run_call(*c, [&] { return read_state(*c); });
}

/// Causal attention, from a state to a state.
EXPORT int32_t linattn_linear_causal_forward(const LinearCall* c) {
  return run_call(*c, [&] { return causal_forward(*c); });
}

/// Backward of update_state: gradients of keys and values.
EXPORT int32_t linattn_linear_update_state_backward(const LinearCall* c) {
  return run_call(*c, [&] { return update_state_backward(*c); });
}

/// Backward of read_state: gradients of queries and state.
EXPORT int32_t linattn_linear_read_state_backward(const LinearCall* c) {
  return run_call(*c, [&] { return read_state_backward(*c); });
}

/// Backward of causal_forward, from its checkpoints.
EXPORT int32_t linattn_linear_causal_backward(const LinearCall* c) {
  return run_call(*c, [&] { return causal_backward(*c); });
}

/// Stateless forward. `shared` holds what all calls of one shape have in common.
EXPORT int32_t linattn_linear_forward(const LinearCall* shared, const void* query, const void* key, const void* value,
                                      float* out, int64_t threads, int32_t is_causal) {
  LinearCall c = *shared;
  c.query = query, c.key = key, c.value = value, c.out = out, c.threads = threads;
  return run_call(c, [&] { return forward(c, is_causal); });
}

/// One token. `shared` holds what all tokens have in common. The new state is one buffer (PackedState); the old one is such
/// a buffer too, or the five tensors S, Z, log_scale, tokens, guarded in `parts`. weights (weight_bytes), or null: those of
/// the kernel, which must still have this checksum.
EXPORT int32_t linattn_linear_decode(const LinearCall* shared, const void* query, const void* key, const void* value,
                                     const void* const* parts, float* old_state, float* new_state, float* out,
                                     const uint8_t* weights, int64_t weight_bytes, uint64_t checksum) {
  if (weights && linattn_checksum(weights, weight_bytes) != checksum) return STALE;
  LinearCall c = *shared;
  c.query = query, c.key = key, c.value = value, c.out = out;
  if (parts) {
    c.S = static_cast<const float*>(parts[0]), c.Z = static_cast<const float*>(parts[1]);
    c.log_scale = static_cast<const float*>(parts[2]);
    c.tokens = static_cast<const int64_t*>(parts[3]), c.guarded = static_cast<const int64_t*>(parts[4]);
  } else {
    const PackedState p(c, old_state);
    c.S = p.S, c.Z = p.Z, c.log_scale = p.log_scale, c.tokens = p.tokens, c.guarded = p.guarded;
  }
  const PackedState p(c, new_state);
  c.S_new = p.S, c.Z_new = p.Z, c.log_scale_new = p.log_scale, c.tokens_new = p.tokens, c.guarded_new = p.guarded;
  return run_call(c, [&] { return decode(c); });
}
