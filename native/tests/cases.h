// What the tests ask of the kernels: one problem each, small enough to be summed pair by pair in double precision.
#pragma once

#include <string>
#include <vector>

#include "memory.h"

namespace rooftile::test {

// What rows see through their intervals.
enum class Sight {
  kAll,         // no intervals
  kCausal,      // aligned bottom right: with more queries than keys the first rows see nothing
  kWindow,      // causal, the last 33 keys
  kRagged,      // a length for each sequence, 0 among them; only `hi` is given
  kPrefix,      // the same for all sequences, only `lo` is given: keys before 11 are hidden
  kScattered,   // any interval before or behind a gap that no row sees; some are empty, some have lo > hi
};

constexpr unsigned kOverBatch = 1, kOverHeads = 2, kOverRows = 4, kOverKeys = 8;
constexpr int kAbsent = -1;

struct Shape {
  int64_t batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim;
};

struct Case {
  std::string name;
  Shape shape;
  Sight sight = Sight::kAll;
  bool shared_intervals = false;
  int dense = kAbsent;        // else dimensions that it is broadcast over, a bit each
  int bias = kAbsent;         // the same
  int32_t bias_dtype = kFp32;
  float scale = 0.3f, softcap = 0.0f, dropout = 0.0f;
  bool sinks = false;
  int64_t page_size = 0;
  Layout q_layout = Layout::kContiguous, kv_layout = Layout::kContiguous, out_layout = Layout::kSequenceFirst;
  unsigned kv_broadcast = 0;  // dimensions of k and v with stride 0
  bool fp32_out = false, lse_wanted = true, dlse = true;
  std::array<bool, 3> wanted = {true, true, true};  // dq, dk, dv
  bool bias_gradient = true;
  double magnitude = 1.0;     // of q, k, v and dout
  bool nan_in_unseen_keys = false;    // keys that no row sees
  bool nan_in_last_value = false;     // of the last key, which the last row alone sees; in column 0
  bool nan_in_blind_queries = false;  // rows of q and dout that see no key
  bool every_dtype = true;  // else fp32 alone
  bool backward = true;
};

std::vector<Case> all_cases();

}  // namespace rooftile::test
