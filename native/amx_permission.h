// Whether this process may use AMX: the processor has it, the system saves its registers, and the kernel has granted them.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace rooftile {
namespace {

#if defined(__x86_64__) && defined(__linux__)
inline bool ask_for_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kOsXsave = 1u << 27, kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || (c & kOsXsave) == 0) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;  // XTILECFG and XTILEDATA
  if ((low & kTileState) != kTileState) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of asm/prctl.h since Linux 5.16
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
// Asked once: the permission holds for all threads of the process, and for its forked children.
inline bool has_amx() {
  static const bool granted = ask_for_amx();
  return granted;
}
#else
inline bool has_amx() { return false; }
#endif

}  // namespace
}  // namespace rooftile
