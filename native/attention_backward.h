// The backward pass over tiles: Algorithm 4 of FlashAttention (Dao et al. 2022), scores recomputed from the LSE.
//
// A task owns a range of one kv head's keys (its dK and dV) and walks over all query rows that see them. Its part of dQ is either
// final, or one of a few partial sums that are added in key order afterwards: no atomics, the same bits for any number of threads.
#pragma once

#include "attention_backward_tasks.h"

namespace rooftile {
namespace ROOFTILE_ISA {

constexpr float kCoarseLse = 8192.0f;  // above it half an ulp of an fp32 LSE is 2^-11 and more

// One lane group as the backward pass reads it.
template <typename Scalar>
struct BackwardBlock {
  LaneGroup lanes;
  Scalar *q_t, *dout_t;        // [depth][lane]: operand B of the scores and of dP
  Scalar *q_rows, *dout_rows;  // operand B of dK and dV
  float *shift, *weight;       // [lane]; P = exp(score - shift) * weight: the LSE and 1, or see restate_rows
  float* d;                    // [lane]; D = rowsum(dO * O) - dLSE
  bool restated;
  int bad, bad_lane[kLanes];   // lanes where Q or dO is not finite: there q_rows and dout_rows have zeros
};

template <class Engine>
class BackwardPass {
 public:
  using Scalar = typename Engine::Scalar;

  // `shared` holds every part's dQ where there are several, else null.
  BackwardPass(const AttentionProblem& problem, const AttentionGradients& gradients, Arena* arena, float* shared_dq)
      : p(problem), grad(gradients), tasks(problem, gradients), shared(shared_dq) {
    wide_q = Engine::padded(p.head_dim), wide_v = Engine::padded(p.value_dim);
    columns_q = round_up(p.head_dim, kColumnStep), columns_v = round_up(p.value_dim, kColumnStep);
    const int64_t tile = kBackwardKeys * kLanes, most = wide_q > wide_v ? wide_q : wide_v;
    rows = arena->take<Scalar>(kLanes * most);
    const int64_t written = 16 * columns_q, read = 2 * columns_v;
    numbers = arena->take<float>(written > read ? written : read);
    block.q_t = arena->take<Scalar>(wide_q * kLanes);
    block.dout_t = arena->take<Scalar>(wide_v * kLanes);
    block.q_rows = arena->take<Scalar>(Engine::row_sum_operand(columns_q));
    block.dout_rows = arena->take<Scalar>(Engine::row_sum_operand(columns_v));
    block.shift = arena->take<float>(kLanes);
    block.weight = arena->take<float>(kLanes);
    k_rows = arena->take<Scalar>(kBackwardChunk * wide_q);
    clean_scratch = arena->take<Scalar>(kBackwardChunk * wide_q);
    restated_k = arena->take<Scalar>(kBackwardKeys * wide_q);
    factor = arena->take<float>(kLanes);
    v_rows = arena->take<Scalar>(kBackwardChunk * wide_v);
    k_columns = arena->take<Scalar>(Engine::key_columns(columns_q));
    dk = arena->take<float>(kBackwardChunk * columns_q);
    dv = arena->take<float>(kBackwardChunk * columns_v);
    s = arena->take<float>(tile);
    dp = arena->take<float>(tile);
    extra = arena->take<float>(tile);
    slope = arena->take<float>(tile);
    visible = arena->take<uint32_t>(tile);
    keep = arena->take<uint32_t>(tile);
    operands = arena->take<Scalar>(Engine::gradient_operands());
    known_d = arena->take<float>(tasks.blocks * tasks.domains_per_head * kLanes);
    reach = arena->take<Reach>(tasks.blocks * tasks.domains_per_head);
    if (tasks.parts == 1) own_dq = arena->take<float>(dq_block() * tasks.blocks * tasks.domains_per_head);
  }

  int64_t dq_block() const { return columns_q * kLanes; }
  // Floats of one part's dQ over all sequences and heads.
  int64_t dq_part() const { return dq_block() * tasks.blocks * tasks.domains_per_head * p.kv_heads * p.batch; }

  void run(int64_t task) {
    const int64_t unit = task / tasks.parts, part = task % tasks.parts;
    const int64_t head_units = p.kv_heads / tasks.unit_heads;
    const int64_t b0 = unit / head_units * tasks.unit_batch, h0 = unit % head_units * tasks.unit_heads;
    for (int64_t b = b0; b < b0 + tasks.unit_batch; ++b) {
      for (int64_t h = h0; h < h0 + tasks.unit_heads; ++h) {
        float* dq = dq_of(part, b, h);
        std::memset(dq, 0, static_cast<size_t>(dq_block() * tasks.blocks * tasks.domains_per_head) * 4);
        const int64_t begin = part * tasks.part_keys;
        for (int64_t i = 0; i < tasks.blocks * tasks.domains_per_head; ++i) {
          known_d[i * kLanes] = kUnknown;
          fill_lanes(p, domain(b, h, i / tasks.blocks), i % tasks.blocks * kLanes, &block.lanes);
          reach[i] = {block.lanes.first, block.lanes.last};
        }
        const int64_t end = begin + tasks.part_keys < p.kv_len ? begin + tasks.part_keys : p.kv_len;
        for (int64_t j = begin; j < end; j += kBackwardChunk) chunk(b, h, j, j + kBackwardChunk < end ? j + kBackwardChunk : end, dq);
        if (tasks.parts == 1) {
          for (int64_t i = 0; i < tasks.blocks * tasks.domains_per_head; ++i) write_dq(b, h, i, dq + i * dq_block());
        }
      }
    }
  }

  // Adds the parts of one block of dQ in key order and writes it.
  void reduce(int64_t index) {
    const int64_t per_head = tasks.blocks * tasks.domains_per_head, head = index / per_head, i = index % per_head;
    float* sum = dq_of(0, head / p.kv_heads, head % p.kv_heads) + i * dq_block();
    for (int64_t part = 1; part < tasks.parts; ++part) {
      const float* other = dq_of(part, head / p.kv_heads, head % p.kv_heads) + i * dq_block();
      for (int64_t x = 0; x < dq_block(); ++x) sum[x] += other[x];
    }
    write_dq(head / p.kv_heads, head % p.kv_heads, i, sum);
  }
  int64_t reductions() const { return tasks.parts == 1 ? 0 : p.batch * p.kv_heads * tasks.blocks * tasks.domains_per_head; }

 private:
  const AttentionProblem& p;
  const AttentionGradients& grad;
  const BackwardTasks tasks;
  int64_t wide_q, wide_v, columns_q, columns_v;
  float *shared, *own_dq = nullptr;
  BackwardBlock<Scalar> block;
  Scalar *rows, *k_rows, *v_rows, *k_columns, *operands;
  float *numbers, *dk, *dv, *s, *dp, *extra, *slope;
  float* known_d;  // D of every block of the kv head, from the first chunk of keys that it sees
  static constexpr float kUnknown = -kInfinity;
  struct Reach {
    int64_t first, last;
  };
  Reach* reach;  // the keys between which all lie that any row of a block sees
  uint32_t *visible, *keep;
  const Scalar* clean_k;            // k_rows, or a copy in which keys that are not finite are zeroed
  Scalar *clean_scratch, *restated_k;
  float* factor;
  int64_t bad_keys = 0, bad_key[kBackwardChunk];

  float* dq_of(int64_t part, int64_t b, int64_t h) {
    if (tasks.parts == 1) return own_dq;
    return shared + part * dq_part() + (b * p.kv_heads + h) * dq_block() * tasks.blocks * tasks.domains_per_head;
  }

  RowDomain domain(int64_t b, int64_t h, int64_t which) const {
    return domain_of(p, packs_heads(p) ? b * p.kv_heads + h : b * p.q_heads + h * tasks.domains_per_head + which);
  }

  void chunk(int64_t b, int64_t h, int64_t begin, int64_t end, float* dq) {
    const RowSource k = key_source(p, p.k, b, h), v = key_source(p, p.v, b, h);
    const int64_t count = end - begin, touched = round_up(count, kBackwardKeys);
    bool prepared = false;
    std::memset(dk, 0, static_cast<size_t>(touched * columns_q) * 4);
    std::memset(dv, 0, static_cast<size_t>(touched * columns_v) * 4);
    for (int64_t which = 0; which < tasks.domains_per_head; ++which) {
      const RowDomain rows_of = domain(b, h, which);
      for (int64_t i = 0; i < tasks.blocks; ++i) {
        const Reach seen = reach[which * tasks.blocks + i];
        if (seen.first >= end || begin >= seen.last) continue;
        fill_lanes(p, rows_of, i * kLanes, &block.lanes);
        if (!prepared) {
          prepared = true;
          Engine::copy_rows(k, begin, count, p.head_dim, k_rows);
          Engine::copy_rows(v, begin, count, p.value_dim, v_rows);
          set_bad_keys_aside(k, begin, count);
          Engine::key_columns_of(clean_k, wide_q, count, columns_q, k_columns);
        }
        open_block(k, known_d + (which * tasks.blocks + i) * kLanes);
        for (int64_t j = begin; j < end; j += kBackwardKeys) {
          const int64_t to = j + kBackwardKeys < end ? j + kBackwardKeys : end;
          if (block.lanes.sees(j, to)) step(begin, j, to, dq + (which * tasks.blocks + i) * dq_block());
        }
      }
    }
    write_rows(grad.dk, b, h, begin, count, p.head_dim, dk, columns_q, p.scale);
    write_rows(grad.dv, b, h, begin, count, p.value_dim, dv, columns_v, 1.0f);
  }

  // A hidden pair's zero times NaN would be NaN. So what is not finite in K, Q and dO leaves the sums over keys and queries, and
  // add_bad_pairs adds it where it is seen; all other results keep the bits that any finite number in its place would give them.
  void set_bad_keys_aside(const RowSource& k, int64_t begin, int64_t count) {
    bad_keys = 0;
    for (int64_t j = 0; j < count; ++j) {
      if (!row_finite(k, begin + j, p.head_dim)) bad_key[bad_keys++] = j;
    }
    clean_k = k_rows;
    if (bad_keys == 0) return;
    std::memcpy(static_cast<void*>(clean_scratch), k_rows, static_cast<size_t>(count * wide_q) * sizeof(Scalar));
    for (int64_t i = 0; i < bad_keys; ++i) Engine::clean_row(clean_scratch + bad_key[i] * wide_q, p.head_dim);
    clean_k = clean_scratch;
  }

  void open_block(const RowSource& k, float* d) {
    const LaneGroup& g = block.lanes;
    bool bad[kLanes] = {};
    for (int lane = 0; lane < g.rows; ++lane) {  // rows of heads side by side are too far apart for the processor to foresee
      const RowSource out = source_of(p.out, p.out_dtype, g.b, g.head[lane]), dout = source_of(grad.dout, p.dtype, g.b, g.head[lane]);
      prefetch_row(dout.row(g.query[lane]), p.value_dim * dout.element_bytes);
      if (d[0] == kUnknown) prefetch_row(out.row(g.query[lane]), p.value_dim * out.element_bytes);
    }
    const int64_t padded_rows = round_up(g.rows, 16);
    gather_rows(p.q, p.head_dim, wide_q, padded_rows, bad);
    Engine::transpose(rows, wide_q, padded_rows, wide_q, block.q_t, kLanes);
    for (int lane = 0; lane < g.rows; ++lane) {
      if (bad[lane]) Engine::clean_row(rows + lane * wide_q, p.head_dim);
    }
    Engine::sum_over_rows(rows, wide_q, g.rows, columns_q, block.q_rows);
    gather_rows(grad.dout, p.value_dim, wide_v, padded_rows, bad);
    Engine::transpose(rows, wide_v, padded_rows, wide_v, block.dout_t, kLanes);
    block.bad = 0;
    for (int lane = 0; lane < g.rows; ++lane) {
      if (!bad[lane]) continue;
      block.bad_lane[block.bad++] = lane;
      Engine::clean_row(rows + lane * wide_v, p.value_dim);
    }
    Engine::sum_over_rows(rows, wide_v, g.rows, columns_v, block.dout_rows);
    if (d[0] == kUnknown) {
      for (int first = 0; first < kLanes; first += 16) find_d(first, d + first);
    }
    block.d = d;
    block.restated = false;
    for (int lane = 0; lane < kLanes; ++lane) {
      block.shift[lane] = kInfinity;  // a lane without a query has probabilities of zero
      block.weight[lane] = 1.0f;
      if (lane >= g.rows) continue;
      const float lse = block.shift[lane] = p.lse[statistic(lane)];
      block.restated = block.restated || (finite(lse) && std::fabs(lse) > kCoarseLse);
    }
    if (block.restated) restate_rows(k);
  }

  // Where the LSE of a lane's row is, and its gradient.
  int64_t statistic(int lane) const {
    const LaneGroup& g = block.lanes;
    return (g.b * p.q_heads + g.head[lane]) * p.q_len + g.query[lane];
  }

  // D of 16 lanes: their partial sums lie in rows, which are transposed to be added.
  void find_d(int first, float* d) {
    const LaneGroup& g = block.lanes;
    alignas(64) float sums[16 * 16] = {}, columns[16 * 16];
    for (int lane = first; lane < first + 16 && lane < g.rows; ++lane) {
      const RowSource out = source_of(p.out, p.out_dtype, g.b, g.head[lane]), dout = source_of(grad.dout, p.dtype, g.b, g.head[lane]);
      read_row(out.row(g.query[lane]), out.element_bytes, out.dtype, p.value_dim, columns_v, numbers);
      read_row(dout.row(g.query[lane]), dout.element_bytes, dout.dtype, p.value_dim, columns_v, numbers + columns_v);
      Vf sum[16 / W] = {};
      for (int64_t at = 0; at < columns_v; at += 16) {
        for (int n = 0; n < 16 / W; ++n) sum[n] = fma(load(numbers + at + n * W), load(numbers + columns_v + at + n * W), sum[n]);
      }
      for (int n = 0; n < 16 / W; ++n) store(sums + (lane - first) * 16 + n * W, sum[n]);
    }
    transpose_dwords(reinterpret_cast<const uint32_t*>(sums), 16, 16, 16, reinterpret_cast<uint32_t*>(columns), 16);
    for (int n = 0; n < 16 / W; ++n) {
      Vf total{};
      for (int i = 0; i < 16; ++i) total = total + load(columns + i * 16 + n * W);
      store(d + n * W, total);
    }
    if (grad.dlse == nullptr) return;
    for (int lane = first; lane < first + 16 && lane < g.rows; ++lane) d[lane - first] -= grad.dlse[statistic(lane)];
  }

  // An fp32 LSE of large magnitude has lost the logarithm of its row sum: beside scores of finfo.min nothing of it is left, and
  // exp(score - LSE) would be 1 for every key. For such a block the maximum and the row sum are taken again, apart.
  void restate_rows(const RowSource& k) {
    const LaneGroup& g = block.lanes;
    alignas(64) float m[kLanes], l[kLanes] = {};
    for (int lane = 0; lane < kLanes; ++lane) m[lane] = -kInfinity;
    for (int64_t from = g.first; from < g.last; from += kBackwardKeys) {
      const int64_t count = from + kBackwardKeys < g.last ? kBackwardKeys : g.last - from;
      const RowOperand<Scalar> keys = Engine::row_operand(k, from, count, p.head_dim, restated_k);
      gemm<typename Engine::Op, Into::kStore, false>(count, g.vecs, Engine::depth(p.head_dim), keys.data, keys.step, block.q_t, kLanes, s,
                                                     kLanes);
      const bool masked = find_visible(from, count);
      cap_and_bias(p, g.vecs, count, s, p.bias.data != nullptr ? extra : nullptr);
      if (masked) {
        softmax_fp32<true>(g.vecs, count, kLog2E, s, visible, m, l, factor);
      } else {
        softmax_fp32<false>(g.vecs, count, kLog2E, s, visible, m, l, factor);
      }
    }
    for (int lane = 0; lane < g.rows; ++lane) {
      if (!finite(block.shift[lane]) || m[lane] == -kInfinity) continue;
      if (p.sinks != nullptr) {
        const float sink = p.sinks[g.head[lane]], top = m[lane] > sink ? m[lane] : sink;
        l[lane] = l[lane] * std::exp(m[lane] - top) + std::exp(sink - top);
        m[lane] = top;
      }
      block.shift[lane] = m[lane];
      block.weight[lane] = 1.0f / l[lane];
    }
  }

  // `visible` and `extra` (the bias) of keys [from, from + count); whether they hide or shift anything.
  bool find_visible(int64_t from, int64_t count) {
    const LaneGroup& g = block.lanes;
    const bool bias = p.bias.data != nullptr, dense = p.dense.data != nullptr;
    if (!bias && !dense && g.sees_all(from, from + count)) return false;
    visible_from_intervals(g, from, count, visible);
    if (dense) hide_by_dense(p.dense, g, from, count, visible);
    if (bias) read_bias(p, g, from, count, extra, visible);
    return true;
  }

  void gather_rows(const TensorView& view, int64_t dim, int64_t wide, int64_t padded_rows, bool* bad) {
    const LaneGroup& g = block.lanes;
    for (int lane = 0; lane < padded_rows; ++lane) {
      if (lane >= g.rows) {
        std::memset(static_cast<void*>(rows + lane * wide), 0, static_cast<size_t>(wide) * sizeof(Scalar));
        continue;
      }
      const RowSource source = source_of(view, p.dtype, g.b, g.head[lane]);
      Engine::copy_row(source.row(g.query[lane]), source, dim, rows + lane * wide);
      bad[lane] = bad[lane] || !row_finite(source, g.query[lane], dim);
    }
  }

  // The block against keys [from, to) of the chunk that starts at `chunk_begin`.
  void step(int64_t chunk_begin, int64_t from, int64_t to, float* dq) {
    const LaneGroup& g = block.lanes;
    const int64_t count = to - from, at = from - chunk_begin;
    gemm<typename Engine::Op, Into::kStore, false>(count, g.vecs, Engine::depth(p.head_dim), k_rows + at * wide_q, wide_q, block.q_t,
                                                   kLanes, s, kLanes);
    gemm<typename Engine::Op, Into::kStore, false>(count, g.vecs, Engine::depth(p.value_dim), v_rows + at * wide_v, wide_v,
                                                   block.dout_t, kLanes, dp, kLanes);
    const bool masked = find_visible(from, count);
    if (p.drop_below != 0) read_keep(p, g, from, count, keep);
    const bool general = p.bias.data != nullptr || p.softcap > 0.0f || p.drop_below != 0 || block.restated;
    if (general) {
      probabilities(count, masked);
      if (grad.dbias.data != nullptr) add_dbias(from, count);
      if (p.softcap > 0.0f) times_slope(count);
    } else {
      plain_probabilities(count, masked);
    }
    Engine::gradients(g.vecs, g.rows, count, s, dp, operands);
    if (grad.dv.data != nullptr) Engine::add_row_sum(count, g.rows, columns_v, s, operands, 0, block.dout_rows, dv + at * columns_v);
    if (grad.dk.data != nullptr) Engine::add_row_sum(count, g.rows, columns_q, dp, operands, 1, block.q_rows, dk + at * columns_q);
    if (grad.dq.data != nullptr) Engine::add_dq(g.vecs, g.rows, count, at, p.head_dim, columns_q, dp, operands, clean_k, k_columns, dq);
    if (block.bad > 0 || bad_keys > 0) add_bad_pairs(at, count, masked, dq);
  }

  // s becomes P, dp becomes dS, where scores are scaled products and nothing else.
  ROOFTILE_NOINLINE void plain_probabilities(int64_t count, bool masked) {
    const Vf scale = set1(p.scale), log2e = set1(kLog2E), both = scale * log2e;
    for (int n = 0; n < block.lanes.vecs; ++n) {
      const Vf shift = load(block.shift + n * W), minus_shift = Vf{} - shift * log2e, d = load(block.d + n * W);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t at = k * kLanes + n * W;
        // Where P will be rounded to 16 bits, the rounding of shift * log2e (of at most kCoarseLse) is lost in that.
        Vf prob = exp2_lanes(Engine::kRounds ? fma(load(s + at), both, minus_shift) : (load(s + at) * scale - shift) * log2e);
        Vf d_score = prob * (load(dp + at) - d);
        if (masked) {
          const Vu seen = load(visible + at);
          prob = (Vf)((Vu)prob & seen);
          d_score = (Vf)((Vu)d_score & seen);
        }
        store(s + at, prob);
        store(dp + at, d_score);
      }
    }
  }

  // s becomes P (times dropout), dp becomes dS. `slope` keeps the derivative of the softcap.
  ROOFTILE_NOINLINE void probabilities(int64_t count, bool masked) {
    const Vf scale = set1(p.scale), log2e = set1(kLog2E), keep_scale = set1(p.keep_scale);
    for (int64_t k = 0; k < count; ++k) {
      for (int n = 0; n < block.lanes.vecs; ++n) {
        const int64_t at = k * kLanes + n * W;
        Vf score = load(s + at) * scale, d_prob = load(dp + at);
        if (p.softcap > 0.0f) {
          const Vf t = tanh_lanes(score / set1(p.softcap));
          store(slope + at, set1(1.0f) - t * t);
          score = set1(p.softcap) * t;
        }
        if (p.bias.data != nullptr) score = score + load(extra + at);
        const Vf prob = exp2_lanes((score - load(block.shift + n * W)) * log2e) * load(block.weight + n * W);
        Vf used = prob;
        if (p.drop_below != 0) {
          const Vu kept = load(keep + at);
          used = (Vf)((Vu)(prob * keep_scale) & kept);
          d_prob = (Vf)((Vu)(d_prob * keep_scale) & kept);
        }
        Vf d_score = prob * (d_prob - load(block.d + n * W));
        if (masked) {
          const Vu seen = load(visible + at);
          used = (Vf)((Vu)used & seen);
          d_score = (Vf)((Vu)d_score & seen);
          if (p.softcap > 0.0f) store(slope + at, (Vf)((Vu)load(slope + at) & seen));
        }
        store(s + at, used);
        store(dp + at, d_score);
      }
    }
  }

  void times_slope(int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
      for (int n = 0; n < block.lanes.vecs; ++n) {
        const int64_t at = k * kLanes + n * W;
        store(dp + at, load(dp + at) * load(slope + at));
      }
    }
  }

  // dS of the tile into the bias's gradient. Where the bias is broadcast over queries or keys, a tile's sum is taken in fp64 and
  // added once: adding pair by pair into one fp32 cell would lose what a long sum loses.
  void add_dbias(int64_t from, int64_t count) {
    float* data = static_cast<float*>(grad.dbias.data);
    const LaneGroup& g = block.lanes;
    const bool one_row = grad.dbias.stride[2] == 0 && (grad.dbias.stride[1] == 0 || !packs_heads(p)), one_key = grad.dbias.stride[3] == 0;
    if (one_row && !one_key) {
      for (int64_t k = 0; k < count; ++k) {
        double sum = 0.0;
        for (int lane = 0; lane < g.rows; ++lane) sum += static_cast<double>(dp[k * kLanes + lane]);
        data[offset_of(grad.dbias, g, 0, from + k)] += static_cast<float>(sum);
      }
      return;
    }
    double all = 0.0;
    for (int lane = 0; lane < g.rows; ++lane) {
      float* row = data + offset_of(grad.dbias, g, lane, from);
      double sum = 0.0;
      for (int64_t k = 0; k < count; ++k) {
        if (one_key) {
          sum += static_cast<double>(dp[k * kLanes + lane]);
        } else {
          row[k * grad.dbias.stride[3]] += dp[k * kLanes + lane];
        }
      }
      if (one_key && !one_row) *row += static_cast<float>(sum);
      all += sum;
    }
    if (one_key && one_row) data[offset_of(grad.dbias, g, 0, from)] += static_cast<float>(all);
  }

  void add_bad_pairs(int64_t at, int64_t count, bool masked, float* dq) {
    for (int i = 0; i < block.bad; ++i) {
      const int lane = block.bad_lane[i];
      for (int64_t k = 0; k < count; ++k) {
        if (masked && visible[k * kLanes + lane] == 0) continue;
        const float prob = s[k * kLanes + lane], d_score = dp[k * kLanes + lane];
        for (int64_t d = 0; d < p.value_dim; ++d) {
          const float dout = Engine::element(block.dout_t, d, kLanes, lane);
          if (!finite(dout)) dv[(at + k) * columns_v + d] += prob * dout;
        }
        for (int64_t d = 0; d < p.head_dim; ++d) {
          const float query = Engine::element(block.q_t, d, kLanes, lane);
          if (!finite(query)) dk[(at + k) * columns_q + d] += d_score * query;
        }
      }
    }
    for (int64_t i = 0; i < bad_keys; ++i) {
      const int64_t k = bad_key[i] - at;
      if (k < 0 || k >= count) continue;
      for (int lane = 0; lane < block.lanes.rows; ++lane) {
        if (masked && visible[k * kLanes + lane] == 0) continue;
        const float d_score = dp[k * kLanes + lane];
        for (int64_t d = 0; d < p.head_dim; ++d) {
          const float key = Engine::row_element(k_rows + bad_key[i] * wide_q, d);
          if (!finite(key)) dq[Engine::dq_index(d, lane, columns_q)] += d_score * key;
        }
      }
    }
  }

  void write_rows(const TensorView& view, int64_t b, int64_t h, int64_t first, int64_t count, int64_t dim, const float* from, int64_t ld,
                  float scale) {
    if (view.data == nullptr) return;
    const RowSource to = source_of(view, p.dtype, b, h);
    for (int64_t j = 0; j < count; ++j) {
      scale_row(from + j * ld, ld, scale, numbers);
      write_row(const_cast<char*>(to.row(first + j)), to.element_bytes, p.dtype, dim, numbers);
    }
  }

  static void scale_row(const float* from, int64_t count, float scale, float* to) {
    for (int64_t d = 0; d < count; d += W) store(to + d, load(from + d) * set1(scale));
  }

  void write_dq(int64_t b, int64_t h, int64_t index, const float* from) {
    if (grad.dq.data == nullptr) return;
    fill_lanes(p, domain(b, h, index / tasks.blocks), index % tasks.blocks * kLanes, &block.lanes);
    for (int first = 0; first < block.lanes.rows; first += 16) {
      if (Engine::kDqByColumns) {
        transpose_dwords(reinterpret_cast<const uint32_t*>(from + first), kLanes, columns_q, 16, reinterpret_cast<uint32_t*>(numbers), columns_q);
      }
      for (int lane = first; lane < first + 16 && lane < block.lanes.rows; ++lane) {
        float* row = numbers + (lane - first) * columns_q;
        scale_row(Engine::kDqByColumns ? row : from + lane * columns_q, columns_q, p.scale, row);
        const RowSource to = source_of(grad.dq, p.dtype, b, block.lanes.head[lane]);
        write_row(const_cast<char*>(to.row(block.lanes.query[lane])), to.element_bytes, p.dtype, p.head_dim, row);
      }
    }
  }
};

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
