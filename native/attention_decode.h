// The forward pass for few query rows: keys and values are read once, for all query heads of their kv group.
//
// Keys are split into chunks of a constant size, counted from key 0. A chunk's softmax is a partial state (O, m, l), and whoever
// finishes the last chunk of a kv head merges them in key order (split-KV decode, Dao et al. 2023). So the bits of a row depend on
// the keys that it sees and on nothing else: not on the capacity behind them, the rows beside it, where its pages lie, or the
// number of threads.
#pragma once

#include "attention_columns.h"
#include "attention_decode_merge.h"
#include "attention_softmax.h"

namespace rooftile {
namespace ROOFTILE_ISA {

constexpr int64_t kBlock = 64;  // keys whose rows stay in L1 while one pack of queries after the other meets them

template <class Format>
class DecodePass {
 public:
  static constexpr int64_t kGranule = W * Format::kVecs;  // columns of a load
  static constexpr int64_t kElement = Format::kBytes / kGranule;

  static int64_t wide(int64_t dim) { return dim == 0 ? kGranule : round_up(dim, kGranule); }

  DecodePass(const AttentionProblem& problem, char* shared, Arena* arena)
      : p(problem), layout(problem, wide(problem.value_dim), shared), wide_q(wide(p.head_dim)), wide_v(wide(p.value_dim)),
        packs((layout.rows + kPack - 1) / kPack), merge(problem, layout, wide_v, arena) {
    const int64_t widest = wide_q > wide_v ? wide_q : wide_v;
    lanes = arena->take<LaneGroup>(1);
    row_scratch = arena->take<float>(widest);
    q = arena->take<float>(packs * kPack * wide_q);
    s = arena->take<float>(packs * kPackScores);
    l = arena->take<float>(packs * W);
    visible = arena->take<uint32_t>(packs * kPackScores);
    bias = arena->take<float>(kPackScores);
    nothing = arena->take<char>(widest * 4);
    copies = arena->take<char>(kBlock * widest * 4);
    rows = arena->take<const char*>(kBlock);
    ahead = arena->take<const char*>(kBlock);
    if (arena->base == nullptr) return;
    std::memset(nothing, 0, static_cast<size_t>(widest) * 4);
    std::memset(static_cast<void*>(s), 0, static_cast<size_t>(packs * kPackScores) * 4);
  }

  void run(int64_t index) {
    const DecodeLayout::Task task = layout.task(index);
    fill_lanes(p, domain_of(p, task.b * p.kv_heads + task.kv_head), 0, lanes);
    if (task.first_chunk < task.last_chunk) {
      read_queries();
      const RowSource k = key_source(p, p.k, task.b, task.kv_head), v = key_source(p, p.v, task.b, task.kv_head);
      const int64_t end = task.last_chunk * kChunk < lanes->last ? task.last_chunk * kChunk : lanes->last;
      for (int64_t chunk = task.first_chunk; chunk < task.last_chunk; ++chunk) {
        Span keys;
        keys.from = chunk * kChunk > lanes->first ? chunk * kChunk : lanes->first;
        keys.count = ((chunk + 1) * kChunk < end ? (chunk + 1) * kChunk : end) - keys.from;
        keys.left = end - keys.from;
        keys.differ = p.dense.data != nullptr || p.bias.data != nullptr || !lanes->sees_all(keys.from, keys.from + keys.count);
        const DecodeLayout::Part part = layout.part(task.b, task.kv_head, chunk);
        score(k, v, keys);
        for (int64_t pack = 0; pack < packs; ++pack) soften(pack, keys, part);
        sum(k, v, keys, part);
      }
    }
    if (layout.finish(task)) merge.run(task.b, task.kv_head, *lanes);
  }

 private:
  static constexpr int64_t kPackScores = kPack * kChunk + W;  // the last W: read with what lies before them, never used

  struct Span {  // the keys of a chunk that any row sees
    int64_t from, count;
    int64_t left;  // from here to the end of the task
    bool differ;   // in what rows see of them, or may
  };

  const AttentionProblem& p;
  const DecodeLayout layout;
  const int64_t wide_q, wide_v, packs;
  const DecodeMerge<Format> merge;
  LaneGroup* lanes;
  float *row_scratch, *q, *s, *l, *bias;
  uint32_t* visible;
  char *nothing, *copies;
  const char **rows, **ahead;

  // Rows of a pack, padded to a power of two: the lanes of a vector of scores are shared out among them.
  int pack_rows(int64_t pack) const {
    const int64_t left = layout.rows - pack * kPack;
    return left > 2 ? 4 : static_cast<int>(left);
  }

  static bool in_place(const RowSource& source, int64_t dim) {
    return source.element_bytes == kElement && bytes_of(source.dtype) == kElement && dim != 0;
  }

  // `count` rows of `dim` elements, as place() has put them.
  Rows placed(const RowSource& source, int64_t count, int64_t dim) const {
    if (!in_place(source, dim)) return {rows, ahead, count, wide(dim) / kGranule, 0};
    return {rows, ahead, count, dim / kGranule, static_cast<uint32_t>(dim % kGranule)};
  }

  // Q of every pack, as score_keys reads it.
  void read_queries() {
    constexpr int64_t kPart = Format::kQueryVecs * W;  // of a row, for one load of a key
    std::memset(static_cast<void*>(q), 0, static_cast<size_t>(packs * kPack * wide_q) * 4);
    for (int64_t row = 0; row < layout.rows; ++row) {
      const RowSource source = source_of(p.q, p.dtype, lanes->b, lanes->head[row]);
      const char* from = source.row(lanes->query[row]);
      if (kPart < kGranule) {
        read_row_raw(from, source.element_bytes, p.head_dim, wide_q, reinterpret_cast<uint16_t*>(row_scratch));
      } else {
        read_row(from, source.element_bytes, source.dtype, p.head_dim, wide_q, row_scratch);
      }
      const int64_t pack = row / kPack, together = pack_rows(pack);
      float* to = q + pack * kPack * wide_q + row % kPack * kPart;
      for (int64_t first = 0; first < wide_q; first += kGranule, to += together * kPart) {
        if (kPart < kGranule) {
          std::memcpy(to, row_scratch + first / 2, kPart * 4);
        } else {
          for (int64_t i = 0; i < kPart; ++i) to[Format::column(i)] = row_scratch[first + i];
        }
      }
    }
  }

  // Where rows [first, first + count) lie, then rows of zeros up to `padded`.
  void point_at(const RowSource& source, int64_t first, int64_t count, int64_t padded, const char** to) const {
    int64_t j = 0;
    while (j < count) {  // page by page
      const int64_t here = source.pages == nullptr ? count : source.page_size - (first + j) % source.page_size;
      const char* at = source.row(first + j);
      for (const int64_t end = here < count - j ? j + here : count; j < end; ++j, at += source.row_bytes) to[j] = at;
    }
    for (; j < padded; ++j) to[j] = nothing;
  }

  // The same for the products to read: rows whose elements are strided, or of a dtype that no load can read, are copied.
  void place(const RowSource& source, int64_t first, int64_t count, int64_t padded, int64_t dim) const {
    point_at(source, first, dim == 0 ? 0 : count, padded, rows);
    if (in_place(source, dim) || dim == 0) return;
    const int64_t columns = wide(dim);
    for (int64_t j = 0; j < count; ++j) {
      char* to = copies + j * columns * kElement;
      if (kElement == 4) {
        read_row(rows[j], source.element_bytes, source.dtype, dim, columns, reinterpret_cast<float*>(to));
      } else {
        read_row_raw(rows[j], source.element_bytes, dim, columns, reinterpret_cast<uint16_t*>(to));
      }
      rows[j] = to;
    }
  }

  // s[key][row] of every pack. Meanwhile the same keys' values are fetched.
  void score(const RowSource& k, const RowSource& v, const Span& keys) {
    for (int64_t first = 0; first < keys.count; first += kBlock) {
      const int64_t count = first + kBlock < keys.count ? kBlock : keys.count - first, padded = round_up<int64_t>(count, W);
      place(k, keys.from + first, count, padded, p.head_dim);
      point_at(v, keys.from + first, in_place(v, p.value_dim) ? count : 0, padded, ahead);
      const Rows placed_keys = placed(k, padded, p.head_dim);
      for (int64_t pack = 0; pack < packs; ++pack) {
        const int r = pack_rows(pack);
        const auto product = placed_keys.rest == 0 ? product_of<false>(r) : product_of<true>(r);
        product(placed_keys, q + pack * kPack * wide_q, s + pack * kPackScores + first * r);
      }
    }
  }

  template <bool Rest>
  static auto product_of(int rows_of_q) {
    return rows_of_q == 1 ? score_keys<Format, 1, Rest> : rows_of_q == 2 ? score_keys<Format, 2, Rest> : score_keys<Format, 4, Rest>;
  }

  // Scores of a pack become probabilities against their own maximum.
  void soften(int64_t pack, const Span& keys, DecodeLayout::Part part) {
    const int r = pack_rows(pack);
    const int64_t padded = round_up<int64_t>(keys.count, W);
    float* scores = s + pack * kPackScores;
    const uint32_t* shown = visible + pack * kPackScores;
    const bool masked = keys.differ || padded != keys.count;
    if (masked) look(pack, keys, padded, part);
    if (scaled(p)) cap(scores, padded * r);
    Vf top = set1(-kInfinity);
    for (int64_t i = 0; i < padded * r; i += W) {
      Vf x = load(scores + i);
      if (masked) {
        x = select(load(shown + i), x, set1(-kInfinity));
        store(scores + i, x);
      }
      top = max_or_second(x, top);
    }
    float m[W];
    store(m, top);
    for (int lane = r; lane < W; ++lane) m[lane % r] = m[lane] > m[lane % r] ? m[lane] : m[lane % r];
    for (int lane = r; lane < W; ++lane) m[lane] = m[lane % r];
    for (int row = 0; row < r && pack * kPack + row < layout.rows; ++row) {
      part.m[pack * kPack + row] = m[row];
      if (!masked) part.seen[pack * kPack + row] = 1;
    }
    top = load(m);
    const Vf shift = select((Vu)(top == set1(-kInfinity)), Vf{}, top), c = set1((scaled(p) ? 1.0f : p.scale) * kLog2E);
    for (int64_t i = 0; i < padded * r; i += W) store(scores + i, exp2_lanes((load(scores + i) - shift) * c));
  }

  void cap(float* scores, int64_t count) const {
    for (int64_t i = 0; i < count; i += W) {
      Vf x = load(scores + i) * set1(p.scale);
      if (p.softcap > 0.0f) x = set1(p.softcap) * tanh_lanes(x / set1(p.softcap));
      if (p.bias.data != nullptr) x = x + load(bias + i);
      store(scores + i, x);
    }
  }

  // visible[key][row] and bias[key][row] of a pack, and which of its rows see any key.
  void look(int64_t pack, const Span& keys, int64_t padded, DecodeLayout::Part part) {
    const int r = pack_rows(pack);
    uint32_t* shown = visible + pack * kPackScores;
    for (int row = 0; row < r; ++row) {
      const int lane = static_cast<int>(pack) * kPack + row;
      uint32_t any = 0;
      for (int64_t k = 0; k < padded; ++k) {
        const int64_t j = keys.from + k;
        bool sees = k < keys.count && lanes->lo[lane] <= j && j < lanes->hi[lane];
        if (sees && p.dense.data != nullptr) sees = static_cast<const uint8_t*>(p.dense.data)[offset_of(p.dense, *lanes, lane, j)] != 0;
        float value = 0.0f;
        if (sees && p.bias.data != nullptr) {
          const char* at = static_cast<const char*>(p.bias.data) + offset_of(p.bias, *lanes, lane, j) * bytes_of(p.bias_dtype);
          value = read_element(at, p.bias_dtype);
          sees = value != -kInfinity;
        }
        bias[k * r + row] = sees ? value : 0.0f;
        shown[k * r + row] = sees ? ~0u : 0u;
        any |= shown[k * r + row];
      }
      if (lane < layout.rows) part.seen[lane] = any;
    }
  }

  // O and l of every pack. Meanwhile the next chunk's keys are fetched.
  void sum(const RowSource& k, const RowSource& v, const Span& keys, DecodeLayout::Part part) {
    std::memset(static_cast<void*>(part.o), 0, static_cast<size_t>(layout.padded_rows * layout.columns) * 4);
    std::memset(static_cast<void*>(l), 0, static_cast<size_t>(packs * W) * 4);
    const bool poisoned = keys.differ && has_poison(v, keys);
    for (int64_t first = 0; first < keys.count; first += kBlock) {
      const int64_t count = first + kBlock < keys.count ? kBlock : keys.count - first;
      place(v, keys.from + first, count, count, p.value_dim);
      const int64_t left = in_place(k, p.head_dim) ? keys.left - kChunk - first : 0;
      point_at(k, keys.from + kChunk + first, left < 0 ? 0 : left < count ? left : count, count, ahead);
      const Rows values = placed(v, count, p.value_dim);
      for (int64_t pack = 0; pack < packs; ++pack) {
        if (poisoned) {
          add_visible(pack, first, values, part.o);
          continue;
        }
        const int r = pack_rows(pack);
        const float* weights = s + pack * kPackScores + first * r;
        float* to = part.o + pack * kPack * layout.columns;
        if (r == 1) add<1>(values, weights, to, l + pack * W);
        if (r == 2) add<2>(values, weights, to, l + pack * W);
        if (r == 4) add<4>(values, weights, to, l + pack * W);
      }
    }
    for (int64_t row = 0; row < layout.rows; ++row) {
      store(part.o + row * layout.columns + wide_v, set1(l[row / kPack * W + row % kPack]));
    }
  }

  bool has_poison(const RowSource& v, const Span& keys) const {
    for (int64_t j = keys.from; j < keys.from + keys.count; ++j) {
      if (!row_finite(v, j, p.value_dim)) return true;
    }
    return false;
  }

  template <int R>
  void add(const Rows& values, const float* weights, float* to, float* sums) const {
    constexpr int kVecs = W / R < 8 ? W / R : 8;  // of a row of O, in registers
    constexpr int kLoads = kVecs < Format::kVecs ? 1 : kVecs / Format::kVecs;
    int64_t i = 0;
    for (; i + kLoads <= values.loads; i += kLoads) {
      const auto product = i == 0 ? add_values<Format, R, kLoads, true> : add_values<Format, R, kLoads, false>;
      product(values, i, weights, to + i * kGranule, layout.columns, sums);
    }
    for (; i < values.loads; ++i) {
      const auto product = i == 0 ? add_values<Format, R, 1, true> : add_values<Format, R, 1, false>;
      product(values, i, weights, to + i * kGranule, layout.columns, sums);
    }
    if (values.rest != 0) {
      const auto product = i == 0 ? add_values<Format, R, 0, true> : add_values<Format, R, 0, false>;
      product(values, i, weights, to + i * kGranule, layout.columns, sums);
    }
  }

  // Zero times a hidden value that is not finite would be NaN, so each row meets what it sees and nothing else. Rare, so slow.
  void add_visible(int64_t pack, int64_t first, const Rows& values, float* o) {
    const int r = pack_rows(pack);
    for (int64_t row = 0; row < r && pack * kPack + row < layout.rows; ++row) {
      const char* seen[kBlock];
      float weights[kBlock + W] = {}, sums[W] = {};
      int64_t n = 0;
      for (int64_t k = 0; k < values.count; ++k) {
        const int64_t at = pack * kPackScores + (first + k) * r + row;
        if (visible[at] == 0) continue;
        weights[n] = s[at];
        seen[n++] = values.at[k];
      }
      sums[0] = l[pack * W + row];
      add<1>({seen, values.ahead, n, values.loads, values.rest}, weights, o + (pack * kPack + row) * layout.columns, sums);
      l[pack * W + row] = sums[0];
    }
  }
};

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
