/// The entry points of the steps around an update rule: rows and heads go to threads.
#include "core/partition.h"
#include "mixer/abi.h"

namespace {

/// Runs work(first, last) for `count` items in about equal pieces; a thread is worth waking for about 100 KB.
template <class Work>
int32_t run_pieces(int64_t count, int64_t bytes, int64_t threads, const Work& work) {
  const int64_t worth = bytes / 100000 + 1, workers = worth < threads ? worth : threads;
  const int64_t wanted = workers > 1 ? 4 * workers : 1, pieces = wanted < count ? wanted : count;
  try {
    parallel_for(pieces, workers, [&](int64_t i) { work(count * i / pieces, count * (i + 1) / pieces); });
    return OK;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

}  // namespace

EXPORT int64_t linattn_norm_call_size() { return sizeof(NormCall); }
EXPORT int64_t linattn_conv_step_size() { return sizeof(ConvStep); }
EXPORT int64_t linattn_ssd_step_size() { return sizeof(SsdStep); }
EXPORT int64_t linattn_project_call_size() { return sizeof(ProjectCall); }

/// out (rows, size): normalised and gated rows. Returns flags.
EXPORT int32_t linattn_gated_norm(const NormCall* c) {
  return run_pieces(c->rows, c->rows * c->size * 4, c->threads,
                    [&](int64_t first, int64_t last) { mixer_kernels().gated_norm(*c, first, last); });
}

EXPORT int32_t linattn_conv_step(const ConvStep* c) {
  return run_pieces(1, 0, 1, [&](int64_t, int64_t) { mixer_kernels().conv_step(*c); });
}

/// One token of Mamba-2: out (B, heads, dim), and the state (B, heads, dim, states) moves on. Returns flags.
EXPORT int32_t linattn_ssd_step(const SsdStep* s) {
  return run_pieces(s->batch * s->heads, s->batch * s->heads * s->dim * s->states * 4, s->threads,
                    [&](int64_t first, int64_t last) { mixer_kernels().ssd_step(*s, first, last); });
}

/// out (rows, outputs) = x (rows, inputs) weight^T + bias for few rows. Returns flags.
EXPORT int32_t linattn_project(const ProjectCall* c) {
  const int64_t bytes = c->inputs * c->outputs * (c->dtype == FLOAT32 ? 4 : 2);
  return run_pieces(c->outputs, bytes, c->threads,
                    [&](int64_t first, int64_t last) { mixer_kernels().project(*c, first, last); });
}

/// The same for many rows, in blocks of outputs. Returns flags.
EXPORT int32_t linattn_project_many(const ProjectCall* c) {
  const int64_t blocks = (c->outputs + PROJECT_OUTPUTS - 1) / PROJECT_OUTPUTS;
  // About a thousand rows: in the last cache for all blocks, and few enough that no thread waits long in the end.
  const int64_t wanted = (c->rows + 1023) / 1024,
                least = split_count(blocks, c->rows, c->threads > 1 ? 4 * c->threads : 1, UNIT);
  const int64_t parts = wanted > least ? wanted : least;
  try {
    parallel_for(blocks * parts, c->threads, [&](int64_t i) {
      const int64_t part = i / blocks, first = i % blocks * PROJECT_OUTPUTS, last = first + PROJECT_OUTPUTS;
      mixer_kernels().project_many(*c, split_begin(c->rows, part, parts, UNIT), split_begin(c->rows, part + 1, parts, UNIT),
                                   first, last < c->outputs ? last : c->outputs);
    });
    return OK;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

/// Whether project_many is faster than torch's product (MKL) on this processor: measured on AMD's Zen 4 with AVX-512.
EXPORT int32_t linattn_project_many_wins() {
#ifdef __x86_64__
  __builtin_cpu_init();
  return isa_level() == 2 && __builtin_cpu_is("amd");
#else
  return 0;
#endif
}
