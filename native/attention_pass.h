// Binds a pass over an engine into the table that attention_core.cpp calls.
#pragma once

#include "attention_forward.h"
#include "attention_kernels.h"

namespace rooftile {
namespace ROOFTILE_ISA {

template <class Pass>
int64_t scratch_of(const AttentionProblem& p) {
  Arena arena;
  const Pass pass(p, &arena);
  (void)pass;
  return arena.used;
}

template <class Pass>
void run_tasks(const AttentionProblem& p, int64_t first, int64_t last, char* scratch) {
  Arena arena;
  arena.base = scratch;
  Pass pass(p, &arena);
  for (int64_t task = first; task < last; ++task) pass.run(task);
}

template <class Engine>
constexpr AttentionPass forward_pass() {
  return {forward_tasks, scratch_of<ForwardPass<Engine>>, run_tasks<ForwardPass<Engine>>, kLanes, Engine::kKeyTile};
}

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
