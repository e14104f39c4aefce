// Eight tiles of 16 rows by 64 bytes and the bf16 product on them: the processor's own (AMX), or the same arithmetic in plain C++.
//
// The C++ one exists for tests: everything above the tile instructions runs on any processor, with the bits that AMX gives.
#pragma once

#include <cfloat>

#include "attention_simd.h"

namespace rooftile {
namespace ROOFTILE_ISA {

constexpr int kTileRows = 16;
constexpr int kTileDwords = 16;  // of a row: 16 fp32 numbers, or 16 pairs of bf16

#if defined(ROOFTILE_AMX)
// Raw assembly: GCC 12's intrinsics declare neither the memory that they read and write nor the whole of the configuration, so
// stores to it were dropped. No compiler that we build with uses tile registers on its own, so there is nothing else to declare.
struct AmxTiles {
  // Tiles exist between its construction and its destruction, in this thread alone.
  class Region {
   public:
    Region() {
      struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
      } const layout;
      static_assert(sizeof layout == 64, "ldtilecfg reads 64 bytes");
      asm volatile("ldtilecfg %0" : : "m"(layout) : "memory");
    }
    ~Region() { asm volatile("tilerelease" : : : "memory"); }
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
  };

  template <int T>
  ROOFTILE_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  template <int T>
  ROOFTILE_INLINE void load(const void* from, int64_t row_bytes) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(row_bytes) : "memory");
  }
  template <int T>
  ROOFTILE_INLINE void store(void* to, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(row_bytes) : "memory");
  }
  // C += A B: rows of A hold pairs along the sum, rows of B hold such pairs of all columns.
  template <int C, int A, int B>
  ROOFTILE_INLINE void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};
#endif

// TDPBF16PS as Intel's Software Developer's Manual writes it down: even and odd members of the pairs are summed apart, by fused
// multiply-adds from zero; their sum is added to C. Every operand and result that is subnormal counts as zero.
class SoftwareTiles {
 public:
  struct Region {
    Region() {}  // as AmxTiles has one: the variable is used by being there
  };

  template <int T>
  void zero() {
    std::memset(tile[T], 0, sizeof tile[T]);
  }
  template <int T>
  void load(const void* from, int64_t row_bytes) {
    for (int m = 0; m < kTileRows; ++m) std::memcpy(tile[T][m], static_cast<const char*>(from) + m * row_bytes, sizeof tile[T][m]);
  }
  template <int T>
  void store(void* to, int64_t row_bytes) const {
    for (int m = 0; m < kTileRows; ++m) std::memcpy(static_cast<char*>(to) + m * row_bytes, tile[T][m], sizeof tile[T][m]);
  }
  template <int C, int A, int B>
  void dot() {
    dot_tiles(tile[C], tile[A], tile[B]);
  }

 private:
  typedef uint32_t Tile[kTileRows][kTileDwords];
  Tile tile[8];

  // Unsanitized from here on: every index is below a constant, and sanitizers would take minutes to see it.
  static ROOFTILE_INLINE ROOFTILE_UNSANITIZED float number(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  static ROOFTILE_INLINE ROOFTILE_UNSANITIZED float flushed(float x) { return std::fabs(x) < FLT_MIN ? x * 0.0f : x; }
  static ROOFTILE_INLINE ROOFTILE_UNSANITIZED float member(uint32_t pair, int odd) { return flushed(number(odd ? pair & 0xffff0000u : pair << 16)); }

  // sum[n] = fma(a, b[n], sum[n]). Products of two bf16 numbers are exact in fp32 unless they leave its normal range.
  static ROOFTILE_INLINE ROOFTILE_UNSANITIZED void add_products(float a, const float* b, float* sum) {
    float next[kTileDwords];
    bool exact = true;
    for (int n = 0; n < kTileDwords; ++n) {
      const float product = a * b[n], size = std::fabs(product);
      exact &= (size >= FLT_MIN && size <= FLT_MAX) || a == 0.0f || b[n] == 0.0f;
      next[n] = flushed(sum[n] + product);
    }
    for (int n = 0; n < kTileDwords; ++n) sum[n] = exact ? next[n] : flushed(std::fma(a, b[n], sum[n]));
  }

  static ROOFTILE_NOINLINE ROOFTILE_UNSANITIZED void dot_tiles(Tile& c, const Tile& a, const Tile& b) {
    float columns[2][kTileRows][kTileDwords];
    for (int odd = 0; odd < 2; ++odd) {
      for (int k = 0; k < kTileRows; ++k) {
        for (int n = 0; n < kTileDwords; ++n) columns[odd][k][n] = member(b[k][n], odd);
      }
    }
    for (int m = 0; m < kTileRows; ++m) {
      float sum[2][kTileDwords] = {};
      for (int k = 0; k < kTileDwords; ++k) {
        for (int odd = 0; odd < 2; ++odd) add_products(member(a[m][k], odd), columns[odd][k], sum[odd]);
      }
      for (int n = 0; n < kTileDwords; ++n) {
        const float result = flushed(flushed(number(c[m][n])) + flushed(sum[0][n] + sum[1][n]));
        std::memcpy(&c[m][n], &result, 4);
      }
    }
  }
};

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
