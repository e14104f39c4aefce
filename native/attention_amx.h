// Attention on tiles of bf16 pairs (AMX): the product of attention_gemm.h's operands, and the engine over it.
//
// Numbers of more than 8 significant bits are sums of bf16 numbers, their planes: bf16 has one, fp16 two. A product of two numbers
// is then a few products of planes, which all add to the same tile of C.
#pragma once

#include "attention_amx_tiles.h"
#include "attention_engines.h"

namespace rooftile {
namespace ROOFTILE_ISA {

// An operand in planes: tile (r, k) of plane p starts at data + 16 * r rows + k * block + p * plane, all in dwords.
struct PlanarOperand {
  const uint32_t* data;
  int64_t row, plane, block;
};

// Which planes of A and B are multiplied, the smallest products first.
struct OnePlane {
  static constexpr int kCount = 1, a[kCount] = {0}, b[kCount] = {0};
};

// C (32 x 32, or half of it in either direction) from `steps` tiles along the sum. noinline: eight tiles and a few addresses.
template <class Tiles, class Pairs, Into into, int M, int N>
ROOFTILE_NOINLINE void tile_block(int64_t steps, PlanarOperand a, PlanarOperand b, float* c, int64_t ldc) {
  static_assert(into != Into::kScaleAdd, "rows of C are scaled beforehand");
  Tiles tiles;
  const int64_t row_a = a.row * 4, row_b = b.row * 4, row_c = ldc * 4;
  float* const lower = c + kTileRows * ldc;
  if (into == Into::kStore) {
    tiles.template zero<0>();
    if (N > 1) tiles.template zero<1>();
    if (M > 1) tiles.template zero<2>();
    if (M > 1 && N > 1) tiles.template zero<3>();
  } else {
    tiles.template load<0>(c, row_c);
    if (N > 1) tiles.template load<1>(c + kTileDwords, row_c);
    if (M > 1) tiles.template load<2>(lower, row_c);
    if (M > 1 && N > 1) tiles.template load<3>(lower + kTileDwords, row_c);
  }
  for (int64_t k = 0; k < steps; ++k) {
    for (int i = 0; i < Pairs::kCount; ++i) {
      const uint32_t *from_a = a.data + Pairs::a[i] * a.plane, *from_b = b.data + Pairs::b[i] * b.plane;
      tiles.template load<6>(from_b, row_b);
      tiles.template load<4>(from_a, row_a);
      tiles.template dot<0, 4, 6>();
      if (N > 1) tiles.template load<7>(from_b + kTileDwords, row_b);
      if (N > 1) tiles.template dot<1, 4, 7>();
      if (M > 1) tiles.template load<5>(from_a + kTileRows * a.row, row_a);
      if (M > 1) tiles.template dot<2, 5, 6>();
      if (M > 1 && N > 1) tiles.template dot<3, 5, 7>();
    }
    a.data += a.block;
    b.data += b.block;
  }
  tiles.template store<0>(c, row_c);
  if (N > 1) tiles.template store<1>(c + kTileDwords, row_c);
  if (M > 1) tiles.template store<2>(lower, row_c);
  if (M > 1 && N > 1) tiles.template store<3>(lower + kTileDwords, row_c);
}

// C (rows x columns) = or += A B over `depth` dwords of each plane. Whole tiles are read and written: rows of A and C, columns of B
// and C up to the next multiple of 16, and of the last 16 dwords along the sum those beyond `depth` must be zero in one operand and
// finite in the other.
template <class Tiles, class Pairs, Into into>
void multiply(int64_t rows, int64_t columns, int64_t depth, PlanarOperand a, PlanarOperand b, float* c, int64_t ldc) {
  const int64_t steps = (depth + kTileDwords - 1) / kTileDwords;
  for (int64_t m = 0; m < rows; m += 2 * kTileRows) {
    const bool both_rows = rows - m > kTileRows;
    PlanarOperand panel = b;
    for (int64_t n = 0; n < columns; n += 2 * kTileDwords, panel.data += 2 * kTileDwords) {
      const bool both_columns = columns - n > kTileDwords;
      const auto block = both_rows ? both_columns ? tile_block<Tiles, Pairs, into, 2, 2> : tile_block<Tiles, Pairs, into, 2, 1>
                                   : both_columns ? tile_block<Tiles, Pairs, into, 1, 2> : tile_block<Tiles, Pairs, into, 1, 1>;
      block(steps, a, panel, c + n, ldc);
    }
    a.data += 2 * kTileRows * a.row;
    c += 2 * kTileRows * ldc;
  }
}

// The product over the head dim: rows as the engine copies them, times rows as it transposes them.
template <class Tiles, class Pairs, int Planes>
struct TileOp {
  using Scalar = uint32_t;
  static constexpr bool kOnTiles = true;

  template <Into into>
  static void product(int64_t rows, int vecs, int64_t depth, const Scalar* a, int64_t step, const Scalar* b, int64_t ldb, float* c,
                      int64_t ldc) {
    multiply<Tiles, Pairs, into>(rows, vecs * W, depth, {a, step, kTileDwords, Planes * kTileDwords},
                                 {b, ldb, kTileRows * ldb, Planes * kTileRows * ldb}, c, ldc);
  }
};

// 2^t for the probabilities: the fraction of t is taken downwards, which leaves it in [0, 1) and saves its rounding.
ROOFTILE_INLINE Vf exp2_probability(Vf t) {
#if defined(__AVX512F__)
  const __mmask16 alive = _mm512_cmp_ps_mask((__m512)t, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const Vf f = (Vf)_mm512_reduce_ps((__m512)t, 9);  // t - floor(t); 0 at -inf
  Vf p = fma(set1(0.013426686637103558f), f, set1(0.0522424690425396f));
  p = fma(p, f, set1(0.2412802129983902f));
  p = fma(p, f, set1(0.6930448412895203f));
  p = fma(p, f, set1(1.0f));
  return (Vf)_mm512_maskz_scalef_ps(alive, (__m512)p, (__m512)t);  // by 2^floor(t)
#else
  return exp2_poly<4>(t);
#endif
}

// The maximum that probabilities are taken against, and the factor of the older sums. A maximum that has grown by less than 2^8 is
// kept: probabilities then reach 256, which rounds no worse, and the sums are left alone.
template <int Vecs>
ROOFTILE_INLINE void settle_maximum(const Vf m[Vecs], float c, float* running, float* factor, Vf shift[Vecs]) {
  for (int n = 0; n < Vecs; ++n) {
    const Vf old = load(running + n * W);
    const Vf settled = select((Vu)((m[n] - old) * set1(c) > set1(8.0f)), m[n], old);  // old of -inf: grown by infinity
    shift[n] = select((Vu)(settled == set1(-kInfinity)), Vf{}, settled);
    store(factor + n * W, exp2_poly<5>((old - shift[n]) * set1(c)));
    store(running + n * W, settled);
  }
}

// bf16 on tiles. Scalars are pairs of neighbours along the sum.
template <class Tiles>
struct TileEngine {
  using Op = TileOp<Tiles, OnePlane, 1>;
  using Scalar = uint32_t;
  using Region = typename Tiles::Region;
  static constexpr int64_t kKeyTile = 128;   // four tiles along the sum of the product with V
  static constexpr int64_t kKeyAlign = 32;   // a group's part of a key tile starts at a whole tile of V^T
  static constexpr int64_t kGroupsPerTask = 8;  // V is transposed once for 512 queries

  static int64_t depth(int64_t dim) { return (dim + 1) / 2; }
  static int64_t padded(int64_t dim) { return round_up(depth(dim), int64_t{kTileDwords}); }

  static void copy_row(const char* at, const RowSource& rows, int64_t dim, Scalar* to) {
    read_row_raw(at, rows.element_bytes, dim, padded(dim) * 2, reinterpret_cast<uint16_t*>(to));
  }
  static void copy_rows(const RowSource& rows, int64_t first, int64_t count, int64_t dim, Scalar* to) {
    for (int64_t j = 0; j < count; ++j) copy_row(rows.row(first + j), rows, dim, to + j * padded(dim));
  }
  // In place: whole tiles of adjacent rows. Rows that lie far apart share few sets of the first-level cache, so they are copied.
  static RowOperand<Scalar> row_operand(const RowSource& rows, int64_t first, int64_t count, int64_t dim, Scalar* scratch) {
    if (dim % (2 * kTileDwords) == 0 && count % kTileRows == 0 && rows.element_bytes == 2 && rows.row_bytes == dim * 2 &&
        rows.adjacent(first, count) && reinterpret_cast<uintptr_t>(rows.row(first)) % 4 == 0) {
      return {reinterpret_cast<const uint32_t*>(rows.row(first)), dim / 2};
    }
    copy_rows(rows, first, count, dim, scratch);
    return {scratch, padded(dim)};
  }
  static void transpose(const Scalar* from, int64_t ld, int64_t rows, int64_t cols, Scalar* to, int64_t ld_to) {
    transpose_dwords(from, ld, rows, cols, to, ld_to);
  }

  // ---- the forward pass: V^T[dim][key pair], zeros up to whole tiles. The scratch holds it first and the interleaved rows behind it.
  static constexpr int64_t kPairs = kKeyTile / 2;
  static int64_t value_scratch(int64_t value_dim) { return (kPairs + 1) * round_up(value_dim, kColumnStep) * 2; }
  static RowOperand<Scalar> value_operand(const RowSource& v, int64_t first, int64_t count, int64_t dim, Scalar* scratch) {
    const int64_t wide = round_up(dim, kColumnStep), pairs = round_up((count + 1) / 2, int64_t{kTileDwords});
    Scalar* interleaved = scratch + kPairs * wide;
    uint16_t* row = reinterpret_cast<uint16_t*>(interleaved + kPairs * wide);  // two rows, where memory can't be read in place
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const uint16_t* source[2];
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t j = 2 * pair + half;
        source[half] = row + half * wide;
        if (j >= count) {
          std::memset(row + half * wide, 0, static_cast<size_t>(dim) * 2);
        } else if (v.element_bytes == 2 && reinterpret_cast<uintptr_t>(v.row(first + j)) % 2 == 0) {
          source[half] = reinterpret_cast<const uint16_t*>(v.row(first + j));
        } else {
          read_row_raw(v.row(first + j), v.element_bytes, dim, dim, row + half * wide);
        }
      }
      interleave_rows(source[0], source[1], dim, interleaved + pair * wide);
      std::memset(interleaved + pair * wide + dim, 0, static_cast<size_t>(wide - dim) * 4);
    }
    transpose_dwords(interleaved, wide, pairs, wide, scratch, kPairs);
    return {scratch, kPairs};
  }

  // Probabilities take the place of the scores: those of pair p lie in row p, whose scores have been read by then.
  static int64_t probability_scratch() { return 0; }
  static Scalar* probabilities_in(float* s) { return reinterpret_cast<Scalar*>(s); }

  // The row sum adds the rounded probabilities in the order in which the tiles add their products with V: with V = 1 both are the
  // same number, bit by bit.
  template <bool Masked, int Vecs>
  static ROOFTILE_INLINE void stripe(int64_t keys, float c, float* s, const uint32_t* visible, float* running, float* l, float* factor) {
    Vf m[Vecs], shift[Vecs], total[Vecs];
    for (int n = 0; n < Vecs; ++n) m[n] = load(running + n * W);
    stripe_maximum<Vecs, Masked>(keys, s, visible, m);
    settle_maximum<Vecs>(m, c, running, factor, shift);
    for (int n = 0; n < Vecs; ++n) total[n] = load(l + n * W) * load(factor + n * W);
    const int64_t pairs = (keys + 1) / 2;
    for (int64_t tile = 0; tile < pairs; tile += kTileRows) {
      Vf even_sum[Vecs] = {}, odd_sum[Vecs] = {};
      for (int64_t pair = tile; pair < tile + kTileRows; ++pair) {
        Scalar* to = probabilities_in(s) + pair * kLanes;
        if (pair >= pairs) {
          for (int n = 0; n < Vecs; ++n) store(to + n * W, Vu{});
          continue;
        }
        const float* from = s + 2 * pair * kLanes;
        for (int n = 0; n < Vecs; ++n) {
          const Vf even = exp2_probability((load(from + n * W) - shift[n]) * set1(c));
          const Vf odd = 2 * pair + 1 < keys ? exp2_probability((load(from + kLanes + n * W) - shift[n]) * set1(c)) : Vf{};
          const Vu both = pack_bf16(even, odd);
          store(to + n * W, both);
          even_sum[n] = even_sum[n] + (Vf)(both << 16);
          odd_sum[n] = odd_sum[n] + (Vf)(both & set1(0xffff0000u));
        }
      }
      for (int n = 0; n < Vecs; ++n) total[n] = total[n] + (even_sum[n] + odd_sum[n]);
    }
    for (int n = 0; n < Vecs; ++n) store(l + n * W, total[n]);
  }
  template <bool Masked>
  static ROOFTILE_NOINLINE void softmax(int vecs, int64_t keys, float c, float* s, const uint32_t* visible, float* m, float* l,
                                        float* factor, Scalar*) {
    int n = 0;
    for (; n + kStripe <= vecs; n += kStripe) {
      stripe<Masked, kStripe>(keys, c, s + n * W, visible + n * W, m + n * W, l + n * W, factor + n * W);
    }
    for (; n < vecs; ++n) stripe<Masked, 1>(keys, c, s + n * W, visible + n * W, m + n * W, l + n * W, factor + n * W);
  }
  static float probability(const float* s, const Scalar*, int64_t key, int lane) {
    uint32_t pair;
    std::memcpy(&pair, s + key / 2 * kLanes + lane, 4);
    return widen_bf16(static_cast<uint16_t>(pair >> (key % 2 * 16)));
  }
  static void drop(int vecs, int64_t keys, const uint32_t* keep, float* s, Scalar*) {
    for (int64_t k = 0; k < keys; k += 2) {
      for (int n = 0; n < vecs; ++n) {
        const Vu even = load(keep + k * kLanes + n * W);
        const Vu odd = k + 1 < keys ? load(keep + (k + 1) * kLanes + n * W) : Vu{};
        Scalar* at = probabilities_in(s) + k / 2 * kLanes + n * W;
        store(at, load(at) & ((even & set1(0xffffu)) | (odd & set1(0xffff0000u))));
      }
    }
  }
  static void accumulate(int vecs, int64_t keys, int64_t dim, RowOperand<Scalar> v, int64_t from, float* s, const Scalar*,
                         const float* factor, float* out) {
    scale_lanes(vecs, dim, factor, out);
    const Scalar* p = probabilities_in(s);
    multiply<Tiles, OnePlane, Into::kAdd>(dim, vecs * W, (keys + 1) / 2, {v.data + from / 2, v.step, 0, kTileDwords},
                                          {p, kLanes, 0, kTileRows * kLanes}, out, kLanes);
  }
  // out[dim][lane] *= factor[lane], where any factor is not 1: with a settled maximum few tiles of keys have one.
  static ROOFTILE_NOINLINE void scale_lanes(int vecs, int64_t dim, const float* factor, float* out) {
    Vu other{};
    for (int n = 0; n < vecs; ++n) other |= (Vu)(load(factor + n * W) != set1(1.0f));
    uint32_t any = 0;
    for (int i = 0; i < W; ++i) any |= other[i];
    if (any == 0) return;
    for (int64_t d = 0; d < dim; ++d) {
      for (int n = 0; n < vecs; ++n) {
        float* at = out + d * kLanes + n * W;
        store(at, load(at) * load(factor + n * W));
      }
    }
  }
};

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
