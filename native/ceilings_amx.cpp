// TDPBF16PS at full rate: four 16 x 16 fp32 tiles, each += a 16 x 32 by 32 x 16 product of bf16. Raw assembly: the intrinsics of
// GCC 12 tell the compiler neither what _tile_loadconfig reads nor what tile loads and stores touch.
#include "ceilings_kernels.h"

#include <cstring>

#include "amx_permission.h"

namespace rooftile {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

}  // namespace

bool amx_permitted() { return has_amx(); }

int64_t amx_bf16(int64_t times) {
  TileConfig config;
  std::memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = 16;
    config.row_bytes[tile] = 64;
  }
  alignas(64) uint16_t operand[16 * 32];
  for (uint16_t& value : operand) value = 0x3c00;  // 2^-7
  const int64_t stride = 64;
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  asm volatile(
      "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"
      "tileloadd (%0,%1,1), %%tmm4\n\ttileloadd (%0,%1,1), %%tmm5\n\t"
      "tileloadd (%0,%1,1), %%tmm6\n\ttileloadd (%0,%1,1), %%tmm7"
      :
      : "r"(operand), "r"(stride)
      : "memory");
  for (int64_t t = 0; t < times; ++t) {
    asm volatile(
        "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
        "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3"
        :
        :
        : "memory");
  }
  asm volatile("tilerelease" : : : "memory");
  return times * 4 * (2 * 16 * 16 * 32);
}

}  // namespace rooftile
