// The one matrix product of the attention kernels: C[m][lanes] = sum over k of A(m, k) * B[k][lanes], all operands in tiles.
//
// Every product of the forward and the backward pass has this form once queries (or head dims) lie along the lanes: A is read by
// broadcasting its elements from rows in memory, B and C are rows of vectors. A k-step is one fp32 number, or one pair of bf16
// numbers in a dword (vdpbf16ps).
#pragma once

#include "attention_simd.h"

namespace rooftile {
namespace ROOFTILE_ISA {

struct Fp32Op {
  static constexpr bool kOnTiles = false;
  using Scalar = float;
  using Vec = Vf;
  static ROOFTILE_INLINE Vf dot(Vf acc, Vf a, Vf b) { return fma(a, b, acc); }
};

#if defined(__AVX512BF16__)
struct Bf16PairOp {
  static constexpr bool kOnTiles = false;
  using Scalar = uint32_t;
  using Vec = Vu;
  static ROOFTILE_INLINE Vf dot(Vf acc, Vu a, Vu b) {
    return (Vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
  }
};
#endif

enum class Into { kStore, kAdd, kScaleAdd };  // C = AB, C += AB, C = C * factor[lane] + AB

// Rows of A, columns (vectors) of B held in registers at once: rows x columns accumulators, columns of B and one of A.
#if defined(__AVX512F__)
constexpr int kPanelRows = 6, kPanelVecs = 4;
#else
constexpr int kPanelRows = 6, kPanelVecs = 2;
#endif

// Sums over k start at zero and are added to C once: shorter chains, and the row sum of the softmax can repeat them exactly.
// AdjacentRows: A(m, k) at a[m + k * step], else at a[m * step + k]. noinline: inlined variants were compiled worse.
template <class Op, int Rows, int Vecs, Into into, bool AdjacentRows>
ROOFTILE_NOINLINE void panel(int64_t depth, const typename Op::Scalar* a, int64_t step, const typename Op::Scalar* b, int64_t ldb,
                             float* c, int64_t ldc, const float* factor) {
  Vf sum[Rows][Vecs];  // in registers: every loop over it is unrolled
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < Vecs; ++n) sum[m][n] = Vf{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    typename Op::Vec columns[Vecs];
#pragma GCC unroll 8
    for (int n = 0; n < Vecs; ++n) columns[n] = load(b + n * W);
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) {
      const typename Op::Vec element = set1(AdjacentRows ? a[m] : a[m * step]);
#pragma GCC unroll 8
      for (int n = 0; n < Vecs; ++n) sum[m][n] = Op::dot(sum[m][n], element, columns[n]);
    }
    a += AdjacentRows ? step : 1;
    b += ldb;
  }
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < Vecs; ++n) {
      float* at = c + m * ldc + n * W;
      if (into == Into::kStore) store(at, sum[m][n]);
      if (into == Into::kAdd) store(at, load(at) + sum[m][n]);
      if (into == Into::kScaleAdd) store(at, fma(load(at), load(factor + n * W), sum[m][n]));
    }
  }
}

template <class Op, int Vecs, Into into, bool AdjacentRows>
void panels(int64_t rows, int64_t depth, const typename Op::Scalar* a, int64_t step, const typename Op::Scalar* b, int64_t ldb,
            float* c, int64_t ldc, const float* factor) {
  const auto advance = [&](int count) {
    a += AdjacentRows ? count : count * step;
    c += count * ldc;
    rows -= count;
  };
  // A remainder of 1 or 2 would be a slow panel of its own: the last two share what is left.
  while (rows >= kPanelRows && rows != kPanelRows + 1 && rows != kPanelRows + 2) {
    panel<Op, kPanelRows, Vecs, into, AdjacentRows>(depth, a, step, b, ldb, c, ldc, factor);
    advance(kPanelRows);
  }
  while (rows >= 4) {
    panel<Op, 4, Vecs, into, AdjacentRows>(depth, a, step, b, ldb, c, ldc, factor);
    advance(4);
  }
  if (rows >= 2) {
    panel<Op, 2, Vecs, into, AdjacentRows>(depth, a, step, b, ldb, c, ldc, factor);
    advance(2);
  }
  if (rows >= 1) {
    panel<Op, 1, Vecs, into, AdjacentRows>(depth, a, step, b, ldb, c, ldc, factor);
    advance(1);
  }
}

template <class Op, Into into, bool AdjacentRows>
void lane_gemm(int64_t rows, int vecs, int64_t depth, const typename Op::Scalar* a, int64_t step, const typename Op::Scalar* b,
               int64_t ldb, float* c, int64_t ldc, const float* factor) {
  int n = 0;
  const auto of_column = [&] { return factor == nullptr ? nullptr : factor + n * W; };
  for (; n + kPanelVecs <= vecs; n += kPanelVecs) {
    panels<Op, kPanelVecs, into, AdjacentRows>(rows, depth, a, step, b + n * W, ldb, c + n * W, ldc, of_column());
  }
#if defined(__AVX512F__)
  if (n + 2 <= vecs) {
    panels<Op, 2, into, AdjacentRows>(rows, depth, a, step, b + n * W, ldb, c + n * W, ldc, of_column());
    n += 2;
  }
#endif
  if (n < vecs) panels<Op, 1, into, AdjacentRows>(rows, depth, a, step, b + n * W, ldb, c + n * W, ldc, of_column());
}

// C (rows x vecs vectors), A (rows x depth), B (depth x vecs vectors); ldb, ldc and step in elements.
template <class Op, Into into, bool AdjacentRows>
void gemm(int64_t rows, int vecs, int64_t depth, const typename Op::Scalar* a, int64_t step, const typename Op::Scalar* b,
          int64_t ldb, float* c, int64_t ldc, const float* factor = nullptr) {
  if constexpr (Op::kOnTiles) {
    Op::template product<into>(rows, vecs, depth, a, step, b, ldb, c, ldc);
  } else {
    lane_gemm<Op, into, AdjacentRows>(rows, vecs, depth, a, step, b, ldb, c, ldc, factor);
  }
}

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
