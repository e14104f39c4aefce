// Numbers of the three dtypes as bytes in memory, and the generators: written from the definitions, not from the kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../attention_abi.h"

namespace rooftile::test {

constexpr int32_t kByte = 3;  // the dtype of a dense mask, behind those of attention_abi.h

inline int64_t element_size(int32_t dtype) { return dtype == kFp32 ? 4 : dtype == kByte ? 1 : 2; }

struct SmallFormat {
  int exponent_bits, fraction_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};

inline SmallFormat format_of(int32_t dtype) { return dtype == kBf16 ? SmallFormat{8, 7} : SmallFormat{5, 10}; }

inline double decode(const unsigned char* at, int32_t dtype) {
  if (dtype == kByte) return *at;
  if (dtype == kFp32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  const SmallFormat f = format_of(dtype);
  const int fraction = bits & ((1 << f.fraction_bits) - 1), exponent = bits >> f.fraction_bits & ((1 << f.exponent_bits) - 1);
  const double sign = bits >> 15 ? -1.0 : 1.0;
  if (exponent == (1 << f.exponent_bits) - 1) return fraction == 0 ? sign * INFINITY : NAN;
  const double significand = exponent == 0 ? fraction : fraction + (1 << f.fraction_bits);
  return sign * std::ldexp(significand, (exponent == 0 ? 1 : exponent) - f.bias() - f.fraction_bits);
}

// To nearest, ties to even.
inline void encode(unsigned char* at, int32_t dtype, double x) {
  if (dtype == kByte) {
    *at = static_cast<unsigned char>(x);
    return;
  }
  if (dtype == kFp32) {
    const float value = static_cast<float>(x);
    std::memcpy(at, &value, 4);
    return;
  }
  const SmallFormat f = format_of(dtype);
  const int top = (1 << f.exponent_bits) - 1, smallest = 1 - f.bias();
  int bits = 0;
  if (std::isnan(x)) {
    bits = top << f.fraction_bits | 1;
  } else if (std::isinf(x)) {
    bits = top << f.fraction_bits;
  } else if (x != 0.0) {
    const int natural = std::ilogb(x), exponent = natural < smallest ? smallest : natural;
    const int steps = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(x), f.fraction_bits - exponent)));
    // Counted in steps of the exponent's spacing, a significand that rounds up to 2 carries into the exponent by itself.
    bits = ((exponent - smallest) << f.fraction_bits) + steps;
    if (bits > top << f.fraction_bits) bits = top << f.fraction_bits;
  }
  const uint16_t stored = static_cast<uint16_t>(bits | (std::signbit(x) ? 0x8000 : 0));
  std::memcpy(at, &stored, 2);
}

// Half the distance between neighbours: relative to normal numbers, and the absolute one below them. The kernels flush
// denormals of fp32 to zero, hence the second number of the wide exponents.
inline double unit_roundoff(int32_t dtype) { return dtype == kFp32 ? 0x1p-24 : dtype == kBf16 ? 0x1p-8 : 0x1p-11; }
inline double smallest_error(int32_t dtype) { return dtype == kFp16 ? 0x1p-24 : 0x1p-118; }

// SplitMix64 (Steele, Lea and Flood 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state(seed) {}
  uint64_t bits() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform() { return std::ldexp(static_cast<double>(bits() >> 11), -53); }
  int64_t below(int64_t count) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(count)); }
  double normal() { return std::sqrt(-2.0 * std::log(1.0 - uniform())) * std::cos(6.283185307179586 * uniform()); }

 private:
  uint64_t state;
};

// The 32 bits of dropout for one pair: Philox4x32-10 (Salmon et al., SC'11), counter (key / 4, query, sequence and head, 0).
inline uint32_t dropout_bits(uint64_t seed, int64_t sequence_head, int64_t query, int64_t key) {
  uint32_t counter[4] = {static_cast<uint32_t>(key / 4), static_cast<uint32_t>(query), static_cast<uint32_t>(sequence_head), 0};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0], b = uint64_t{0xCD9E8D57u} * counter[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ k0, static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ counter[3] ^ k1, static_cast<uint32_t>(a)};
    std::memcpy(counter, next, sizeof counter);
  }
  return counter[key % 4];
}

}  // namespace rooftile::test
