// Rows of K and V as vectors along the head dim: how a load of each dtype becomes fp32 lanes, and the products over them.
//
// The products take one pointer a row, so contiguous, strided and paged memory run the same instructions and give the same bits.
#pragma once

#include "attention_tiles.h"

namespace rooftile {
namespace ROOFTILE_ISA {

typedef uint32_t VuBytes __attribute__((vector_size(W * 4), aligned(1), may_alias));
typedef float VfBytes __attribute__((vector_size(W * 4), aligned(1), may_alias));

template <class Load>
Load load_bytes(const char* at, size_t bytes) {
  Load to{};
  std::memcpy(&to, at, bytes);
  return to;
}

// How a load of kBytes becomes kVecs vectors of fp32; column d of a row is then at column(d). load_first takes `count` elements and
// zeros behind them, and reads no further. Q is kept as it meets the keys: kQueryVecs vectors for a load, of fp32 in the same
// order or, for products of pairs, as it is in memory.
struct Fp32Columns {
  static constexpr int kVecs = 1, kQueryVecs = 1, kBytes = W * 4;
  using Load = Vf;
  static int64_t column(int64_t d) { return d; }
  static ROOFTILE_INLINE Load load_all(const char* at) { return (Vf)*reinterpret_cast<const VfBytes*>(at); }
  static ROOFTILE_INLINE Load load_first(const char* at, uint32_t count) {
#if defined(__AVX512F__)
    return (Vf)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), at);
#else
    return load_bytes<Load>(at, count * 4);
#endif
  }
  static ROOFTILE_INLINE void widen(Load from, Vf* to) { to[0] = from; }
};

// Even columns, then odd ones: one instruction a vector, where widening in order takes two.
struct Bf16Columns {
  static constexpr int kVecs = 2, kQueryVecs = 2, kBytes = W * 4;
  using Load = Vu;
  static int64_t column(int64_t d) { return d / (2 * W) * (2 * W) + d % 2 * W + d % (2 * W) / 2; }
  static ROOFTILE_INLINE Load load_all(const char* at) { return (Vu)*reinterpret_cast<const VuBytes*>(at); }
  static ROOFTILE_INLINE Load load_first(const char* at, uint32_t count) {
#if defined(__AVX512F__)
    return (Vu)_mm512_maskz_loadu_epi16((1u << count) - 1, at);
#else
    return load_bytes<Load>(at, count * 2);
#endif
  }
  static ROOFTILE_INLINE void widen(Load from, Vf* to) {
    to[0] = (Vf)(from << 16);
    to[1] = (Vf)(from & set1(0xffff0000u));
  }
};

#if defined(__AVX512BF16__)
// The same, but Q K^T by products of pairs: exact products and fp32 sums as well, and half as many instructions.
struct Bf16Pairs : Bf16Columns {
  static constexpr int kQueryVecs = 1;
};
#endif

#if defined(__F16C__) || defined(__AVX512F__)
struct Fp16Columns {
  static constexpr int kVecs = 1, kQueryVecs = 1, kBytes = W * 2;
  static int64_t column(int64_t d) { return d; }
#if defined(__AVX512F__)
  using Load = __m256i;
  static ROOFTILE_INLINE Load load_all(const char* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
  static ROOFTILE_INLINE Load load_first(const char* at, uint32_t count) {
    return _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), at);
  }
  static ROOFTILE_INLINE void widen(Load from, Vf* to) { to[0] = (Vf)_mm512_cvtph_ps(from); }
#else
  using Load = __m128i;
  static ROOFTILE_INLINE Load load_all(const char* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
  static ROOFTILE_INLINE Load load_first(const char* at, uint32_t count) { return load_bytes<Load>(at, count * 2); }
  static ROOFTILE_INLINE void widen(Load from, Vf* to) { to[0] = (Vf)_mm256_cvtph_ps(from); }
#endif
};
#else
using Fp16Columns = Fp32Columns;  // rows are widened into copies
#endif

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

// The products of one load of a key with R rows of Q, whose parts of this load lie side by side.
template <class Format, int R>
ROOFTILE_INLINE void multiply(typename Format::Load key, const float* q, Vf* sums) {
#if defined(__AVX512BF16__)
  if constexpr (Format::kQueryVecs < Format::kVecs) {
    for (int r = 0; r < R; ++r) {
      sums[r] = (Vf)_mm512_dpbf16_ps((__m512)sums[r], (__m512bh)_mm512_loadu_si512(q + r * W), (__m512bh)key);
    }
    return;
  }
#endif
  Vf x[Format::kVecs];
  Format::widen(key, x);
  for (int n = 0; n < Format::kVecs; ++n) {
    for (int r = 0; r < R; ++r) sums[r] = fma(x[n], load(q + (r * Format::kVecs + n) * W), sums[r]);
  }
}

// What a product reads: a pointer a row, and how far a row goes. Meanwhile the rows of `ahead` come nearer, for the next product.
struct Rows {
  const char* const* at;
  const char* const* ahead;
  int64_t count;
  int64_t loads;   // whole ones of a row
  uint32_t rest;   // elements behind them
};

// s[key][row] = Q K^T for the keys, a multiple of W / R, and R rows of Q: load by load, row by row. Rest: whether a row ends within
// a load; in one function with the other case the sums would not stay in registers.
template <class Format, int R, bool Rest>
ROOFTILE_NOINLINE void score_keys(Rows keys, const float* q, float* s) {
  constexpr int kKeys = W / R;
  constexpr int64_t kStep = R * Format::kQueryVecs * W;  // of Q from load to load
  const int64_t bytes = keys.loads * Format::kBytes;
  for (int64_t k = 0; k < keys.count; k += kKeys) {
    Vf sums[W] = {};
    const float* part = q;
    for (int64_t at = 0; at < bytes; at += Format::kBytes, part += kStep) {
      for (int key = 0; key < kKeys; ++key) {
        __builtin_prefetch(keys.ahead[k + key] + at, 0, 2);
        multiply<Format, R>(Format::load_all(keys.at[k + key] + at), part, sums + key * R);
      }
    }
    for (int key = 0; Rest && key < kKeys; ++key) {
      __builtin_prefetch(keys.ahead[k + key] + bytes, 0, 2);
      multiply<Format, R>(Format::load_first(keys.at[k + key] + bytes, keys.rest), part, sums + key * R);
    }
    store(s + k * R, sum_lanes(sums));
  }
}

// O[row][column] += P V for R rows of O that lie `wide` apart, key by key, over the columns of `Loads` loads from load `first` on;
// with Loads = 0, of what is behind the whole loads. With Sum, l[row] += P in the same order: with V = 1 it is the same number,
// bit by bit. l has room for W lanes.
template <class Format, int R, int Loads, bool Sum>
ROOFTILE_NOINLINE void add_values(Rows values, int64_t first, const float* p, float* o, int64_t wide, float* l) {
  constexpr int kVecs = (Loads == 0 ? 1 : Loads) * Format::kVecs;
  Vf sums[R * kVecs], total = load(l);
#pragma GCC unroll 16
  for (int i = 0; i < R * kVecs; ++i) sums[i] = load(o + i / kVecs * wide + i % kVecs * W);
  for (int64_t k = 0; k < values.count; ++k) {
    const char* at = values.at[k] + first * Format::kBytes;
    const char* ahead = values.ahead[k] + first * Format::kBytes;
    Vf x[kVecs];
    for (int i = 0; i < Loads; ++i) {
      __builtin_prefetch(ahead + i * Format::kBytes, 0, 2);
      Format::widen(Format::load_all(at + i * Format::kBytes), x + i * Format::kVecs);
    }
    if (Loads == 0) {
      __builtin_prefetch(ahead, 0, 2);
      Format::widen(Format::load_first(at, values.rest), x);
    }
    for (int r = 0; r < R; ++r) {
      const Vf weight = set1(p[k * R + r]);
      for (int n = 0; n < kVecs; ++n) sums[r * kVecs + n] = fma(weight, x[n], sums[r * kVecs + n]);
    }
    if (Sum) total = total + load(p + k * R);  // lanes behind R hold what nobody reads
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * kVecs; ++i) store(o + i / kVecs * wide + i % kVecs * W, sums[i]);
  if (Sum) store(l, total);
}

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
