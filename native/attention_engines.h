// What differs between arithmetics: how operands are laid out, and how a tile of probabilities becomes one.
//
// An engine packs query rows once (their transpose is operand B of the scores), reads keys as operand A straight from memory where
// their layout allows it, and multiplies probabilities with V. The forward and backward passes are written once over it.
#pragma once

#include "attention_softmax.h"

namespace rooftile {
namespace ROOFTILE_ISA {

constexpr int64_t kColumnStep = 16;  // operands are padded to whole 16 x 16 transposes
constexpr int64_t kBackwardChunk = 256;  // keys whose gradients stay in the second-level cache while the queries pass
constexpr int64_t kBackwardKeys = 64;    // keys of one product of the backward pass

// A tile of rows as operand A of a product over the head dim: row j at data + j * step.
template <typename Scalar>
struct RowOperand {
  const Scalar* data;
  int64_t step;
};

// What a thread holds while it runs a task: nothing, but for engines whose registers have to be set up.
struct NoRegion {};

// fp32 arithmetic on operands of any dtype.
struct Fp32Engine {
  using Region = NoRegion;
  static constexpr bool kFiniteOnly = false;  // whether its products take no Inf
  using Op = Fp32Op;
  using Scalar = float;
  static constexpr bool kRounds = false;  // whether probabilities are rounded before they multiply V
  static constexpr int64_t kKeyTile = 96;
  static constexpr int64_t kKeyAlign = 1;  // a group's visible part of a tile may start anywhere
  static constexpr int64_t kGroupsPerTask = 4;  // lane groups that share a prepared tile of keys

  static int64_t depth(int64_t dim) { return dim; }
  static int64_t padded(int64_t dim) { return round_up(dim, kColumnStep); }

  // Rows [first, first + count) with zeros up to padded(dim), as row-major Scalars.
  static void copy_rows(const RowSource& rows, int64_t first, int64_t count, int64_t dim, Scalar* to) {
    for (int64_t j = 0; j < count; ++j) copy_row(rows.row(first + j), rows, dim, to + j * padded(dim));
  }
  static void copy_row(const char* at, const RowSource& rows, int64_t dim, Scalar* to) {
    read_row(at, rows.element_bytes, rows.dtype, dim, padded(dim), to);
  }
  static RowOperand<Scalar> row_operand(const RowSource& rows, int64_t first, int64_t count, int64_t dim, Scalar* scratch) {
    if (rows.dtype == kFp32 && rows.element_bytes == 4 && rows.row_bytes % 4 == 0 && rows.adjacent(first, count)) {
      return {reinterpret_cast<const float*>(rows.row(first)), rows.row_bytes / 4};
    }
    copy_rows(rows, first, count, dim, scratch);
    return {scratch, padded(dim)};
  }
  static void transpose(const Scalar* from, int64_t ld, int64_t rows, int64_t cols, Scalar* to, int64_t ld_to) {
    transpose_dwords(reinterpret_cast<const uint32_t*>(from), ld, rows, cols, reinterpret_cast<uint32_t*>(to), ld_to);
  }

  // ---- the forward pass: V as it lies in memory is the operand of the product with the probabilities.
  static int64_t value_scratch(int64_t value_dim) { return kKeyTile * padded(value_dim); }
  static RowOperand<Scalar> value_operand(const RowSource& v, int64_t first, int64_t count, int64_t dim, Scalar* scratch) {
    return row_operand(v, first, count, dim, scratch);
  }
  // The same operand with zeros for what is not finite in these rows.
  static RowOperand<Scalar> cleaned(RowOperand<Scalar> v, int64_t count, int64_t dim, const int64_t* rows, int64_t bad, Scalar* scratch) {
    if (v.data != scratch) {
      for (int64_t j = 0; j < count; ++j) std::memcpy(scratch + j * padded(dim), v.data + j * v.step, static_cast<size_t>(dim) * 4);
    }
    for (int64_t i = 0; i < bad; ++i) clean_row(scratch + rows[i] * padded(dim), dim);
    return {scratch, padded(dim)};
  }
  static void clean_row(Scalar* row, int64_t dim) {
    for (int64_t d = 0; d < dim; ++d) row[d] = finite(row[d]) ? row[d] : 0.0f;
  }
  static int64_t probability_scratch() { return 0; }  // in place of the scores

  template <bool Masked>
  static void softmax(int vecs, int64_t keys, float c, float* s, const uint32_t* visible, float* m, float* l, float*, float* factor,
                      Scalar*) {
    softmax_fp32<Masked>(vecs, keys, c, s, visible, m, l, factor);
  }
  static float probability(const float* s, const Scalar*, int64_t key, int lane) { return s[key * kLanes + lane]; }
  static void drop(int vecs, int64_t keys, const uint32_t* keep, float* s, Scalar*) {
    for (int64_t k = 0; k < keys; ++k) {
      for (int n = 0; n < vecs; ++n) {
        float* at = s + k * kLanes + n * W;
        store(at, (Vf)((Vu)load(at) & load(keep + k * kLanes + n * W)));
      }
    }
  }
  // O^T[dim][lane] = O^T * factor[lane] + V^T P^T over the tile's keys from `from` on.
  static void accumulate(int vecs, int64_t keys, int64_t dim, RowOperand<Scalar> v, int64_t from, const float* s, const Scalar*,
                         const float* factor, float* out) {
    gemm<Op, Into::kScaleAdd, true>(dim, vecs, keys, v.data + from * v.step, v.step, s, kLanes, out, kLanes, factor);
  }

  // ---- the backward pass. P and dS are used as they are; rows of Q and dO are operand B of the sums over queries.
  static int64_t row_sum_operand(int64_t columns) { return kLanes * columns; }
  static void sum_over_rows(const Scalar* rows, int64_t ld, int64_t count, int64_t columns, Scalar* to) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * columns, rows + i * ld, static_cast<size_t>(columns) * 4);
  }
  static int64_t key_columns(int64_t) { return 0; }
  static void key_columns_of(const Scalar*, int64_t, int64_t, int64_t, Scalar*) {}
  static int64_t gradient_operands() { return 0; }
  static void gradients(int, int64_t, int64_t, const float*, const float*, Scalar*) {}
  // to[key][column] += sum over lanes of x[key][lane] * rows[lane][column]
  static void add_row_sum(int64_t keys, int64_t lanes, int64_t columns, const float* x, const Scalar*, int, const Scalar* rows, float* to) {
    gemm<Op, Into::kAdd, false>(keys, static_cast<int>(columns / W), lanes, x, kLanes, rows, columns, to, columns);
  }
  // dq[lane][column] += sum over keys of dS[key][lane] * K[key][column]
  static void add_dq(int, int64_t lanes, int64_t keys, int64_t at, int64_t, int64_t columns, const float* ds, const Scalar*,
                     const Scalar* k_rows, const Scalar*, float* dq) {
    gemm<Op, Into::kAdd, true>(lanes, static_cast<int>(columns / W), keys, ds, kLanes, k_rows + at * columns, columns, dq, columns);
  }
  static constexpr bool kDqByColumns = false;  // dq is [lane][column], else [column][lane]
  static int64_t dq_index(int64_t d, int lane, int64_t columns) { return lane * columns + d; }
  static float element(const Scalar* transposed, int64_t d, int64_t ld, int lane) { return transposed[d * ld + lane]; }
  static float row_element(const Scalar* row, int64_t d) { return row[d]; }
};

#if defined(__AVX512BF16__)
// bf16 operands and products, fp32 sums. Scalars are pairs of neighbours along the sum, in one dword.
struct Bf16Engine {
  using Region = NoRegion;
  static constexpr bool kFiniteOnly = false;
  using Op = Bf16PairOp;
  using Scalar = uint32_t;
  static constexpr bool kRounds = true;
  static constexpr int64_t kKeyTile = 128;
  static constexpr int64_t kKeyAlign = 2;
  static constexpr int64_t kGroupsPerTask = 4;

  static int64_t depth(int64_t dim) { return (dim + 1) / 2; }
  static int64_t padded(int64_t dim) { return round_up(depth(dim), kColumnStep); }

  static void copy_row(const char* at, const RowSource& rows, int64_t dim, Scalar* to) {
    read_row_raw(at, rows.element_bytes, dim, padded(dim) * 2, reinterpret_cast<uint16_t*>(to));
  }
  static void copy_rows(const RowSource& rows, int64_t first, int64_t count, int64_t dim, Scalar* to) {
    for (int64_t j = 0; j < count; ++j) copy_row(rows.row(first + j), rows, dim, to + j * padded(dim));
  }
  static RowOperand<Scalar> row_operand(const RowSource& rows, int64_t first, int64_t count, int64_t dim, Scalar* scratch) {
    if (dim % 2 == 0 && rows.element_bytes == 2 && rows.row_bytes % 4 == 0 && rows.adjacent(first, count) &&
        reinterpret_cast<uintptr_t>(rows.row(first)) % 4 == 0) {
      return {reinterpret_cast<const uint32_t*>(rows.row(first)), rows.row_bytes / 4};
    }
    copy_rows(rows, first, count, dim, scratch);
    return {scratch, padded(dim)};
  }
  static void transpose(const Scalar* from, int64_t ld, int64_t rows, int64_t cols, Scalar* to, int64_t ld_to) {
    transpose_dwords(from, ld, rows, cols, to, ld_to);
  }

  // ---- the forward pass: V^T[dim][key pair]. The scratch holds it first and the interleaved rows behind it.
  static constexpr int64_t kPairs = kKeyTile / 2;
  static int64_t value_scratch(int64_t value_dim) { return (kPairs + 1) * round_up(value_dim, kColumnStep) * 2; }
  static RowOperand<Scalar> value_operand(const RowSource& v, int64_t first, int64_t count, int64_t dim, Scalar* scratch) {
    const int64_t wide = round_up(dim, kColumnStep), pairs = (count + 1) / 2;
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
    }
    transpose_dwords(interleaved, wide, round_up(pairs, kColumnStep), wide, scratch, kPairs);
    return {scratch, kPairs};
  }
  static RowOperand<Scalar> cleaned(RowOperand<Scalar> v, int64_t, int64_t dim, const int64_t* rows, int64_t bad, Scalar* scratch) {
    for (int64_t i = 0; i < bad; ++i) {
      for (int64_t d = 0; d < dim; ++d) clean_half(scratch + d * kPairs + rows[i] / 2, rows[i] % 2);
    }
    return v;
  }
  static void clean_row(Scalar* row, int64_t dim) {
    for (int64_t d = 0; d < dim; ++d) clean_half(row + d / 2, d % 2);
  }
  static void clean_half(Scalar* pair, int64_t half) {
    const uint32_t exponent = 0x7f80u << (half * 16);
    if ((*pair & exponent) == exponent) *pair &= half == 0 ? 0xffff0000u : 0x0000ffffu;
  }
  static int64_t probability_scratch() { return kPairs * kLanes; }

  // l sums the rounded probabilities, in the order of the product with V: with V = 1 the output is 1. `exact` sums them as they
  // are, for the LSE: what rounding does to a row sum is no part of it.
  template <bool Masked, int Vecs>
  static ROOFTILE_INLINE void stripe(int64_t keys, float c, float* s, const uint32_t* visible, float* running, float* l, float* exact,
                                     float* factor, Scalar* probabilities) {
    Vf m[Vecs], shift[Vecs], sum[Vecs] = {}, exact_sum[Vecs] = {};
    for (int n = 0; n < Vecs; ++n) m[n] = load(running + n * W);
    stripe_maximum<Vecs, Masked>(keys, s, visible, m);
    shift_maximum<Vecs>(m, c, running, factor, shift);
    const Vu ones = set1(0x3f803f80u);
    for (int64_t pair = 0; pair < (keys + 1) / 2; ++pair) {
      for (int n = 0; n < Vecs; ++n) {
        const float* at = s + 2 * pair * kLanes + n * W;
        const Vf even = exp2_lanes((load(at) - shift[n]) * set1(c));
        const Vf odd = 2 * pair + 1 < keys ? exp2_lanes((load(at + kLanes) - shift[n]) * set1(c)) : Vf{};
        const Vu both = pack_bf16(even, odd);
        store(probabilities + pair * kLanes + n * W, both);
        sum[n] = Op::dot(sum[n], ones, both);
        exact_sum[n] = exact_sum[n] + (even + odd);
      }
    }
    for (int n = 0; n < Vecs; ++n) {
      store(l + n * W, fma(load(l + n * W), load(factor + n * W), sum[n]));
      store(exact + n * W, fma(load(exact + n * W), load(factor + n * W), exact_sum[n]));
    }
  }
  template <bool Masked>
  static ROOFTILE_NOINLINE void softmax(int vecs, int64_t keys, float c, float* s, const uint32_t* visible, float* m, float* l,
                                        float* exact, float* factor, Scalar* probabilities) {
    int n = 0;
    for (; n + kStripe <= vecs; n += kStripe) {
      const int x = n * W;
      stripe<Masked, kStripe>(keys, c, s + x, visible + x, m + x, l + x, exact + x, factor + x, probabilities + x);
    }
    for (; n < vecs; ++n) {
      const int x = n * W;
      stripe<Masked, 1>(keys, c, s + x, visible + x, m + x, l + x, exact + x, factor + x, probabilities + x);
    }
  }
  static float probability(const float*, const Scalar* probabilities, int64_t key, int lane) {
    return widen_bf16(static_cast<uint16_t>(probabilities[key / 2 * kLanes + lane] >> (key % 2 * 16)));
  }
  static void drop(int vecs, int64_t keys, const uint32_t* keep, float*, Scalar* probabilities) {
    for (int64_t k = 0; k < keys; k += 2) {
      for (int n = 0; n < vecs; ++n) {
        const Vu even = load(keep + k * kLanes + n * W);
        const Vu odd = k + 1 < keys ? load(keep + (k + 1) * kLanes + n * W) : Vu{};
        Scalar* at = probabilities + k / 2 * kLanes + n * W;
        store(at, load(at) & ((even & set1(0xffffu)) | (odd & set1(0xffff0000u))));
      }
    }
  }
  static void accumulate(int vecs, int64_t keys, int64_t dim, RowOperand<Scalar> v, int64_t from, const float*,
                         const Scalar* probabilities, const float* factor, float* out) {
    gemm<Op, Into::kScaleAdd, false>(dim, vecs, (keys + 1) / 2, v.data + from / 2, v.step, probabilities, kLanes, out, kLanes, factor);
  }

  // ---- the backward pass. Operands, one behind the other: P and dS by rows [key][lane pair], dS by columns [key pair][lane].
  static constexpr int64_t kRowPairs = kLanes / 2;
  static int64_t row_sum_operand(int64_t columns) { return kRowPairs * columns; }
  static void sum_over_rows(const Scalar* rows, int64_t ld, int64_t count, int64_t columns, Scalar* to) {
    for (int64_t pair = 0; pair < (count + 1) / 2; ++pair) {  // a row beyond `count` is a row of zeros
      interleave_rows(reinterpret_cast<const uint16_t*>(rows + 2 * pair * ld), reinterpret_cast<const uint16_t*>(rows + (2 * pair + 1) * ld),
                      columns, to + pair * columns);
    }
  }
  // K^T[column][key pair], and the interleaved rows behind it.
  static int64_t key_columns(int64_t columns) { return 2 * (kBackwardChunk / 2) * columns; }
  static void key_columns_of(const Scalar* k_rows, int64_t ld, int64_t count, int64_t columns, Scalar* to) {
    const int64_t pairs = (count + 1) / 2, ld_to = kBackwardChunk / 2;
    Scalar* interleaved = to + ld_to * columns;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const uint16_t* even = reinterpret_cast<const uint16_t*>(k_rows + 2 * pair * ld);
      uint32_t* row = interleaved + pair * columns;
      if (2 * pair + 1 < count) {
        interleave_rows(even, reinterpret_cast<const uint16_t*>(k_rows + (2 * pair + 1) * ld), columns, row);
      } else {
        for (int64_t d = 0; d < columns; ++d) row[d] = even[d];
      }
    }
    transpose_dwords(interleaved, columns, round_up(pairs, kColumnStep), columns, to, ld_to);
  }
  static constexpr int64_t kTileRows = kBackwardKeys * kRowPairs;
  static int64_t gradient_operands() { return 2 * kTileRows + kBackwardKeys / 2 * kLanes; }
  static ROOFTILE_NOINLINE void gradients(int vecs, int64_t, int64_t keys, const float* p, const float* ds, Scalar* operands) {
    Scalar *p_rows = operands, *ds_rows = operands + kTileRows, *ds_columns = operands + 2 * kTileRows;
    for (int64_t k = 0; k < keys; ++k) {
      for (int n = 0; n < vecs; n += 2) {
        const int64_t at = k * kLanes + n * W;
        const bool both = n + 1 < vecs;
        store(p_rows + k * kRowPairs + n * W / 2, neighbours_bf16(load(p + at), both ? load(p + at + W) : Vf{}));
        store(ds_rows + k * kRowPairs + n * W / 2, neighbours_bf16(load(ds + at), both ? load(ds + at + W) : Vf{}));
      }
    }
    for (int64_t k = 0; k < keys; k += 2) {
      for (int n = 0; n < vecs; ++n) {
        const int64_t at = k * kLanes + n * W;
        store(ds_columns + k / 2 * kLanes + n * W, pack_bf16(load(ds + at), k + 1 < keys ? load(ds + at + kLanes) : Vf{}));
      }
    }
  }
  static void add_row_sum(int64_t keys, int64_t lanes, int64_t columns, const float*, const Scalar* operands, int which, const Scalar* rows,
                          float* to) {
    gemm<Op, Into::kAdd, false>(keys, static_cast<int>(columns / W), (lanes + 1) / 2, operands + which * kTileRows, kRowPairs, rows, columns,
                                to, columns);
  }
  // dq^T[d][lane] += sum over keys of K^T[d][key] * dS[key][lane]
  static void add_dq(int vecs, int64_t, int64_t keys, int64_t at, int64_t dim, int64_t, const float*, const Scalar* operands, const Scalar*,
                     const Scalar* k_columns, float* dq) {
    gemm<Op, Into::kAdd, false>(dim, vecs, (keys + 1) / 2, k_columns + at / 2, kBackwardChunk / 2, operands + 2 * kTileRows, kLanes, dq, kLanes);
  }
  static constexpr bool kDqByColumns = true;
  static int64_t dq_index(int64_t d, int lane, int64_t) { return d * kLanes + lane; }
  static float element(const Scalar* transposed, int64_t d, int64_t ld, int lane) {
    return widen_bf16(static_cast<uint16_t>(transposed[d / 2 * ld + lane] >> (d % 2 * 16)));
  }
  static float row_element(const Scalar* row, int64_t d) { return widen_bf16(static_cast<uint16_t>(row[d / 2] >> (d % 2 * 16))); }
};
#endif

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
