// The C ABI of exact tiled attention: checks the problem, chooses the code path, and shares independent tasks among threads.
//
// Which tasks there are depends on shapes alone, and no two of them write the same memory: the bits of a result do not depend on
// how many threads there are or which of them runs what.
#include "attention_abi.h"

#include <cstdlib>

#include "amx_permission.h"
#include "attention_executor.h"
#include "attention_kernels.h"
#include "platform.h"

namespace rooftile {
namespace {

bool has_bf16_products() {
#if defined(ROOFTILE_X86)
  __builtin_cpu_init();
  return machine_isa == kAvx512 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// The AMX path rounds to bf16 with AVX-512's instructions.
bool has_tiles() {
#if defined(ROOFTILE_AMX)
  return has_bf16_products() && has_amx();
#else
  return false;
#endif
}

int32_t best_path() {
  if (has_tiles()) return kPathAmx;
  if (has_bf16_products()) return kPathAvx512Bf16;
  return machine_isa == kAvx512 ? kPathAvx512 : machine_isa == kAvx2 ? kPathAvx2 : kPathPortable;
}

int32_t machine_path() {
  static const int32_t path = best_path();
  return path;
}

int32_t chosen_path(const AttentionProblem& p) {
  const int32_t path = p.path == kPathAuto ? machine_path() : p.path;
  // Paths that differ only in bf16 products are one path for other dtypes.
  return path == kPathAvx512Bf16 && p.dtype != kBf16 ? kPathAvx512 : path;
}

// The pass of the problem's dtype, where each has arithmetic of its own.
template <typename Pass>
const Pass* by_dtype(const AttentionProblem& p, const Pass& fp32, const Pass& bf16, const Pass& fp16) {
  return p.dtype == kFp32 ? &fp32 : p.dtype == kBf16 ? &bf16 : &fp16;
}

const AttentionPass* forward_of(const AttentionProblem& p) {
  switch (chosen_path(p)) {
    case kPathPortable: return &portable::forward_fp32;
#if defined(ROOFTILE_X86)
    case kPathAvx2: return machine_isa >= kAvx2 ? &avx2::forward_fp32 : nullptr;
    case kPathAvx512: return machine_isa >= kAvx512 ? &avx512::forward_fp32 : nullptr;
    case kPathAvx512Bf16: return has_bf16_products() ? &avx512bf16::forward_bf16 : nullptr;
#endif
#if defined(ROOFTILE_AMX)
    case kPathAmx: return has_tiles() ? by_dtype(p, amx::forward_fp32, amx::forward_bf16, amx::forward_fp16) : nullptr;
#endif
    case kPathAmxSoftware: return by_dtype(p, amx_software::forward_fp32, amx_software::forward_bf16, amx_software::forward_fp16);
    default: return nullptr;
  }
}

const AttentionGradientPass* backward_of(const AttentionProblem& p) {
  switch (chosen_path(p)) {
    case kPathPortable: return &portable::backward_fp32;
#if defined(ROOFTILE_X86)
    case kPathAvx2: return machine_isa >= kAvx2 ? &avx2::backward_fp32 : nullptr;
    case kPathAvx512: return machine_isa >= kAvx512 ? &avx512::backward_fp32 : nullptr;
    case kPathAvx512Bf16: return has_bf16_products() ? &avx512bf16::backward_bf16 : nullptr;
#endif
#if defined(ROOFTILE_AMX)
    case kPathAmx: return has_tiles() ? by_dtype(p, amx::backward_fp32, amx::backward_bf16, amx::backward_fp16) : nullptr;
#endif
    case kPathAmxSoftware: return by_dtype(p, amx_software::backward_fp32, amx_software::backward_bf16, amx_software::backward_fp16);
    default: return nullptr;
  }
}

// Up to these rows the decode pass is faster than the tiled one, which has room for 16 in a vector; and further where a pass over
// the keys of each head would give few threads something to do.
constexpr int64_t kMostDecodeRows = 8, kMostDecodeRowsOfFewHeads = 16, kFewHeads = 3;

// Neither the lengths nor the batch decide: a row's bits do not change with the capacity of a cache or with its neighbours.
const AttentionDecodePass* decode_of(const AttentionProblem& p) {
  const int64_t rows = p.q_heads / p.kv_heads * p.q_len;
  const int64_t most = p.kv_heads <= kFewHeads ? kMostDecodeRowsOfFewHeads : kMostDecodeRows;
  if (rows == 0 || rows > most || p.drop_below != 0) return nullptr;  // dropout: the tiled pass has it
  switch (chosen_path(p)) {
    case kPathPortable:
    case kPathAmxSoftware: return &portable::decode_passes[p.dtype];
#if defined(ROOFTILE_X86)
    case kPathAvx2: return machine_isa >= kAvx2 ? &avx2::decode_passes[p.dtype] : nullptr;
    case kPathAvx512: return machine_isa >= kAvx512 ? &avx512::decode_passes[p.dtype] : nullptr;
    case kPathAvx512Bf16: return has_bf16_products() ? &avx512bf16::decode_bf16 : nullptr;
    case kPathAmx: return has_tiles() ? &avx512::decode_passes[p.dtype] : nullptr;  // vdpbf16ps is slow where AMX is
#endif
    default: return nullptr;
  }
}

constexpr int64_t kMostHeadDim = 512;

bool usable(const AttentionProblem& p) {
  return p.batch >= 0 && p.q_heads >= 0 && p.kv_heads > 0 && p.q_len >= 0 && p.kv_len >= 0 && p.kv_len < (int64_t{1} << 31) &&
         p.q_heads % p.kv_heads == 0 && p.head_dim >= 0 && p.head_dim <= kMostHeadDim && p.value_dim >= 0 &&
         p.value_dim <= kMostHeadDim && p.dtype >= kFp32 && p.dtype <= kFp16 && (p.out_dtype == p.dtype || p.out_dtype == kFp32) &&
         (p.page_size == 0 || p.pages != nullptr);
}

int32_t execute(const AttentionPass& pass, const AttentionProblem& p) {
  return share_tasks(pass.tasks(p), pass.scratch(p), forked() ? 1 : p.threads, [&](int64_t first, int64_t last, char* scratch) {
    pass.run(p, first, last, scratch);
  });
}

constexpr int64_t kSerialProducts = 1 << 20;  // some 20 us: waking a thread may take longer

int32_t execute(const AttentionDecodePass& pass, const AttentionProblem& p) {
  static thread_local Scratch kept;
  char* shared = kept.take(pass.shared_bytes(p));
  if (shared == nullptr) return -3;
  pass.prepare(p, shared);
  const bool serial = forked() || pass.scores(p) * (p.head_dim + p.value_dim) < kSerialProducts;
  const int32_t status = share_tasks(pass.tasks(p), pass.scratch(p), serial ? 1 : p.threads,
                                     [&](int64_t first, int64_t last, char* mine) { pass.run(p, first, last, mine, shared); });
  kept.give_back();
  return status;
}

int32_t execute(const AttentionGradientPass& pass, const AttentionProblem& p, const AttentionGradients& g) {
  const int64_t scratch = pass.scratch(p, g), shared_bytes = pass.shared_bytes(p, g);
  const int32_t threads = forked() ? 1 : p.threads;
  char* shared = nullptr;
  if (shared_bytes > 0) {
    shared = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>((shared_bytes + 63) / 64 * 64)));
    if (shared == nullptr) return -3;
  }
  int32_t status = share_tasks(pass.tasks(p, g), scratch, threads,
                               [&](int64_t first, int64_t last, char* mine) { pass.run(p, g, first, last, mine, shared); });
  if (status == 0) {
    status = share_tasks(pass.reductions(p, g), scratch, threads,
                         [&](int64_t first, int64_t last, char* mine) { pass.reduce(p, g, first, last, mine, shared); });
  }
  std::free(shared);
  return status;
}

}  // namespace
}  // namespace rooftile

using namespace rooftile;

ROOFTILE_API int32_t rooftile_attention_abi() { return 1; }

ROOFTILE_API int32_t rooftile_attention_best_path() { return machine_path(); }

ROOFTILE_API int32_t rooftile_attention_forward(const AttentionProblem* problem) {
  if (!usable(*problem)) return -1;
  const AttentionPass* pass = forward_of(*problem);
  if (pass == nullptr) return -2;
  const AttentionDecodePass* decode = decode_of(*problem);
  return decode != nullptr ? execute(*decode, *problem) : execute(*pass, *problem);
}

ROOFTILE_API int32_t rooftile_attention_backward(const AttentionProblem* problem, const AttentionGradients* gradients) {
  if (!usable(*problem) || problem->page_size != 0) return -1;
  const AttentionGradientPass* pass = backward_of(*problem);
  return pass == nullptr ? -2 : execute(*pass, *problem, *gradients);
}

ROOFTILE_API int32_t rooftile_attention_plan(const AttentionProblem* problem, AttentionPlan* plan) {
  if (!usable(*problem)) return -1;
  const AttentionPass* pass = forward_of(*problem);
  if (pass == nullptr) return -2;
  if (const AttentionDecodePass* decode = decode_of(*problem)) {
    const int64_t rows = problem->q_heads / problem->kv_heads * problem->q_len;
    *plan = {chosen_path(*problem), static_cast<int32_t>(decode->split_keys), rows, decode->split_keys, decode->tasks(*problem),
             decode->scores(*problem), decode->scratch(*problem)};
    return 0;
  }
  *plan = {chosen_path(*problem), 0, pass->q_tile, pass->kv_tile, pass->tasks(*problem), pass->scores(*problem), pass->scratch(*problem)};
  return 0;
}
