// The decode pass for operands of any dtype, as attention_core.cpp calls it.
#include "attention_decode.h"

#include "attention_kernels.h"

namespace rooftile {
namespace ROOFTILE_ISA {
namespace {

template <class Format>
struct Decode {
  using Pass = DecodePass<Format>;

  static DecodeLayout layout(const AttentionProblem& p, char* shared) { return DecodeLayout(p, Pass::wide(p.value_dim), shared); }
  static int64_t shared_bytes(const AttentionProblem& p) { return layout(p, nullptr).extent().bytes; }
  static int64_t tasks(const AttentionProblem& p) { return layout(p, nullptr).extent().tasks; }
  static int64_t scores(const AttentionProblem& p) { return layout(p, nullptr).extent().scores; }
  static void prepare(const AttentionProblem& p, char* shared) { layout(p, shared).fill(); }
  static int64_t scratch(const AttentionProblem& p) {
    Arena arena;
    const Pass pass(p, nullptr, &arena);
    return arena.used;
  }
  static void run(const AttentionProblem& p, int64_t first, int64_t last, char* scratch, char* shared) {
    Arena arena{scratch, 0};
    Pass pass(p, shared, &arena);
    for (int64_t task = first; task < last; ++task) pass.run(task);
  }
  static constexpr AttentionDecodePass pass() { return {shared_bytes, prepare, tasks, scratch, run, scores, kChunk}; }
};

}  // namespace

#if defined(__AVX512BF16__)
const AttentionDecodePass decode_bf16 = Decode<Bf16Pairs>::pass();
#else
const AttentionDecodePass decode_passes[] = {Decode<Fp32Columns>::pass(), Decode<Bf16Columns>::pass(), Decode<Fp16Columns>::pass()};
#endif

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
