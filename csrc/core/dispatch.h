/// The instruction set in use. Each subject (linear, nearfar, ..) has a table of kernels for each instruction set, compiled
/// from the subject's kernels.cpp, and one function that picks the table: <subject>_kernels().
#pragma once
#include "core/abi.h"
#include "core/scratch.h"

/// 0 portable; 1 AVX2, or NEON on aarch64; 2 AVX-512: the best that this CPU and this library have, or what
/// linattn_set_isa chose.
int isa_level();

/// A number that changes with any of the bytes [at, at + count).
extern "C" uint64_t linattn_checksum(const uint8_t* at, int64_t count);

/// Declares the tables of one subject, and the function that picks one of them.
#if defined(LINATTN_ONLY_PORTABLE)
#define DECLARE_KERNELS(Table, subject)                   \
  extern "C" const Table* linattn_##subject##_portable(); \
  inline const Table& subject##_kernels() { return *linattn_##subject##_portable(); }
#elif defined(__aarch64__)
#define DECLARE_KERNELS(Table, subject)                                                  \
  extern "C" const Table* linattn_##subject##_portable();                                \
  extern "C" const Table* linattn_##subject##_neon();                                    \
  inline const Table& subject##_kernels() {                                              \
    return *(isa_level() ? linattn_##subject##_neon() : linattn_##subject##_portable()); \
  }
#elif defined(__x86_64__)
#define DECLARE_KERNELS(Table, subject)                   \
  extern "C" const Table* linattn_##subject##_portable(); \
  extern "C" const Table* linattn_##subject##_avx2();     \
  extern "C" const Table* linattn_##subject##_avx512();   \
  inline const Table& subject##_kernels() {               \
    switch (isa_level()) {                                \
      case 2: return *linattn_##subject##_avx512();       \
      case 1: return *linattn_##subject##_avx2();         \
      default: return *linattn_##subject##_portable();    \
    }                                                     \
  }
#else
#error "set LINATTN_ONLY_PORTABLE for this CPU family"
#endif

/// Opens the definition of the function that returns one subject's table for the instruction set this file is compiled for.
#define JOIN_(prefix, isa) prefix##isa
#define JOIN(prefix, isa) JOIN_(prefix, isa)
#define DEFINE_KERNELS(Table, subject) \
  extern "C" __attribute__((visibility("hidden"))) const Table* JOIN(linattn_##subject##_, LINATTN_ISA)()
