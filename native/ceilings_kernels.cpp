// fp32 FMA, exp2, read and copy as plain vector code, which the compiler turns into this copy's instruction set.
#include "ceilings_kernels.h"

#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef ROOFTILE_ISA
#define ROOFTILE_ISA portable
#endif

namespace rooftile {
namespace ROOFTILE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64, kAccumulators = 16;  // of 32 registers
#elif defined(__AVX2__)
constexpr int kBytes = 32, kAccumulators = 12;  // of 16: latency 4-5 at two a cycle needs 10
#else
constexpr int kBytes = 16, kAccumulators = 12;
#endif
constexpr int kLanes = kBytes / 4;

typedef float Vector __attribute__((vector_size(kBytes), may_alias));
typedef int32_t Integers __attribute__((vector_size(kBytes), may_alias));

// The compiler must take what is written here for used, and memory for changed.
void used(const void* result) { asm volatile("" : : "r"(result) : "memory"); }

}  // namespace

int64_t fma_fp32(int64_t times) {
  volatile float half = 0.5f, one = 1.0f;  // read at run time, or the whole loop would be computed by the compiler
  const Vector factor = half - Vector{}, addend = one - Vector{};
  Vector sums[kAccumulators];
  for (Vector& sum : sums) sum = one - Vector{};  // each read anew: of sums known to be equal the compiler would keep one
  for (int64_t t = 0; t < times; ++t) {
    for (int i = 0; i < kAccumulators; ++i) sums[i] = sums[i] * factor + addend;
  }
  used(sums);
  return times * kAccumulators * kLanes * 2;
}

int64_t exp2_fp32(const float* in, float* out, int64_t n, int64_t times) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23, whose spacing is 1: adding it rounds to an integer
  const Vector* x = reinterpret_cast<const Vector*>(in);
  Vector* y = reinterpret_cast<Vector*>(out);
  for (int64_t t = 0; t < times; ++t) {
    for (int64_t i = 0; i < n / kLanes; ++i) {
      const Vector shifted = x[i] + kMagic;
      const Vector f = x[i] - (shifted - kMagic);  // in [-1/2, 1/2]
      // Minimax for relative error 4.3e-7 with constant term 1, so that powers of two are exact.
      Vector p = f * 0.00111255092635f + 0.00966628254749f;
      p = p * f + 0.0555740046864f;
      p = p * f + 0.240223506502f;
      p = p * f + 0.693142830611f;
      p = p * f + 1.0f;
      y[i] = (Vector)((Integers)p + ((Integers)shifted << 23));  // the same bits as integers
    }
    used(out);
  }
  return times * n;
}

int64_t read_bytes(const void* from, int64_t bytes, int64_t times) {
  constexpr int kStreams = 8;
  const Integers* x = static_cast<const Integers*>(from);
  Integers seen[kStreams] = {};
  for (int64_t t = 0; t < times; ++t) {
    for (int64_t i = 0; i < bytes / kBytes; i += kStreams) {
      for (int s = 0; s < kStreams; ++s) seen[s] |= x[i + s];
    }
    asm volatile("" : : : "memory");  // what was read may have changed: read it again
  }
  Integers all = seen[0];
  for (const Integers& part : seen) all |= part;
  used(&all);
  return times * bytes;
}

// Stores that don't read their line first, where the instruction set has them: a plain store moves three bytes for each two counted.
int64_t copy_bytes(const void* from, void* to, int64_t bytes, int64_t times) {
  for (int64_t t = 0; t < times; ++t) {
#if defined(__AVX512F__)
    for (int64_t i = 0; i < bytes / 64; ++i)
      _mm512_stream_si512(static_cast<__m512i*>(to) + i, _mm512_load_si512(static_cast<const __m512i*>(from) + i));
    _mm_sfence();
#elif defined(__AVX2__)
    for (int64_t i = 0; i < bytes / 32; ++i)
      _mm256_stream_si256(static_cast<__m256i*>(to) + i, _mm256_load_si256(static_cast<const __m256i*>(from) + i));
    _mm_sfence();
#elif defined(__SSE2__)
    for (int64_t i = 0; i < bytes / 16; ++i)
      _mm_stream_si128(static_cast<__m128i*>(to) + i, _mm_load_si128(static_cast<const __m128i*>(from) + i));
    _mm_sfence();
#else
    std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
    used(to);
  }
  return times * bytes * 2;  // read and written
}

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
