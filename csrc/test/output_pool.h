/// The output pool used from several threads: no block is handed out twice, freed ones come back, and the limit holds.
#pragma once
#include <atomic>

#include "support.h"

extern "C" {
void* linattn_pool_alloc(int32_t, const int64_t*);
void linattn_pool_free(void*);
void linattn_pool_set_limit(int64_t);
int64_t linattn_pool_trim(int64_t);
}

namespace {

/// The data of a DLManagedTensor.
float* floats_of(void* tensor) { return *static_cast<float**>(tensor); }

/// Checks the pool.
void check_output_pool() {
#ifdef __linux__
  static constexpr int64_t LIMIT = 24 << 20, SHAPE[4] = {1, 3, 200, 1024};  // 2.3 MiB, so 4 MiB in whole pages
  expect(!linattn_pool_alloc(4, SHAPE), "memory before a limit is set");
  linattn_pool_set_limit(LIMIT);
  const int64_t absurd[4] = {1 << 30, 1 << 30, 1 << 30, 1 << 30}, none[1] = {0};
  expect(!linattn_pool_alloc(4, absurd) && !linattn_pool_alloc(1, none) && !linattn_pool_alloc(5, absurd), "odd shapes");
  void* first = linattn_pool_alloc(4, SHAPE);
  float* at = floats_of(first);
  linattn_pool_free(first);
  void* second = linattn_pool_alloc(3, SHAPE + 1);
  expect(floats_of(second) == at, "a freed block comes back");
  linattn_pool_free(second);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int mine = 0; mine < 4; ++mine) {
    threads.emplace_back([&wrong, mine] {
      for (int turn = 0; turn < 200; ++turn) {
        const int64_t shape[2] = {SHAPE[2] + 700 * (turn % 3), 3 * SHAPE[3]}, last = shape[0] * shape[1] - 1;
        void *one = linattn_pool_alloc(2, shape), *two = linattn_pool_alloc(2, shape);
        floats_of(one)[0] = floats_of(one)[last] = float(mine);
        floats_of(two)[0] = floats_of(two)[last] = float(mine + 10);
        std::this_thread::yield();
        wrong += floats_of(one)[0] != mine || floats_of(one)[last] != mine;
        wrong += floats_of(two)[0] != mine + 10 || floats_of(two)[last] != mine + 10;
        linattn_pool_free(one), linattn_pool_free(two);
        wrong += linattn_pool_trim(INT64_MAX) > LIMIT;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  expect(wrong == 0, "blocks lent to several threads");
  expect(linattn_pool_trim(INT64_MAX) > 0 && linattn_pool_trim(0) == 0, "blocks kept, and handed back");
  linattn_pool_set_limit(0);
#endif
}

}  // namespace
