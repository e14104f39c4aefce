// The C ABI of scaled low precision: split the work over threads and run the kernels of the chosen instruction set.
//
// Every function returns 0, or a negative number for an argument that it can't take. Splitting never changes codes, scales or
// counts; the two sums of squares of a score are added task by task in an order that the number of threads doesn't change.
#include "lowp_kernels.h"

#include <vector>

#include "platform.h"

namespace rooftile {
namespace {

int team_size(int64_t elements, int64_t tasks, int32_t threads) {
  if (elements < kSerialBelow || threads < 1 || forked()) return 1;
  return static_cast<int>(tasks < threads ? (tasks < 1 ? 1 : tasks) : threads);
}

// The same call for the chosen copy of a kernel.
#if defined(ROOFTILE_X86)
#define ROOFTILE_RUN(isa, call)               \
  do {                                        \
    if ((isa) == kAvx512) { avx512::call; }   \
    else if ((isa) == kAvx2) { avx2::call; }  \
    else { portable::call; }                  \
  } while (0)
#else
#define ROOFTILE_RUN(isa, call) do { (void)(isa); portable::call; } while (0)
#endif

bool usable(const Blocks& b, int32_t source, int32_t* isa) {
  *isa = chosen_isa(*isa);
  return *isa <= machine_isa && b.rows >= 0 && b.cols >= 0 && b.block_rows > 0 && b.block_cols > 0 && source >= kLowpFp32 &&
         source <= kLowpBf16 && b.grid_cols == (b.cols + b.block_cols - 1) / b.block_cols;
}

int64_t count_of(const Blocks& b) { return (b.rows + b.block_rows - 1) / b.block_rows * b.grid_cols; }

constexpr int64_t kPartsPerThread = 8;  // on a busy machine one thread may lag: the others take what is left

// work(first, last) over all blocks. Parts are whole rows of blocks where there are enough: their kernels read whole rows at once.
template <typename Work>
void over_blocks(const Blocks& blocks, int32_t threads, Work work) {
  const int64_t count = count_of(blocks);
  const int team = team_size(blocks.rows * blocks.cols, count, threads);
  if (team == 1) return work(0, count);
  const int64_t grid_rows = count / blocks.grid_cols, unit = grid_rows >= 2 * team ? blocks.grid_cols : 1, units = count / unit;
  const int64_t parts = units < team * kPartsPerThread ? units : team * kPartsPerThread;
#pragma omp parallel for num_threads(team) schedule(dynamic, 1)
  for (int64_t part = 0; part < parts; ++part) work(units * part / parts * unit, units * (part + 1) / parts * unit);
}

void merge(const ScoreOutput& from, ScoreOutput* into) {
  into->zeros += from.zeros;
  into->non_finite += from.non_finite;
  into->flushed += from.flushed;
  into->saturated += from.saturated;
  if (from.largest_error > into->largest_error) into->largest_error = from.largest_error;
  for (int bin = 0; bin < kErrorBins; ++bin) into->errors[bin] += from.errors[bin];
}

}  // namespace
}  // namespace rooftile

using namespace rooftile;

// Raised whenever a signature, a struct or the meaning of an argument changes; Python refuses another number.
ROOFTILE_API int32_t rooftile_lowp_abi() { return 2; }

ROOFTILE_API int32_t rooftile_block_amax(const void* in, int32_t source, const Blocks* blocks, float* amax, int32_t threads,
                                         int32_t isa) {
  if (!usable(*blocks, source, &isa)) return -1;
  over_blocks(*blocks, threads, [&](int64_t first, int64_t last) {
    ROOFTILE_RUN(isa, block_amax(in, source, *blocks, first, last, amax));
  });
  return 0;
}

ROOFTILE_API int32_t rooftile_quantize_blocks(const void* in, int32_t source, const Blocks* blocks, const CodePlan* code,
                                              const ScalePlan* scale, void* codes, float* decode, int32_t threads, int32_t isa) {
  if (!usable(*blocks, source, &isa) || scale->rule < kExact || scale->rule > kPowerOfTwoFloor) return -1;
  uint8_t* out = static_cast<uint8_t*>(codes);
  advise_huge_pages(out, blocks->rows * blocks->cols);
  over_blocks(*blocks, threads, [&](int64_t first, int64_t last) {
    ROOFTILE_RUN(isa, quantize_blocks(in, source, *blocks, first, last, *code, *scale, out, decode));
  });
  return 0;
}

ROOFTILE_API int32_t rooftile_encode_blocks(const void* in, int32_t source, const Blocks* blocks, const CodePlan* code,
                                            const float* encode, void* codes, int32_t threads, int32_t isa) {
  if (!usable(*blocks, source, &isa)) return -1;
  uint8_t* out = static_cast<uint8_t*>(codes);
  advise_huge_pages(out, blocks->rows * blocks->cols);
  over_blocks(*blocks, threads, [&](int64_t first, int64_t last) {
    ROOFTILE_RUN(isa, encode_blocks(in, source, *blocks, first, last, *code, encode, out));
  });
  return 0;
}

// outputs: one per recipe, zeroed by the caller. Each task reads its part once from memory and scores it under every recipe.
ROOFTILE_API int32_t rooftile_score(const void* in, int32_t source, const ScoreInput* inputs, ScoreOutput* outputs,
                                    int32_t recipes, int64_t task_rows, int64_t task_cols, int32_t threads, int32_t isa) {
  if (recipes < 1 || task_rows < 1 || task_cols < 1) return -1;
  for (int r = 0; r < recipes; ++r)
    if (!usable(inputs[r].blocks, source, &isa)) return -1;
  const int64_t rows = inputs[0].blocks.rows, cols = inputs[0].blocks.cols;
  const int64_t across = (cols + task_cols - 1) / task_cols, tasks = (rows + task_rows - 1) / task_rows * across;
  [[maybe_unused]] const int team = team_size(rows * cols, tasks, threads);  // unused without OpenMP
  std::vector<double> sums(static_cast<size_t>(2 * tasks * recipes));
#pragma omp parallel num_threads(team) if (team > 1)
  {
    std::vector<ScoreOutput> mine(static_cast<size_t>(recipes));
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t row = task / across * task_rows, col = task % across * task_cols;
      const Part part = {row, row + task_rows < rows ? row + task_rows : rows, col, col + task_cols < cols ? col + task_cols : cols};
      for (int r = 0; r < recipes; ++r) {
        mine[r].signal = mine[r].noise = 0;
        ROOFTILE_RUN(isa, score_part(in, source, inputs[r], part, &mine[r]));
        sums[2 * (task * recipes + r)] = mine[r].signal;
        sums[2 * (task * recipes + r) + 1] = mine[r].noise;
      }
    }
#pragma omp critical(rooftile_score_merge)
    for (int r = 0; r < recipes; ++r) merge(mine[r], &outputs[r]);
  }
  for (int64_t task = 0; task < tasks; ++task) {
    for (int r = 0; r < recipes; ++r) {
      outputs[r].signal += sums[2 * (task * recipes + r)];
      outputs[r].noise += sums[2 * (task * recipes + r) + 1];
    }
  }
  return 0;
}
