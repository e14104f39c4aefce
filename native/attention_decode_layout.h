// Which chunks of keys a decode pass visits, who visits them, and where their partial states are kept.
#pragma once

#include "attention_lanes.h"

namespace rooftile {
namespace ROOFTILE_ISA {

constexpr int64_t kChunk = 256;        // keys of a partial state: a constant, so that bits do not depend on the shape of the call
constexpr int kPack = 4;               // query rows that share a vector of K or V in registers
constexpr int64_t kChunksPerTask = 4;  // one behind the other: the next chunk's keys are fetched meanwhile

// The memory that the tasks share: a table of the sequences, the unfinished tasks of each kv head, and the partial states.
class DecodeLayout {
 public:
  struct Task {
    int64_t b, kv_head, first_chunk, last_chunk;  // no chunk at all where no row sees a key
  };
  // The partial states of one chunk, row by row. Columns of O come as the pass has them; its last W columns are the row sum.
  struct Part {
    float* m;
    uint32_t* seen;
    float* o;
  };

  const int64_t rows;         // query rows of a kv head
  const int64_t padded_rows;  // of a partial O: three rows are computed as four
  const int64_t columns;      // of a partial O

  // Without memory (null) it can tell its extent.
  DecodeLayout(const AttentionProblem& problem, int64_t wide_v, char* shared)
      : rows(problem.q_heads / problem.kv_heads * problem.q_len),
        padded_rows(rows % kPack == 3 ? rows + 1 : rows),
        columns(wide_v + W),
        p(problem) {
    Arena arena{shared, 0};
    sequences = arena.take<Sequence>(p.batch);
    unfinished = arena.take<int32_t>(p.batch * p.kv_heads);
    parts = arena.take<float>(0);
    header_bytes = arena.used;
  }

  struct Extent {
    int64_t bytes, tasks, scores;  // scores: query-key pairs that are visited
  };
  Extent extent() const {
    int64_t chunks = 0, tasks = 0, keys = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = sequence(b);
      chunks += s.chunks;
      tasks += s.tasks();
      keys += s.keys;
    }
    return {header_bytes + chunks * p.kv_heads * part_floats() * 4, tasks * p.kv_heads, keys * p.kv_heads * rows};
  }

  // Writes the table.
  void fill() {
    int64_t chunks = 0, tasks = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      Sequence& s = sequences[b] = sequence(b);
      s.chunks_before = chunks;
      s.tasks_before = tasks;
      chunks += s.chunks * p.kv_heads;
      tasks += s.tasks() * p.kv_heads;
      for (int64_t h = 0; h < p.kv_heads; ++h) unfinished[b * p.kv_heads + h] = static_cast<int32_t>(s.tasks());
    }
  }

  Task task(int64_t index) const {
    int64_t b = 0, behind = p.batch;  // tasks_before of b <= index < tasks_before of behind
    while (behind - b > 1) {
      const int64_t middle = (b + behind) / 2;
      (sequences[middle].tasks_before <= index ? b : behind) = middle;
    }
    const Sequence& s = sequences[b];
    // Heads one behind the other over the same keys: where heads of a token are neighbours, they share pages of memory.
    const int64_t local = index - s.tasks_before, end = s.first + s.chunks;
    const int64_t first = s.first + local / p.kv_heads * kChunksPerTask;
    return {b, local % p.kv_heads, first, first + kChunksPerTask < end ? first + kChunksPerTask : end};
  }

  int64_t first_chunk(int64_t b) const { return sequences[b].first; }
  int64_t last_chunk(int64_t b) const { return sequences[b].first + sequences[b].chunks; }

  Part part(int64_t b, int64_t kv_head, int64_t chunk) const {
    const Sequence& s = sequences[b];
    float* at = parts + (s.chunks_before + kv_head * s.chunks + chunk - s.first) * part_floats();
    return {at, reinterpret_cast<uint32_t*>(at + rows), at + round_up<int64_t>(2 * rows, 16)};
  }

  // True for one task of a kv head, the last one: it sees what all the others wrote.
  bool finish(const Task& task) const {
    return __atomic_sub_fetch(unfinished + task.b * p.kv_heads + task.kv_head, 1, __ATOMIC_ACQ_REL) == 0;
  }

 private:
  struct Sequence {
    int64_t keys, first, chunks;          // what its rows see, in keys and in chunks
    int64_t chunks_before, tasks_before;  // in the sequences before it
    int64_t tasks() const { return chunks == 0 ? 1 : (chunks + kChunksPerTask - 1) / kChunksPerTask; }
  };

  const AttentionProblem& p;
  Sequence* sequences;
  int32_t* unfinished;
  float* parts;
  int64_t header_bytes;

  int64_t part_floats() const { return round_up<int64_t>(2 * rows, 16) + padded_rows * columns; }

  Sequence sequence(int64_t b) const {
    int64_t first = p.kv_len, last = 0;
    for (int64_t i = 0; i < p.q_len; ++i) {
      const int64_t lo = p.lo == nullptr ? 0 : p.lo[b * p.interval_stride + i];
      const int64_t hi = p.hi == nullptr ? p.kv_len : p.hi[b * p.interval_stride + i];
      if (lo >= hi) continue;
      if (lo < first) first = lo;
      if (hi > last) last = hi;
    }
    if (first >= last) return {0, 0, 0, 0, 0};
    return {last - first, first / kChunk, (last + kChunk - 1) / kChunk - first / kChunk, 0, 0};
  }
};

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
