// The C ABI of the machine's ceilings: the same work on every thread, timed from a common start to the last thread's end.
#include "ceilings_kernels.h"

#include <chrono>
#include <cstdlib>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "platform.h"

namespace rooftile {
namespace {

enum Ceiling : int32_t { kFmaFp32 = 0, kDotBf16 = 1, kAmxBf16 = 2, kExp2Fp32 = 3, kRead = 4, kCopy = 5 };

constexpr int64_t kExp2Elements = 2048;  // input and output stay in the first-level cache

// One thread's memory, written before it is read, or all its pages would be the one zero page.
class Memory {
 public:
  Memory(int64_t bytes, bool two) : two_(two), from_(filled(bytes)), to_(two ? filled(bytes) : nullptr) {}
  ~Memory() {
    std::free(from_);
    std::free(to_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  bool whole() const { return from_ && (to_ || !two_); }
  float* from() const { return from_; }
  float* to() const { return to_; }

 private:
  static float* filled(int64_t bytes) {
    constexpr int64_t kPage = int64_t(1) << 21;
    float* data = static_cast<float*>(std::aligned_alloc(kPage, static_cast<size_t>((bytes + kPage - 1) / kPage * kPage)));
    if (!data) return nullptr;
    advise_huge_pages(data, bytes);
    for (int64_t i = 0; i < bytes / 4; ++i) data[i] = -20.0f * static_cast<float>(i % 1021) / 1021.0f;
    return data;
  }

  bool two_;
  float* from_;
  float* to_;
};

#if defined(ROOFTILE_X86)
#define ROOFTILE_CALL(isa, call) ((isa) == kAvx512 ? avx512::call : (isa) == kAvx2 ? avx2::call : portable::call)
#else
#define ROOFTILE_CALL(isa, call) ((void)(isa), portable::call)
#endif

bool supported(int32_t ceiling) {
  if (ceiling == kDotBf16) {
#if defined(ROOFTILE_HAS_DOT_BF16)
    return machine_isa == kAvx512 && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
  }
  if (ceiling == kAmxBf16) {
#if defined(ROOFTILE_HAS_AMX)
    return amx_permitted();
#else
    return false;
#endif
  }
  return ceiling >= kFmaFp32 && ceiling <= kCopy;
}

int64_t work(int32_t ceiling, const Memory& memory, int64_t bytes, int64_t times, int32_t isa) {
  switch (ceiling) {
    case kFmaFp32: return ROOFTILE_CALL(isa, fma_fp32(times));
#if defined(ROOFTILE_HAS_DOT_BF16)
    case kDotBf16: return dot_bf16(times);
#endif
#if defined(ROOFTILE_HAS_AMX)
    case kAmxBf16: return amx_bf16(times);
#endif
    case kExp2Fp32: return ROOFTILE_CALL(isa, exp2_fp32(memory.from(), memory.to(), kExp2Elements, times));
    case kRead: return ROOFTILE_CALL(isa, read_bytes(memory.from(), bytes, times));
    case kCopy: return ROOFTILE_CALL(isa, copy_bytes(memory.from(), memory.to(), bytes, times));
    default: return 0;
  }
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// How many times the work has to be done to last `least_seconds`.
int64_t times_for(double least_seconds, int32_t ceiling, const Memory& memory, int64_t bytes, int32_t isa) {
  for (int64_t times = 1;; times *= 2) {
    const double start = now();
    work(ceiling, memory, bytes, times, isa);
    const double took = now() - start;
    if (took >= least_seconds) return times;
    if (took >= least_seconds / 16) return static_cast<int64_t>(static_cast<double>(times) * least_seconds / took) + 1;
  }
}

int team_in_parallel() {
#if defined(_OPENMP)
  return omp_get_num_threads();
#else
  return 1;
#endif
}

}  // namespace
}  // namespace rooftile

using namespace rooftile;

// Raised whenever a signature or the meaning of an argument changes; Python refuses another number.
ROOFTILE_API int32_t rooftile_ceilings_abi() { return 1; }

// Whether this processor and this build have the instructions of a ceiling. Asking about AMX asks the kernel for its permission.
ROOFTILE_API int32_t rooftile_ceiling_supported(int32_t ceiling) { return supported(ceiling) ? 1 : 0; }

// Rates, per second and over all threads together, of `repeats` rounds that last at least `least_seconds` each. `bytes` is what each
// thread reads or copies (ignored by arithmetic). Returns the number of threads that took part, -1 for an argument that can't be
// taken, -2 where there is no memory.
ROOFTILE_API int32_t rooftile_ceiling(int32_t ceiling, int64_t bytes, double least_seconds, int32_t repeats, int32_t threads,
                                      int32_t isa, double* rates) {
  isa = chosen_isa(isa);
  bytes = ceiling == kExp2Fp32 ? kExp2Elements * 4 : ceiling < kRead ? kChunk : bytes / kChunk * kChunk;
  if (!supported(ceiling) || isa > machine_isa || bytes < kChunk || repeats < 1 || threads < 1 || !(least_seconds > 0)) return -1;
  [[maybe_unused]] const int asked = forked() ? 1 : threads;  // without OpenMP there is one
  int team = 1, failed = 0;
  int64_t times = 0, done = 0;
  double first = 0, last = 0;
#pragma omp parallel num_threads(asked)
  {
    const Memory memory(bytes, ceiling != kRead);  // first touched by the thread that reads it
    if (!memory.whole()) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp barrier
#pragma omp single
    {
      team = team_in_parallel();
      if (!failed) times = times_for(least_seconds, ceiling, memory, bytes, isa);
    }
    for (int32_t r = 0; r < repeats && !failed; ++r) {
#pragma omp single
      {
        done = 0;
        first = 1e300;
        last = 0;
      }
      const double start = now();
      const int64_t mine = work(ceiling, memory, bytes, times, isa);
      const double end = now();
#pragma omp critical(rooftile_ceiling_round)
      {
        done += mine;
        first = start < first ? start : first;
        last = end > last ? end : last;
      }
#pragma omp barrier
#pragma omp single
      rates[r] = static_cast<double>(done) / (last - first);
    }
  }
  return failed ? -2 : team;
}

// The exp2 whose rate is measured, for a test of what it computes: n a multiple of 16, both pointers at multiples of 64 bytes.
ROOFTILE_API int32_t rooftile_ceiling_exp2(const float* in, float* out, int64_t n, int32_t isa) {
  isa = chosen_isa(isa);
  if (isa > machine_isa || n < 0 || n % 16 != 0) return -1;
  ROOFTILE_CALL(isa, exp2_fp32(in, out, n, 1));
  return 0;
}
