/// What the interfaces of all subjects share: the ABI version, number types and result flags.
#pragma once
#include <stdint.h>

/// Rises with every change of an entry point or of a call structure; engines/native/ffi.py must expect the same number.
constexpr int64_t ABI_VERSION = 10;

enum Dtype : int32_t { FLOAT32, FLOAT16, BFLOAT16 };
enum Flag : int32_t { OK = 0, NOT_FINITE = 1, NO_MEMORY = 2 };

#define EXPORT extern "C" __attribute__((visibility("default")))
