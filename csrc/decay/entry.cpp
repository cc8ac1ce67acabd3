/// The entry points of the decayed sums.
#include "decay/backward_calls.h"

namespace {

/// Runs a call that has something to do. Returns its flags, or NO_MEMORY.
template <class Body>
int32_t guarded_call(const DecayCall& c, const Body& body) {
  if (c.batch * c.heads == 0) return OK;
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

}  // namespace

EXPORT int64_t linattn_decay_call_size() { return sizeof(DecayCall); }

EXPORT int32_t linattn_decay_forward(const DecayCall* c) {
  return guarded_call(*c, [&] { return forward_call(*c); });
}

EXPORT int64_t linattn_scan_layer_size() { return sizeof(ScanLayer); }

/// Convolution, scan and gate of a layer; c and layer are as csrc/decay/abi.h says.
EXPORT int32_t linattn_scan_layer(const DecayCall* c, const ScanLayer* layer) {
  return guarded_call(*c, [&] {
    const WorkLines lines(*c);
    // In slices, so that the threads end together even if one of them is slower; but not where a sequence is so long that
    // what rounding takes from its states is kept, which the states between slices do not hold.
    constexpr int64_t SLICE = 512, MOST = 16384;
    const int64_t slices = c->tokens > MOST ? 1 : (c->tokens + SLICE - 1) / SLICE;
    parallel_for_in_order(lines.count(), slices, c->threads, [&](int64_t i, int64_t slice) {
      DecayPart part = lines[i];
      part.begin = slice * SLICE, part.end = slice + 1 < slices ? part.begin + SLICE : c->tokens;
      decay_kernels().forward_layer(*c, *layer, part);
    });
    return int32_t(OK);
  });
}

/// One token of every head (T = 1, one sequence), with what calls of one shape have in common in `fixed`. Without a mask,
/// bad inputs are refused with NOT_FINITE before anything is written. tokens: counts to add 1 to, or null.
EXPORT int32_t linattn_decay_decode(const DecayCall* fixed, const void* query, const void* key, const void* value,
                                    const float* log_decay, const uint8_t* mask, const float* state, float* state_new,
                                    void* out, int64_t* tokens, int64_t threads) {
  DecayCall c = *fixed;
  c.query = query, c.key = key, c.value = value, c.log_decay = log_decay, c.mask = mask;
  c.state = state, c.state_new = state_new, c.out = out, c.threads = threads;
  if (!mask && !decay_kernels().step_fits(c)) return NOT_FINITE;
  return guarded_call(c, [&] {
    const int32_t flags = decode_call(c);
    return flags || mask ? flags : decay_kernels().step_flags(c, tokens);
  });
}
/// Gradients of every input, from the checkpoints of the forward pass.
EXPORT int32_t linattn_decay_backward(const DecayCall* c) {
  return guarded_call(*c, [&] { return backward_call(*c); });
}
