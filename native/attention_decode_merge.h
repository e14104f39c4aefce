// What becomes of a kv head's partial states: one row of O and one LSE for each of its query rows.
#pragma once

#include "attention_columns.h"
#include "attention_decode_layout.h"
#include "attention_softmax.h"

namespace rooftile {
namespace ROOFTILE_ISA {

// Whether scores, and their maxima, are stored as the definition has them; else they are still without their scale.
inline bool scaled(const AttentionProblem& p) { return p.softcap > 0.0f || p.bias.data != nullptr || p.scale <= 0.0f; }

// The partial states in key order, and then the sinks. The row sum is merged as one more column of O: with V = 1 it is the same
// number, bit by bit.
template <class Format>
class DecodeMerge {
 public:
  DecodeMerge(const AttentionProblem& problem, const DecodeLayout& parts, int64_t wide, Arena* arena)
      : p(problem), layout(parts), wide_v(wide), sum(arena->take<float>(layout.columns)), o(arena->take<float>(wide_v)) {}

  // Rows of a kv head, as `lanes` names them.
  void run(int64_t b, int64_t kv_head, const LaneGroup& lanes) const {
    const float c = (scaled(p) ? 1.0f : p.scale) * kLog2E;
    for (int64_t row = 0; row < layout.rows; ++row) {
      float m = -kInfinity;
      bool seen = false;
      for (int64_t chunk = layout.first_chunk(b); chunk < layout.last_chunk(b); ++chunk) {
        const DecodeLayout::Part part = layout.part(b, kv_head, chunk);
        if (part.seen[row] == 0) continue;
        seen = true;
        m = part.m[row] > m ? part.m[row] : m;
      }
      const float shift = m == -kInfinity ? 0.0f : m;
      std::memset(static_cast<void*>(sum), 0, static_cast<size_t>(layout.columns) * 4);
      for (int64_t chunk = layout.first_chunk(b); chunk < layout.last_chunk(b); ++chunk) {
        const DecodeLayout::Part part = layout.part(b, kv_head, chunk);
        if (part.seen[row] == 0) continue;
        const Vf weight = exp2_lanes(set1((part.m[row] - shift) * c));
        const float* from = part.o + row * layout.columns;
        for (int64_t i = 0; i < layout.columns; i += W) store(sum + i, fma(weight, load(from + i), load(sum + i)));
      }
      close_row(lanes, row, seen, scaled(p) ? m : m * p.scale);
    }
  }

 private:
  const AttentionProblem& p;
  const DecodeLayout& layout;
  const int64_t wide_v;
  float *sum, *o;

  void close_row(const LaneGroup& lanes, int64_t row, bool seen, float m) const {
    const float l = sum[wide_v];
    float lse = !seen ? -kInfinity : l == 0.0f ? l / l : m + std::log(l), shrink = 1.0f;  // all visible scores -inf: 0 / 0
    if (p.sinks != nullptr) add_sink(p.sinks[lanes.head[row]], &lse, &shrink);
    if (p.lse != nullptr) p.lse[(lanes.b * p.q_heads + lanes.head[row]) * p.q_len + lanes.query[row]] = lse;
    const int64_t size = bytes_of(p.out_dtype);
    for (int64_t i = 0; i < wide_v; i += W) {
      store(sum + i, seen ? load(sum + i) / set1(l) * set1(shrink) : Vf{});
    }
    for (int64_t d = 0; d < p.value_dim; ++d) o[d] = sum[Format::column(d)];
    write_row(static_cast<char*>(p.out.data) +
                  (lanes.b * p.out.stride[0] + lanes.head[row] * p.out.stride[1] + lanes.query[row] * p.out.stride[2]) * size,
              p.out.stride[3] * size, p.out_dtype, p.value_dim, o);
  }
};

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
