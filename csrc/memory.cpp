// Memory of large outputs. Fresh pages have to be cleared, which takes as long as much of the arithmetic: blocks that were
// given back are therefore kept for the next call, as far as a limit allows and until the system wants their pages.
#include "dispatch.h"

#ifdef __linux__
#include <pthread.h>
#include <sys/mman.h>

#include <cstring>

#ifndef MADV_FREE
#define MADV_FREE 8
#endif

namespace {

// DLPack's DLManagedTensor: its binary interface, in plain fields.
struct Managed {
  void* data;
  int32_t device, device_id, dims;
  uint8_t kind, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t offset;
  void* context;
  void (*deleter)(Managed*);
};

struct Block {
  char* at;
  int64_t bytes;
  bool offered;  // to the system, which may take the pages
};

constexpr int32_t DLPACK_CPU = 1, MOST_DIMS = 4;
constexpr uint8_t DLPACK_FLOAT = 2;
constexpr int64_t LARGE_PAGE = 2 << 20;
constexpr int64_t MOST_BYTES = int64_t(1) << 46;
constexpr int MOST_BLOCKS = 256;

struct Output {
  Managed tensor;
  Block block;
  int64_t shape[MOST_DIMS], strides[MOST_DIMS];
};

// The pool: all of it plain numbers, so that nothing is left to do when the process ends, while tensors may still be freed.
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
Block blocks[MOST_BLOCKS];  // oldest first
int count = 0;
int64_t kept = 0, limit = 0;  // bytes

struct Lock {
  Lock() { pthread_mutex_lock(&mutex); }
  ~Lock() { pthread_mutex_unlock(&mutex); }
};

void unmap(const Block& block) { munmap(block.at, size_t(block.bytes)); }

// A forked child starts with the lock free and the pool empty: what the parent keeps would have to be copied, page by page.
void before_fork() { pthread_mutex_lock(&mutex); }
void after_fork() { pthread_mutex_unlock(&mutex); }
void in_child() {
  for (int i = 0; i < count; ++i) unmap(blocks[i]);
  count = 0, kept = 0;
  pthread_mutex_unlock(&mutex);
}
const bool safe_to_fork = pthread_atfork(before_fork, after_fork, in_child) == 0;

Block remove(int i) {
  const Block block = blocks[i];
  std::memmove(blocks + i, blocks + i + 1, size_t(--count - i) * sizeof(Block));
  kept -= block.bytes;
  return block;
}

// A new block of whole large pages, or none.
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

// The kept block that fits best, of those the one freed last; else a new one. None if it could not be kept afterwards.
Block take(int64_t bytes) {
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

// Offers the oldest blocks to the system, which may have their pages from now on; unless it takes them, they stay as they
// are. Not the newest, an eighth of what may be kept: to offer pages, every core has to be told.
void offer_old() {
  int64_t newest = 0;
  for (int i = count; i-- > 0;) {
    newest += blocks[i].bytes;
    if (newest <= limit / 8 || blocks[i].offered) continue;
    madvise(blocks[i].at, size_t(blocks[i].bytes), MADV_FREE);
    blocks[i].offered = true;
  }
}

// Keeps a block in place of the oldest ones.
void give(Block block) {
  block.offered = false;
  for (;;) {
    Block old = block;
    {
      const Lock lock;
      if (block.bytes <= limit) {
        if (count < MOST_BLOCKS && kept + block.bytes <= limit) {
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

void give_back(Managed* tensor) {
  Output* output = static_cast<Output*>(tensor->context);
  give(output->block);
  delete output;
}

}  // namespace

// Uninitialised float32 of this shape as a DLManagedTensor, whose deleter keeps the memory; null: it is not to be had here.
EXPORT void* linattn_memory_take(int32_t dims, const int64_t* shape) {
  if (!safe_to_fork || dims < 1 || dims > MOST_DIMS) return nullptr;
  Output* output = new (std::nothrow) Output();
  if (!output) return nullptr;
  int64_t floats = 1;
  for (int32_t i = dims - 1; i >= 0; --i) {
    output->shape[i] = shape[i], output->strides[i] = floats;
    if (shape[i] < 1 || shape[i] > MOST_BYTES / 4 / floats) {
      delete output;
      return nullptr;
    }
    floats *= shape[i];
  }
  output->block = take((floats * 4 + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE);
  if (!output->block.at) {
    delete output;
    return nullptr;
  }
  output->tensor = {output->block.at, DLPACK_CPU,      0, dims,   DLPACK_FLOAT, 32, 1,
                    output->shape,    output->strides, 0, output, give_back};
  return &output->tensor;
}

EXPORT void linattn_memory_give(void* tensor) { give_back(static_cast<Managed*>(tensor)); }

// How many bytes may be kept from now on: 0 at the start.
EXPORT void linattn_memory_limit(int64_t bytes) {
  {
    const Lock lock;
    limit = bytes;
  }
  trim(bytes);
}

// Hands the oldest blocks to the system until at most so many bytes are kept. Returns how many are.
EXPORT int64_t linattn_memory_trim(int64_t most) { return trim(most); }

#else

EXPORT void* linattn_memory_take(int32_t, const int64_t*) { return nullptr; }
EXPORT void linattn_memory_give(void*) {}
EXPORT void linattn_memory_limit(int64_t) {}
EXPORT int64_t linattn_memory_trim(int64_t) { return 0; }

#endif
