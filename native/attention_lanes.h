// A lane group: up to 64 query rows of one kv head, what each may see, and the tiles [key][lane] of all that acts on their scores.
#pragma once

#include "attention_tiles.h"

namespace rooftile {
namespace ROOFTILE_ISA {

// The query rows that share a pass over a kv head's keys. Where a head has fewer rows than lanes, the heads of a kv group are packed.
struct RowDomain {
  int64_t b, kv_head, first_head;
  int64_t rows;  // packed: group * Lq, else Lq
};

inline bool packs_heads(const AttentionProblem& p) { return p.q_len < kLanes && p.q_heads > p.kv_heads; }

inline int64_t domains_of(const AttentionProblem& p) { return p.batch * (packs_heads(p) ? p.kv_heads : p.q_heads); }

inline RowDomain domain_of(const AttentionProblem& p, int64_t index) {
  const int64_t group = p.q_heads / p.kv_heads;
  if (packs_heads(p)) return {index / p.kv_heads, index % p.kv_heads, index % p.kv_heads * group, group * p.q_len};
  const int64_t head = index % p.q_heads;
  return {index / p.q_heads, head / group, head, p.q_len};
}

struct LaneGroup {
  int rows;  // lanes in use
  int vecs;
  int64_t b;
  int64_t head[kLanes], query[kLanes];
  int32_t lo[kLanes], hi[kLanes];  // the lane sees keys [lo, hi); unused lanes see none
  int64_t first, last;             // every visible key lies in [first, last)
  int64_t inner_first, inner_last;  // all lanes in use see all of [inner_first, inner_last)

  bool sees(int64_t from, int64_t to) const { return first < to && from < last; }
  bool sees_all(int64_t from, int64_t to) const { return inner_first <= from && to <= inner_last; }
};

inline void fill_lanes(const AttentionProblem& p, const RowDomain& domain, int64_t first_row, LaneGroup* g) {
  const int64_t left = domain.rows - first_row;
  g->rows = static_cast<int>(left < kLanes ? left : kLanes);
  g->vecs = (g->rows + W - 1) / W;
  g->b = domain.b;
  g->first = p.kv_len;
  g->last = 0;
  g->inner_first = 0;
  g->inner_last = p.kv_len;
  int64_t head = domain.first_head + first_row / p.q_len, i = first_row % p.q_len;
  for (int lane = 0; lane < kLanes; ++lane, ++i) {
    g->lo[lane] = g->hi[lane] = 0;
    g->head[lane] = g->query[lane] = 0;
    if (lane >= g->rows) continue;
    if (i == p.q_len) {
      i = 0;
      ++head;
    }
    g->head[lane] = head;
    g->query[lane] = i;
    const int64_t lo = p.lo == nullptr ? 0 : p.lo[domain.b * p.interval_stride + i];
    const int64_t hi = p.hi == nullptr ? p.kv_len : p.hi[domain.b * p.interval_stride + i];
    if (lo < hi) {
      g->lo[lane] = static_cast<int32_t>(lo);
      g->hi[lane] = static_cast<int32_t>(hi);
      if (lo < g->first) g->first = lo;
      if (hi > g->last) g->last = hi;
    }
    if (lo > g->inner_first) g->inner_first = lo;
    if (hi < g->inner_last) g->inner_last = hi;
  }
}

// visible[key][lane]: all ones where the lane sees the key, else 0, from the intervals.
inline void visible_from_intervals(const LaneGroup& g, int64_t j0, int64_t keys, uint32_t* visible) {
  for (int n = 0; n < g.vecs; ++n) {
    Vi lo, hi;
    std::memcpy(&lo, g.lo + n * W, sizeof lo);
    std::memcpy(&hi, g.hi + n * W, sizeof hi);
    for (int64_t k = 0; k < keys; ++k) {
      const Vi key = static_cast<int32_t>(j0 + k) - Vi{};
      store(visible + k * kLanes + n * W, (Vu)(key >= lo) & (Vu)(key < hi));
    }
  }
}

inline int64_t offset_of(const TensorView& view, const LaneGroup& g, int lane, int64_t key) {
  return g.b * view.stride[0] + g.head[lane] * view.stride[1] + g.query[lane] * view.stride[2] + key * view.stride[3];
}

inline void hide_by_dense(const TensorView& dense, const LaneGroup& g, int64_t j0, int64_t keys, uint32_t* visible) {
  const uint8_t* bytes = static_cast<const uint8_t*>(dense.data);
  for (int lane = 0; lane < g.rows; ++lane) {
    const uint8_t* row = bytes + offset_of(dense, g, lane, j0);
    for (int64_t k = 0; k < keys; ++k) {
      if (row[k * dense.stride[3]] == 0) visible[k * kLanes + lane] = 0;
    }
  }
}

// bias[key][lane] in fp32; a bias of -inf hides its pair. Hidden pairs get 0, so that what lies there is never computed with.
inline void read_bias(const AttentionProblem& p, const LaneGroup& g, int64_t j0, int64_t keys, float* bias, uint32_t* visible) {
  const int64_t size = bytes_of(p.bias_dtype);
  const char* data = static_cast<const char*>(p.bias.data);
  for (int64_t k = 0; k < keys; ++k) {
    for (int lane = g.rows; lane < g.vecs * W; ++lane) bias[k * kLanes + lane] = 0.0f;
  }
  for (int lane = 0; lane < g.rows; ++lane) {
    const char* row = data + offset_of(p.bias, g, lane, j0) * size;
    for (int64_t k = 0; k < keys; ++k) {
      float value = 0.0f;
      if (visible[k * kLanes + lane] != 0) value = read_element(row + k * p.bias.stride[3] * size, p.bias_dtype);
      if (value == -kInfinity) visible[k * kLanes + lane] = 0;
      bias[k * kLanes + lane] = value == -kInfinity ? 0.0f : value;
    }
  }
}

// Philox4x32-10 (Salmon et al., SC'11): four 32-bit words for one counter, lane by lane.
ROOFTILE_INLINE void philox(Vu counter[4], uint32_t key0, uint32_t key1) {
  typedef uint64_t Wide __attribute__((vector_size(W * 8)));
  for (int round = 0; round < 10; ++round) {
    const Wide a = __builtin_convertvector(counter[0], Wide) * 0xD2511F53u, b = __builtin_convertvector(counter[2], Wide) * 0xCD9E8D57u;
    const Vu high_a = __builtin_convertvector(a >> 32, Vu), low_a = __builtin_convertvector(a, Vu);
    const Vu high_b = __builtin_convertvector(b >> 32, Vu), low_b = __builtin_convertvector(b, Vu);
    counter[0] = high_b ^ counter[1] ^ set1(key0);
    counter[1] = low_b;
    counter[2] = high_a ^ counter[3] ^ set1(key1);
    counter[3] = low_a;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// keep[key][lane]: all ones where dropout keeps the pair. The bits of a pair depend on (seed, sequence, head, query, key) alone.
inline void read_keep(const AttentionProblem& p, const LaneGroup& g, int64_t j0, int64_t keys, uint32_t* keep) {
  const uint32_t key0 = static_cast<uint32_t>(p.seed), key1 = static_cast<uint32_t>(p.seed >> 32);
  for (int n = 0; n < g.vecs; ++n) {
    Vu row, head;
    for (int i = 0; i < W; ++i) {
      row[i] = static_cast<uint32_t>(g.query[n * W + i]);
      head[i] = static_cast<uint32_t>(g.b * p.q_heads + g.head[n * W + i]);
    }
    for (int64_t quad = j0 / 4; quad * 4 < j0 + keys; ++quad) {
      Vu words[4] = {set1(static_cast<uint32_t>(quad)), row, head, Vu{}};
      philox(words, key0, key1);
      for (int64_t w = 0; w < 4; ++w) {
        const int64_t k = quad * 4 + w - j0;
        if (k >= 0 && k < keys) store(keep + k * kLanes + n * W, (Vu)(words[w] >= set1(p.drop_below)));
      }
    }
  }
}

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
