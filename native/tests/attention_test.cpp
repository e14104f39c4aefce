// The native attention core through its C ABI, on every code path of this machine, under the sanitizer that this is built with.
//
// Inputs end where their memory ends, outputs start as NaN, and what is written is compared with the definition of attention
// (reference.h) within bounds that follow from the arithmetic. One, two and three threads must give the same bits.
#include <atomic>
#include <cstdio>
#include <initializer_list>
#include <thread>

#include "reference.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

extern "C" {
int32_t rooftile_attention_abi();
int32_t rooftile_attention_best_path();
int32_t rooftile_attention_forward(const rooftile::AttentionProblem*);
int32_t rooftile_attention_backward(const rooftile::AttentionProblem*, const rooftile::AttentionGradients*);
int32_t rooftile_attention_plan(const rooftile::AttentionProblem*, rooftile::AttentionPlan*);
}

namespace rooftile::test {
namespace {

constexpr int32_t kWrongProblem = -1, kNoSuchPath = -2;
#if defined(ROOFTILE_STD_THREADS)
constexpr int32_t kTeams[] = {3};  // ThreadSanitizer sees a race whatever the order of events, and takes its time
#else
constexpr int32_t kTeams[] = {2, 3};
#endif
const char* const kPathNames[] = {"portable", "avx2", "avx512", "avx512-bf16", "amx", "amx in software"};
const char* const kDtypeNames[] = {"fp32", "bf16", "fp16"};

constexpr int kShown = 50;
std::atomic<int> failures{0};

void fail(const std::string& what) {
  if (++failures <= kShown) std::printf("FAILED: %s\n", what.c_str());
}

void check(bool right, const char* what) {
  if (!right) fail(what);
}

bool has_processor_for(int32_t path) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (path == kPathAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
  if (path == kPathAvx512) return avx512;
  if (path == kPathAvx512Bf16) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return path == kPathPortable || path == kPathAmxSoftware;
}

// Whether the path has no code of its own for this dtype.
bool is_another(int32_t path, int32_t dtype) { return path == kPathAvx512Bf16 && dtype != kBf16; }

// The caller's floating-point mode must survive each call.
class SameMode {
 public:
#if defined(__SSE__)
  SameMode() : before(_mm_getcsr() & kControl) {}
  ~SameMode() { check((_mm_getcsr() & kControl) == before, "the caller's rounding and denormal mode came back"); }

 private:
  static constexpr unsigned kControl = 0xffc0u;  // the rest are flags that arithmetic raises
  const unsigned before;
#endif
};

int32_t forward(const AttentionProblem& p) {
  const SameMode mode;
  return rooftile_attention_forward(&p);
}

int32_t backward(const AttentionProblem& p, const AttentionGradients& g) {
  const SameMode mode;
  return rooftile_attention_backward(&p, &g);
}

// What a code path has been through.
struct Record {
  int forwards = 0, backwards = 0, refused_forwards = 0, refused_backwards = 0;
  double largest = 0.0;  // error, as a share of its bound
};
Record records[6][3];

// One case in one dtype on one path.
class Trial {
 public:
  Trial(const Inputs& inputs, const Expected& right, int32_t on_path)
      : in(inputs), expected(right), path(on_path), record(&records[on_path][inputs.dtype]) {}

  void run() {
    Outputs outputs = in.outputs();
    const int32_t status = forward(in.problem(outputs, path, 1));
    if (status == kNoSuchPath) {
      ++record->refused_forwards;
      expect_untouched(outputs.out, "out");
      return;
    }
    if (status != 0) return complain("forward", "returned an error");
    ++record->forwards;
    compare("out", outputs.out, expected.out);
    compare("lse", outputs.lse, expected.lse);
    for (const int32_t threads : kTeams) {
      const Outputs again = in.outputs();
      forward(in.problem(again, path, threads));
      if (!(again.out.memory == outputs.out.memory && again.lse == outputs.lse)) complain("forward", "other bits with more threads");
    }
    plan(in.problem(outputs, path, 1));
    if (in.c.lse_wanted && in.c.backward) gradients(outputs);
  }

 private:
  const Inputs& in;
  const Expected& expected;
  const int32_t path;
  Record* const record;

  void complain(const char* where, const char* what) const {
    fail(in.c.name + ", " + kDtypeNames[in.dtype] + ", " + kPathNames[path] + ": " + where + ": " + what);
  }

  void gradients(const Outputs& outputs) {
    const Gradients got = in.gradients();
    const AttentionProblem p = in.problem(outputs, path, 1);
    const int32_t status = backward(p, in.wanted(got));
    if (in.c.page_size > 0) {
      if (status != kWrongProblem) complain("backward", "pages have no gradient, and it did not say so");
      return;
    }
    if (status == kNoSuchPath) {
      ++record->refused_backwards;
      expect_untouched(got.dq, "dq");
      return;
    }
    if (status != 0) return complain("backward", "returned an error");
    ++record->backwards;
    compare("dq", got.dq, expected.dq);
    compare("dk", got.dk, expected.dk);
    compare("dv", got.dv, expected.dv);
    compare("dbias", got.dbias.memory, expected.dbias);
    for (const int32_t threads : kTeams) {
      const Gradients again = in.gradients();
      backward(in.problem(outputs, path, threads), in.wanted(again));
      if (!(again.dq.memory == got.dq.memory && again.dk.memory == got.dk.memory && again.dv.memory == got.dv.memory &&
            again.dbias.memory == got.dbias.memory)) {
        complain("backward", "other bits with more threads");
      }
    }
  }

  void compare(const char* what, const Tensor& got, const Numbers& right) {
    if (!got.present()) return;
    compare(what, got.values(), right);
    if (!got.gaps_untouched()) complain(what, "memory between its elements was written");
  }
  void compare(const char* what, const Exact& floats, const Numbers& right) {
    if (floats.size() == 0) return;
    compare(what, std::vector<double>(floats.as<float>(), floats.as<float>() + floats.size() / 4), right);
  }
  void compare(const char* what, const std::vector<double>& got, const Numbers& right) {
    size_t wrong = 0, first = 0;
    for (size_t n = 0; n < got.size(); ++n) {
      const double share = std::fabs(got[n] - right.value[n]) / right.error[n];
      if (share <= 1.0) {
        record->largest = std::fmax(record->largest, share);
      } else if (std::isfinite(right.value[n]) || !(std::isnan(right.value[n]) ? std::isnan(got[n]) : got[n] == right.value[n])) {
        if (wrong++ == 0) first = n;
      }
    }
    if (wrong == 0) return;
    char numbers[160];
    std::snprintf(numbers, sizeof numbers, "%zu of %zu wrong; [%zu] is %.9g, and should be %.9g within %.3g", wrong, got.size(), first,
                  got[first], right.value[first], right.error[first]);
    complain(what, numbers);
  }

  void expect_untouched(const Tensor& tensor, const char* what) const {
    for (size_t n = 0; n < tensor.memory.size(); ++n) {
      if (tensor.memory.data()[n] != 0xff) return complain(what, "was written by a path that refused");
    }
  }

  void plan(const AttentionProblem& p) {
    AttentionPlan plan{};
    if (rooftile_attention_plan(&p, &plan) != 0) return complain("plan", "refused what the forward pass took");
    int64_t seen = 0, pairs = p.batch * p.q_heads * p.q_len * p.kv_len;
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t i = 0; i < p.q_len; ++i) {
        const int64_t first = p.lo == nullptr ? 0 : p.lo[b * p.interval_stride + i];
        const int64_t last = p.hi == nullptr ? p.kv_len : p.hi[b * p.interval_stride + i];
        if (first < last) seen += (last - first) * p.q_heads;
      }
    }
    if (plan.scores < seen || plan.scores > pairs) complain("plan", "visits fewer pairs than are seen, or more than there are");
    if (plan.path < 0 || plan.path > kPathAmxSoftware || plan.scratch_bytes <= 0) complain("plan", "names no path or no scratch");
  }
};

void run_case(const Case& c, uint64_t seed) {
  for (const int32_t dtype : {kFp32, kBf16, kFp16}) {
    if (dtype != kFp32 && !c.every_dtype) continue;
    const Inputs inputs(c, dtype, seed);
    const Expected sums_in_fp32 = expected_of(inputs, {0.0, 5e-7});
    const Expected products_in_bf16 = dtype == kBf16 ? expected_of(inputs, {unit_roundoff(kBf16), 5e-6}) : Expected{};
    for (int32_t path = kPathPortable; path <= kPathAmxSoftware; ++path) {
      if (is_another(path, dtype)) continue;
      Trial(inputs, path >= kPathAvx512Bf16 && dtype == kBf16 ? products_in_bf16 : sums_in_fp32, path).run();
    }
  }
}

// ---- what the ABI refuses, and how.
template <typename Change>
void expect_status(int32_t right, const char* what, Change change) {
  Case c;
  c.name = what;
  c.shape = {1, 2, 2, 5, 9, 8, 8};
  const Inputs inputs(c, kFp32, 1);
  const Outputs outputs = inputs.outputs();
  const Gradients gradients = inputs.gradients();
  AttentionProblem p = inputs.problem(outputs, kPathAuto, 2);
  change(p);
  AttentionPlan plan{};
  check(forward(p) == right && rooftile_attention_plan(&p, &plan) == right, what);
  check(backward(p, inputs.wanted(gradients)) == right, what);
}

void run_refusals() {
  check(rooftile_attention_abi() == 1, "the ABI is the one that this test is written against");
  const int32_t best = rooftile_attention_best_path();
  check(best == kPathAmx || (best < kPathAmx && has_processor_for(best)), "the best path is one of this processor's");
  expect_status(0, "an ordinary problem is taken", [](AttentionProblem&) {});
  expect_status(0, "no threads count as one", [](AttentionProblem& p) { p.threads = 0; });
  expect_status(kNoSuchPath, "path 6 is refused", [](AttentionProblem& p) { p.path = 6; });
  expect_status(kNoSuchPath, "path -2 is refused", [](AttentionProblem& p) { p.path = -2; });
  expect_status(kWrongProblem, "a head dim of 513 is refused", [](AttentionProblem& p) { p.head_dim = 513; });
  expect_status(kWrongProblem, "a value dim of 513 is refused", [](AttentionProblem& p) { p.value_dim = 513; });
  expect_status(kWrongProblem, "a negative length is refused", [](AttentionProblem& p) { p.q_len = -1; });
  expect_status(kWrongProblem, "2^31 keys are refused", [](AttentionProblem& p) { p.kv_len = int64_t{1} << 31; });
  expect_status(kWrongProblem, "heads that do not divide are refused", [](AttentionProblem& p) { p.q_heads = 3; });
  expect_status(kWrongProblem, "no kv heads are refused", [](AttentionProblem& p) { p.kv_heads = 0; });
  expect_status(kWrongProblem, "an unknown dtype is refused", [](AttentionProblem& p) { p.dtype = p.out_dtype = 3; });
  expect_status(kWrongProblem, "a narrower out is refused", [](AttentionProblem& p) { p.out_dtype = kBf16; });
  expect_status(kWrongProblem, "pages without a table are refused", [](AttentionProblem& p) { p.page_size = 16; });
}

// Calls from several threads at once, as Python threads make them.
void run_concurrent() {
  Case c;
  c.name = "concurrent calls";
  c.shape = {2, 4, 2, 66, 300, 16, 16};
  c.sight = Sight::kCausal;
  const Inputs inputs(c, kBf16, 7);
  const auto call = [&inputs](Outputs* outputs, Gradients* gradients) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      const AttentionProblem p = inputs.problem(*outputs, kPathAuto, 2);
      check(forward(p) == 0 && backward(p, inputs.wanted(*gradients)) == 0, "concurrent calls succeed");
    }
  };
  Outputs outputs[3] = {inputs.outputs(), inputs.outputs(), inputs.outputs()};
  Gradients gradients[3] = {inputs.gradients(), inputs.gradients(), inputs.gradients()};
  call(&outputs[0], &gradients[0]);
  std::thread others[2] = {std::thread(call, &outputs[1], &gradients[1]), std::thread(call, &outputs[2], &gradients[2])};
  for (std::thread& other : others) other.join();
  for (int n = 1; n < 3; ++n) {
    check(outputs[n].out.memory == outputs[0].out.memory && outputs[n].lse == outputs[0].lse, "concurrent forward passes give the same bits");
    check(gradients[n].dq.memory == gradients[0].dq.memory && gradients[n].dk.memory == gradients[0].dk.memory &&
              gradients[n].dv.memory == gradients[0].dv.memory, "concurrent backward passes give the same bits");
  }
}

void report() {
  for (int32_t path = kPathPortable; path <= kPathAmxSoftware; ++path) {
    for (const int32_t dtype : {kFp32, kBf16, kFp16}) {
      const Record& r = records[path][dtype];
      const bool ran = r.forwards > 0;
      if (ran) {
        std::printf("%-16s %s: %3d forward, %3d backward, largest error %.2f of its bound\n", kPathNames[path], kDtypeNames[dtype], r.forwards,
                    r.backwards, r.largest);
      }
      if ((ran && r.refused_forwards > 0) || (r.backwards > 0 && r.refused_backwards > 0)) {
        fail(std::string(kPathNames[path]) + ", " + kDtypeNames[dtype] + ": takes one problem and refuses another");
      }
      // Whether AMX may be used is for the library to find out: the system has a say in it.
      if (path != kPathAmx && !is_another(path, dtype) && (r.forwards > 0 && r.backwards > 0) != has_processor_for(path)) {
        fail(std::string(kPathNames[path]) + ", " + kDtypeNames[dtype] + (ran ? ": ran without its processor" : ": did not run"));
      }
    }
  }
}

int run(const char* only) {
  uint64_t seed = 0;
  for (const Case& c : all_cases()) {
    ++seed;
    if (only == nullptr || c.name.find(only) != std::string::npos) run_case(c, seed);
  }
  if (only == nullptr) {
    run_refusals();
    run_concurrent();
    report();
  }
  std::printf("%d failures\n", failures.load());
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace rooftile::test

// Without an argument every case; with one, those whose names contain it.
int main(int arguments, char** argument) { return rooftile::test::run(arguments > 1 ? argument[1] : nullptr); }
