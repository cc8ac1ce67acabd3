/// Parallel loops on torch's own threads.
#pragma once
#include <atomic>
#include <chrono>
#include <new>
#include <thread>
#include <vector>

#include "core/abi.h"

typedef void (*LoopBody)(int64_t, int64_t, void*);
typedef int32_t (*ParallelLoop)(int64_t, int64_t, int64_t, LoopBody, void*);

/// torch's parallel loop, or null where it was not found.
ParallelLoop parallel_loop();

/// ThreadSanitizer's build waits before each task, so that the next one goes to another thread however short both are.
#ifdef LINATTN_SPREAD_WORK
inline void before_task() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
#else
inline void before_task() {}
#endif

/// Runs task(0) .. task(count - 1) on up to `threads` threads; a free thread takes the next one. The counter is relaxed:
/// tasks may not read each other's results, and ThreadSanitizer would not notice if the counter ordered them.
template <class Task>
void parallel_for(int64_t count, int64_t threads, const Task& task) {
  const ParallelLoop loop = parallel_loop();
  if (!loop || threads < 2 || count < 2) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  struct Shared {
    const Task& task;
    int64_t count;
    std::atomic<int64_t> next{0};
  } shared{task, count};
  const LoopBody body = [](int64_t begin, int64_t end, void* context) {
    Shared& s = *static_cast<Shared*>(context);
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < s.count;) before_task(), s.task(i);
    }
  };
  const int32_t failed = loop(0, threads < count ? threads : count, 1, body, &shared);
  if (failed) throw std::bad_alloc();  // tasks throw nothing else
}

/// A slice of a line (see parallel_for_in_order).
struct LineSlice {
  int64_t line, slice;
};

/// The slice that the thread working on (line, slice) is likely to take next, if all threads are equally fast.
inline LineSlice likely_next(int64_t line, int64_t slice, int64_t lines, int64_t threads) {
  const int64_t i = slice * lines + line + threads;
  return {i % lines, i / lines};
}

/// Runs task(line, slice) for every line and slice; the slices of a line run one after the other, on whichever thread is
/// free. Threads are not equally fast: with one task per line, all would wait for the slowest.
template <class Task>
void parallel_for_in_order(int64_t lines, int64_t slices, int64_t threads, const Task& task) {
  std::vector<std::atomic<int64_t>> done(static_cast<size_t>(lines));
  parallel_for(lines * slices, threads, [&](int64_t i) {
    std::atomic<int64_t>& finished = done[size_t(i % lines)];
    while (finished.load(std::memory_order_acquire) < i / lines) std::this_thread::yield();
    struct Advance {  // on exceptions too, or the other threads would wait for ever
      std::atomic<int64_t>& finished;
      ~Advance() { finished.fetch_add(1, std::memory_order_release); }
    } advance{finished};
    task(i % lines, i / lines);
  });
}
