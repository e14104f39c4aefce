// The C ABI: choose the instruction set, split the work over threads, run the kernels. No link to torch or Python.
//
// Every function returns 0, or a negative number for an argument that it can't take. `isa` is -1 for the best one of this
// machine, or one of Isa (tests compare them). Splitting never changes a result: elements are rounded one by one and counts add.
#include "formats_kernels.h"

#include "platform.h"

namespace rooftile {
namespace {

int team_size(int64_t n, int32_t threads) { return n < kSerialBelow || threads < 1 || forked() ? 1 : threads; }

// Parts are handed out as threads become free, since on a busy machine one of them may lag: enough of them to even that out, and
// large enough that starting one costs nothing.
constexpr int64_t kPartElements = 1 << 20;

int part_count(int64_t n, int team) {
  const int64_t parts = n / kPartElements;
  return static_cast<int>(parts < team ? team : parts > 65536 ? 65536 : parts);
}

struct Part {
  int64_t first, count;
};

// Part `rank` of `parts` almost equal ones, at a multiple of 16 elements so that no cache line is written twice.
Part part(int64_t n, int rank, int parts) {
  const int64_t lines = (n + 15) / 16;
  const int64_t first = lines * rank / parts * 16, last = lines * (rank + 1) / parts * 16;
  return {first, (last > n ? n : last) - first};
}

void round_part(const uint32_t* in, uint32_t* out, int64_t n, const RoundPlan& plan, int32_t isa) {
  const size_t count = static_cast<size_t>(n);
#if defined(ROOFTILE_X86)
  if (isa == kAvx512) return avx512::round_fp32(in, out, count, plan);
  if (isa == kAvx2) return avx2::round_fp32(in, out, count, plan);
#endif
  (void)isa;
  portable::round_fp32(in, out, count, plan);
}

void histogram_part(const char* in, int64_t n, int32_t source, int64_t* fields, int64_t* powers, Special* special,
                    int32_t isa) {
  const size_t count = static_cast<size_t>(n);
#if defined(ROOFTILE_X86)
  if (isa == kAvx512) return avx512::histogram(in, count, source, fields, powers, special);
  if (isa == kAvx2) return avx2::histogram(in, count, source, fields, powers, special);
#endif
  (void)isa;
  portable::histogram(in, count, source, fields, powers, special);
}

Special empty_special() {
  Special special = {};
  special.smallest = UINT64_MAX;
  return special;
}

void merge(const Special& from, Special* into) {
  for (int sign = 0; sign < 2; ++sign) {
    into->zeros[sign] += from.zeros[sign];
    into->infs[sign] += from.infs[sign];
    for (int bit = 0; bit < 52; ++bit) into->subnormals[sign][bit] += from.subnormals[sign][bit];
  }
  for (int bit = 0; bit < 52; ++bit) into->subnormal_powers[bit] += from.subnormal_powers[bit];
  into->nans += from.nans;
  if (from.largest > into->largest) into->largest = from.largest;
  if (from.smallest < into->smallest) into->smallest = from.smallest;
}

}  // namespace
}  // namespace rooftile

using namespace rooftile;

// Raised whenever a signature, a struct or the meaning of an argument changes; Python refuses another number.
ROOFTILE_API int32_t rooftile_formats_abi() { return 1; }

ROOFTILE_API int32_t rooftile_best_isa() { return machine_isa; }

ROOFTILE_API int32_t rooftile_round_fp32(const void* in, void* out, int64_t n, const RoundPlan* plan, int32_t threads,
                                         int32_t isa) {
  isa = chosen_isa(isa);
  if (n < 0 || isa > machine_isa || plan->normal_shift < 1 || plan->mode < kNearestEven || plan->mode > kDown) return -1;
  const uint32_t* source = static_cast<const uint32_t*>(in);
  uint32_t* target = static_cast<uint32_t*>(out);
  const int team = team_size(n, threads);
  advise_huge_pages(out, n * 4);
  if (team == 1) {
    round_part(source, target, n, *plan, isa);
    return 0;
  }
  const int parts = part_count(n, team);
#pragma omp parallel for num_threads(team) schedule(dynamic, 1)
  for (int rank = 0; rank < parts; ++rank) {
    const Part mine = part(n, rank, parts);
    round_part(source + mine.first, target + mine.first, mine.count, *plan, isa);
  }
  return 0;
}

// fields: counts by (sign, exponent field) of normal numbers, 512 of them as fp32 or 4096 as fp64, added to; powers: the same
// without the sign, of exact powers of two alone; special: set.
ROOFTILE_API int32_t rooftile_histogram(const void* in, int64_t n, int32_t source, int64_t* fields, int64_t* powers,
                                        Special* special, int32_t threads, int32_t isa) {
  isa = chosen_isa(isa);
  if (n < 0 || isa > machine_isa || source < kFp32 || source > kFp64) return -1;
  const int64_t width = source == kFp64 ? 8 : source == kFp32 ? 4 : 2;
  const int count = source == kFp64 ? kMaxFields : kFp32Fields;
  const char* data = static_cast<const char*>(in);
  *special = empty_special();
  const int team = team_size(n, threads);
  if (team == 1) {
    histogram_part(data, n, source, fields, powers, special, isa);
    return 0;
  }
  const int parts = part_count(n, team);
#pragma omp parallel for num_threads(team) schedule(dynamic, 1)
  for (int rank = 0; rank < parts; ++rank) {
    int64_t my_fields[kMaxFields] = {}, my_powers[kMaxFields / 2] = {};
    Special my_special = empty_special();
    const Part mine = part(n, rank, parts);
    histogram_part(data + mine.first * width, mine.count, source, my_fields, my_powers, &my_special, isa);
#pragma omp critical(rooftile_histogram_merge)
    {
      for (int field = 0; field < count; ++field) fields[field] += my_fields[field];
      for (int field = 0; field < count / 2; ++field) powers[field] += my_powers[field];
      merge(my_special, special);
    }
  }
  return 0;
}
