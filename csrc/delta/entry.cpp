/// The entry points of the delta rule.
#include <algorithm>

#include "core/threads.h"
#include "delta/layer_step.h"

namespace {

/// Columns of values in one of `parts` parts: whole groups of 16.
int64_t part_bound(int64_t columns, int64_t part, int64_t parts) {
  const int64_t at = (columns + 15) / 16 * part / parts * 16;
  return at < columns ? at : columns;
}

/// Runs work(part, index) for every head of every sequence, its value columns in `parts` parts. Returns flags.
template <class Work>
int32_t run_parts(const DeltaCall& c, int64_t parts, const Work& work) {
  try {
    const int64_t heads = c.batch * c.sequences * c.heads;
    parallel_for(heads * parts, c.threads, [&](int64_t i) {
      const int64_t part = i % parts, head = i / parts % c.heads, state = i / parts / c.heads;
      const int64_t begin = part_bound(c.value_dim, part, parts), end = part_bound(c.value_dim, part + 1, parts);
      work(DeltaPart{state / c.sequences, state % c.sequences, head, begin, end}, part);
    });
    return OK;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

/// Into how many parts the value columns are cut so that every thread has work: each repeats the products of keys and
/// queries, so none has fewer than 32 columns.
int64_t useful_parts(const DeltaCall& c) {
  const int64_t heads = c.batch * c.sequences * c.heads, most = c.value_dim / 32 > 1 ? c.value_dim / 32 : 1;
  if (heads == 0 || heads >= c.threads) return 1;
  const int64_t wanted = (c.threads + heads - 1) / heads;
  return wanted < most ? wanted : most;
}

}  // namespace

EXPORT int64_t linattn_delta_call_size() { return sizeof(DeltaCall); }

EXPORT int64_t linattn_delta_layer_size() { return sizeof(DeltaLayer); }

EXPORT int32_t linattn_delta_forward(const DeltaCall* c) {
  return run_parts(*c, useful_parts(*c), [&](const DeltaPart& part, int64_t) { delta_kernels().forward(*c, part); });
}

/// Convolution, rule and norm of a layer; c and layer are as csrc/delta/abi.h says.
EXPORT int32_t linattn_delta_layer(const DeltaCall* c, const DeltaLayer* layer) {
  const int64_t shared = c->heads / c->key_heads, keys = c->batch * c->key_heads;
  // Heads that share keys stay together, unless they decay by channels or some thread would have nothing to do in the end.
  const bool even = !c->channels && (keys % c->threads == 0 || keys >= 4 * c->threads);
  const int64_t together = even ? (shared < MOST_SHARED ? shared : MOST_SHARED) : 1,
                groups = (shared + together - 1) / together;
  try {
    // By segments, so that the threads end together even if one of them is slower.
    const int64_t slices = (c->tokens + SEGMENT - 1) / SEGMENT;
    parallel_for_in_order(keys * groups, slices, c->threads, [&](int64_t i, int64_t slice) {
      const int64_t key = i / groups, first = i % groups * together, left = shared - first, begin = slice * SEGMENT;
      const int64_t count = left < together ? left : together, end = slice + 1 < slices ? begin + SEGMENT : c->tokens;
      delta_kernels().forward_layer(*c, *layer,
                                    {key / c->key_heads, key % c->key_heads * shared + first, count, begin, end});
    });
    return OK;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

/// How many parts a backward call is cut into: callers make room for the gradients of each.
EXPORT int64_t linattn_delta_parts(const DeltaCall* c) { return useful_parts(*c); }

EXPORT int32_t linattn_delta_backward(const DeltaCall* c) {
  return run_parts(*c, c->parts, [&](const DeltaPart& p, int64_t part) { delta_kernels().backward(*c, p, part); });
}

/// One token for every head of the batch, with everything that stays the same from step to step in `fixed`. Without a mask,
/// bad inputs are refused with NOT_FINITE before anything is written. tokens: counts to add 1 to, or null.
EXPORT int32_t linattn_delta_step(const DeltaCall* fixed, const void* query, const void* key, const void* value,
                                  const float* beta, const float* log_decay, const uint8_t* mask, const float* state,
                                  float* state_new, void* out, int64_t* tokens, int64_t threads) {
  DeltaCall c = *fixed;
  const int64_t bounds[2] = {0, 1};
  c.bounds = bounds, c.sequences = 1;
  c.query = query, c.key = key, c.value = value, c.beta = beta, c.log_decay = log_decay, c.mask = mask;
  c.state = state, c.state_new = state_new, c.out = out;
  if (!mask && !delta_kernels().step_fits(c)) return NOT_FINITE;
  // A thread is worth waking for about 100 KB of state. Each takes one run of heads, the same ones in every step, so that
  // their states stay in its cache.
  const int64_t heads = c.batch * c.heads, worth = heads * c.dim * c.value_dim * 4 / 100000 + 1;
  const int64_t workers = worth < threads ? worth : threads;
  try {
    parallel_for(workers, workers, [&](int64_t i) {
      const int64_t first = heads * i / workers;
      delta_kernels().decode(c, first, heads * (i + 1) / workers - first);
    });
    return mask ? OK : delta_kernels().step_flags(c, tokens);
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

namespace {

/// The rule of all batch entries; by itself each, if one of them is not finite.
int32_t step_entries(const DeltaLayerStep& s, const StepSpace& space) {
  const StepChannels channels(s);
  DeltaCall rule = step_rule(s);
  const auto step = [&](int64_t first, int64_t count) {
    rule.batch = count;
    const float* rows[3];
    for (int i = 0; i < 3; ++i) rows[i] = space.rows[i] + first * channels.part[i];
    const float *beta = space.beta + first * s.heads, *log_decay = space.log_decay + first * rule.decay_stride[0];
    float *state = s.state + first * s.heads * s.dim * s.value_dim, *out = space.out + first * s.heads * s.value_dim;
    const int32_t flags = linattn_delta_step(&rule, rows[0], rows[1], rows[2], beta, log_decay, nullptr, state, state, out,
                                             nullptr, s.threads);
    if (flags == NOT_FINITE) std::fill(out, out + count * s.heads * s.value_dim, std::nanf(""));
    return flags;
  };
  int32_t flags = step(0, s.batch);
  if (flags != NOT_FINITE || s.batch == 1) return flags;
  for (int64_t i = 0; i < s.batch; ++i) flags |= step(i, 1);
  return flags;
}

}  // namespace

EXPORT int64_t linattn_delta_layer_step_size() { return sizeof(DeltaLayerStep); }

/// One token of a layer. Where the inputs of a batch entry are not finite, its outputs are NaN and its state stays as it
/// is.
EXPORT int32_t linattn_delta_layer_step(const DeltaLayerStep* s) {
  const StepChannels channels(*s);
  try {
    const StepSpace space(*s);
    for (int64_t i = 0, first = 0; i < 3; first += channels.part[i++]) {
      mixer_kernels().conv_step(step_convolution(*s, int(i), first, channels.part[i], space.rows[i]));
    }
    delta_kernels().step_gates(*s, space.beta, space.log_decay);
    const int32_t flags = step_entries(*s, space);
    if (!(flags & NO_MEMORY)) mixer_kernels().gated_norm(step_norm(*s, space.out), 0, s->batch * s->heads);
    return flags;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}
