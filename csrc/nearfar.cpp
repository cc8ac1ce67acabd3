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

EXPORT int32_t linattn_nearfar_step(const NearFarCall* c) {
  const int64_t keys = c->held_new + c->slots / c->kv_heads + c->sinks;
  const int64_t work = c->batch * c->heads * keys * (c->dim + c->value_dim);
  const int64_t threads = work > 1000000 ? c->threads : 1;  // waking threads takes longer than a small step
  return run_all(c->batch * c->kv_heads, threads, [&](int64_t head) { return pieces().near_far.step(*c, head); });
}

EXPORT int32_t linattn_merge_slots(const MergeCall* c) {
  return run_all(c->problems, c->threads, [&](int64_t i) { return pieces().near_far.merge(*c, i); });
}
