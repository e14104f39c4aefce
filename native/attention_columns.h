// Rows of K and V as vectors along the head dim: how a load of each dtype becomes fp32 lanes, and the products over them.
//
// The products take one pointer a row, so contiguous, strided and paged memory run the same instructions and give the same bits.
#pragma once

#include "attention_tiles.h"

namespace rooftile {
namespace ROOFTILE_ISA {

typedef uint32_t VuBytes __attribute__((vector_size(W * 4), aligned(1), may_alias));
typedef float VfBytes __attribute__((vector_size(W * 4), aligned(1), may_alias));

// A load of kBytes becomes kVecs vectors. Column d of a row is then at column(d).
struct Fp32Columns {
  static constexpr int kVecs = 1, kBytes = W * 4;
  static int64_t column(int64_t d) { return d; }
  static ROOFTILE_INLINE void widen(const char* at, Vf* to) { to[0] = (Vf)*reinterpret_cast<const VfBytes*>(at); }
};

// Even columns, then odd ones: one instruction a vector, where widening in order takes two.
struct Bf16Columns {
  static constexpr int kVecs = 2, kBytes = W * 4;
  static int64_t column(int64_t d) { return d / (2 * W) * (2 * W) + d % 2 * W + d % (2 * W) / 2; }
  static ROOFTILE_INLINE void widen(const char* at, Vf* to) {
    const Vu pairs = (Vu)*reinterpret_cast<const VuBytes*>(at);
    to[0] = (Vf)(pairs << 16);
    to[1] = (Vf)(pairs & set1(0xffff0000u));
  }
};

struct Fp16Columns {
  static constexpr int kVecs = 1, kBytes = W * 2;
  static int64_t column(int64_t d) { return d; }
  static ROOFTILE_INLINE void widen(const char* at, Vf* to) {
#if defined(__AVX512F__)
    to[0] = (Vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(__F16C__)
    to[0] = (Vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#else
    for (int i = 0; i < W; ++i) to[0][i] = read_element(at + i * 2, kFp16);
#endif
  }
};

// Lane i of the result: the sum of the lanes of v[i], in the same order for every i. v is overwritten.
ROOFTILE_INLINE Vf sum_lanes(Vf v[W]) {
#if defined(__AVX512F__)
  // Each round folds two vectors into one: halves, then quarters, eighths, sixteenths. A round's blend needs no shuffle port.
  const auto fold = [](Vf a, Vf b, __mmask16 low, __m512i other) {
    const __m512 kept = _mm512_mask_blend_ps(low, (__m512)b, (__m512)a);
    return (Vf)kept + (Vf)_mm512_permutex2var_ps((__m512)a, other, (__m512)b);
  };
  const __m512i by8 = _mm512_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
  const __m512i by4 = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  const __m512i by2 = _mm512_setr_epi32(2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
  const __m512i by1 = _mm512_setr_epi32(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
  for (int i = 0; i < 8; ++i) v[i] = fold(v[i], v[i + 8], 0x00ff, by8);
  for (int i = 0; i < 4; ++i) v[i] = fold(v[i], v[i + 4], 0x0f0f, by4);
  for (int i = 0; i < 2; ++i) v[i] = fold(v[i], v[i + 2], 0x3333, by2);
  return fold(v[0], v[1], 0x5555, by1);
#elif defined(__AVX2__)
  const auto halves = [](Vf a, Vf b) {
    const __m256 other = _mm256_permute2f128_ps((__m256)a, (__m256)b, 0x21);
    return (Vf)_mm256_blend_ps((__m256)a, (__m256)b, 0xf0) + (Vf)other;
  };
  for (int i = 0; i < 4; ++i) v[i] = halves(v[i], v[i + 4]);
  for (int i = 0; i < 2; ++i) {
    const __m256d a = _mm256_castps_pd((__m256)v[i]), b = _mm256_castps_pd((__m256)v[i + 2]);
    v[i] = (Vf)_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)) + (Vf)_mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
  }
  // [a0 a1 b0 b1]: even ones plus odd ones, then back in order.
  const Vf even = (Vf)_mm256_shuffle_ps((__m256)v[0], (__m256)v[1], 0x88), odd = (Vf)_mm256_shuffle_ps((__m256)v[0], (__m256)v[1], 0xdd);
  return (Vf)_mm256_permute_ps((__m256)(even + odd), 0xd8);
#else
  Vf out;
  for (int i = 0; i < W; ++i) {
    float sum[W];
    for (int lane = 0; lane < W; ++lane) sum[lane] = v[i][lane];
    for (int step = W / 2; step > 0; step /= 2) {
      for (int lane = 0; lane < step; ++lane) sum[lane] += sum[lane + step];
    }
    out[i] = sum[0];
  }
  return out;
#endif
}

// s[key][row] = Q K^T for `count` keys, a multiple of W / R, and R rows of Q that lie `wide` apart. Meanwhile the rows that `ahead`
// points to come nearer: what the next phase reads.
template <class Format, int R>
ROOFTILE_NOINLINE void score_keys(const char* const* keys, const char* const* ahead, int64_t loads, int64_t count, const float* q,
                                  int64_t wide, float* s) {
  constexpr int kKeys = W / R;
  for (int64_t k = 0; k < count; k += kKeys) {
    Vf sums[W] = {};
    for (int64_t i = 0; i < loads; ++i) {
      for (int key = 0; key < kKeys; ++key) {
        __builtin_prefetch(ahead[k + key] + i * Format::kBytes, 0, 2);
        Vf x[Format::kVecs];
        Format::widen(keys[k + key] + i * Format::kBytes, x);
        for (int n = 0; n < Format::kVecs; ++n) {
          for (int r = 0; r < R; ++r) {
            sums[key * R + r] = fma(x[n], load(q + r * wide + (i * Format::kVecs + n) * W), sums[key * R + r]);
          }
        }
      }
    }
    store(s + k * R, sum_lanes(sums));
  }
}

// O[row][column] += P V for R rows of O that lie `wide` apart, key by key, over the columns of `Loads` loads from byte `offset` on.
// With Sum, l[row] += P in the same order: with V = 1 it is the same number, bit by bit. l has room for W lanes.
template <class Format, int R, int Loads, bool Sum>
ROOFTILE_NOINLINE void add_values(const char* const* values, const char* const* ahead, int64_t offset, int64_t count, const float* p,
                                  float* o, int64_t wide, float* l) {
  constexpr int kVecs = Loads * Format::kVecs;
  Vf sums[R][kVecs], total = load(l);
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < kVecs; ++n) sums[r][n] = load(o + r * wide + n * W);
  }
  for (int64_t k = 0; k < count; ++k) {
    Vf x[kVecs];
    for (int i = 0; i < Loads; ++i) {
      __builtin_prefetch(ahead[k] + offset + i * Format::kBytes, 0, 2);
      Format::widen(values[k] + offset + i * Format::kBytes, x + i * Format::kVecs);
    }
    for (int r = 0; r < R; ++r) {
      const Vf weight = set1(p[k * R + r]);
      for (int n = 0; n < kVecs; ++n) sums[r][n] = fma(weight, x[n], sums[r][n]);
    }
    if (Sum) total = total + load(p + k * R);  // lanes behind R hold what nobody reads
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < kVecs; ++n) store(o + r * wide + n * W, sums[r][n]);
  }
  if (Sum) store(l, total);
}

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
