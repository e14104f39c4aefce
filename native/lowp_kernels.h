// What the kernels of scaled low precision offer to the C ABI (lowp_core.cpp). Compiled once per instruction set, each copy in a
// namespace of its own. A matrix is `rows` x `cols`, contiguous; block k is row k / grid_cols, column k % grid_cols of the grid.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rooftile {

// A format of at most 8 bits, worked out by the caller (rooftile/lowp/native.py). Codes without their sign bit are ordered.
struct CodePlan {
  int32_t shift;          // fraction bits that the format lacks against fp32
  uint32_t rebias;        // (fp32 field of the smallest normal value + shift) << fraction bits
  uint32_t tiny_bits;     // fp32 bits of the smallest normal value
  float magic;            // a power of two whose spacing is the smallest subnormal: adding it rounds to that grid
  uint32_t max_bits;      // fp32 bits of the largest finite value
  uint32_t inf_code;      // what an infinite value becomes; the NaN code where the format has no infinity
  int32_t nan_code;       // -1 where the format has none: the block's decode scale is then NaN
  uint32_t sign_bit;
  uint32_t keeps_minus_zero;
};

enum ScaleRule : int32_t { kExact = 0, kPowerOfTwoUp = 1, kPowerOfTwoFloor = 2 };

struct ScalePlan {
  int32_t rule;           // ScaleRule
  int32_t max_exponent;   // floor(log2(max))
  int32_t least_exponent; // of a decode scale; smaller ones are raised to it, so that no encode scale is infinite
  float max;              // largest finite value of the format
};

struct Blocks {
  int64_t rows, cols;              // of the matrix
  int64_t block_rows, block_cols;
  int64_t grid_cols;               // blocks in a row of blocks
};

enum LowpSource : int32_t { kLowpFp32 = 0, kLowpBf16 = 1 };

// A rectangle of the matrix; its edges may cut blocks, since every element finds its own scale.
struct Part {
  int64_t first_row, last_row, first_col, last_col;
};

// One recipe's view of a matrix that is scored: how it is blocked, and the scale to multiply by before the cast.
struct ScoreInput {
  Blocks blocks;
  CodePlan code;
  const float* encode;
  const float* decode;
};

constexpr int kErrorShift = 15;                        // 256 bins a binade
constexpr uint32_t kErrorBase = (127u - 24u) << 8;     // errors below 2^-24 share the first bin
constexpr int kErrorBins = 24 * 256 + 1;               // the last bin is error 1, a value that is flushed

struct ScoreOutput {
  int64_t zeros, non_finite, flushed, saturated;
  double signal, noise;   // sums of squares, of the values and of their errors
  double largest_error;   // relative
  int64_t errors[kErrorBins];
};

#define ROOFTILE_DECLARE_LOWP(isa)                                                                                          \
  namespace isa {                                                                                                           \
  void block_amax(const void* in, int32_t source, const Blocks& blocks, int64_t first, int64_t last, float* amax);          \
  void quantize_blocks(const void* in, int32_t source, const Blocks& blocks, int64_t first, int64_t last,                   \
                       const CodePlan& code, const ScalePlan& scale, uint8_t* codes, float* decode);                        \
  void encode_blocks(const void* in, int32_t source, const Blocks& blocks, int64_t first, int64_t last,                     \
                     const CodePlan& code, const float* encode, uint8_t* codes);                                            \
  void score_part(const void* in, int32_t source, const ScoreInput& input, const Part& part, ScoreOutput* out);             \
  }

ROOFTILE_DECLARE_LOWP(portable)
ROOFTILE_DECLARE_LOWP(avx2)
ROOFTILE_DECLARE_LOWP(avx512)

}  // namespace rooftile
