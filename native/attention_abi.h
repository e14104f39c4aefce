// The C ABI of exact tiled attention: plain structs, no link to torch. Python mirrors them field by field (_attention/native.py).
#pragma once

#include <cstdint>

namespace rooftile {

enum AttentionDtype : int32_t { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

// Code paths. Each is forced by its number in tests; -1 takes the best that the processor has.
enum AttentionPath : int32_t {
  kPathAuto = -1,
  kPathPortable = 0,      // plain C++, what the compiler makes of it
  kPathAvx2 = 1,          // 8 lanes, FMA, F16C
  kPathAvx512 = 2,        // 16 lanes; 16-bit operands are widened to fp32
  kPathAvx512Bf16 = 3,    // vdpbf16ps for bf16; the rest as kPathAvx512
  kPathAmx = 4,           // TDPBF16PS
  kPathAmxSoftware = 5,   // the AMX path with its tile instructions computed in C++: for tests on any processor
};

// (B, H, L, D), strides in elements, any of them (0 and negative too); data null: absent.
struct TensorView {
  void* data;
  int64_t stride[4];
};

struct AttentionProblem {
  int64_t batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim;
  int32_t dtype;         // of q, k, v
  int32_t out_dtype;     // dtype, or kFp32: a partial state
  int32_t bias_dtype;
  int32_t path;          // AttentionPath
  int32_t threads;
  uint32_t drop_below;   // dropout: a pair is dropped where its 32 random bits are below this; 0: no dropout
  uint64_t seed;         // of the dropout generator
  float scale;           // of Q K^T
  float softcap;         // 0: none
  float keep_scale;      // 1 / (1 - dropout_p)
  int32_t page_size;     // keys of a page; 0: k and v are (B, H, L, D)
  TensorView q, k, v;    // paged: k and v are (pages, H, page_size, D)
  TensorView out;
  float* lse;            // (B, Hq, Lq) contiguous, natural logarithm
  const int32_t* lo;     // row i sees keys [lo[i], hi[i]); null: [0, kv_len). Already inside [0, kv_len]; an empty row has lo >= hi
  const int32_t* hi;
  int64_t interval_stride;  // from one sequence of the batch to the next; 0: shared
  TensorView dense;      // bytes, 0 hides the pair; null: none
  TensorView bias;       // added after the softcap; -inf hides the pair
  const float* sinks;    // (Hq), null: none
  const int32_t* pages;  // (B, pages of a sequence): where page p of a sequence is stored
  int64_t pages_stride;
};

// What the backward pass reads besides the problem (whose out and lse are those of the forward pass), and what it writes.
struct AttentionGradients {
  TensorView dout;       // (B, Hq, Lq, Dv), dtype
  const float* dlse;     // (B, Hq, Lq) contiguous; null: no gradient from the LSE
  TensorView dq, dk, dv; // dtype; data null: not wanted. Written whole, never read
  TensorView dbias;      // fp32, *added to* (the caller zeroes it), stride 0 where the bias is broadcast; null: not wanted
};

// How a call is carried out, for the reports.
struct AttentionPlan {
  int32_t path;
  int32_t split_keys;    // decode: keys of a split; 0: the tiled pass
  int64_t q_tile, kv_tile;
  int64_t tasks;
  int64_t scores;        // query-key pairs that the tiles visit, over all heads
  int64_t scratch_bytes; // of one thread
};

}  // namespace rooftile

// rooftile_attention_abi() -> int32: raised whenever anything above changes.
// rooftile_attention_best_path() -> int32: what kPathAuto means here.
// rooftile_attention_forward(const AttentionProblem*) -> int32: 0, or negative for a problem that it can't take.
// rooftile_attention_backward(const AttentionProblem*, const AttentionGradients*) -> int32.
// rooftile_attention_plan(const AttentionProblem*, AttentionPlan*) -> int32.
