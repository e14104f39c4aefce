// Counting exponents, one copy per instruction set (ROOFTILE_ISA).
//
// Counting is bound by stores: one increment of a table a cycle. So two elements share one increment. A *slot* (6 bits) is the
// sign and how many binades the element lies below a base exponent; two slots make the index of a 4096-entry table. Slots:
// 0..29 binades, kZeroSlot, and kRestSlot for what is left (outside the window, subnormal, Inf, NaN), counted one by one.
#include <type_traits>

#include "formats_kernels.h"

namespace rooftile {
namespace ROOFTILE_ISA {
namespace {

constexpr size_t kBlock = 2048;  // elements: the block, its indices and the hot lines of the tables share the L1 cache
constexpr size_t kHalf = kBlock / 2;
constexpr uint16_t kWindow = 30;
constexpr uint16_t kZeroSlot = 30;
constexpr uint16_t kRestSlot = 31;
constexpr int kSlotBits = 6;
constexpr int kPairTables = 4;  // runs of one exponent would otherwise wait for their own stores
constexpr size_t kHeavy = kBlock / 16;  // more rest elements than this in a block, and the plain loop is faster

template <typename UInt, int kFraction>
struct Layout {
  static constexpr UInt sign = UInt(1) << (8 * sizeof(UInt) - 1);
  static constexpr UInt magnitude = sign - 1;
  static constexpr UInt inf = magnitude >> kFraction << kFraction;
  static constexpr UInt tiny = UInt(1) << kFraction;
  static constexpr int fields = 1 << (8 * sizeof(UInt) - kFraction);  // sign included
};

template <typename UInt, int kFraction>
struct Counter {
  using L = Layout<UInt, kFraction>;
  static constexpr int kTopFraction = kFraction - (8 * static_cast<int>(sizeof(UInt)) - 16);
  using Signed = std::conditional_t<sizeof(UInt) == 8, int64_t, int32_t>;
  static constexpr int kTopShift = 8 * static_cast<int>(sizeof(UInt)) - 16;
  static constexpr UInt kTail = L::sign | (L::tiny - 1);
  static constexpr uint16_t kTopExponent = 0x7fff >> kTopFraction << kTopFraction;

  int64_t* fields;
  int64_t* powers;
  Special* special;
  UInt base = 0;  // exponent field of slot 0
  alignas(64) uint16_t top[kBlock];
  alignas(64) uint16_t index[kBlock];
  alignas(64) uint8_t flags[kBlock];
  uint32_t pairs[kPairTables][1 << (2 * kSlotBits)];
  uint32_t plain[kPairTables][L::fields];
  size_t since_flush = 0;

  void start(int64_t* fields_out, int64_t* powers_out, Special* special_out) {
    fields = fields_out;
    powers = powers_out;
    special = special_out;
    __builtin_memset(pairs, 0, sizeof pairs);
    __builtin_memset(plain, 0, sizeof plain);
  }

  // From the upper 16 bits alone (sign, exponent, a few fraction bits), so that 32 lanes fit a vector. Exponent field 0 counts
  // as zero: blocks with subnormals never get here.
  static uint16_t slot_of(uint16_t top, uint16_t base) {
    const uint16_t exponent = top & kTopExponent;
    const uint16_t below = static_cast<uint16_t>(base - (exponent >> kTopFraction));  // wraps above the base, far outside
    uint16_t slot = below < kWindow ? below : kRestSlot;
    slot = exponent == 0 ? kZeroSlot : slot;
    return static_cast<uint16_t>(slot | (top >> 15 << (kSlotBits - 1)));
  }

  void note_extremes(UInt largest, UInt smallest_less_one) {
    if (largest > special->largest) special->largest = largest;
    if (smallest_less_one < L::magnitude && uint64_t(smallest_less_one) + 1 < special->smallest) {
      special->smallest = uint64_t(smallest_less_one) + 1;
    }
  }

  // What a rest slot may stand for: a normal value outside the window, Inf or NaN.
  void add_one(UInt bits) {
    const UInt a = bits & L::magnitude;
    if (a > L::inf) {
      special->nans += 1;
    } else if (a == L::inf) {
      special->infs[(bits & L::sign) != 0] += 1;
    } else {
      fields[bits >> kFraction] += 1;
      note_extremes(a, a - 1);
    }
  }

  void add_block(const UInt* block) {
    const Sweep found = sweep_tops(block, top);
    if (found.smallest >= L::tiny && found.largest >> kFraction <= base && (found.smallest >> kFraction) + kWindow > base) {
      index_inside(top, static_cast<uint16_t>(base), index);
      note_extremes(found.largest, found.smallest - 1);
      if (found.least_fraction == 0) add_powers(block, kBlock);
    } else if (!add_mixed(block, found.largest)) {
      return;
    }
    count_pairs(index, pairs, reinterpret_cast<const char*>(block + kBlock));
    since_flush += kBlock;
  }

  // A block with zeros or with values outside the window. Returns false where it has been counted by add_plain.
  bool add_mixed(const UInt* block, UInt largest) {
    UInt smallest;
    const bool has_powers = sweep_nonzero(block, &smallest);
    bool plain_instead = smallest < L::tiny - 1;  // subnormals
    if (!plain_instead && index_mixed(top, static_cast<uint16_t>(base), index)) {
      size_t rest = 0;
      for (size_t i = 0; i < kHalf; ++i) {
        rest += (index[i] & kRestSlot) == kRestSlot;
        rest += (index[i] >> kSlotBits & kRestSlot) == kRestSlot;
      }
      plain_instead = rest > kHeavy;
      if (!plain_instead) add_rest(block, largest >= L::inf);
    }
    if (plain_instead) {
      add_plain(block, kBlock, largest, smallest);
      return false;
    }
    if (largest < L::inf) note_extremes(largest, smallest);
    if (has_powers) add_powers(block, kBlock);
    return true;
  }

  // Magnitudes: the extremes (smallest is 0 where there is a zero), and the least fraction field (0 at a power of two).
  struct Sweep {
    UInt largest, smallest, least_fraction;
  };

  // This and the next ones are free of `this`, so that the compiler knows what can't overlap and vectorises.
  static Sweep sweep_tops(const UInt* __restrict block, uint16_t* __restrict tops) {
    UInt largest = 0, smallest = ~UInt(0), least = ~UInt(0);
    for (size_t i = 0; i < kBlock; ++i) {
      const UInt bits = block[i];
      const UInt a = bits & L::magnitude;
      const UInt fraction = bits & (L::tiny - 1);
      tops[i] = static_cast<uint16_t>(bits >> kTopShift);
      largest = a > largest ? a : largest;
      smallest = a < smallest ? a : smallest;
      least = fraction < least ? fraction : least;
    }
    return {largest, smallest, least};
  }

  // Smallest non-zero magnitude less one, and whether a power of two (or Inf) is there: its bits less one end in ones for the
  // whole fraction. Zero less one wraps to the largest integer; with the sign bit kept it is below all others as a signed one.
  static bool sweep_nonzero(const UInt* __restrict block, UInt* smallest_less_one) {
    UInt smallest = ~UInt(0);
    Signed ones = 0;
    for (size_t i = 0; i < kBlock; ++i) {
      const UInt less_one = (block[i] & L::magnitude) - 1;
      smallest = less_one < smallest ? less_one : smallest;
      const Signed tail = static_cast<Signed>(less_one & kTail);
      ones = tail > ones ? tail : ones;
    }
    *smallest_less_one = smallest;
    return static_cast<UInt>(ones) == L::tiny - 1;
  }

  // Every element is a normal number inside the window, so base less exponent fits five bits; the sign, which the subtraction
  // leaves just above the exponent, becomes the sixth.
  static void index_inside(const uint16_t* __restrict tops, uint16_t window, uint16_t* __restrict out) {
    constexpr int kSignDown = 15 - kTopFraction - (kSlotBits - 1);
    for (size_t i = 0; i < kHalf; ++i) {
      const uint16_t first = static_cast<uint16_t>(window - (tops[i] >> kTopFraction));
      const uint16_t second = static_cast<uint16_t>(window - (tops[i + kHalf] >> kTopFraction));
      const uint16_t a = (first & 31) | ((first >> kSignDown) & 32), b = (second & 31) | ((second >> kSignDown) & 32);
      out[i] = static_cast<uint16_t>(a | b << kSlotBits);
    }
  }

  // Any elements but subnormals. Returns whether a rest element is among them.
  static bool index_mixed(const uint16_t* __restrict tops, uint16_t window, uint16_t* __restrict out) {
    uint16_t highest = 0;
    for (size_t i = 0; i < kHalf; ++i) {
      const uint16_t first = slot_of(tops[i], window), second = slot_of(tops[i + kHalf], window);
      const uint16_t a = first & kRestSlot, b = second & kRestSlot;
      const uint16_t high = a > b ? a : b;
      highest = high > highest ? high : highest;
      out[i] = static_cast<uint16_t>(first | second << kSlotBits);
    }
    return highest == kRestSlot;
  }

  void add_powers(const UInt* block, size_t count) {
    flag_powers(block, count, flags);
    for (size_t i = 0; i < count; i += 8) {
      uint64_t eight;
      __builtin_memcpy(&eight, flags + i, sizeof eight);
      for (; eight != 0; eight &= eight - 1) {
        const UInt a = block[i + static_cast<size_t>(__builtin_ctzll(eight)) / 8] & L::magnitude;
        if (a < L::inf) powers[a >> kFraction] += 1;
      }
    }
  }

  static void flag_powers(const UInt* __restrict block, size_t count, uint8_t* __restrict out) {
    for (size_t i = 0; i < count; ++i) {
      out[i] = ((((block[i] & L::magnitude) - 1) & kTail) == L::tiny - 1) ? uint8_t(1) : uint8_t(0);
    }
    for (size_t i = count; i % 8 != 0; ++i) out[i] = 0;
  }

  // Counting leaves the memory idle, so meanwhile the next block is fetched (a prefetch past the end of the data does nothing);
  // without it the two phases take turns, and data from memory is counted at half the speed.
  static void count_pairs(const uint16_t* __restrict in, uint32_t (*__restrict tables)[1 << (2 * kSlotBits)],
                          const char* next) {
    constexpr size_t kBytesPerStep = kBlock * sizeof(UInt) / (kHalf / 8);
    for (size_t i = 0; i < kHalf; i += 8) {
      for (size_t byte = 0; byte < kBytesPerStep; byte += 64) __builtin_prefetch(next + i / 8 * kBytesPerStep + byte);
      uint64_t four[2];
      __builtin_memcpy(four, in + i, sizeof four);  // two loads instead of eight
      tables[0][uint16_t(four[0])] += 1;
      tables[1][uint16_t(four[0] >> 16)] += 1;
      tables[2][uint16_t(four[0] >> 32)] += 1;
      tables[3][four[0] >> 48] += 1;
      tables[0][uint16_t(four[1])] += 1;
      tables[1][uint16_t(four[1] >> 16)] += 1;
      tables[2][uint16_t(four[1] >> 32)] += 1;
      tables[3][four[1] >> 48] += 1;
    }
  }

  void add_rest(const UInt* block, bool extremes_unknown) {
    for (size_t i = 0; i < kHalf; ++i) {
      if ((index[i] & kRestSlot) == kRestSlot) add_one(block[i]);
      if ((index[i] >> kSlotBits & kRestSlot) == kRestSlot) add_one(block[i + kHalf]);
    }
    if (!extremes_unknown) return;
    for (size_t i = 0; i < kBlock; ++i) {
      const UInt a = block[i] & L::magnitude;
      if (a < L::inf) note_extremes(a, a - 1);
    }
  }

  // Any number of elements up to a block, whatever they are; moves the window to them for the blocks that follow.
  void add_plain(const UInt* block, size_t count, UInt largest, UInt smallest_less_one) {
    for (size_t i = 0; i < count; ++i) index[i] = static_cast<uint16_t>(block[i] >> kFraction);
    size_t i = 0;
    for (; i + kPairTables <= count; i += kPairTables)
      for (int t = 0; t < kPairTables; ++t) plain[t][index[i + t]] += 1;
    for (; i < count; ++i) plain[0][index[i]] += 1;
    since_flush += count;
    add_powers(block, count);
    UInt zeros = 0, minus_zeros = 0;
    for (i = 0; i < count; ++i) {
      zeros += block[i] == 0 ? UInt(1) : UInt(0);
      minus_zeros += block[i] == L::sign ? UInt(1) : UInt(0);
    }
    special->zeros[0] += zeros;
    special->zeros[1] += minus_zeros;
    if (largest >= L::inf || smallest_less_one < L::tiny - 1) {
      largest = add_special(block, count);
    } else {
      note_extremes(largest, smallest_less_one);
    }
    const UInt field = largest >> kFraction;
    if (field > base || field + kWindow / 2 < base) {
      flush();
      base = field + 1 < L::inf >> kFraction ? field + 1 : field;  // room for a larger finite value in a later block
    }
  }

  // Subnormals, Inf, NaN and the extremes of a block. Returns the largest finite magnitude.
  UInt add_special(const UInt* block, size_t count) {
    UInt infs = 0, minus_infs = 0, nans = 0, subnormals = 0, largest = 0, smallest = ~UInt(0);
    for (size_t i = 0; i < count; ++i) {
      infs += block[i] == L::inf ? UInt(1) : UInt(0);
      minus_infs += block[i] == (L::inf | L::sign) ? UInt(1) : UInt(0);
    }
    for (size_t i = 0; i < count; ++i) {
      const UInt a = block[i] & L::magnitude;
      const UInt less_one = a - 1;
      nans += a > L::inf ? UInt(1) : UInt(0);
      subnormals += less_one < L::tiny - 1 ? UInt(1) : UInt(0);
      const UInt finite = a < L::inf ? a : UInt(0);
      largest = finite > largest ? finite : largest;
      const UInt candidate = a < L::inf ? less_one : ~UInt(0);
      smallest = candidate < smallest ? candidate : smallest;
    }
    special->infs[0] += infs;
    special->infs[1] += minus_infs;
    special->nans += nans;
    note_extremes(largest, smallest);
    for (size_t i = 0; subnormals != 0 && i < count; ++i) {
      const UInt a = block[i] & L::magnitude;
      if (a == 0 || a >= L::tiny) continue;
      const int leading = 63 - __builtin_clzll(a);
      special->subnormals[(block[i] & L::sign) != 0][leading] += 1;
      special->subnormal_powers[leading] += (a & (a - 1)) == 0;
    }
    return largest;
  }

  // Empties the tables into 64-bit counts. Fields 0 and top of `fields` are left to Special and mean nothing.
  void flush() {
    for (uint32_t pair = 0; pair < 1u << (2 * kSlotBits); ++pair) {
      int64_t count = 0;
      for (int t = 0; t < kPairTables; ++t) count += pairs[t][pair];
      if (count == 0) continue;
      add_slot(pair & 63, count);
      add_slot(pair >> kSlotBits, count);
    }
    for (int t = 0; t < kPairTables; ++t)
      for (int f = 0; f < L::fields; ++f) fields[f] += plain[t][f];
    __builtin_memset(pairs, 0, sizeof pairs);
    __builtin_memset(plain, 0, sizeof plain);
    since_flush = 0;
  }

  void add_slot(uint32_t slot, int64_t count) {
    const int negative = slot >> (kSlotBits - 1);
    const uint32_t below = slot & kRestSlot;
    if (below == kZeroSlot) special->zeros[negative] += count;
    if (below < kWindow) fields[(negative ? L::fields / 2 : 0) + (base - below)] += count;
  }
};

template <typename UInt, int kFraction, typename Load>
void histogram_of(size_t n, int64_t* fields, int64_t* powers, Special* special, Load load) {
  constexpr size_t kFlush = size_t(1) << 30;  // elements before a 32-bit count could overflow
  Counter<UInt, kFraction> counter;
  counter.start(fields, powers, special);
  alignas(64) UInt scratch[kBlock];
  for (size_t start = 0; start < n; start += kBlock) {
    const size_t count = n - start < kBlock ? n - start : kBlock;
    const UInt* block = load(start, count, scratch);
    if (count == kBlock) {
      counter.add_block(block);
    } else {
      counter.add_plain(block, count, Layout<UInt, kFraction>::inf, 0);  // extremes unknown
    }
    if (counter.since_flush >= kFlush) counter.flush();
  }
  counter.flush();
}

// fp16 as fp32 bits. A subnormal goes through an integer, never through an fp32 subnormal, so a caller's flush-to-zero setting
// changes nothing; every non-zero fp16 value is a normal fp32 value.
uint32_t widen_fp16(uint16_t half) {
  const uint32_t a = half & 0x7fffu;
  const float subnormal = static_cast<float>(static_cast<int32_t>(a)) * 0x1p-24f;
  uint32_t bits;
  __builtin_memcpy(&bits, &subnormal, sizeof bits);
  const uint32_t normal = (a << 13) + (112u << 23) + ((a >= 0x7c00u ? 112u : 0u) << 23);  // Inf, NaN: field 255
  const uint32_t choice = 0u - (a < 0x400u ? 1u : 0u);  // a mask, since a branch here keeps the loop from being vectorised
  bits = (bits & choice) | (normal & ~choice);
  return bits | static_cast<uint32_t>(half & 0x8000u) << 16;
}

}  // namespace

void histogram(const void* in, size_t n, int32_t source, int64_t* fields, int64_t* powers, Special* special) {
  const uint16_t* half = static_cast<const uint16_t*>(in);
  const uint32_t* single = static_cast<const uint32_t*>(in);
  const uint64_t* wide = static_cast<const uint64_t*>(in);
  switch (source) {
    case kFp32:
      return histogram_of<uint32_t, 23>(n, fields, powers, special,
                                        [=](size_t start, size_t, uint32_t*) { return single + start; });
    case kBf16:
      return histogram_of<uint32_t, 23>(n, fields, powers, special, [=](size_t start, size_t count, uint32_t* scratch) {
        for (size_t i = 0; i < count; ++i) scratch[i] = static_cast<uint32_t>(half[start + i]) << 16;
        return scratch;
      });
    case kFp16:
      return histogram_of<uint32_t, 23>(n, fields, powers, special, [=](size_t start, size_t count, uint32_t* scratch) {
        for (size_t i = 0; i < count; ++i) scratch[i] = widen_fp16(half[start + i]);
        return scratch;
      });
    default:
      return histogram_of<uint64_t, 52>(n, fields, powers, special,
                                        [=](size_t start, size_t, uint64_t*) { return wide + start; });
  }
}

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
