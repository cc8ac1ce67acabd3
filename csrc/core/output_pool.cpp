/// A pool of memory for large outputs. The system clears fresh pages, which can take as long as the arithmetic; freed
/// blocks are therefore kept for the next call, up to a limit, and until the system needs their pages.
#include "core/threads.h"

#ifdef __linux__
#include <pthread.h>
#include <sys/mman.h>

#include <cstring>

#ifndef MADV_FREE
#define MADV_FREE 8
#endif

namespace {

/// DLPack's DLManagedTensor, in plain fields.
struct ManagedTensor {
  void* data;
  int32_t device, device_id, dims;
  uint8_t kind, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t offset;
  void* context;
  void (*deleter)(ManagedTensor*);
};

/// A block of memory; `offered`: the system may take its pages.
struct Block {
  char* at;
  int64_t bytes;
  bool offered;
};

constexpr int32_t DLPACK_CPU = 1, MAX_DIMS = 4;
constexpr uint8_t DLPACK_FLOAT = 2;
constexpr int64_t LARGE_PAGE = 2 << 20;
constexpr int64_t MAX_BYTES = int64_t(1) << 46;
constexpr int MAX_BLOCKS = 256;

/// An output that is in use.
struct Output {
  ManagedTensor tensor;
  Block block;
  int64_t shape[MAX_DIMS], strides[MAX_DIMS];
};

/// The pool. Plain data without destructors, because tensors may still be freed while the process ends.
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
Block blocks[MAX_BLOCKS];  // oldest first
int count = 0;
int64_t kept = 0, limit = 0;  // bytes

/// Holds the pool's mutex.
struct Lock {
  Lock() { pthread_mutex_lock(&mutex); }
  ~Lock() { pthread_mutex_unlock(&mutex); }
};

/// Returns a block to the system.
void unmap(const Block& block) { munmap(block.at, size_t(block.bytes)); }

/// A forked child starts with a free mutex and an empty pool: the parent's pages would be copied on write.
void before_fork() { pthread_mutex_lock(&mutex); }
void after_fork() { pthread_mutex_unlock(&mutex); }
/// A child process lets the blocks go: its parent uses them.
void in_child() {
  for (int i = 0; i < count; ++i) unmap(blocks[i]);
  count = 0, kept = 0;
  pthread_mutex_unlock(&mutex);
}
const bool safe_to_fork = pthread_atfork(before_fork, after_fork, in_child) == 0;

/// Takes block i out of the pool.
Block remove(int i) {
  const Block block = blocks[i];
  std::memmove(blocks + i, blocks + i + 1, size_t(--count - i) * sizeof(Block));
  kept -= block.bytes;
  return block;
}

/// A new block of whole large pages; null `at` if there is no memory.
Block map(int64_t bytes) {
  void* found = mmap(nullptr, size_t(bytes + LARGE_PAGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return {nullptr, 0, false};
  char* begin = static_cast<char*>(found);
  const int64_t skip = (LARGE_PAGE - int64_t(reinterpret_cast<uintptr_t>(begin) % LARGE_PAGE)) % LARGE_PAGE;
  if (skip) munmap(begin, size_t(skip));
  munmap(begin + skip + bytes, size_t(LARGE_PAGE - skip));
  madvise(begin + skip, size_t(bytes), MADV_HUGEPAGE);
  return {begin + skip, bytes, false};
}

/// The block of the pool that fits best, the one freed last of equals; else a new one. Null if it is above the limit.
Block alloc_block(int64_t bytes) {
  {
    const Lock lock;
    if (bytes > limit) return {nullptr, 0, false};
    int best = -1;
    for (int i = count - 1; i >= 0; --i) {
      const int64_t has = blocks[i].bytes;
      if (has >= bytes && has <= bytes + bytes / 4 && (best < 0 || has < blocks[best].bytes)) best = i;
    }
    if (best >= 0) return remove(best);
  }
  return map(bytes);
}

/// Marks the pages of old blocks as free to take (MADV_FREE). The newest blocks, an eighth of the limit, are not offered,
/// because doing so interrupts every core.
void offer_old() {
  int64_t newest = 0;
  for (int i = count; i-- > 0;) {
    newest += blocks[i].bytes;
    if (newest <= limit / 8 || blocks[i].offered) continue;
    madvise(blocks[i].at, size_t(blocks[i].bytes), MADV_FREE);
    blocks[i].offered = true;
  }
}

/// Puts a block into the pool and removes the oldest ones above the limit.
void free_block(Block block) {
  block.offered = false;
  for (;;) {
    Block old = block;
    {
      const Lock lock;
      if (block.bytes <= limit) {
        if (count < MAX_BLOCKS && kept + block.bytes <= limit) {
          blocks[count++] = block, kept += block.bytes;
          offer_old();
          return;
        }
        old = remove(0);
      }
    }
    unmap(old);
    if (old.at == block.at) return;
  }
}

/// Returns the oldest blocks to the system until at most `most` bytes are kept. Returns how many are.
int64_t trim(int64_t most) {
  for (;;) {
    Block old;
    {
      const Lock lock;
      if (kept <= most) return kept;
      old = remove(0);
    }
    unmap(old);
  }
}

/// The deleter of an output: its block goes to the pool.
void free_output(ManagedTensor* tensor) {
  Output* output = static_cast<Output*>(tensor->context);
  free_block(output->block);
  delete output;
}

}  // namespace

/// An uninitialised float32 tensor of this shape as a DLManagedTensor, whose deleter returns the memory to the pool; null
/// if the pool cannot serve it.
EXPORT void* linattn_pool_alloc(int32_t dims, const int64_t* shape) {
  if (!safe_to_fork || dims < 1 || dims > MAX_DIMS) return nullptr;
  Output* output = new (std::nothrow) Output();
  if (!output) return nullptr;
  int64_t floats = 1;
  for (int32_t i = dims - 1; i >= 0; --i) {
    output->shape[i] = shape[i], output->strides[i] = floats;
    if (shape[i] < 1 || shape[i] > MAX_BYTES / 4 / floats) {
      delete output;
      return nullptr;
    }
    floats *= shape[i];
  }
  output->block = alloc_block((floats * 4 + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE);
  if (!output->block.at) {
    delete output;
    return nullptr;
  }
  output->tensor = {output->block.at, DLPACK_CPU,      0, dims,   DLPACK_FLOAT, 32, 1,
                    output->shape,    output->strides, 0, output, free_output};
  return &output->tensor;
}

/// Frees a tensor of linattn_pool_alloc that was not handed over.
EXPORT void linattn_pool_free(void* tensor) { free_output(static_cast<ManagedTensor*>(tensor)); }

/// Sets the limit in bytes; it is 0 at first.
EXPORT void linattn_pool_set_limit(int64_t bytes) {
  {
    const Lock lock;
    limit = bytes;
  }
  trim(bytes);
}

/// Returns the oldest blocks to the system until at most `most` bytes are kept. Returns how many are.
EXPORT int64_t linattn_pool_trim(int64_t most) { return trim(most); }

#else

/// Other systems: no pool; torch allocates outputs.
EXPORT void* linattn_pool_alloc(int32_t, const int64_t*) { return nullptr; }
EXPORT void linattn_pool_free(void*) {}
EXPORT void linattn_pool_set_limit(int64_t) {}
EXPORT int64_t linattn_pool_trim(int64_t) { return 0; }

#endif
