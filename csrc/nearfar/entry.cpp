/// The entry points of near/far attention. Each returns flags (core/abi.h).
#include <memory>

#include "core/threads.h"
#include "nearfar/bidirectional_shape.h"

namespace {

/// Runs kernel(0) .. kernel(count - 1) in parallel and joins their flags; NO_MEMORY where one throws std::bad_alloc.
template <class Kernel>
int32_t run_kernels(int64_t count, int64_t threads, const Kernel& kernel) {
  std::atomic<int32_t> flags{OK};
  try {
    parallel_for(count, threads, [&](int64_t i) { flags |= kernel(i); });
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
  return flags;
}

/// The stages of attention without a causal mask; the tasks of a stage run in parallel. Throws std::bad_alloc.
int32_t run_bidirectional(const BidirectionalCall& c) {
  const BidirectionalKernels& kernels = nearfar_kernels().bidirectional;
  const int64_t heads = c.batch * c.kv_heads, blocks = block_count(c);
  BidirectionalSpace space{nullptr, 0, 0};
  int64_t parts = 0;
  for (int64_t kv = 0; kv < c.kv_heads; ++kv) {
    const BidirectionalShape shape(c, kv);
    if (shape.floats(c) > space.floats) space.floats = shape.floats(c);
    if (shape.parts > parts) parts = shape.parts;
  }
  // A task loads the window before and behind its blocks: four at least, and more where there are tasks enough.
  const int64_t share = heads * blocks / (4 * c.threads);
  space.blocks_per_task = share > 4 ? share : 4;
  const int64_t tasks = (blocks + space.blocks_per_task - 1) / space.blocks_per_task;
  const std::unique_ptr<float[]> floats(new float[size_t(heads * space.floats)]);
  space.at = floats.get();
  int32_t flags = run_kernels(heads, c.threads, [&](int64_t head) { return kernels.read_queries(c, space, head); });
  flags |=
      run_kernels(heads * parts, c.threads, [&](int64_t i) { return kernels.merge_part(c, space, i / parts, i % parts); });
  flags |= run_kernels(heads, c.threads, [&](int64_t head) { return kernels.merge_keys(c, space, head); });
  if (flags) return flags;
  return run_kernels(heads * tasks, c.threads, [&](int64_t i) { return kernels.attend(c, space, i / tasks, i % tasks); });
}

}  // namespace

/// The sizes of the call structures, which callers compare with their own.
EXPORT int64_t linattn_nearfar_call_size() { return sizeof(NearFarCall); }
EXPORT int64_t linattn_nearfar_far_cache_call_size() { return sizeof(FarCacheCall); }
EXPORT int64_t linattn_nearfar_merge_call_size() { return sizeof(MergeCall); }
EXPORT int64_t linattn_nearfar_bidirectional_call_size() { return sizeof(BidirectionalCall); }
EXPORT int64_t linattn_nearfar_grads_size() { return sizeof(NearFarGrads); }

/// New tokens, from a state to a state; outputs if c->out is given.
EXPORT int32_t linattn_nearfar_prefill(const NearFarCall* c) {
  const NearFarKernels& kernels = nearfar_kernels();
  const int64_t heads = c->batch * c->kv_heads;
  if (!c->far) return run_kernels(heads, c->threads, [&](int64_t head) { return kernels.prefill(*c, head); });
  // Heads with recall take longest and go first, so that no thread starts one while the others finish.
  const auto recalls = [&](int64_t head) { return c->far->recall[head % c->kv_heads] > 0; };
  return run_kernels(2 * heads, c->threads,
                     [&](int64_t i) { return recalls(i % heads) == (i < heads) ? kernels.prefill(*c, i % heads) : OK; });
}

/// One token inside a block, `step` after the tokens that shared->seen counts. `shared` holds what the calls of one block
/// have in common. The token's key and value go behind the `near_tokens` ones of near_new; query_samples_new and
/// moments_new are null where these do not change.
EXPORT int32_t linattn_nearfar_decode(const NearFarCall* shared, int64_t step, const void* query, const void* key,
                                      const void* value, void* near_new, int64_t near_tokens, const float* query_samples,
                                      float* query_samples_new, float* moments_new, float* out) {
  NearFarCall c = *shared;
  c.step = step, c.query = query, c.key = key, c.value = value;
  c.near_new = near_new, c.near_tokens_new = near_tokens + 1, c.query_samples = query_samples;
  c.query_samples_new = query_samples_new, c.moments_new = moments_new, c.out = out;
  const int64_t keys = near_tokens + c.slots / c.kv_heads + c.sinks + (c.far ? c.far->cells / 4 : 0);
  const int64_t work = c.batch * c.heads * keys * (c.dim + c.value_dim);
  const int64_t threads = work > 1000000 ? c.threads : 1;  // waking threads takes longer than a small step
  const NearFarKernels& kernels = nearfar_kernels();
  return run_kernels(c.batch * c.kv_heads, threads, [&](int64_t head) { return kernels.decode(c, head); });
}

/// Merges slots.
EXPORT int32_t linattn_nearfar_merge(const MergeCall* c) {
  const NearFarKernels& kernels = nearfar_kernels();
  return run_kernels(c->problems, c->threads, [&](int64_t i) { return kernels.merge(*c, i); });
}

/// The gradients of a prefill's inputs.
EXPORT int32_t linattn_nearfar_backward(const NearFarGrads* g) {
  const NearFarKernels& kernels = nearfar_kernels();
  const NearFarCall& c = *g->call;
  return run_kernels(c.batch * c.kv_heads, c.threads, [&](int64_t head) { return kernels.backward(*g, head); });
}

/// Attention without a causal mask and without a state.
EXPORT int32_t linattn_nearfar_bidirectional(const BidirectionalCall* c) {
  try {
    return run_bidirectional(*c);
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}
