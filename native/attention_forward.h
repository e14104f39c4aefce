// The forward pass over tiles: Algorithm 1 of FlashAttention (Dao et al. 2022) with the queries along the lanes.
#pragma once

#include "attention_engines.h"

namespace rooftile {
namespace ROOFTILE_ISA {

// Rows of a task depend on shapes alone: never on the number of threads.
template <class Engine>
int64_t task_rows(const AttentionProblem& p) {
  const int64_t domains = domains_of(p), rows = packs_heads(p) ? p.q_heads / p.kv_heads * p.q_len : p.q_len;
  int64_t large = Engine::kGroupsPerTask * kLanes;
  while (large > kLanes && domains * ((rows + large - 1) / large) < 16) large /= 2;
  return large;
}

template <class Engine>
int64_t tasks_per_domain(const AttentionProblem& p) {
  const int64_t rows = packs_heads(p) ? p.q_heads / p.kv_heads * p.q_len : p.q_len;
  const int64_t of_task = task_rows<Engine>(p);
  return (rows + of_task - 1) / of_task;
}

template <class Engine>
int64_t forward_tasks(const AttentionProblem& p) {
  return domains_of(p) * tasks_per_domain<Engine>(p);
}

// Where a lane group begins in a key tile that was prepared from key `from` on.
template <class Engine>
int64_t first_key(const LaneGroup& lanes, int64_t from) {
  return lanes.first > from ? from + (lanes.first - from) / Engine::kKeyAlign * Engine::kKeyAlign : from;
}

// Query-key pairs that the pass computes scores for: what a lane group visits, times its rows.
template <class Engine>
int64_t visited_scores(const AttentionProblem& p) {
  int64_t scores = 0;
  const int64_t of_task = task_rows<Engine>(p);
  LaneGroup lanes;
  for (int64_t index = 0; index < domains_of(p); ++index) {
    const RowDomain domain = domain_of(p, index);
    int64_t first = 0;  // of the task
    for (int64_t row = 0; row < domain.rows; row += kLanes) {
      if (row % of_task == 0) first = p.kv_len;
      fill_lanes(p, domain, row, &lanes);
      if (lanes.first >= lanes.last) continue;
      first = lanes.first < first ? lanes.first : first;
      const int64_t tile = lanes.first / Engine::kKeyTile * Engine::kKeyTile;
      scores += (lanes.last - first_key<Engine>(lanes, tile > first ? tile : first)) * lanes.rows;
    }
  }
  return scores;
}

template <class Engine>
class ForwardPass {
 public:
  using Scalar = typename Engine::Scalar;

  ForwardPass(const AttentionProblem& problem, Arena* arena) : p(problem) {
    const int64_t key_tile = Engine::kKeyTile, wide_q = Engine::padded(p.head_dim), wide_v = round_up(p.value_dim, kColumnStep);
    rows = arena->take<Scalar>(kLanes * wide_q);
    const int64_t smallest = 16 * wide_v;  // the scores' memory also takes rows of O on their way out
    s_floats = key_tile * kLanes > smallest ? key_tile * kLanes : smallest;
    s = arena->take<float>(s_floats);
    visible = arena->take<uint32_t>(key_tile * kLanes);
    extra = arena->take<float>(key_tile * kLanes);
    probabilities = arena->take<Scalar>(Engine::probability_scratch());
    k_scratch = arena->take<Scalar>(key_tile * wide_q);
    v_scratch = arena->take<Scalar>(Engine::value_scratch(p.value_dim));
    factor = arena->take<float>(kLanes);
    for (int64_t g = 0; g < Engine::kGroupsPerTask; ++g) {
      state[g].lanes = arena->take<LaneGroup>(1);
      state[g].q = arena->take<Scalar>(wide_q * kLanes);
      state[g].o = arena->take<float>(wide_v * kLanes);
      state[g].m = arena->take<float>(kLanes);
      state[g].l = arena->take<float>(kLanes);
      state[g].exact = Engine::kRounds ? arena->take<float>(kLanes) : state[g].l;
      state[g].seen = arena->take<uint32_t>(kLanes);
    }
  }

  void run(int64_t task) {
    const int64_t per_domain = tasks_per_domain<Engine>(p), of_task = task_rows<Engine>(p);
    const RowDomain domain = domain_of(p, task / per_domain);
    const int64_t begin = task % per_domain * of_task;
    int groups = 0;
    int64_t first = p.kv_len, last = 0;
    for (int64_t row = begin; row < begin + of_task && row < domain.rows; row += kLanes, ++groups) {
      open_group(domain, row, &state[groups]);
      const LaneGroup& lanes = *state[groups].lanes;
      if (lanes.first < first) first = lanes.first;
      if (lanes.last > last) last = lanes.last;
    }
    const RowSource k = key_source(p, p.k, domain.b, domain.kv_head), v = key_source(p, p.v, domain.b, domain.kv_head);
    for (int64_t tile = first / Engine::kKeyTile * Engine::kKeyTile; tile < last; tile += Engine::kKeyTile) {
      // Memory that no row of this task sees is never read.
      const int64_t from = tile > first ? tile : first;
      const int64_t to = tile + Engine::kKeyTile < last ? tile + Engine::kKeyTile : last;
      visit(k, v, from, to, groups);
    }
    for (int g = 0; g < groups; ++g) close_group(&state[g]);
  }

 private:
  struct Group {
    LaneGroup* lanes;
    Scalar* q;      // Q^T [depth][lane]
    float* o;       // O^T [value_dim][lane], unnormalised
    float *m, *l, *exact;  // exact: the row sum before rounding
    uint32_t* seen;  // all ones where the lane has seen a key
  };

  const AttentionProblem& p;
  Scalar *rows, *probabilities, *k_scratch, *v_scratch;
  float *s, *extra, *factor;
  uint32_t* visible;
  int64_t s_floats;
  Group state[Engine::kGroupsPerTask];
  static constexpr int64_t kUnknown = -1;
  int64_t bad_values = kUnknown;  // rows of the prepared tile's values that are not finite, and which they are
  int64_t bad_value[Engine::kKeyTile];
  int64_t bad_keys = 0;  // the same of its keys, where the engine's products take finite numbers alone
  int64_t bad_key[Engine::kKeyTile];

  void open_group(const RowDomain& domain, int64_t first_row, Group* group) {
    LaneGroup& g = *group->lanes;
    fill_lanes(p, domain, first_row, &g);
    const int64_t wide = Engine::padded(p.head_dim);
    for (int lane = 0; lane < round_up(g.rows, 16); ++lane) {
      if (lane >= g.rows) {
        std::memset(static_cast<void*>(rows + lane * wide), 0, static_cast<size_t>(wide) * sizeof(Scalar));
        continue;
      }
      const RowSource q = source_of(p.q, p.dtype, g.b, g.head[lane]);
      Engine::copy_row(q.row(g.query[lane]), q, p.head_dim, rows + lane * wide);
    }
    Engine::transpose(rows, wide, round_up(g.rows, 16), wide, group->q, kLanes);
    std::memset(group->o, 0, static_cast<size_t>(round_up(p.value_dim, kColumnStep) * kLanes) * 4);
    for (int lane = 0; lane < kLanes; ++lane) {
      group->m[lane] = -kInfinity;
      group->l[lane] = group->exact[lane] = 0.0f;
      group->seen[lane] = 0;
    }
  }

  void visit(const RowSource& k, const RowSource& v, int64_t from, int64_t to, int groups) {
    bool prepared = false;
    bad_values = kUnknown;
    RowOperand<Scalar> keys{}, values{};
    for (int g = 0; g < groups; ++g) {
      const LaneGroup& lanes = *state[g].lanes;
      if (!lanes.sees(from, to)) continue;
      if (!prepared) {
        keys = Engine::row_operand(k, from, to - from, p.head_dim, k_scratch);
        values = Engine::value_operand(v, from, to - from, p.value_dim, v_scratch);
        if (Engine::kFiniteOnly) bad_keys = list_bad_rows(k, from, to, p.head_dim, bad_key);
        prepared = true;
      }
      const int64_t begin = first_key<Engine>(lanes, from);
      const int64_t end = lanes.last < to ? lanes.last : to;
      step(&state[g], k, v, keys, &values, from, to, begin, end);
    }
  }

  // One lane group against keys [begin, end) of the prepared tile [tile, tile_end).
  void step(Group* group, const RowSource& k, const RowSource& v, RowOperand<Scalar> keys, RowOperand<Scalar>* values, int64_t tile,
            int64_t tile_end, int64_t begin, int64_t end) {
    const LaneGroup& g = *group->lanes;
    const int64_t count = end - begin;
    const bool masked = p.dense.data != nullptr || p.bias.data != nullptr || !g.sees_all(begin, end);
    gemm<typename Engine::Op, Into::kStore, false>(count, g.vecs, Engine::depth(p.head_dim), keys.data + (begin - tile) * keys.step,
                                                   keys.step, group->q, kLanes, s, kLanes);
    for (int64_t i = 0; i < bad_keys; ++i) {
      const int64_t key = tile + bad_key[i];
      if (begin <= key && key < end) plain_scores(group, k, key, s + (key - begin) * kLanes);
    }
    if (masked) {
      visible_from_intervals(g, begin, count, visible);
      if (p.dense.data != nullptr) hide_by_dense(p.dense, g, begin, count, visible);
      if (p.bias.data != nullptr) read_bias(p, g, begin, count, extra, visible);
      const bool by_intervals = p.dense.data == nullptr && p.bias.data == nullptr;
      if (!(by_intervals ? note_reached(g, begin, end, group->seen) : note_seen(g, count, group->seen))) return;
    } else {
      for (int lane = 0; lane < kLanes; ++lane) group->seen[lane] = ~0u;
    }
    float c = p.scale * kLog2E;
    if (p.softcap > 0.0f || p.bias.data != nullptr || p.scale <= 0.0f) {
      cap_and_bias(p, g.vecs, count, s, p.bias.data != nullptr ? extra : nullptr);
      c = kLog2E;
    }
    if (masked) {
      Engine::template softmax<true>(g.vecs, count, c, s, visible, group->m, group->l, group->exact, factor, probabilities);
    } else {
      Engine::template softmax<false>(g.vecs, count, c, s, visible, group->m, group->l, group->exact, factor, probabilities);
    }
    if (p.drop_below != 0) {
      uint32_t* keep = reinterpret_cast<uint32_t*>(extra);
      read_keep(p, g, begin, count, keep);
      Engine::drop(g.vecs, count, keep, s, probabilities);
    }
    // A product may go on behind `end`, with probabilities of zero.
    if ((masked || end < tile_end || Engine::kFiniteOnly) && bad_values == kUnknown) set_bad_values_aside(v, tile, tile_end, values);
    Engine::accumulate(g.vecs, count, p.value_dim, *values, begin - tile, s, probabilities, factor, group->o);
    for (int64_t i = 0; i < bad_values; ++i) {
      const int64_t key = tile + bad_value[i];
      if (begin <= key && key < end) add_value(group, v, key, key - begin, masked);
    }
  }

  // Scores of a key that the engine's products don't take. Rare, so plain.
  void plain_scores(Group* group, const RowSource& k, int64_t key, float* scores) {
    const char* row = k.row(key);
    for (int lane = 0; lane < group->lanes->rows; ++lane) {
      scores[lane] = 0.0f;
      for (int64_t d = 0; d < p.head_dim; ++d) {
        scores[lane] += Engine::element(group->q, d, kLanes, lane) * read_element(row + d * k.element_bytes, k.dtype);
      }
    }
  }

  static int64_t list_bad_rows(const RowSource& rows, int64_t first, int64_t last, int64_t dim, int64_t* list) {
    int64_t count = 0;
    for (int64_t j = first; j < last; ++j) {
      if (!row_finite(rows, j, dim)) list[count++] = j - first;
    }
    return count;
  }

  // Whether any lane sees a key of [begin, end), by its interval alone.
  static bool note_reached(const LaneGroup& g, int64_t begin, int64_t end, uint32_t* seen) {
    bool any = false;
    for (int lane = 0; lane < g.rows; ++lane) {
      const bool here = g.lo[lane] < end && begin < g.hi[lane];
      if (here) seen[lane] = ~0u;
      any = any || here;
    }
    return any;
  }

  // The same by the tile of what is visible.
  bool note_seen(const LaneGroup& g, int64_t count, uint32_t* seen) {
    Vu any{};
    for (int n = 0; n < g.vecs; ++n) {
      Vu here{};
      for (int64_t k = 0; k < count; ++k) here |= load(visible + k * kLanes + n * W);
      store(seen + n * W, load(seen + n * W) | here);
      any |= here;
    }
    uint32_t all = 0;
    for (int i = 0; i < W; ++i) all |= any[i];
    return all != 0;
  }

  // A hidden pair's probability of zero times NaN would be NaN. So what is not finite in V leaves the product, and is added for the
  // lanes that see it; all other results keep the bits that any finite number in its place would give them.
  void set_bad_values_aside(const RowSource& v, int64_t tile, int64_t tile_end, RowOperand<Scalar>* values) {
    bad_values = list_bad_rows(v, tile, tile_end, p.value_dim, bad_value);
    if (bad_values > 0) *values = Engine::cleaned(*values, tile_end - tile, p.value_dim, bad_value, bad_values, v_scratch);
  }

  void add_value(Group* group, const RowSource& v, int64_t key, int64_t k, bool masked) {
    for (int lane = 0; lane < group->lanes->rows; ++lane) {
      if (masked && visible[k * kLanes + lane] == 0) continue;
      const float prob = Engine::probability(s, probabilities, k, lane);
      for (int64_t d = 0; d < p.value_dim; ++d) {
        const float value = read_element(v.row(key) + d * v.element_bytes, v.dtype);
        if (!finite(value)) group->o[d * kLanes + lane] += prob * value;
      }
    }
  }

  char* output_row(const LaneGroup& g, int64_t lane) const {
    const int64_t at = g.b * p.out.stride[0] + g.head[lane] * p.out.stride[1] + g.query[lane] * p.out.stride[2];
    return static_cast<char*>(p.out.data) + at * bytes_of(p.out_dtype);
  }

  void close_group(Group* group) {
    const LaneGroup& g = *group->lanes;
    for (int lane = 0; lane < g.rows; ++lane) prefetch_row(output_row(g, lane), p.value_dim * bytes_of(p.out_dtype));
    const bool scaled = p.softcap > 0.0f || p.bias.data != nullptr || p.scale <= 0.0f;
    float* times = factor;
    for (int lane = 0; lane < kLanes; ++lane) {
      times[lane] = 0.0f;
      if (lane >= g.rows) continue;
      const bool empty = group->seen[lane] == 0;  // a row whose visible scores are all -inf is not: it gives NaN, as 0 / 0 does
      const float m = scaled ? group->m[lane] : group->m[lane] * p.scale, l = group->exact[lane];
      float lse = empty ? -kInfinity : l == 0.0f ? l / l : m + std::log(l), shrink = 1.0f;
      if (p.sinks != nullptr) add_sink(p.sinks[g.head[lane]], &lse, &shrink);
      if (p.lse != nullptr) p.lse[(g.b * p.q_heads + g.head[lane]) * p.q_len + g.query[lane]] = lse;
      times[lane] = shrink * (p.drop_below != 0 ? p.keep_scale : 1.0f);
      if (empty) group->l[lane] = 1.0f;  // O is 0 there
    }
    const int64_t wide = round_up(p.value_dim, kColumnStep), size = bytes_of(p.out_dtype);
    for (int64_t d = 0; d < p.value_dim; ++d) {
      for (int n = 0; n < g.vecs; ++n) {
        float* at = group->o + d * kLanes + n * W;
        store(at, load(at) / load(group->l + n * W) * load(times + n * W));
      }
    }
    float* out = s;  // [lane][value_dim], all lanes at once where they fit
    const int64_t step = kLanes * wide <= s_floats ? kLanes : 16;
    for (int64_t first = 0; first < g.rows; first += step) {
      const int64_t used = g.rows - first < step ? round_up<int64_t>(g.rows - first, 16) : step;
      transpose_dwords(reinterpret_cast<const uint32_t*>(group->o + first), kLanes, wide, used, reinterpret_cast<uint32_t*>(out), wide);
      for (int64_t lane = first; lane < first + step && lane < g.rows; ++lane) {
        write_row(output_row(g, lane), p.out.stride[3] * size, p.out_dtype, p.value_dim, out + (lane - first) * wide);
      }
    }
  }
};

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
