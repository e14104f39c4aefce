// Attention on tiles of bf16 pairs (AMX): matrix products of tiles, and the engine over them.
//
// A number of more than 8 significant bits is the sum of a few bf16 numbers, its planes: fp16 has two, fp32 three. The product of
// two such numbers is a few products of planes, which all add to the same tile of C.
#pragma once

#include "attention_amx_planes.h"
#include "attention_amx_tiles.h"
#include "attention_engines.h"

namespace rooftile {
namespace ROOFTILE_ISA {

// An operand in planes: tile (r, k) of plane p starts at data + 16 * r rows + k * block + p * plane, all in dwords.
struct PlanarOperand {
  const uint32_t* data;
  int64_t row, plane, block;
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
  for (int i = 0; i < Pairs::kCount; ++i) {
    const uint32_t *from_a = a.data + Pairs::a[i] * a.plane, *from_b = b.data + Pairs::b[i] * b.plane;
    for (int64_t k = 0; k < steps; ++k) {
      tiles.template load<6>(from_b, row_b);
      tiles.template load<4>(from_a, row_a);
      tiles.template dot<0, 4, 6>();
      if (N > 1) tiles.template load<7>(from_b + kTileDwords, row_b);
      if (N > 1) tiles.template dot<1, 4, 7>();
      if (M > 1) tiles.template load<5>(from_a + kTileRows * a.row, row_a);
      if (M > 1) tiles.template dot<2, 5, 6>();
      if (M > 1 && N > 1) tiles.template dot<3, 5, 7>();
      from_a += a.block;
      from_b += b.block;
    }
  }
  tiles.template store<0>(c, row_c);
  if (N > 1) tiles.template store<1>(c + kTileDwords, row_c);
  if (M > 1) tiles.template store<2>(lower, row_c);
  if (M > 1 && N > 1) tiles.template store<3>(lower + kTileDwords, row_c);
}

// The same, summed from zero and added to C once: for many small products, whose sum would lose bits in a large C one by one.
template <class Tiles, class Pairs, Into into, int M, int N>
void apart_block(int64_t steps, PlanarOperand a, PlanarOperand b, float* c, int64_t ldc, const float* factor) {
  constexpr int kColumns = N * kTileDwords;
  alignas(64) float sum[M * kTileRows * kColumns];
  tile_block<Tiles, Pairs, Into::kStore, M, N>(steps, a, b, sum, kColumns);
  for (int m = 0; m < M * kTileRows; ++m) {
    for (int n = 0; n < kColumns; n += W) {
      float* at = c + m * ldc + n;
      const Vf term = load(sum + m * kColumns + n);
      store(at, into == Into::kScaleAdd ? fma(load(at), load(factor + n), term) : load(at) + term);
    }
  }
}

// C (rows x columns) = AB, C += AB, or, apart alone, C = C * factor[column] + AB, over `depth` dwords of each plane. Whole tiles are
// read and written: rows of A and C, columns of B and C up to the next multiple of 16; and of the last 16 dwords along the sum those
// beyond `depth` must be zero in one operand and finite in the other.
template <class Tiles, class Pairs, Into into>
void multiply(int64_t rows, int64_t columns, int64_t depth, PlanarOperand a, PlanarOperand b, float* c, int64_t ldc,
              const float* factor = nullptr) {
  const int64_t steps = (depth + kTileDwords - 1) / kTileDwords;
  for (int64_t m = 0; m < rows; m += 2 * kTileRows) {
    const bool both_rows = rows - m > kTileRows;
    PlanarOperand panel = b;
    for (int64_t n = 0; n < columns; n += 2 * kTileDwords, panel.data += 2 * kTileDwords) {
      const bool both_columns = columns - n > kTileDwords;
      if constexpr (Pairs::kApart && into != Into::kStore) {
        const auto block = both_rows ? both_columns ? apart_block<Tiles, Pairs, into, 2, 2> : apart_block<Tiles, Pairs, into, 2, 1>
                                     : both_columns ? apart_block<Tiles, Pairs, into, 1, 2> : apart_block<Tiles, Pairs, into, 1, 1>;
        block(steps, a, panel, c + n, ldc, factor + (into == Into::kScaleAdd ? n : 0));
      } else {
        const auto block = both_rows ? both_columns ? tile_block<Tiles, Pairs, into, 2, 2> : tile_block<Tiles, Pairs, into, 2, 1>
                                     : both_columns ? tile_block<Tiles, Pairs, into, 1, 2> : tile_block<Tiles, Pairs, into, 1, 1>;
        block(steps, a, panel, c + n, ldc);
      }
    }
    a.data += 2 * kTileRows * a.row;
    c += 2 * kTileRows * ldc;
  }
}

// The product over the head dim: rows as the engine copies them, times rows as it transposes them.
template <class Tiles, int Planes>
struct TileOp {
  using Scalar = uint32_t;
  static constexpr bool kOnTiles = true;

  template <Into into>
  static void product(int64_t rows, int vecs, int64_t depth, const Scalar* a, int64_t step, const Scalar* b, int64_t ldb, float* c,
                      int64_t ldc) {
    multiply<Tiles, typename PlanePairs<Planes>::Scores, into>(rows, vecs * W, depth, {a, step, kTileDwords, Planes * kTileDwords},
                                                               {b, ldb, kTileRows * ldb, Planes * kTileRows * ldb}, c, ldc);
  }
};

// The maximum that probabilities are taken against, and the factor of the older sums. A maximum that has grown by no more than 2^8
// is kept: probabilities then reach 256, which rounds no worse, and the sums are left alone.
template <int Vecs>
ROOFTILE_INLINE void settle_maximum(const Vf m[Vecs], float c, float* running, float* factor, Vf shift[Vecs]) {
  for (int n = 0; n < Vecs; ++n) {
    const Vf old = load(running + n * W);
    const Vf settled = select((Vu)((m[n] - old) * set1(c) > set1(8.0f)), m[n], old);  // from -inf it has grown by infinity
    shift[n] = select((Vu)(settled == set1(-kInfinity)), Vf{}, settled);
    store(factor + n * W, exp2_lanes((old - shift[n]) * set1(c)));
    store(running + n * W, settled);
  }
}

// Operands of Planes bf16 numbers each, on tiles. Scalars are pairs of neighbours along the sum.
template <class Tiles, int Planes>
struct TileEngine {
  using Op = TileOp<Tiles, Planes>;
  using Sum = typename PlanePairs<Planes>::Sums;
  using Scalar = uint32_t;
  using Region = typename Tiles::Region;
  static constexpr bool kRounds = Planes == 1;     // more planes lose too little for a row sum of its own
  static constexpr bool kFiniteOnly = Planes > 1;  // an infinite operand times a lower plane of zero would be NaN
  static constexpr int64_t kKeyTile = 128;         // four tiles along the sum of the product with V
  static constexpr int64_t kKeyAlign = 32;         // a group's part of a key tile starts at a whole tile of V^T
  static constexpr int64_t kGroupsPerTask = 8;     // V is transposed once for 512 queries
  static constexpr int64_t kBlock = Planes * kTileDwords;  // dwords of a row for 32 numbers: plane by plane

  static int64_t depth(int64_t dim) { return (dim + 1) / 2; }  // of each plane
  static int64_t padded(int64_t dim) { return round_up(depth(dim), int64_t{kTileDwords}) * Planes; }

  static void copy_row(const char* at, const RowSource& rows, int64_t dim, Scalar* to) {
    if (Planes == 1) {
      read_row_raw(at, rows.element_bytes, dim, padded(dim) * 2, reinterpret_cast<uint16_t*>(to));
    } else {
      split_row<Planes>(at, rows, dim, kTileDwords, kBlock, to);
    }
  }
  static void copy_rows(const RowSource& rows, int64_t first, int64_t count, int64_t dim, Scalar* to) {
    for (int64_t j = 0; j < count; ++j) copy_row(rows.row(first + j), rows, dim, to + j * padded(dim));
  }
  // In place: whole tiles of adjacent rows. Rows that lie far apart share few sets of the first-level cache, so they are copied.
  static RowOperand<Scalar> row_operand(const RowSource& rows, int64_t first, int64_t count, int64_t dim, Scalar* scratch) {
    if (Planes == 1 && dim % (2 * kTileDwords) == 0 && count % kTileRows == 0 && rows.element_bytes == 2 && rows.row_bytes == dim * 2 &&
        rows.adjacent(first, count) && reinterpret_cast<uintptr_t>(rows.row(first)) % 4 == 0) {
      return {reinterpret_cast<const uint32_t*>(rows.row(first)), dim / 2};
    }
    copy_rows(rows, first, count, dim, scratch);
    return {scratch, padded(dim)};
  }
  static void transpose(const Scalar* from, int64_t ld, int64_t rows, int64_t cols, Scalar* to, int64_t ld_to) {
    transpose_dwords(from, ld, rows, cols, to, ld_to);
  }

  // ---- the forward pass: V^T[dim][key pair], and behind it what its making needs.
  static constexpr int64_t kValueStep = kKeyTile / 2 * Planes;
  static int64_t value_scratch(int64_t value_dim) {
    return kValueStep * round_up(value_dim, kColumnStep) + ColumnPairs<Planes>::scratch(value_dim);
  }
  static RowOperand<Scalar> value_operand(const RowSource& v, int64_t first, int64_t count, int64_t dim, Scalar* scratch) {
    ColumnPairs<Planes> columns(dim, scratch + kValueStep * round_up(dim, kColumnStep));
    const bool in_place = Planes == 1 && dim % kColumnStep == 0 && v.element_bytes == 2;
    columns.transpose(count, scratch, kValueStep, [&](int64_t j, Scalar* memory) {
      const char* at = v.row(first + j);
      if (in_place && reinterpret_cast<uintptr_t>(at) % 4 == 0) return reinterpret_cast<const Scalar*>(at);
      copy_row(at, v, dim, memory);
      return const_cast<const Scalar*>(memory);
    });
    return {scratch, kValueStep};
  }

  static RowOperand<Scalar> cleaned(RowOperand<Scalar> v, int64_t, int64_t dim, const int64_t* rows, int64_t bad, Scalar* scratch) {
    for (int64_t i = 0; i < bad; ++i) {
      for (int64_t d = 0; d < dim; ++d) clean_number(scratch + d * kValueStep, rows[i]);
    }
    return v;
  }
  static void clean_row(Scalar* row, int64_t dim) {
    for (int64_t d = 0; d < dim; ++d) clean_number(row, d);
  }
  // Number i of a row in planes becomes zero where it is not finite: then its first plane is not either, and the others are zero.
  static void clean_number(Scalar* row, int64_t i) {
    Scalar* pair = row + i / 32 * kBlock + i % 32 / 2;
    const uint32_t exponent = 0x7f80u << (i % 2 * 16);
    if ((*pair & exponent) == exponent) *pair &= i % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
  }

  // Probabilities take the place of the scores where those have been read by then: plane b of pair p lies in row Planes * p + b.
  static constexpr bool kInPlace = Planes <= 2;
  static int64_t probability_scratch() { return kInPlace ? 0 : kKeyTile / 2 * Planes * kLanes; }
  static Scalar* chosen(float* s, Scalar* probabilities) { return kInPlace ? reinterpret_cast<Scalar*>(s) : probabilities; }

  // l adds the rounded probabilities in the order in which the tiles add their products with V: with V = 1 both are the same number,
  // bit by bit. `exact` sums them before rounding, for the LSE.
  template <bool Masked, int Vecs>
  static ROOFTILE_INLINE void stripe(int64_t keys, float c, float* s, const uint32_t* visible, float* running, float* l, float* exact,
                                     float* factor, Scalar* probabilities) {
    Vf m[Vecs], shift[Vecs], total[Vecs], exact_sum[Vecs] = {};
    for (int n = 0; n < Vecs; ++n) m[n] = load(running + n * W);
    stripe_maximum<Vecs, Masked>(keys, s, visible, m);
    settle_maximum<Vecs>(m, c, running, factor, shift);
    for (int n = 0; n < Vecs; ++n) {
      total[n] = Sum::kApart ? Vf{} : load(l + n * W) * load(factor + n * W);
      if (keys % 2 != 0) store(s + keys * kLanes + n * W, set1(-kInfinity));
    }
    const int64_t pairs = (keys + 1) / 2, whole = round_up(pairs, int64_t{kTileRows});
    Vf of_tile[kKeyTile / 2 / kTileRows][Planes][Vecs];
    for (int64_t first = 0; first < pairs; first += kTileRows) {
      Vf sum[Planes][2][Vecs] = {};
      const int64_t last = first + kTileRows < pairs ? first + kTileRows : pairs;
      for (int64_t pair = first; pair < last; ++pair) {
        for (int n = 0; n < Vecs; ++n) {
          const float* from = s + 2 * pair * kLanes + n * W;
          Vf even = exp2_lanes((load(from) - shift[n]) * set1(c)), odd = exp2_lanes((load(from + kLanes) - shift[n]) * set1(c));
          if (kRounds) exact_sum[n] = exact_sum[n] + (even + odd);
          for (int plane = 0; plane < Planes; ++plane) {
            const Vu both = pack_bf16(even, odd);
            store(probabilities + (Planes * pair + plane) * kLanes + n * W, both);
            const Vf low = (Vf)(both << 16), high = (Vf)(both & set1(0xffff0000u));
            sum[plane][0][n] = sum[plane][0][n] + low;
            sum[plane][1][n] = sum[plane][1][n] + high;
            even = even - low;
            odd = odd - high;
          }
        }
      }
      for (int plane = 0; plane < Planes; ++plane) {
        for (int n = 0; n < Vecs; ++n) of_tile[first / kTileRows][plane][n] = sum[plane][0][n] + sum[plane][1][n];
      }
    }
    for (int plane = Planes - 1; plane >= 0; --plane) {
      for (int64_t tile = 0; tile < whole / kTileRows; ++tile) {
        for (int n = 0; n < Vecs; ++n) total[n] = total[n] + of_tile[tile][plane][n];
      }
    }
    for (int64_t row = Planes * pairs; row < Planes * whole; ++row) {
      for (int n = 0; n < Vecs; ++n) store(probabilities + row * kLanes + n * W, Vu{});
    }
    for (int n = 0; n < Vecs; ++n) {
      store(l + n * W, Sum::kApart ? fma(load(l + n * W), load(factor + n * W), total[n]) : total[n]);
      if (kRounds) store(exact + n * W, fma(load(exact + n * W), load(factor + n * W), exact_sum[n]));
    }
  }
  template <bool Masked>
  static ROOFTILE_NOINLINE void softmax(int vecs, int64_t keys, float c, float* s, const uint32_t* visible, float* m, float* l,
                                        float* exact, float* factor, Scalar* probabilities) {
    constexpr int kVecs = Planes == 1 || kStripe == 1 ? kStripe : 2;  // sums of every plane in registers
    Scalar* to = chosen(s, probabilities);
    int n = 0;
    for (; n + kVecs <= vecs; n += kVecs) {
      const int x = n * W;
      stripe<Masked, kVecs>(keys, c, s + x, visible + x, m + x, l + x, exact + x, factor + x, to + x);
    }
    for (; n < vecs; ++n) {
      const int x = n * W;
      stripe<Masked, 1>(keys, c, s + x, visible + x, m + x, l + x, exact + x, factor + x, to + x);
    }
  }
  static float probability(const float* s, const Scalar* probabilities, int64_t key, int lane) {
    const void* from = kInPlace ? static_cast<const void*>(s) : probabilities;
    float sum = 0.0f;
    for (int plane = Planes - 1; plane >= 0; --plane) {
      uint32_t pair;
      std::memcpy(&pair, static_cast<const char*>(from) + ((Planes * (key / 2) + plane) * kLanes + lane) * 4, 4);
      sum += widen_bf16(static_cast<uint16_t>(pair >> (key % 2 * 16)));
    }
    return sum;
  }
  static void drop(int vecs, int64_t keys, const uint32_t* keep, float* s, Scalar* probabilities) {
    Scalar* at = chosen(s, probabilities);
    for (int64_t k = 0; k < keys; k += 2) {
      for (int n = 0; n < vecs; ++n) {
        const Vu even = load(keep + k * kLanes + n * W);
        const Vu odd = k + 1 < keys ? load(keep + (k + 1) * kLanes + n * W) : Vu{};
        const Vu both = (even & set1(0xffffu)) | (odd & set1(0xffff0000u));
        for (int plane = 0; plane < Planes; ++plane) {
          Scalar* row = at + (Planes * (k / 2) + plane) * kLanes + n * W;
          store(row, load(row) & both);
        }
      }
    }
  }
  static void accumulate(int vecs, int64_t keys, int64_t dim, RowOperand<Scalar> v, int64_t from, float* s, Scalar* probabilities,
                         const float* factor, float* out) {
    if (!Sum::kApart) scale_lanes(vecs, dim, factor, out);
    constexpr Into into = Sum::kApart ? Into::kScaleAdd : Into::kAdd;
    multiply<Tiles, Sum, into>(dim, vecs * W, (keys + 1) / 2, {v.data + from / 2 * Planes, v.step, kTileDwords, kBlock},
                               {chosen(s, probabilities), Planes * kLanes, kLanes, kTileRows * Planes * kLanes}, out, kLanes, factor);
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

  // ---- the backward pass. Rows of Q and dO as operand B of the sums over queries: [lane pair][column], 16 pairs of a plane at a time.
  static constexpr int64_t kLanePairs = kLanes / 2;
  static int64_t row_sum_operand(int64_t columns) { return kLanePairs * Planes * columns; }
  static void sum_over_rows(const Scalar* rows, int64_t ld, int64_t count, int64_t columns, Scalar* to) {
    for (int64_t pair = 0; pair < round_up((count + 1) / 2, int64_t{kTileRows}); ++pair) {  // a row beyond `count` is a row of zeros
      const Scalar* even = 2 * pair < count ? rows + 2 * pair * ld : nullptr;
      const Scalar* odd = 2 * pair + 1 < count ? rows + (2 * pair + 1) * ld : nullptr;
      for (int plane = 0; plane < Planes; ++plane) {
        interleave_plane<Planes>(even, odd, plane, columns, to + ((pair / kTileRows * Planes + plane) * kTileRows + pair % kTileRows) * columns);
      }
    }
  }
  // K^T[column][key pair] of a chunk, and behind it what its making needs.
  static constexpr int64_t kKeyStep = kBackwardChunk / 2 * Planes;
  static int64_t key_columns(int64_t columns) { return kKeyStep * columns + ColumnPairs<Planes>::scratch(columns); }
  static void key_columns_of(const Scalar* k_rows, int64_t ld, int64_t count, int64_t columns, Scalar* to) {
    ColumnPairs<Planes> pairs(columns, to + kKeyStep * columns);
    pairs.transpose(count, to, kKeyStep, [&](int64_t j, Scalar*) { return k_rows + j * ld; });
  }
  // Operands, one behind the other: P and dS by rows [key][lane pair], dS by columns [key pair][lane].
  static constexpr int64_t kGradientStep = kLanePairs * Planes, kGradientRows = kBackwardKeys * kGradientStep;
  static int64_t gradient_operands() { return 2 * kGradientRows + kBackwardKeys / 2 * Planes * kLanes; }
  static ROOFTILE_NOINLINE void gradients(int vecs, int64_t, int64_t keys, const float* p, const float* ds, Scalar* operands) {
    by_rows<false>(vecs, keys, p, operands, nullptr);
    by_rows<true>(vecs, keys, ds, operands + kGradientRows, operands + 2 * kGradientRows);
  }
  static Scalar* column_row(Scalar* columns, int64_t pair, int plane) {
    return columns + ((pair / kTileRows * Planes + plane) * kTileRows + pair % kTileRows) * kLanes;
  }
#if defined(__AVX512BF16__)
  // Rounded once: pairs along the keys are put together from the rounded rows of two keys. What is not finite becomes NaN.
  template <bool Columns>
  static ROOFTILE_INLINE void by_rows(int vecs, int64_t keys, const float* x, Scalar* rows, Scalar* columns) {
    const Vu index = {0x00200000, 0x00210001, 0x00220002, 0x00230003, 0x00240004, 0x00250005, 0x00260006, 0x00270007,
                      0x00280008, 0x00290009, 0x002a000a, 0x002b000b, 0x002c000c, 0x002d000d, 0x002e000e, 0x002f000f};
    const __m512i lower = (__m512i)index, upper = (__m512i)(index + set1(0x00100010u));
    const int64_t pairs = (keys + 1) / 2;
    for (int n = 0; n < vecs; n += 2) {
      for (int64_t pair = 0; pair < pairs; ++pair) {
        Vf rest[2][2];  // of two keys and 32 lanes
        for (int key = 0; key < 2; ++key) {
          const float* from = x + (2 * pair + key) * kLanes + n * W;
          const bool there = 2 * pair + key < keys;
          rest[key][0] = there ? load(from) : Vf{};
          rest[key][1] = there && n + 1 < vecs ? load(from + W) : Vf{};
        }
        for (int plane = 0; plane < Planes; ++plane) {
          Vu rounded[2];
          for (int key = 0; key < 2; ++key) {
            rounded[key] = neighbours_bf16(rest[key][0], rest[key][1]);
            store(rows + (2 * pair + key) * kGradientStep + n / 2 * kBlock + plane * kTileDwords, rounded[key]);
            rest[key][0] = rest[key][0] - lower_half_bf16(rounded[key]);
            rest[key][1] = rest[key][1] - upper_half_bf16(rounded[key]);
          }
          if (!Columns) continue;
          Scalar* to = column_row(columns, pair, plane) + n * W;
          store(to, (Vu)_mm512_permutex2var_epi16((__m512i)rounded[0], lower, (__m512i)rounded[1]));
          store(to + W, (Vu)_mm512_permutex2var_epi16((__m512i)rounded[0], upper, (__m512i)rounded[1]));
        }
      }
    }
    if (Columns) zero_columns(pairs, columns);
  }
#else
  template <bool Columns>
  static ROOFTILE_INLINE void by_rows(int vecs, int64_t keys, const float* x, Scalar* rows, Scalar* columns) {
    const int lanes = round_up(vecs * W, 2 * kTileDwords);
    for (int64_t k = 0; k < keys; ++k) {
      for (int n = 0; n < lanes / W; n += 2) {
        const float* from = x + k * kLanes + n * W;
        split_neighbours<Planes>(n < vecs ? load(from) : Vf{}, n + 1 < vecs ? load(from + W) : Vf{}, kTileDwords,
                                 rows + k * kGradientStep + n * W / (2 * kTileDwords) * kBlock + n * W / 2 % kTileDwords);
      }
    }
    if (!Columns) return;
    const int64_t pairs = (keys + 1) / 2;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      for (int n = 0; n < vecs; ++n) {
        const float* from = x + 2 * pair * kLanes + n * W;
        Vf even = load(from), odd = 2 * pair + 1 < keys ? load(from + kLanes) : Vf{};
        for (int plane = 0; plane < Planes; ++plane) {
          const Vu both = pack_bf16(even, odd);
          store(column_row(columns, pair, plane) + n * W, both);
          even = even - (Vf)(both << 16);
          odd = odd - (Vf)(both & set1(0xffff0000u));
        }
      }
    }
    zero_columns(pairs, columns);
  }
#endif
  static void zero_columns(int64_t pairs, Scalar* columns) {  // up to whole tiles
    for (int64_t pair = pairs; pair < round_up(pairs, int64_t{kTileRows}); ++pair) {
      for (int plane = 0; plane < Planes; ++plane) std::memset(column_row(columns, pair, plane), 0, kLanes * sizeof(Scalar));
    }
  }
  // to[key][column] += sum over lanes of x[key][lane] * rows[lane][column]
  static void add_row_sum(int64_t keys, int64_t lanes, int64_t columns, const float*, const Scalar* operands, int which, const Scalar* rows,
                          float* to) {
    multiply<Tiles, Sum, Into::kAdd>(keys, columns, (lanes + 1) / 2, {operands + which * kGradientRows, kGradientStep, kTileDwords, kBlock},
                                     {rows, columns, kTileRows * columns, kTileRows * Planes * columns}, to, columns);
  }
  // dq^T[d][lane] += sum over keys of K^T[d][key] * dS[key][lane]
  static void add_dq(int vecs, int64_t, int64_t keys, int64_t at, int64_t dim, int64_t, const float*, const Scalar* operands, const Scalar*,
                     const Scalar* k_columns, float* dq) {
    multiply<Tiles, Sum, Into::kAdd>(dim, vecs * W, (keys + 1) / 2, {k_columns + at / 2 * Planes, kKeyStep, kTileDwords, kBlock},
                                     {operands + 2 * kGradientRows, kLanes, kTileRows * kLanes, kTileRows * Planes * kLanes}, dq, kLanes);
  }
  static constexpr bool kDqByColumns = true;
  static int64_t dq_index(int64_t d, int lane, int64_t) { return d * kLanes + lane; }
  static float element(const Scalar* transposed, int64_t d, int64_t ld, int lane) {
    float sum = 0.0f;
    for (int plane = Planes - 1; plane >= 0; --plane) {
      sum += widen_bf16(static_cast<uint16_t>(transposed[(d / 32 * kBlock + plane * kTileDwords + d % 32 / 2) * ld + lane] >> (d % 2 * 16)));
    }
    return sum;
  }
  static float row_element(const Scalar* row, int64_t d) { return element(row, d, 1, 0); }
};

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
