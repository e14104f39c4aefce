// Block quantisation and its score, as plain loops that the compiler turns into vector code for this copy's instruction set.
// The definition is rooftile/lowp/quantize.py's: multiply by the encode scale in fp32, round once to nearest even, saturate.
#include "lowp_kernels.h"

#include <cmath>

#ifndef ROOFTILE_ISA
#define ROOFTILE_ISA portable
#endif

namespace rooftile {
namespace ROOFTILE_ISA {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInf = 0x7f800000u;
constexpr uint32_t kOne = 0x3f800000u;  // 1.0f
constexpr int64_t kSegment = 512;  // elements of one scored piece, whose indices stay in the first-level cache

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float value_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t load(const uint32_t* in, int64_t i) { return in[i]; }
inline uint32_t load(const uint16_t* in, int64_t i) { return static_cast<uint32_t>(in[i]) << 16; }

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// One block's rectangle, cut off at the matrix's edge.
struct Rectangle {
  int64_t row, col, rows, cols;
};

inline Rectangle rectangle(const Blocks& blocks, int64_t index) {
  const int64_t row = index / blocks.grid_cols * blocks.block_rows, col = index % blocks.grid_cols * blocks.block_cols;
  return {row, col, least(blocks.block_rows, blocks.rows - row), least(blocks.block_cols, blocks.cols - col)};
}

// The largest finite magnitude and the largest of all, as fp32 bits.
struct Largest {
  uint32_t finite, any;
};

template <typename T>
Largest row_largest(const T* __restrict in, int64_t n, Largest so_far) {
  uint32_t finite = so_far.finite, any = so_far.any;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t a = load(in, i) & kMagnitude;
    any = a > any ? a : any;
  }
  if (any < kInf) return {any, any};  // the usual case needs one maximum only
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t a = load(in, i) & kMagnitude;
    const uint32_t kept = a < kInf ? a : 0u;
    finite = kept > finite ? kept : finite;
  }
  return {finite, any};
}

struct Scales {
  float encode, decode;
};

float power_of_two(int exponent) {  // down to the subnormal 2^-127
  return exponent > -127 ? value_of(static_cast<uint32_t>(exponent + 127) << 23) : value_of(1u << 22);
}

Scales scales_of(uint32_t amax_bits, const ScalePlan& plan) {
  const float amax = value_of(amax_bits);
  if (amax_bits == 0) return {1.0f, 1.0f};
  if (plan.rule == kExact) {
    const float smallest = power_of_two(plan.least_exponent), decode = amax / plan.max;
    if (decode < smallest) return {1.0f / smallest, smallest};
    return {plan.max / amax, decode};
  }
  int exponent;
  std::frexp(amax, &exponent);
  exponent -= 1 + plan.max_exponent;
  if (plan.rule == kPowerOfTwoUp && amax > std::ldexp(plan.max, exponent)) ++exponent;
  if (exponent < plan.least_exponent) exponent = plan.least_exponent;
  return {power_of_two(-exponent), power_of_two(exponent)};
}

// kPlain: every element is finite and the format keeps the sign of a zero, which is what nearly all blocks are.
template <bool kPlain, typename T>
inline __attribute__((always_inline)) void encode_elements(const T* __restrict in, uint8_t* __restrict out, int64_t n, float encode,
                                                           const CodePlan& plan) {
  const uint32_t shift = static_cast<uint32_t>(plan.shift), lift = shift << 23;
  const uint32_t nan_code = plan.nan_code < 0 ? 0u : static_cast<uint32_t>(plan.nan_code);
  const uint32_t sign_down = static_cast<uint32_t>(__builtin_clz(plan.sign_bit));
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(value_of(load(in, i)) * encode);
    const uint32_t magnitude = bits & kMagnitude, a = magnitude < plan.max_bits ? magnitude : plan.max_bits;
    // A power of two whose spacing is the format's at `a`: the sum is rounded to that grid, and its low bits count the steps.
    const uint32_t field = a & kInf;
    const uint32_t grid = (field > plan.tiny_bits ? field : plan.tiny_bits) + lift;
    const uint32_t steps = bits_of(value_of(a) + value_of(grid)) - grid;
    uint32_t code = steps + (grid >> shift) - plan.rebias;
    uint32_t sign = bits >> sign_down & plan.sign_bit;
    if (!kPlain) {
      sign = code == 0 && !plan.keeps_minus_zero ? 0u : sign;
      code = magnitude == kInf ? plan.inf_code : code;
      sign = magnitude == kInf && plan.inf_code == nan_code ? 0u : sign;
      code = magnitude > kInf ? nan_code : code;
      sign = magnitude > kInf ? 0u : sign;
    }
    out[i] = static_cast<uint8_t>(code | sign);
  }
}

template <typename T>
inline void encode_row(const T* in, uint8_t* out, int64_t n, float encode, const CodePlan& plan, bool finite) {
  if (!finite || !plan.keeps_minus_zero) return encode_elements<false>(in, out, n, encode, plan);
  if (n == 128) return encode_elements<true>(in, out, 128, encode, plan);  // the length of most calls, without a remainder
  encode_elements<true>(in, out, n, encode, plan);
}

constexpr int64_t kRun = 64;                     // blocks side by side that are done together
constexpr int64_t kRunBytes = int64_t(1) << 22;  // and their size at most, which the last-level cache holds

// Neighbouring blocks are read row by row, twice. One block at a time would defeat the prefetcher with its short rows and, where
// the row length is a power of two, put all of them into a few sets of the second-level cache (measured: 2.0 against 2.9 G/s).
template <typename T>
int64_t run_length(const Blocks& blocks, int64_t index, int64_t last) {
  const int64_t fits = kRunBytes / (blocks.block_rows * blocks.block_cols * static_cast<int64_t>(sizeof(T)));
  const int64_t in_row = blocks.grid_cols - index % blocks.grid_cols;
  return least(least(fits < 1 ? 1 : fits > kRun ? kRun : fits, in_row), last - index);
}

template <typename T>
void run_largest(const T* in, const Blocks& blocks, const Rectangle& r, int64_t run, Largest* largest) {
  for (int64_t b = 0; b < run; ++b) largest[b] = {0, 0};
  for (int64_t row = r.row; row < r.row + r.rows; ++row) {
    const T* at = in + row * blocks.cols;
    for (int64_t b = 0; b < run; ++b) {
      const int64_t col = r.col + b * blocks.block_cols;
      largest[b] = row_largest(at + col, least(blocks.block_cols, blocks.cols - col), largest[b]);
    }
  }
}

template <typename T>
void quantize(const T* in, const Blocks& blocks, int64_t first, int64_t last, const CodePlan& code, const ScalePlan& scale,
              uint8_t* codes, float* decode) {
  Largest largest[kRun];
  float encode[kRun];
  for (int64_t index = first, run; index < last; index += run) {
    run = run_length<T>(blocks, index, last);
    const Rectangle r = rectangle(blocks, index);
    run_largest(in, blocks, r, run, largest);
    for (int64_t b = 0; b < run; ++b) {
      const Scales scales = scales_of(largest[b].finite, scale);
      encode[b] = scales.encode;
      decode[index + b] = code.nan_code < 0 && largest[b].any >= kInf ? NAN : scales.decode;
    }
    for (int64_t row = r.row; row < r.row + r.rows; ++row) {
      for (int64_t b = 0; b < run; ++b) {
        const int64_t col = r.col + b * blocks.block_cols, at = row * blocks.cols + col;
        encode_row(in + at, codes + at, least(blocks.block_cols, blocks.cols - col), encode[b], code, largest[b].any < kInf);
      }
    }
  }
}

// A sum in 16 lanes: the same bits on every instruction set, and a loop that may be vectorised.
float sum_of(const float* __restrict values, int64_t n) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int lane = 0; lane < 16; ++lane) lanes[lane] += values[i + lane];
  for (; i < n; ++i) lanes[i % 16] += values[i];
  float sum = 0;
  for (int lane = 0; lane < 16; ++lane) sum += lanes[lane];
  return sum;
}

struct Piece {
  uint32_t flushed, saturated, zeros, non_finite, largest_error;  // the last as fp32 bits
};

struct Scratch {
  alignas(64) uint16_t bins[kSegment];  // of the relative error; kErrorBins for elements that have none
  alignas(64) float signal[kSegment];   // squares, in units of the decode scale
  alignas(64) float noise[kSegment];
};

// Scores n <= kSegment elements under one scale.
template <typename T>
Piece score_piece(const T* __restrict in, int64_t n, float encode, const CodePlan& plan_in, Scratch* scratch) {
  uint16_t* __restrict bins = scratch->bins;
  float* __restrict signal = scratch->signal;
  float* __restrict noise = scratch->noise;
  const CodePlan plan = plan_in;
  const uint32_t shift = static_cast<uint32_t>(plan.shift), half = (1u << shift >> 1) - 1, keep = ~((1u << shift) - 1);
  uint32_t flushed = 0, saturated = 0, zeros = 0, non_finite = 0, largest = 0;  // locals, so that the loop is vectorised
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t x = load(in, i) & kMagnitude;
    const uint32_t a = bits_of(value_of(x) * encode);
    const uint32_t normal = (a + half + ((a >> shift) & 1u)) & keep;
    const uint32_t subnormal = bits_of((value_of(a) + plan.magic) - plan.magic);
    uint32_t rounded = a < plan.tiny_bits ? subnormal : normal;
    const uint32_t over = rounded > plan.max_bits ? 1u : 0u;
    rounded = rounded > plan.max_bits ? plan.max_bits : rounded;
    const uint32_t finite = x < kInf ? 1u : 0u, zero = x == 0 ? 1u : 0u, counted = finite & (zero ^ 1u);
    const uint32_t mask = 0u - counted;  // masks throughout: a branch keeps the loop from being vectorised
    const float value = value_of(a & mask);
    const float error = value_of(bits_of(value_of(rounded & mask) - value) & kMagnitude);
    const uint32_t vanished = a == 0 ? kOne : 0u;  // a product that vanished is lost whole
    const float quotient = error / value_of((a & mask) | vanished | (kOne & ~mask));
    const uint32_t relative = (bits_of(quotient) | vanished) & mask;
    signal[i] = value * value;
    noise[i] = error * error;
    flushed += counted & (rounded == 0 ? 1u : 0u);
    saturated += counted & over;
    zeros += zero;
    non_finite += finite ^ 1u;
    largest = relative > largest ? relative : largest;
    const uint32_t top = relative >> kErrorShift, raised = top < kErrorBase ? kErrorBase : top;
    bins[i] = static_cast<uint16_t>(((raised - kErrorBase) & mask) | (kErrorBins & ~mask));
  }
  return {flushed, saturated, zeros, non_finite, largest};
}

struct ErrorTables {
  uint32_t counts[2][kErrorBins + 1];  // two, so that equal neighbours don't wait for each other
};

template <typename T>
void score(const T* in, const ScoreInput& input, const Part& part, ScoreOutput* out) {
  const Blocks& blocks = input.blocks;
  ErrorTables tables = {};
  Scratch scratch;
  const uint16_t* bins = scratch.bins;
  for (int64_t row = part.first_row; row < part.last_row; ++row) {
    const int64_t grid_row = row / blocks.block_rows * blocks.grid_cols;
    for (int64_t col = part.first_col; col < part.last_col;) {
      const int64_t block = col / blocks.block_cols;
      const int64_t end = least(least((block + 1) * blocks.block_cols, part.last_col), col + kSegment);
      const float decode = input.decode[grid_row + block];
      const Piece piece = score_piece(in + row * blocks.cols + col, end - col, input.encode[grid_row + block], input.code, &scratch);
      int64_t i = 0;
      for (; i + 2 <= end - col; i += 2) {
        tables.counts[0][bins[i]] += 1;
        tables.counts[1][bins[i + 1]] += 1;
      }
      for (; i < end - col; ++i) tables.counts[0][bins[i]] += 1;
      const double square = static_cast<double>(decode) * decode;
      out->signal += sum_of(scratch.signal, end - col) * square;
      out->noise += sum_of(scratch.noise, end - col) * square;
      out->flushed += piece.flushed;
      out->saturated += piece.saturated;
      out->zeros += piece.zeros;
      out->non_finite += piece.non_finite;
      const double largest = value_of(piece.largest_error);
      if (largest > out->largest_error) out->largest_error = largest;
      col = end;
    }
  }
  for (int bin = 0; bin < kErrorBins; ++bin) out->errors[bin] += int64_t(tables.counts[0][bin]) + tables.counts[1][bin];
}

template <typename T>
void amaxes(const T* in, const Blocks& blocks, int64_t first, int64_t last, float* amax) {
  Largest largest[kRun];
  for (int64_t index = first, run; index < last; index += run) {
    run = run_length<T>(blocks, index, last);
    run_largest(in, blocks, rectangle(blocks, index), run, largest);
    for (int64_t b = 0; b < run; ++b) amax[index + b] = value_of(largest[b].finite);
  }
}

}  // namespace

void block_amax(const void* in, int32_t source, const Blocks& blocks, int64_t first, int64_t last, float* amax) {
  if (source == kLowpBf16) return amaxes(static_cast<const uint16_t*>(in), blocks, first, last, amax);
  amaxes(static_cast<const uint32_t*>(in), blocks, first, last, amax);
}

void quantize_blocks(const void* in, int32_t source, const Blocks& blocks, int64_t first, int64_t last, const CodePlan& code,
                     const ScalePlan& scale, uint8_t* codes, float* decode) {
  if (source == kLowpBf16) return quantize(static_cast<const uint16_t*>(in), blocks, first, last, code, scale, codes, decode);
  quantize(static_cast<const uint32_t*>(in), blocks, first, last, code, scale, codes, decode);
}

void encode_blocks(const void* in, int32_t source, const Blocks& blocks, int64_t first, int64_t last, const CodePlan& code,
                   const float* encode, uint8_t* codes) {
  for (int64_t index = first; index < last; ++index) {
    const Rectangle r = rectangle(blocks, index);
    for (int64_t row = r.row; row < r.row + r.rows; ++row) {
      const int64_t at = row * blocks.cols + r.col;
      if (source == kLowpBf16) {
        encode_row(static_cast<const uint16_t*>(in) + at, codes + at, r.cols, encode[index], code, false);
      } else {
        encode_row(static_cast<const uint32_t*>(in) + at, codes + at, r.cols, encode[index], code, false);
      }
    }
  }
}

void score_part(const void* in, int32_t source, const ScoreInput& input, const Part& part, ScoreOutput* out) {
  if (source == kLowpBf16) return score(static_cast<const uint16_t*>(in), input, part, out);
  score(static_cast<const uint32_t*>(in), input, part, out);
}

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
