// What every part of the C ABI asks of the machine: its instruction set, whether it may use threads, memory in huge pages.
#pragma once

#include <cstdint>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define ROOFTILE_API extern "C" __attribute__((visibility("default")))

namespace rooftile {
namespace {

enum Isa : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

inline int32_t best_isa() {
#if defined(ROOFTILE_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return kAvx2;
#endif
  return kPortable;
}

const int32_t machine_isa = best_isa();

inline int32_t chosen_isa(int32_t asked) { return asked < 0 ? machine_isa : asked; }

#if defined(__unix__) || defined(__APPLE__)
const pid_t loader_pid = getpid();
// A forked child has none of its parent's OpenMP workers, and libgomp would wait for them for ever: there we run serially.
bool forked() { return getpid() != loader_pid; }
#else
bool forked() { return false; }
#endif

constexpr int64_t kSerialBelow = 1 << 15;  // elements; waking a thread costs more than it saves

// A fresh large result is faulted in page by page while it is written, which takes longer than the rounding. Asking for huge
// pages (whole ones inside the result) makes that 512 times rarer; it is advice and changes no byte.
inline void advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = uintptr_t(1) << 21;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  if (last > first) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace
}  // namespace rooftile
