// How the backward pass falls into tasks.
#pragma once

#include "attention_engines.h"

namespace rooftile {
namespace ROOFTILE_ISA {

constexpr int64_t kEnoughTasks = 16;

// How a problem falls into tasks, from shapes alone. Sequences and heads that share a bias gradient share a task.
struct BackwardTasks {
  int64_t unit_batch, unit_heads;  // sequences and kv heads of a task
  int64_t units, parts;            // parts: ranges of keys, each with a partial dQ of its own
  int64_t part_keys;
  int64_t domains_per_head;        // row domains of one kv head
  int64_t rows;                    // of a domain
  int64_t blocks;                  // lane groups of a domain

  BackwardTasks(const AttentionProblem& p, const AttentionGradients& g) {
    const bool bias = g.dbias.data != nullptr;
    unit_batch = bias && g.dbias.stride[0] == 0 ? p.batch : 1;
    unit_heads = bias && g.dbias.stride[1] == 0 ? p.kv_heads : 1;
    units = p.batch == 0 ? 0 : p.batch / unit_batch * (p.kv_heads / unit_heads);
    const int64_t chunks = (p.kv_len + kBackwardChunk - 1) / kBackwardChunk;
    const int64_t wanted = units == 0 ? 1 : (kEnoughTasks + units - 1) / units;
    parts = bias && g.dbias.stride[3] == 0 ? 1 : wanted < chunks ? wanted : chunks;
    if (parts < 1) parts = 1;  // no keys at all: dQ is still written
    part_keys = (chunks + parts - 1) / parts * kBackwardChunk;
    if (part_keys > 0) parts = (chunks * kBackwardChunk + part_keys - 1) / part_keys;
    const int64_t group = p.q_heads / p.kv_heads;
    domains_per_head = packs_heads(p) ? 1 : group;
    rows = packs_heads(p) ? group * p.q_len : p.q_len;
    blocks = (rows + kLanes - 1) / kLanes;
  }
  int64_t count() const { return units * parts; }
};

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
