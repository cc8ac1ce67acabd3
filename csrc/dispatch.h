// What the files with entry points share: the instruction set in use, and work on many threads.
#pragma once
#include <atomic>
#include <new>

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
