// What the loops that measure this machine's ceilings offer to the C ABI (ceilings.cpp). Compiled once per instruction set, each copy
// in a namespace of its own. A function does its work `times` times and returns how much that was: FLOPs, elements or bytes.
#pragma once

#include <cstdint>

namespace rooftile {

#define ROOFTILE_DECLARE_CEILINGS(isa)                                                                        \
  namespace isa {                                                                                             \
  int64_t fma_fp32(int64_t times);                                                                            \
  int64_t exp2_fp32(const float* in, float* out, int64_t n, int64_t times); /* in (-126, 127) */              \
  int64_t read_bytes(const void* from, int64_t bytes, int64_t times);       /* a multiple of kChunk */        \
  int64_t copy_bytes(const void* from, void* to, int64_t bytes, int64_t times);                               \
  }

ROOFTILE_DECLARE_CEILINGS(portable)
ROOFTILE_DECLARE_CEILINGS(avx2)
ROOFTILE_DECLARE_CEILINGS(avx512)

int64_t dot_bf16(int64_t times);  // vdpbf16ps: FLOPs
int64_t amx_bf16(int64_t times);  // TDPBF16PS: FLOPs. Only after amx_permitted()
bool amx_permitted();             // asks the processor and the kernel, whose permission holds for the whole process

constexpr int64_t kChunk = 1024;  // bytes that a pass over memory takes at once

}  // namespace rooftile
