// Vectors of fp32 lanes for the attention kernels: one spelling for AVX-512, AVX2 and plain C++ (GCC and clang vector types).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
// GCC 12's own header leaves a register undefined on purpose and then warns of it (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#endif

#ifndef ROOFTILE_ISA
#error "compile once per instruction set with -DROOFTILE_ISA=<namespace>"
#endif

#define ROOFTILE_INLINE inline __attribute__((always_inline))
#define ROOFTILE_NOINLINE __attribute__((noinline))
#define ROOFTILE_UNSANITIZED __attribute__((no_sanitize("address", "thread", "undefined")))

namespace rooftile {
namespace ROOFTILE_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;  // without AVX2 the compiler splits a vector in two
#endif

typedef float Vf __attribute__((vector_size(W * 4)));
typedef int32_t Vi __attribute__((vector_size(W * 4)));
typedef uint32_t Vu __attribute__((vector_size(W * 4)));
typedef float VfAny __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef uint32_t VuAny __attribute__((vector_size(W * 4), aligned(4), may_alias));

ROOFTILE_INLINE Vf load(const float* p) { return *reinterpret_cast<const VfAny*>(p); }
ROOFTILE_INLINE Vu load(const uint32_t* p) { return *reinterpret_cast<const VuAny*>(p); }
ROOFTILE_INLINE void store(float* p, Vf x) { *reinterpret_cast<VfAny*>(p) = x; }
ROOFTILE_INLINE void store(uint32_t* p, Vu x) { *reinterpret_cast<VuAny*>(p) = x; }

ROOFTILE_INLINE Vf set1(float x) {
#if defined(__AVX512F__)
  return (Vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (Vf)_mm256_set1_ps(x);
#else
  return x - Vf{};
#endif
}
ROOFTILE_INLINE Vu set1(uint32_t x) { return x - Vu{}; }

ROOFTILE_INLINE Vf fma(Vf a, Vf b, Vf c) {
#if defined(__AVX512F__)
  return (Vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// b where a is NaN: a NaN score never becomes the maximum; its own probability carries it on.
ROOFTILE_INLINE Vf max_or_second(Vf a, Vf b) {
#if defined(__AVX512F__)
  return (Vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

ROOFTILE_INLINE Vf select(Vu mask, Vf yes, Vf no) {  // mask: all ones or zero in a lane
#if defined(__AVX512F__)
  return (Vf)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)no, (__m512)yes);
#else
  return (Vf)((mask & (Vu)yes) | (~mask & (Vu)no));
#endif
}

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2E = 1.44269504088896341f;
constexpr double kLn2 = 0.693147180559945309;

// 2^t for t <= 128: a polynomial of minimax relative error 9e-8, exactly 1 at 0, exactly 0 below 2^-126 and at -inf, NaN at NaN.
ROOFTILE_INLINE Vf exp2_lanes(Vf t) {
#if defined(__AVX512F__)
  // The fraction is taken downwards, into [0, 1): one instruction gives it, and scalef takes the same floor of t.
  const __mmask16 alive = _mm512_cmp_ps_mask((__m512)t, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const Vf f = (Vf)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // 0 at -inf
  Vf p = fma(set1(0.0018671303987503052f), f, set1(0.009017029777169228f));
  p = fma(p, f, set1(0.05579991266131401f));
  p = fma(p, f, set1(0.24016444385051727f));
  p = fma(p, f, set1(0.6931512951850891f));
  p = fma(p, f, set1(1.0f));
  return (Vf)_mm512_maskz_scalef_ps(alive, (__m512)p, (__m512)t);
#else
  const Vf magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vu alive = ~(Vu)(t < set1(-126.0f));
  const Vf shifted = t + magic;
  const Vf f = t - (shifted - magic);
  Vf p = fma(set1(0.001326471334323287f), f, set1(0.009671523235738277f));
  p = fma(p, f, set1(0.05550733953714371f));
  p = fma(p, f, set1(0.24022242426872253f));
  p = fma(p, f, set1(0.6931470036506653f));
  p = fma(p, f, set1(1.0f));
  // A NaN stays one whatever power it is multiplied by.
  const Vf power = (Vf)(((Vu)shifted << 23) + set1(0x3f800000u));
  return (Vf)((Vu)(p * power) & alive);
#endif
}

// Rounds fp32 lanes to bf16 (to nearest, ties to even; NaN stays NaN) and puts lane i of `low` and `high` into one dword.
ROOFTILE_INLINE Vu pack_bf16(Vf low, Vf high) {
#if defined(__AVX512BF16__)
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                                         3, 18, 2, 17, 1, 16, 0);
  return (Vu)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
  const auto rounded = [](Vf x) {
    const Vu bits = (Vu)x;
    const Vu nearest = bits + set1(0x7fffu) + ((bits >> 16) & set1(1u));
    return (Vu)select((Vu)(x != x), (Vf)(bits | set1(0x400000u)), (Vf)nearest);
  };
  return (rounded(low) >> 16) | (rounded(high) & set1(0xffff0000u));
#endif
}

// The same rounding, with neighbouring lanes in one dword: `low`'s lanes first.
ROOFTILE_INLINE Vu neighbours_bf16(Vf low, Vf high) {
#if defined(__AVX512BF16__)
  return (Vu)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
  alignas(64) uint32_t lanes[2 * W];
  const Vu even = pack_bf16(low, Vf{}), odd = pack_bf16(high, Vf{});
  store(lanes, even);
  store(lanes + W, odd);
  Vu out;
  for (int i = 0; i < W; ++i) out[i] = lanes[2 * i] | lanes[2 * i + 1] << 16;
  return out;
#endif
}

ROOFTILE_INLINE float widen_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}

ROOFTILE_INLINE uint16_t round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

ROOFTILE_INLINE float widen_fp16(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  // The exponent is moved by 112; that of Inf and NaN twice. A subnormal gets its implicit bit as 2^-14, which is taken away
  // again: a difference of normal numbers, where a product would meet a denormal of fp32, which counts as zero here.
  const bool normal = (bits & 0x7c00) != 0;
  uint32_t magnitude = (static_cast<uint32_t>(bits & 0x7fff) << 13) + (normal ? 0x38000000u : 0x38800000u);
  if ((bits & 0x7c00) == 0x7c00) magnitude += 0x38000000u;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value -= normal ? 0.0f : 6.103515625e-05f;
  std::memcpy(&magnitude, &value, 4);
  magnitude |= static_cast<uint32_t>(bits & 0x8000) << 16;
  std::memcpy(&value, &magnitude, 4);
  return value;
#endif
}

ROOFTILE_INLINE uint16_t round_fp16(float x) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and above: Inf
  if (bits < 0x38800000u) {                                             // subnormal results: the sum with 0.5 rounds
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1);  // rebias by -112 and round to nearest even
  return static_cast<uint16_t>(sign | (bits >> 13));
#endif
}

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
