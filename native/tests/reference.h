// The definition of attention, pair by pair in double precision, with a bound for the error of each number.
#pragma once

#include "inputs.h"

namespace rooftile::test {

// What kernels round on their way, besides sums in fp32.
struct Arithmetic {
  double probability;  // relative error of P and dS as operands: their dtype's, or 0 where they stay fp32
  double exponential;  // relative error of exp
};

struct Numbers {
  Numbers() = default;
  explicit Numbers(int64_t count) : value(static_cast<size_t>(count)), error(static_cast<size_t>(count)) {}
  std::vector<double> value, error;  // contiguous

  void add(int64_t at, double x, double e) {
    value[static_cast<size_t>(at)] += x;
    error[static_cast<size_t>(at)] += e;
  }
};

struct Expected {
  Numbers out, lse, dq, dk, dv;
  Numbers dbias;  // as it lies in memory
};

Expected expected_of(const Inputs& inputs, const Arithmetic& arithmetic);

}  // namespace rooftile::test
