// Numbers as sums of bf16 numbers, their planes: which products of planes make a product, and rows and columns split into planes.
//
// A row of planes holds 32 numbers of one plane, then the same 32 of the next one, in dwords of two neighbours.
#pragma once

#include "attention_tiles.h"

namespace rooftile {
namespace ROOFTILE_ISA {

// Which planes of A and B are multiplied, the smallest products first. kApart: sums are added to C once.
struct OneByOne {
  static constexpr int kCount = 1, a[kCount] = {0}, b[kCount] = {0};
  static constexpr bool kApart = false;
};
struct TwoByTwo {
  static constexpr int kCount = 4, a[kCount] = {1, 1, 0, 0}, b[kCount] = {1, 0, 1, 0};
  static constexpr bool kApart = false;
};
struct TwoByTwoUpper {
  static constexpr int kCount = 3, a[kCount] = {1, 0, 0}, b[kCount] = {0, 1, 0};
  static constexpr bool kApart = false;
};
struct ThreeByThreeUpper {
  static constexpr int kCount = 6, a[kCount] = {2, 1, 0, 1, 0, 0}, b[kCount] = {0, 1, 2, 0, 1, 0};
  static constexpr bool kApart = true;
};

// Scores: products with no error of their own, since an exponential makes the absolute error of a score a relative one of its
// probability. Sums: an error far below the rounding of the probabilities.
template <int Planes>
struct PlanePairs;
template <>
struct PlanePairs<1> {
  using Scores = OneByOne;
  using Sums = OneByOne;
};
// fp16 numbers have 11 significant bits, so two planes of 8 hold them exactly. Sums leave out 2^-16 of a product, where a probability
// as fp16 would have lost 2^-11 of it.
template <>
struct PlanePairs<2> {
  using Scores = TwoByTwo;
  using Sums = TwoByTwoUpper;
};
// fp32, with an error no larger than that of fused multiply-adds. Let u = 2^-24 and 2^e <= |a| < 2^(e+1). Rounding to nearest leaves
// |a - a0| <= 2^(e-8), then |a - a0 - a1| <= 2^(e-17); both are multiples of 2^(e-23), so the second has at most 7 bits and is a2:
// three planes are exact (down to 2^-109, below which a2 is subnormal and counts as zero). The products left out are at most
// |a1 b2| + |a2 b1| + |a2 b2| <= (2^-25 + 2^-25 + 2^-34) |a b|, which is u |a b|: one rounding of each product. Products of planes are
// exact. A sum over n, taken in tiles of 32 numbers, even and odd ones apart, rounds what a0 b0 contributes at most 16 times in its
// tile, once for even plus odd and n / 32 times in C, at most 17 + n / 32 + 1 in all; a chain of fused multiply-adds rounds it up to n
// times. The other products together are 2^-7 of that and come first, while C is as small as they are.
template <>
struct PlanePairs<3> {
  using Scores = ThreeByThreeUpper;
  using Sums = ThreeByThreeUpper;
};

// The bf16 number nearest to each lane, in fp32; the nearest finite one where rounding would give Inf.
ROOFTILE_INLINE Vf nearest_bf16(Vf x) {
  const Vu bits = (Vu)x, exponent = set1(0x7f800000u);
  const Vu nearest = bits + set1(0x7fffu) + ((bits >> 16) & set1(1u));
  const Vu overflows = (Vu)((nearest & exponent) == exponent);
  return (Vf)((Vu)select(overflows, x, (Vf)nearest) & set1(0xffff0000u));
}

// Lanes of `low` and `high`, neighbours in one dword, plane by plane. Inf and NaN have lower planes of zero.
template <int Planes>
ROOFTILE_INLINE void split_neighbours(Vf low, Vf high, int64_t plane_step, uint32_t* to) {
  for (int plane = 0; plane + 1 < Planes; ++plane) {
    const Vf upper_low = nearest_bf16(low), upper_high = nearest_bf16(high);
    store(to + plane * plane_step, neighbours_bf16(select((Vu)(low == low), upper_low, low), select((Vu)(high == high), upper_high, high)));
    low = low - upper_low;
    high = high - upper_high;
    low = select((Vu)(low == low), low, Vf{});
    high = select((Vu)(high == high), high, Vf{});
  }
  store(to + (Planes - 1) * plane_step, neighbours_bf16(low, high));
}

#if defined(__AVX512BF16__)
// The first and the last 16 of 32 bf16 numbers, as fp32.
ROOFTILE_INLINE Vf lower_half_bf16(Vu x) {
  return (Vf)((Vu)_mm512_cvtepu16_epi32(_mm512_castsi512_si256((__m512i)x)) << 16);
}
ROOFTILE_INLINE Vf upper_half_bf16(Vu x) {
  return (Vf)((Vu)_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64((__m512i)x, 1)) << 16);
}
#endif

// 32 numbers in planes.
template <int Planes>
ROOFTILE_INLINE void split_numbers(const float* from, int64_t plane_step, uint32_t* to) {
#if defined(__AVX512BF16__)
  Vf low = load(from), high = load(from + W);
  const Vu largest = set1(0x7f7f7fffu);  // what rounds to a finite bf16 number
  const __mmask16 rare = _mm512_cmpgt_epu32_mask((__m512i)((Vu)low & set1(0x7fffffffu)), (__m512i)largest) |
                         _mm512_cmpgt_epu32_mask((__m512i)((Vu)high & set1(0x7fffffffu)), (__m512i)largest);
  if (__builtin_expect(rare == 0, 1)) {
    for (int plane = 0; plane < Planes; ++plane) {
      const Vu rounded = neighbours_bf16(low, high);
      store(to + plane * plane_step, rounded);
      low = low - lower_half_bf16(rounded);
      high = high - upper_half_bf16(rounded);
    }
    return;
  }
#endif
  for (int n = 0; n < 32 / W; n += 2) split_neighbours<Planes>(load(from + n * W), load(from + (n + 1) * W), plane_step, to + n * W / 2);
}

// One row in planes, zeros up to a multiple of 32.
template <int Planes>
void split_row(const char* from, const RowSource& rows, int64_t dim, int64_t plane_step, int64_t block, uint32_t* to) {
  constexpr int64_t kNumbers = 32;
  alignas(64) float numbers[kNumbers];
  const bool in_place = rows.dtype == kFp32 && rows.element_bytes == 4 && reinterpret_cast<uintptr_t>(from) % 4 == 0;
  for (int64_t d = 0; d < dim; d += kNumbers, to += block) {
    const char* at = from + d * rows.element_bytes;
    if (in_place && d + kNumbers <= dim) {
      split_numbers<Planes>(reinterpret_cast<const float*>(at), plane_step, to);
    } else {
      read_row(at, rows.element_bytes, rows.dtype, d + kNumbers <= dim ? kNumbers : dim - d, kNumbers, numbers);
      split_numbers<Planes>(numbers, plane_step, to);
    }
  }
}

// to[d] = (even[d], odd[d]) of one plane of two rows in planes; a null row is one of zeros.
template <int Planes>
void interleave_plane(const uint32_t* even, const uint32_t* odd, int plane, int64_t count, uint32_t* to) {
  for (int64_t d = 0; d < count; d += 32) {
    static constexpr uint16_t kZeros[32] = {};
    const int64_t at = (d / 32 * Planes + plane) * 16;
    interleave_rows(even == nullptr ? kZeros : reinterpret_cast<const uint16_t*>(even + at),
                    odd == nullptr ? kZeros : reinterpret_cast<const uint16_t*>(odd + at), count - d < 32 ? count - d : 32, to + d);
  }
}

// Makes operand A of a sum over rows: [column][row pair], 16 pairs of a plane at a time, zeros up to whole ones.
template <int Planes>
class ColumnPairs {
 public:
  ColumnPairs(int64_t columns, uint32_t* memory) : wide(round_up<int64_t>(columns, 16)), even(memory), odd(even + row_size(columns)),
                                                   pairs(odd + row_size(columns)) {}
  static int64_t row_size(int64_t columns) { return round_up<int64_t>(columns, 32) / 2 * Planes; }
  static int64_t scratch(int64_t columns) { return 2 * row_size(columns) + Planes * 16 * round_up<int64_t>(columns, 16); }

  // row_of(row, memory): a row in planes, there or written to `memory`.
  template <typename RowOf>
  void transpose(int64_t count, uint32_t* to, int64_t ld, RowOf row_of) const {
    for (int64_t first = 0; first < count; first += 32, to += 16 * Planes) {
      for (int64_t pair = 0; pair < 16; ++pair) {
        const int64_t row = first + 2 * pair;
        const uint32_t* first_row = row < count ? row_of(row, even) : nullptr;
        const uint32_t* second_row = row + 1 < count ? row_of(row + 1, odd) : nullptr;
        for (int plane = 0; plane < Planes; ++plane) {
          interleave_plane<Planes>(first_row, second_row, plane, wide, pairs + (plane * 16 + pair) * wide);
        }
      }
      for (int plane = 0; plane < Planes; ++plane) transpose_dwords(pairs + plane * 16 * wide, wide, 16, wide, to + plane * 16, ld);
    }
  }

 private:
  const int64_t wide;
  uint32_t *even, *odd, *pairs;
};

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
