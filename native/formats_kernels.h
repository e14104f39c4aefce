// What the kernels of number formats offer to the C ABI (core.cpp). kernels are compiled once per instruction set, each copy in
// a namespace of its own, so that no inline function of one copy can be linked into another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rooftile {

// One rounding, worked out by the caller (rooftile/formats/native.py); all *_bits are bits of non-negative fp32 values.
struct RoundPlan {
  int32_t normal_shift;     // fraction bits that the format lacks against fp32; at least 1
  int32_t min_field;        // fp32 exponent field of the format's smallest normal value
  int32_t flush_shift;      // added below the smallest normal where the format has no subnormals, otherwise 0
  int32_t mode;             // Mode
  uint32_t smallest_bits;   // smallest positive value
  uint32_t zero_bits;       // what a zero result becomes: 0, or the smallest value where the format has no zero
  uint32_t largest_bits;    // largest finite value
  uint32_t overflow_up;     // where a positive finite overflow ends
  uint32_t overflow_down;   // where a negative finite overflow ends (magnitude)
  uint32_t inf_bits;        // what an infinite input becomes
  uint32_t sign_mask;       // the sign bit, 0 for an unsigned format
  uint32_t keeps_minus_zero;
};

enum Mode : int32_t { kNearestEven = 0, kTowardZero = 1, kUp = 2, kDown = 3 };

constexpr uint32_t kNan = 0x7fc00000u;

// Counts that the exponent fields alone do not tell: fields 0 and top hold two kinds of numbers each.
struct Special {
  int64_t zeros[2];            // by sign
  int64_t infs[2];             // by sign
  int64_t nans;
  uint64_t largest;            // bits of the largest finite magnitude, 0 if there is none
  uint64_t smallest;           // bits of the smallest non-zero magnitude, UINT64_MAX if there is none
  int64_t subnormals[2][52];   // by sign and by position of the leading bit
  int64_t subnormal_powers[52];  // those of them that are powers of two, both signs
};

constexpr int kMaxFields = 4096;  // sign and exponent of fp64: 12 bits
constexpr int kFp32Fields = 512;  // the same of fp32; 16-bit values are counted as the fp32 values that they are

enum Source : int32_t { kFp32 = 0, kBf16 = 1, kFp16 = 2, kFp64 = 3 };

#define ROOFTILE_DECLARE(isa)                                                                           \
  namespace isa {                                                                                       \
  void round_fp32(const uint32_t* in, uint32_t* out, size_t n, const RoundPlan& plan);                  \
  void histogram(const void* in, size_t n, int32_t source, int64_t* fields, int64_t* powers,            \
                 Special* special);                                                                    \
  }

ROOFTILE_DECLARE(portable)
ROOFTILE_DECLARE(avx2)
ROOFTILE_DECLARE(avx512)

}  // namespace rooftile
