// vdpbf16ps at full rate: pairs of bf16 products into fp32 sums.
#include "ceilings_kernels.h"

#include <immintrin.h>

namespace rooftile {

int64_t dot_bf16(int64_t times) {
  constexpr int kAccumulators = 16;
  volatile int32_t pair = 0x3c003c00;  // two bf16 of 2^-7, read at run time
  const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
  __m512 sums[kAccumulators];
  for (__m512& sum : sums) sum = _mm512_castsi512_ps(_mm512_set1_epi32(pair));  // each read anew, or the compiler would keep one of them
  for (int64_t t = 0; t < times; ++t) {
    for (int i = 0; i < kAccumulators; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, a);
  }
  asm volatile("" : : "r"(sums) : "memory");
  return times * kAccumulators * 16 * 4;  // lanes, and two products and two sums in each
}

}  // namespace rooftile
