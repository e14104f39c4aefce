// The tensors of a case in a dtype, and the problem that the C ABI is given.
#pragma once

#include "cases.h"

namespace rooftile::test {

struct Outputs {
  Tensor out;
  Exact lse;
};

struct Gradients {
  Tensor dq, dk, dv, dbias;
};

class Inputs {
 public:
  Inputs(const Case& described, int32_t type, uint64_t seed);

  const Case& c;
  const int32_t dtype;
  const uint64_t dropout_seed = 0x123456789abcdef1u;
  Tensor q, k, v, dout, bias, dense;  // k and v as (B, H, L, D), also where the problem has them in pages
  Exact sinks, dlse;

  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const;
  uint32_t drop_below() const;
  float keep_scale() const { return static_cast<float>(1.0 / (1.0 - c.dropout)); }

  Outputs outputs() const;      // never written
  Gradients gradients() const;  // but for dbias, which starts at its initial values
  double initial_dbias(int64_t element) const { return 0.25 * static_cast<double>(element % 7); }

  AttentionProblem problem(const Outputs& to, int32_t path, int32_t threads) const;
  AttentionGradients wanted(const Gradients& to) const;

 private:
  Exact lo, hi;
  int64_t interval_stride = 0;
  Tensor k_pages, v_pages;
  Exact table;
  int64_t pages_stride = 0;

  int64_t interval(const Exact& of, int64_t b, int64_t i, int64_t otherwise) const;
  void choose_intervals(Random* random);
  void poison();
  void store_in_pages(Random* random);
};

}  // namespace rooftile::test
