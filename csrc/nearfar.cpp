// The entry points of near/far attention: heads go to threads.
#include "dispatch.h"

namespace {

template <class Work>
int32_t run_all(int64_t count, int64_t threads, const Work& work) {
  std::atomic<int32_t> flags{OK};
  try {
    run(count, threads, [&](int64_t i) { flags |= work(i); });
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
  return flags;
}

}  // namespace

EXPORT int64_t linattn_nearfar_call_size() { return sizeof(NearFarCall); }
EXPORT int64_t linattn_merge_call_size() { return sizeof(MergeCall); }

EXPORT int32_t linattn_nearfar_walk(const NearFarCall* c) {
  return run_all(c->batch * c->kv_heads, c->threads, [&](int64_t head) { return pieces().near_far.walk(*c, head); });
}

// One token, `steps` after those that c.seen counts; everything that stays the same inside a block is in `fixed`.
// The new token goes behind the `held` ones of near_new; queries_new and moments_new: null where they stay as they are.
EXPORT int32_t linattn_nearfar_step(const NearFarCall* fixed, int64_t steps, const void* query, const void* key,
                                    const void* value, float* near_new, int64_t held, const float* queries,
                                    float* queries_new, float* moments_new, float* out) {
  NearFarCall c = *fixed;
  c.steps = steps, c.query = query, c.key = key, c.value = value;
  c.near_new = near_new, c.held_new = held + 1, c.queries = queries;
  c.queries_new = queries_new, c.moments_new = moments_new, c.out = out;
  const int64_t keys = held + c.slots / c.kv_heads + c.sinks;
  const int64_t work = c.batch * c.heads * keys * (c.dim + c.value_dim);
  const int64_t threads = work > 1000000 ? c.threads : 1;  // waking threads takes longer than a small step
  return run_all(c.batch * c.kv_heads, threads, [&](int64_t head) { return pieces().near_far.step(c, head); });
}

EXPORT int32_t linattn_merge_slots(const MergeCall* c) {
  return run_all(c->problems, c->threads, [&](int64_t i) { return pieces().near_far.merge(*c, i); });
}
