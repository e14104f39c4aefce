// Binds a pass over an engine into the table that attention_core.cpp calls.
#pragma once

#include "attention_backward.h"
#include "attention_forward.h"
#include "attention_kernels.h"

namespace rooftile {
namespace ROOFTILE_ISA {

template <class Engine>
int64_t scratch_of(const AttentionProblem& p) {
  Arena arena;
  const ForwardPass<Engine> pass(p, &arena);
  (void)pass;
  return arena.used;
}

template <class Engine>
void run_tasks(const AttentionProblem& p, int64_t first, int64_t last, char* scratch) {
  Arena arena;
  arena.base = scratch;
  ForwardPass<Engine> pass(p, &arena);
  [[maybe_unused]] const typename Engine::Region region;
  for (int64_t task = first; task < last; ++task) pass.run(task);
}

template <class Engine>
constexpr AttentionPass forward_pass() {
  return {forward_tasks<Engine>, scratch_of<Engine>, run_tasks<Engine>, visited_scores<Engine>, kLanes, Engine::kKeyTile};
}

template <class Engine>
struct Backward {
  using Pass = BackwardPass<Engine>;

  static int64_t tasks(const AttentionProblem& p, const AttentionGradients& g) { return BackwardTasks(p, g).count(); }
  static int64_t scratch(const AttentionProblem& p, const AttentionGradients& g) {
    Arena arena;
    const Pass pass(p, g, &arena, nullptr);
    return arena.used;
  }
  static int64_t shared_bytes(const AttentionProblem& p, const AttentionGradients& g) {
    Arena arena;
    const Pass pass(p, g, &arena, nullptr);
    const int64_t parts = BackwardTasks(p, g).parts;
    return parts == 1 ? 0 : parts * pass.dq_part() * 4;
  }
  static int64_t reductions(const AttentionProblem& p, const AttentionGradients& g) {
    Arena arena;
    return Pass(p, g, &arena, nullptr).reductions();
  }
  static void run(const AttentionProblem& p, const AttentionGradients& g, int64_t first, int64_t last, char* scratch, char* shared) {
    Arena arena{scratch, 0};
    Pass pass(p, g, &arena, reinterpret_cast<float*>(shared));
    [[maybe_unused]] const typename Engine::Region region;
    for (int64_t task = first; task < last; ++task) pass.run(task);
  }
  static void reduce(const AttentionProblem& p, const AttentionGradients& g, int64_t first, int64_t last, char* scratch, char* shared) {
    Arena arena{scratch, 0};
    Pass pass(p, g, &arena, reinterpret_cast<float*>(shared));
    for (int64_t index = first; index < last; ++index) pass.reduce(index);
  }
};

template <class Engine>
constexpr AttentionGradientPass backward_pass() {
  using Pass = Backward<Engine>;
  return {Pass::tasks, Pass::scratch, Pass::shared_bytes, Pass::run, Pass::reductions, Pass::reduce};
}

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
