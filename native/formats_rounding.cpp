// Rounding to a format. Written as plain loops over integers that the compiler turns into vector code for the instruction set of
// this copy (ROOFTILE_ISA); the steps are those of rooftile/formats/rounding.py and give the same bits.
#include "formats_kernels.h"

namespace rooftile {
namespace ROOFTILE_ISA {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInf = 0x7f800000u;

// Wide: the format's normal range starts where fp32's does, so every element has the same shift.
template <int32_t kMode, bool kWide>
void round_loop(const uint32_t* __restrict in, uint32_t* __restrict out, size_t n, const RoundPlan& plan_in) {
  const RoundPlan plan = plan_in;  // a local copy can't alias the output
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = in[i];
    const uint32_t a = bits & kMagnitude;
    const bool negative = bits >> 31;
    uint32_t rounded;
    const bool away = kMode == kUp ? !negative : kMode == kDown ? negative : false;
    if (kWide) {
      const uint32_t shift = static_cast<uint32_t>(plan.normal_shift);
      const uint32_t whole = 1u << shift;
      uint32_t add = 0;
      if (kMode == kNearestEven) add = (whole >> 1) - 1 + ((a >> shift) & 1);
      if (kMode == kUp || kMode == kDown) add = away ? whole - 1 : 0;
      rounded = ((a + add) >> shift) << shift;
    } else {
      const int32_t exponent = static_cast<int32_t>(a >> 23);
      const int32_t field = exponent < 1 ? 1 : exponent;
      const uint32_t base = static_cast<uint32_t>(field - 1) << 23;
      const uint32_t significand = a - base;
      const int32_t below = plan.min_field - field;
      const int32_t wanted = plan.normal_shift + (below > 0 ? below + plan.flush_shift : 0);
      const uint32_t shift = static_cast<uint32_t>(wanted > 25 ? 25 : wanted);
      const uint32_t whole = 1u << shift;
      uint32_t add = 0;
      if (kMode == kNearestEven) add = (whole >> 1) - 1 + ((significand >> shift) & 1);
      if (kMode == kUp || kMode == kDown) add = away ? whole - 1 : 0;
      const uint32_t steps = (significand + add) >> shift;
      // Past the significand's width the result is zero or one step.
      rounded = shift > 23 ? (steps ? plan.smallest_bits : 0u) : base + (steps << shift);
    }
    rounded = rounded == 0 ? plan.zero_bits : rounded;
    rounded = rounded > plan.largest_bits ? (negative ? plan.overflow_down : plan.overflow_up) : rounded;
    rounded = a == kInf ? plan.inf_bits : rounded;
    rounded = a > kInf ? kNan : rounded;
    if (plan.sign_mask == 0) rounded = (negative && a != 0) ? kNan : rounded;
    const uint32_t sign = (rounded != 0 || plan.keeps_minus_zero) ? (bits & plan.sign_mask) : 0u;
    out[i] = rounded | sign;
  }
}

// The common case, half the instructions: to nearest, a signed format with zero whose smallest value is a normal fp32 number.
// Below the smallest normal, adding and subtracting 2^23 times the smallest value lets the adder round to the even grid there:
// operands and results are never fp32 subnormals that matter (those are far below half a step), so flush-to-zero can't change it.
void round_common(const uint32_t* __restrict in, uint32_t* __restrict out, size_t n, const RoundPlan& plan_in) {
  const RoundPlan plan = plan_in;
  const uint32_t shift = static_cast<uint32_t>(plan.normal_shift);
  const uint32_t half_less_one = (1u << (shift - 1)) - 1, keep = ~((1u << shift) - 1);
  const uint32_t tiny = static_cast<uint32_t>(plan.min_field) << 23;
  const uint32_t zero_sign = plan.keeps_minus_zero ? 0x80000000u : 0u;
  const uint32_t magic_bits = plan.smallest_bits + (23u << 23);
  float magic;
  __builtin_memcpy(&magic, &magic_bits, sizeof magic);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = in[i];
    const uint32_t a = bits & kMagnitude;
    const uint32_t normal = (a + half_less_one + ((a >> shift) & 1)) & keep;
    float value;
    __builtin_memcpy(&value, &a, sizeof value);
    value = (value + magic) - magic;
    uint32_t below;
    __builtin_memcpy(&below, &value, sizeof below);
    const uint32_t choice = 0u - (a < tiny ? 1u : 0u);  // a mask: the compiler would turn a choice into a branch
    uint32_t rounded = (below & choice) | (normal & ~choice);
    rounded = rounded > plan.largest_bits ? plan.overflow_up : rounded;
    rounded = a == kInf ? plan.inf_bits : rounded;
    rounded = a > kInf ? kNan : rounded;
    out[i] = rounded | (bits & (rounded != 0 ? 0x80000000u : zero_sign));
  }
}

bool is_common(const RoundPlan& plan) {
  return plan.mode == kNearestEven && plan.normal_shift < 23 && plan.zero_bits == 0 && plan.sign_mask != 0 && plan.smallest_bits >= (1u << 23) &&
         plan.smallest_bits < (230u << 23);
}

template <int32_t kMode>
void round_mode(const uint32_t* in, uint32_t* out, size_t n, const RoundPlan& plan) {
  // Rounding the bits where they stand needs a fraction bit to be even or odd; a wide format that flushes or has no zero needs
  // the general loop too.
  if (plan.min_field <= 1 && plan.flush_shift == 0 && plan.normal_shift < 23) {
    round_loop<kMode, true>(in, out, n, plan);
  } else {
    round_loop<kMode, false>(in, out, n, plan);
  }
}

}  // namespace

void round_fp32(const uint32_t* in, uint32_t* out, size_t n, const RoundPlan& plan) {
  if (is_common(plan)) return round_common(in, out, n, plan);
  switch (plan.mode) {
    case kNearestEven: return round_mode<kNearestEven>(in, out, n, plan);
    case kTowardZero: return round_mode<kTowardZero>(in, out, n, plan);
    case kUp: return round_mode<kUp>(in, out, n, plan);
    default: return round_mode<kDown>(in, out, n, plan);
  }
}

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
