// Blocks of memory from several threads: no two are lent at once, freed ones come back, and the limit holds.
#pragma once
#include <atomic>

#include "support.h"

extern "C" {
void* linattn_memory_take(int32_t, const int64_t*);
void linattn_memory_give(void*);
void linattn_memory_limit(int64_t);
int64_t linattn_memory_trim(int64_t);
}

namespace {

float* floats_of(void* tensor) { return *static_cast<float**>(tensor); }

void lent_blocks() {
#ifdef __linux__
  constexpr int64_t LIMIT = 24 << 20, SHAPE[4] = {1, 3, 200, 1024};  // 2.3 MiB, so 4 with what is left of the last page
  expect(!linattn_memory_take(4, SHAPE), "memory before a limit is set");
  linattn_memory_limit(LIMIT);
  const int64_t absurd[4] = {1 << 30, 1 << 30, 1 << 30, 1 << 30}, none[1] = {0};
  expect(!linattn_memory_take(4, absurd) && !linattn_memory_take(1, none) && !linattn_memory_take(5, absurd), "odd shapes");
  void* first = linattn_memory_take(4, SHAPE);
  float* at = floats_of(first);
  linattn_memory_give(first);
  void* second = linattn_memory_take(3, SHAPE + 1);
  expect(floats_of(second) == at, "a freed block comes back");
  linattn_memory_give(second);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int mine = 0; mine < 4; ++mine) {
    threads.emplace_back([&wrong, &SHAPE, mine] {
      for (int turn = 0; turn < 200; ++turn) {
        const int64_t shape[2] = {SHAPE[2] + 700 * (turn % 3), 3 * SHAPE[3]}, last = shape[0] * shape[1] - 1;
        void *one = linattn_memory_take(2, shape), *two = linattn_memory_take(2, shape);
        floats_of(one)[0] = floats_of(one)[last] = float(mine);
        floats_of(two)[0] = floats_of(two)[last] = float(mine + 10);
        std::this_thread::yield();
        wrong += floats_of(one)[0] != mine || floats_of(one)[last] != mine;
        wrong += floats_of(two)[0] != mine + 10 || floats_of(two)[last] != mine + 10;
        linattn_memory_give(one), linattn_memory_give(two);
        wrong += linattn_memory_trim(INT64_MAX) > LIMIT;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  expect(wrong == 0, "blocks lent to several threads");
  expect(linattn_memory_trim(INT64_MAX) > 0 && linattn_memory_trim(0) == 0, "blocks kept, and handed back");
  linattn_memory_limit(0);
#endif
}

}  // namespace
