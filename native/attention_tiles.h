// Rows of Q, K, V and dO in memory (any dtype, any strides, paged or not), and the operand layouts that the products read.
#pragma once

#include "attention_abi.h"
#include "attention_simd.h"

namespace rooftile {
namespace ROOFTILE_ISA {

constexpr int kLanes = 64;  // queries of a lane group: one pass over a tile of keys serves them all

template <typename T>
T round_up(T value, T multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The rows (queries or keys) of one head of one sequence.
struct RowSource {
  const char* base;
  int64_t row_bytes, element_bytes;  // from one row, one element, to the next
  int32_t dtype;
  const int32_t* pages;  // null: rows lie row_bytes apart
  int64_t page_size, page_bytes;

  const char* row(int64_t j) const {
    if (pages == nullptr) return base + j * row_bytes;
    return base + pages[j / page_size] * page_bytes + j % page_size * row_bytes;
  }
  bool adjacent(int64_t first, int64_t count) const {  // whether these rows lie row_bytes apart
    return pages == nullptr || first / page_size == (first + count - 1) / page_size;
  }
};

inline int64_t bytes_of(int32_t dtype) { return dtype == kFp32 ? 4 : 2; }

inline RowSource source_of(const TensorView& view, int32_t dtype, int64_t b, int64_t h) {
  const int64_t size = bytes_of(dtype);
  return {static_cast<const char*>(view.data) + (b * view.stride[0] + h * view.stride[1]) * size, view.stride[2] * size,
          view.stride[3] * size, dtype, nullptr, 0, 0};
}

// K or V of a sequence, through the block table where there is one.
inline RowSource key_source(const AttentionProblem& p, const TensorView& view, int64_t b, int64_t h) {
  if (p.page_size == 0) return source_of(view, p.dtype, b, h);
  RowSource source = source_of(view, p.dtype, 0, h);
  source.pages = p.pages + b * p.pages_stride;
  source.page_size = p.page_size;
  source.page_bytes = view.stride[0] * bytes_of(p.dtype);
  return source;
}

ROOFTILE_INLINE float read_element(const char* at, int32_t dtype) {
  if (dtype == kFp32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return dtype == kBf16 ? widen_bf16(bits) : widen_fp16(bits);
}

// By its bits: a compiler may be told that there are no others.
ROOFTILE_INLINE bool finite(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits & 0x7f800000u) != 0x7f800000u;
}

ROOFTILE_INLINE void write_element(char* at, int32_t dtype, float value) {
  if (dtype == kFp32) {
    std::memcpy(at, &value, 4);
    return;
  }
  const uint16_t bits = dtype == kBf16 ? round_bf16(value) : round_fp16(value);
  std::memcpy(at, &bits, 2);
}

// One row widened to fp32, zeros up to `padded`.
inline void read_row(const char* from, int64_t element_bytes, int32_t dtype, int64_t count, int64_t padded, float* to) {
  if (dtype == kFp32 && element_bytes == 4) {
    std::memcpy(to, from, static_cast<size_t>(count) * 4);
  } else if (dtype == kBf16 && element_bytes == 2) {
    for (int64_t d = 0; d < count; ++d) {
      uint16_t bits;
      std::memcpy(&bits, from + d * 2, 2);
      to[d] = widen_bf16(bits);
    }
  } else if (element_bytes == 2) {
    int64_t d = 0;
#if defined(__AVX512F__)
    for (; d + 16 <= count; d += 16) {
      _mm512_storeu_ps(to + d, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + d * 2))));
    }
#elif defined(__F16C__)
    for (; d + 8 <= count; d += 8) {
      _mm256_storeu_ps(to + d, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + d * 2))));
    }
#endif
    for (; d < count; ++d) to[d] = read_element(from + d * 2, dtype);
  } else {
    for (int64_t d = 0; d < count; ++d) to[d] = read_element(from + d * element_bytes, dtype);
  }
  for (int64_t d = count; d < padded; ++d) to[d] = 0.0f;
}

// One row of 16-bit numbers as they are, zeros up to `padded`. Written bytewise: pairs of them are read as dwords.
inline void read_row_raw(const char* from, int64_t element_bytes, int64_t count, int64_t padded, uint16_t* to) {
  if (element_bytes == 2) {
    std::memcpy(to, from, static_cast<size_t>(count) * 2);
  } else {
    for (int64_t d = 0; d < count; ++d) std::memcpy(to + d, from + d * element_bytes, 2);
  }
  if (padded > count) std::memset(to + count, 0, static_cast<size_t>(padded - count) * 2);
}

// Memory that will soon be read or written comes nearer.
inline void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

// One row of fp32 numbers rounded to `dtype`.
inline void write_row(char* to, int64_t element_bytes, int32_t dtype, int64_t count, const float* from) {
  int64_t d = 0;
  if (dtype == kFp32 && element_bytes == 4) {
    std::memcpy(to, from, static_cast<size_t>(count) * 4);
    return;
  }
  if (dtype == kBf16 && element_bytes == 2) {
    for (; d + 2 * W <= count; d += 2 * W) {
      const Vu pairs = neighbours_bf16(load(from + d), load(from + d + W));
      std::memcpy(to + d * 2, &pairs, sizeof pairs);
    }
  }
#if defined(__AVX512F__)
  if (dtype == kFp16 && element_bytes == 2) {
    for (; d + 16 <= count; d += 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d * 2), _mm512_cvtps_ph((__m512)load(from + d), _MM_FROUND_TO_NEAREST_INT));
    }
  }
#elif defined(__F16C__)
  if (dtype == kFp16 && element_bytes == 2) {
    for (; d + 8 <= count; d += 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d * 2), _mm256_cvtps_ph((__m256)load(from + d), _MM_FROUND_TO_NEAREST_INT));
    }
  }
#endif
  for (; d < count; ++d) write_element(to + d * element_bytes, dtype, from[d]);
}

// to[d] = (a[d], b[d]) as one dword: the pairs along the rows that vdpbf16ps and TDPBF16PS take from B.
inline void interleave_rows(const uint16_t* a, const uint16_t* b, int64_t count, uint32_t* to) {
  for (int64_t d = 0; d < count; ++d) to[d] = a[d] | static_cast<uint32_t>(b[d]) << 16;
}

#if defined(__AVX512F__)
// 16 x 16 dwords in four rounds of 16 shuffles.
ROOFTILE_INLINE void transpose_16x16(const uint32_t* from, int64_t ld_from, uint32_t* to, int64_t ld_to) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * ld_from);
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
    a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
    b[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
    b[8 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
    b[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(to + i * ld_to, _mm512_shuffle_i32x4(b[i], b[8 + i], 0x88));
    _mm512_storeu_si512(to + (8 + i) * ld_to, _mm512_shuffle_i32x4(b[i], b[8 + i], 0xdd));
    _mm512_storeu_si512(to + (4 + i) * ld_to, _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0x88));
    _mm512_storeu_si512(to + (12 + i) * ld_to, _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0xdd));
  }
}
#endif

// to[c][r] = from[r][c]; rows and cols are multiples of 16 (padded by the caller).
inline void transpose_dwords(const uint32_t* from, int64_t ld_from, int64_t rows, int64_t cols, uint32_t* to, int64_t ld_to) {
  for (int64_t r = 0; r < rows; r += 16) {
    for (int64_t c = 0; c < cols; c += 16) {
      const uint32_t* block = from + r * ld_from + c;
      uint32_t* out = to + c * ld_to + r;
#if defined(__AVX512F__)
      transpose_16x16(block, ld_from, out, ld_to);
#else
      for (int i = 0; i < 16; ++i) {
        for (int j = 0; j < 16; ++j) std::memcpy(out + j * ld_to + i, block + i * ld_from + j, 4);  // fp32 or pairs
      }
#endif
    }
  }
}

// Whether no element of the row is Inf or NaN: the largest exponent field says it, without a branch an element.
template <typename Bits>
bool exponents_below(const char* at, int64_t element_bytes, int64_t count, Bits exponent) {
  Bits worst = 0;
  if (element_bytes == static_cast<int64_t>(sizeof(Bits))) {
    for (int64_t d = 0; d < count; ++d) {
      Bits bits;
      std::memcpy(&bits, at + d * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
      bits &= exponent;
      worst = bits > worst ? bits : worst;
    }
    return worst != exponent;
  }
  for (int64_t d = 0; d < count; ++d) {
    Bits bits;
    std::memcpy(&bits, at + d * element_bytes, sizeof(Bits));
    if ((bits & exponent) == exponent) return false;
  }
  return true;
}

inline bool row_finite(const RowSource& source, int64_t j, int64_t count) {
  const char* at = source.row(j);
  if (source.dtype == kFp32) return exponents_below<uint32_t>(at, source.element_bytes, count, 0x7f800000u);
  return exponents_below<uint16_t>(at, source.element_bytes, count, source.dtype == kBf16 ? 0x7f80 : 0x7c00);
}

// Scratch memory of one thread, handed out in 64-byte steps. A null base counts how much would be needed.
struct Arena {
  char* base = nullptr;
  int64_t used = 0;

  template <typename T>
  T* take(int64_t count) {
    T* at = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(used));  // not used while counting
    used += round_up<int64_t>(count * static_cast<int64_t>(sizeof(T)), 64);
    return at;
  }
};

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
