/// What the interfaces of all subjects share: the ABI version, number types and result flags.
#pragma once
#include <stdint.h>

/// Rises with every change of an entry point or of a call structure; engines/native/ffi.py must expect the same number.
constexpr int64_t ABI_VERSION = 22;

/// CODES: entries of a near/far state in 8 bits (nearfar/entries.h).
enum Dtype : int32_t { FLOAT32, FLOAT16, BFLOAT16, CODES };
/// NOT_FINITE: of one-token steps, nothing was written. OVERFLOWED: the new state was written, and the output is not
/// finite. STALE: the kernel's weights have changed since the call was planned; nothing was written.
enum Flag : int32_t { OK = 0, NOT_FINITE = 1, NO_MEMORY = 2, OVERFLOWED = 4, STALE = 8 };

#define EXPORT extern "C" __attribute__((visibility("default")))
