// The passes of exact tiled attention as each instruction set offers them to attention_core.cpp.
#pragma once

#include "attention_abi.h"

namespace rooftile {

// One pass: how many bytes of scratch a thread needs, and one of its independent tasks. `run` takes 64-byte aligned scratch.
struct AttentionPass {
  int64_t (*tasks)(const AttentionProblem&);
  int64_t (*scratch)(const AttentionProblem&);
  void (*run)(const AttentionProblem&, int64_t first, int64_t last, char* scratch);
  int64_t q_tile, kv_tile;
};

#define ROOFTILE_DECLARE_PASSES(isa)           \
  namespace isa {                              \
  extern const AttentionPass forward_fp32;     \
  extern const AttentionPass forward_bf16;     \
  }
ROOFTILE_DECLARE_PASSES(portable)
ROOFTILE_DECLARE_PASSES(avx2)
ROOFTILE_DECLARE_PASSES(avx512)
ROOFTILE_DECLARE_PASSES(avx512bf16)

}  // namespace rooftile
