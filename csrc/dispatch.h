// What the files with entry points share: the instruction set in use, and work on many threads.
#pragma once
#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "call.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

const Pieces& pieces();

typedef void (*Body)(int64_t, int64_t, void*);
typedef int32_t (*ParallelFor)(int64_t, int64_t, int64_t, Body, void*);

ParallelFor threads_of_torch();  // null: there are none

// Runs work(0) .. work(count - 1), each taken by whichever thread is free.
template <class Work>
void run(int64_t count, int64_t threads, const Work& work) {
  const ParallelFor loop = threads_of_torch();
  if (!loop || threads < 2 || count < 2) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  struct Shared {
    const Work& work;
    int64_t count;
    std::atomic<int64_t> next{0};
  } shared{work, count};
  const int32_t failed = loop(0, threads < count ? threads : count, 1,
       [](int64_t begin, int64_t end, void* context) {
         Shared& s = *static_cast<Shared*>(context);
         for (int64_t worker = begin; worker < end; ++worker) {
           for (int64_t i; (i = s.next.fetch_add(1)) < s.count;) s.work(i);
         }
       },
       &shared);
  if (failed) throw std::bad_alloc();  // the only thing that work throws
}

// What the thread that works on a step of a line will probably take next, if all are equally fast.
struct Next {
  int64_t line, step;
};
inline Next after(int64_t line, int64_t step, int64_t lines, int64_t threads) {
  const int64_t i = step * lines + line + threads;
  return {i % lines, i / lines};
}

// Runs work(line, step) for every line and step, the steps of a line one after the other, whichever thread takes them:
// threads are not equally fast, and with whole lines some would wait long for the last one.
template <class Work>
void run_in_order(int64_t lines, int64_t steps, int64_t threads, const Work& work) {
  std::vector<std::atomic<int64_t>> done(static_cast<size_t>(lines));
  run(lines * steps, threads, [&](int64_t i) {
    std::atomic<int64_t>& mine = done[size_t(i % lines)];
    while (mine.load(std::memory_order_acquire) < i / lines) std::this_thread::yield();
    struct Advance {  // also where work throws, or others would wait for ever
      std::atomic<int64_t>& done;
      ~Advance() { done.fetch_add(1, std::memory_order_release); }
    } advance{mine};
    work(i % lines, i / lines);
  });
}
