// The passes of exact tiled attention as each instruction set offers them to attention_core.cpp.
#pragma once

#include "attention_abi.h"

namespace rooftile {

// One pass: how many bytes of scratch a thread needs, and one of its independent tasks. `run` takes 64-byte aligned scratch.
struct AttentionPass {
  int64_t (*tasks)(const AttentionProblem&);
  int64_t (*scratch)(const AttentionProblem&);
  void (*run)(const AttentionProblem&, int64_t first, int64_t last, char* scratch);
  int64_t (*scores)(const AttentionProblem&);  // query-key pairs that the pass visits
  int64_t q_tile, kv_tile;
};

// The backward pass has a second round where keys are split: partial dQ in `shared` are added in key order.
struct AttentionGradientPass {
  int64_t (*tasks)(const AttentionProblem&, const AttentionGradients&);
  int64_t (*scratch)(const AttentionProblem&, const AttentionGradients&);
  int64_t (*shared_bytes)(const AttentionProblem&, const AttentionGradients&);
  void (*run)(const AttentionProblem&, const AttentionGradients&, int64_t first, int64_t last, char* scratch, char* shared);
  int64_t (*reductions)(const AttentionProblem&, const AttentionGradients&);
  void (*reduce)(const AttentionProblem&, const AttentionGradients&, int64_t first, int64_t last, char* scratch, char* shared);
};

// The forward pass of few query rows. `prepare` writes what its tasks share, before any of them.
struct AttentionDecodePass {
  int64_t (*shared_bytes)(const AttentionProblem&);
  void (*prepare)(const AttentionProblem&, char* shared);
  int64_t (*tasks)(const AttentionProblem&);
  int64_t (*scratch)(const AttentionProblem&);
  void (*run)(const AttentionProblem&, int64_t first, int64_t last, char* scratch, char* shared);
  int64_t (*scores)(const AttentionProblem&);
  int64_t split_keys;
};

#define ROOFTILE_DECLARE_PASSES(isa)           \
  namespace isa {                              \
  extern const AttentionPass forward_fp32;     \
  extern const AttentionPass forward_bf16;     \
  extern const AttentionPass forward_fp16;     \
  extern const AttentionGradientPass backward_fp32; \
  extern const AttentionGradientPass backward_bf16; \
  extern const AttentionGradientPass backward_fp16; \
  extern const AttentionDecodePass decode_passes[3]; /* by AttentionDtype */ \
  extern const AttentionDecodePass decode_bf16; \
  }
ROOFTILE_DECLARE_PASSES(portable)
ROOFTILE_DECLARE_PASSES(avx2)
ROOFTILE_DECLARE_PASSES(avx512)
ROOFTILE_DECLARE_PASSES(avx512bf16)
ROOFTILE_DECLARE_PASSES(amx)
ROOFTILE_DECLARE_PASSES(amx_software)

}  // namespace rooftile
