// Memory that ends exactly where its tensor ends: reading or writing one byte further is an error, not luck.
#pragma once

#include <array>
#include <cstdlib>
#include <utility>
#include <vector>

#include "numbers.h"

#if !defined(ROOFTILE_REDZONES)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace rooftile::test {

// Filled with 0xff: NaN in every dtype. AddressSanitizer (ROOFTILE_REDZONES) guards a heap block itself; elsewhere the block ends at a page that nobody
// may touch, which also stops instructions that no sanitizer instruments.
class Exact {
 public:
  Exact() = default;
  explicit Exact(int64_t size) : bytes(static_cast<size_t>(size)) {
    if (bytes == 0) return;  // null, as the data of an empty torch tensor is
#if defined(ROOFTILE_REDZONES)
    block = std::malloc(bytes);
    if (block == nullptr) std::abort();
    start = static_cast<unsigned char*>(block);
#else
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped = (bytes + page - 1) / page * page + page;
    block = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) std::abort();
    unsigned char* const wall = static_cast<unsigned char*>(block) + mapped - page;
    if (mprotect(wall, page, PROT_NONE) != 0) std::abort();
    start = wall - bytes;
#endif
    std::memset(start, 0xff, bytes);
  }
  Exact(Exact&& other) noexcept { *this = std::move(other); }
  Exact& operator=(Exact&& other) noexcept {
    std::swap(block, other.block);
    std::swap(start, other.start);
    std::swap(bytes, other.bytes);
    std::swap(mapped, other.mapped);
    return *this;
  }
  ~Exact() {
#if defined(ROOFTILE_REDZONES)
    std::free(block);
#else
    if (block != nullptr) munmap(block, mapped);
#endif
  }

  unsigned char* data() const { return start; }
  size_t size() const { return bytes; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(start);
  }
  bool operator==(const Exact& other) const { return bytes == other.bytes && (bytes == 0 || std::memcmp(start, other.start, bytes) == 0); }

 private:
  void* block = nullptr;
  unsigned char* start = nullptr;
  size_t bytes = 0, mapped = 0;
};

enum class Layout {
  kContiguous,
  kSequenceFirst,  // (B, L, H, D) in memory
  kOddRows,        // one element of padding behind each row: rows start at any alignment
  kSpread,         // elements three apart
  kReversed,       // every stride negative
  kColumns,        // (B, H, D, L) in memory
};

using Sizes = std::array<int64_t, 4>;

// (B, H, L, D) of a dtype in a layout. Dimensions in `broadcast` (a bit each, 1 for B) have stride 0.
class Tensor {
 public:
  Tensor() = default;
  Tensor(int32_t dtype_, Sizes sizes_, Layout layout = Layout::kContiguous, unsigned broadcast = 0) : dtype(dtype_), sizes(sizes_) {
    std::array<int, 4> inner_first = {3, 2, 1, 0};
    if (layout == Layout::kSequenceFirst) inner_first = {3, 1, 2, 0};
    if (layout == Layout::kColumns) inner_first = {2, 3, 1, 0};
    int64_t pitch = layout == Layout::kSpread ? 3 : 1;
    int64_t last = 0, first = 0;  // offsets from element (0, 0, 0, 0)
    bool empty = false;
    for (int n = 0; n < 4; ++n) {
      const int d = inner_first[static_cast<size_t>(n)];
      const int64_t stored = broadcast >> d & 1 ? 1 : size(d);
      stride[d] = broadcast >> d & 1 ? 0 : layout == Layout::kReversed ? -pitch : pitch;
      pitch *= stored;
      if (n == 0 && layout == Layout::kOddRows) ++pitch;
      (stride[d] < 0 ? first : last) += (stored - 1) * stride[d];
      empty = empty || size(d) == 0;
    }
    origin = -first;
    memory = Exact(empty ? 0 : (last - first + 1) * element_size(dtype));
  }

  int32_t dtype = kFp32;
  Sizes sizes{};
  Exact memory;

  bool present() const { return memory.data() != nullptr; }
  int64_t size(int d) const { return sizes[static_cast<size_t>(d)]; }
  int64_t count() const { return size(0) * size(1) * size(2) * size(3); }
  TensorView view() const {
    if (!present()) return {};
    return {memory.data() + origin * element_size(dtype), {stride[0], stride[1], stride[2], stride[3]}};
  }
  int64_t index(int64_t b, int64_t h, int64_t i, int64_t d) const {  // of an element in its memory
    return origin + b * stride[0] + h * stride[1] + i * stride[2] + d * stride[3];
  }
  double get(int64_t b, int64_t h, int64_t i, int64_t d) const { return decode(at(b, h, i, d), dtype); }
  void set(int64_t b, int64_t h, int64_t i, int64_t d, double x) { encode(at(b, h, i, d), dtype, x); }

  template <typename Make>
  void fill(Make make) {
    each([&](int64_t b, int64_t h, int64_t i, int64_t d) { set(b, h, i, d, make()); });
  }
  // Contiguous, in double precision.
  std::vector<double> values() const {
    std::vector<double> out;
    out.reserve(static_cast<size_t>(count()));
    each([&](int64_t b, int64_t h, int64_t i, int64_t d) { out.push_back(get(b, h, i, d)); });
    return out;
  }
  // Whether nothing was written between the elements.
  bool gaps_untouched() const {
    std::vector<bool> element(memory.size());
    each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
      const int64_t from = at(b, h, i, d) - memory.data();
      for (int64_t n = 0; n < element_size(dtype); ++n) element[static_cast<size_t>(from + n)] = true;
    });
    for (size_t n = 0; n < element.size(); ++n) {
      if (!element[n] && memory.data()[n] != 0xff) return false;
    }
    return true;
  }

 private:
  int64_t stride[4] = {}, origin = 0;

  unsigned char* at(int64_t b, int64_t h, int64_t i, int64_t d) const {
    return memory.data() + index(b, h, i, d) * element_size(dtype);
  }
  template <typename Visit>
  void each(Visit visit) const {
    for (int64_t b = 0; b < size(0); ++b) {
      for (int64_t h = 0; h < size(1); ++h) {
        for (int64_t i = 0; i < size(2); ++i) {
          for (int64_t d = 0; d < size(3); ++d) visit(b, h, i, d);
        }
      }
    }
  }
};

}  // namespace rooftile::test
