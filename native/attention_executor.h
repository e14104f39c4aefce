// Runs independent tasks on the process's OpenMP team, or on std::thread where ThreadSanitizer has to see the synchronisation.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>

#if defined(ROOFTILE_STD_THREADS)
#include <thread>
#include <vector>
#endif
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace rooftile {

// Denormals count as zero while a kernel runs (scalef on them takes microseconds); the caller's setting comes back.
class FlushDenormals {
 public:
#if defined(__SSE__)
  FlushDenormals() : saved(_mm_getcsr()) { _mm_setcsr(saved | 0x8040u); }  // FTZ and DAZ
  ~FlushDenormals() { _mm_setcsr(saved); }

 private:
  const unsigned saved;
#endif
};

// Scratch of the calling thread, kept from call to call: a fresh one would be faulted in page by page. Large ones are given back.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory); }

  char* take(int64_t bytes) {  // null: out of memory
    if (bytes > held) {
      std::free(memory);
      held = (bytes + 4095) / 4096 * 4096;
      memory = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(held)));
      if (memory == nullptr) held = 0;
    }
    return memory;
  }
  void give_back() {
    if (held <= kKept) return;
    std::free(memory);
    memory = nullptr;
    held = 0;
  }

 private:
  static constexpr int64_t kKept = 8 << 20;
  char* memory = nullptr;
  int64_t held = 0;
};

// run(first, last, scratch) for task ranges that cover [0, tasks). Returns 0, or -3 where there is no memory for the scratch.
template <typename Run>
int32_t share_tasks(int64_t tasks, int64_t scratch_bytes, int32_t threads, Run run) {
  if (tasks <= 0) return 0;
  std::atomic<int64_t> next{0};
  std::atomic<int32_t> status{0};
  const auto work = [&] {
    const FlushDenormals flush;
    static thread_local Scratch kept;
    char* scratch = kept.take(scratch_bytes + 64);
    if (scratch == nullptr) {
      status.store(-3);
      return;
    }
    for (int64_t task = next.fetch_add(1); task < tasks; task = next.fetch_add(1)) run(task, task + 1, scratch);
    kept.give_back();
  };
  const int team = static_cast<int>(threads < 1 ? 1 : tasks < threads ? tasks : threads);
  if (team == 1) {
    work();
    return status.load();
  }
#if defined(ROOFTILE_STD_THREADS)
  std::vector<std::thread> crew;
  for (int i = 1; i < team; ++i) crew.emplace_back(work);
  work();
  for (std::thread& member : crew) member.join();
#else
#pragma omp parallel num_threads(team)
  work();
#endif
  return status.load();
}

}  // namespace rooftile
