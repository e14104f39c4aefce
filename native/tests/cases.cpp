#include "cases.h"

namespace rooftile::test {
namespace {

class Cases {
 public:
  void add(const char* name, Shape shape) {
    list.emplace_back();
    list.back().name = name;
    list.back().shape = shape;
  }
  template <typename Change>
  void add(const char* name, Shape shape, Change change) {
    add(name, shape);
    change(list.back());
  }
  std::vector<Case> list;
};

void add_shapes(Cases& cases) {
  cases.add("one of everything", {1, 1, 1, 1, 1, 1, 1});
  // Tiles: 64 queries, 96 or 128 keys forward, 64 and 256 backward.
  const int64_t lengths[][2] = {{63, 95}, {64, 96}, {65, 97}, {17, 127}, {3, 128}, {66, 129}, {18, 255}, {31, 257}, {128, 64}, {129, 63}, {33, 65}, {127, 31}};
  for (const auto& l : lengths) cases.add("tile edges", {1, 2, 2, l[0], l[1], 8, 8});
  const int64_t dims[][2] = {{1, 3}, {3, 1}, {7, 17}, {16, 15}, {31, 33}, {65, 64}, {80, 96}, {128, 127}, {257, 40}, {24, 500}, {512, 512}, {511, 509}};
  for (const auto& d : dims) cases.add("head dims", {1, 1, 1, 18, 21, d[0], d[1]});
  cases.add("rows enough for tasks of 256", {2, 4, 4, 290, 24, 8, 8}, [](Case& c) { c.sight = Sight::kCausal; });
  cases.add("keys split into parts", {1, 2, 1, 20, 700, 9, 6}, [](Case& c) { c.sight = Sight::kCausal; });
  cases.add("two parts for each of many heads", {3, 2, 2, 20, 530, 4, 6}, [](Case& c) { c.sight = Sight::kRagged; });
  cases.add("scratch too large to keep", {1, 32, 1, 65, 2, 512, 1}, [](Case& c) { c.every_dtype = false; });
  cases.add("grouped heads, a pass for each", {2, 6, 2, 66, 70, 16, 8});
  cases.add("grouped heads packed", {2, 6, 2, 20, 130, 16, 24});
  cases.add("grouped heads packed across lane groups", {1, 8, 1, 23, 70, 8, 8}, [](Case& c) { c.sight = Sight::kCausal; });
}

void add_empty(Cases& cases) {
  cases.add("no queries", {2, 2, 1, 0, 5, 8, 8});
  cases.add("no keys", {2, 2, 1, 5, 0, 8, 8});
  cases.add("no keys, sinks", {2, 2, 2, 70, 0, 8, 8}, [](Case& c) { c.sinks = true; });
  cases.add("no keys, intervals", {2, 2, 2, 5, 0, 8, 8}, [](Case& c) { c.sight = Sight::kScattered; });
  cases.add("no batch", {0, 2, 1, 5, 5, 8, 8});
  cases.add("no query heads", {2, 0, 1, 5, 5, 8, 8});
  cases.add("no head dim", {1, 2, 2, 20, 30, 0, 8});
  cases.add("no value dim", {1, 2, 2, 20, 30, 8, 0});
}

void add_masks(Cases& cases) {
  cases.add("causal", {1, 2, 1, 130, 130, 8, 8}, [](Case& c) { c.sight = Sight::kCausal; });
  cases.add("causal, more keys", {1, 2, 2, 70, 300, 8, 8}, [](Case& c) { c.sight = Sight::kCausal; });
  cases.add("causal, more queries", {1, 2, 2, 140, 60, 8, 8}, [](Case& c) { c.sight = Sight::kCausal, c.shared_intervals = true; });
  cases.add("window", {1, 2, 2, 200, 270, 8, 8}, [](Case& c) { c.sight = Sight::kWindow; });
  cases.add("ragged", {4, 2, 1, 20, 140, 8, 8}, [](Case& c) { c.sight = Sight::kRagged, c.sinks = true; });
  cases.add("prefix hidden", {2, 2, 2, 70, 140, 8, 8}, [](Case& c) { c.sight = Sight::kPrefix, c.shared_intervals = true; });
  cases.add("scattered intervals", {2, 2, 1, 20, 300, 8, 8}, [](Case& c) { c.sight = Sight::kScattered, c.sinks = true; });
  cases.add("dense", {2, 4, 2, 20, 100, 8, 8}, [](Case& c) { c.dense = 0; });
  cases.add("dense over heads and rows", {2, 2, 2, 66, 100, 8, 8}, [](Case& c) { c.dense = kOverHeads | kOverRows; });
  cases.add("dense over batch and keys", {2, 2, 2, 66, 100, 8, 8}, [](Case& c) { c.dense = kOverBatch | kOverKeys; });
  cases.add("dense and window", {1, 2, 2, 66, 200, 8, 8}, [](Case& c) { c.dense = kOverHeads, c.sight = Sight::kWindow; });
}

void add_scores(Cases& cases) {
  cases.add("bias", {2, 4, 2, 20, 100, 8, 8}, [](Case& c) { c.bias = 0; });
  cases.add("bias over batch", {2, 2, 2, 66, 70, 8, 8}, [](Case& c) { c.bias = kOverBatch, c.bias_dtype = kBf16; });
  cases.add("bias over heads", {2, 4, 2, 66, 70, 8, 8}, [](Case& c) { c.bias = kOverHeads, c.bias_dtype = kFp16; });
  cases.add("bias over rows", {2, 4, 2, 20, 300, 8, 8}, [](Case& c) { c.bias = kOverBatch | kOverHeads | kOverRows; });
  cases.add("bias over keys", {1, 2, 2, 20, 600, 8, 8}, [](Case& c) { c.bias = kOverHeads | kOverKeys; });
  cases.add("bias over everything", {2, 2, 1, 20, 300, 8, 8}, [](Case& c) { c.bias = 15; });
  cases.add("bias, causal, its gradient unwanted", {1, 2, 1, 70, 70, 8, 8}, [](Case& c) {
    c.bias = 0, c.sight = Sight::kCausal, c.bias_gradient = false;
  });
  cases.add("softcap", {1, 2, 2, 66, 100, 16, 8}, [](Case& c) { c.softcap = 1.5f, c.magnitude = 2.0; });
  cases.add("softcap, bias, causal", {1, 4, 2, 20, 100, 16, 8}, [](Case& c) {
    c.softcap = 2.5f, c.bias = kOverBatch, c.sight = Sight::kCausal;
  });
  cases.add("negative scale", {1, 2, 2, 20, 100, 16, 8}, [](Case& c) { c.scale = -0.3f; });
  cases.add("scale of zero", {1, 2, 2, 20, 100, 16, 8}, [](Case& c) { c.scale = 0.0f; });
  cases.add("sinks", {2, 4, 2, 66, 100, 8, 8}, [](Case& c) { c.sinks = true; });
  cases.add("logits of thousands", {1, 2, 2, 66, 150, 16, 8}, [](Case& c) { c.scale = 100.0f, c.magnitude = 3.0; });
  cases.add("numbers below the smallest normal fp16", {1, 2, 2, 20, 40, 16, 20}, [](Case& c) { c.magnitude = 0x1p-16, c.scale = 0x1p26f; });
  cases.add("dropout", {2, 2, 2, 66, 101, 8, 8}, [](Case& c) { c.dropout = 0.3f; });
  cases.add("dropout, window, grouped", {2, 4, 2, 20, 150, 8, 8}, [](Case& c) { c.dropout = 0.5f, c.sight = Sight::kWindow; });
  cases.add("dropout, softcap, bias, dense, sinks", {1, 4, 2, 20, 75, 8, 8}, [](Case& c) {
    c.dropout = 0.1f, c.softcap = 3.0f, c.bias = 0, c.dense = kOverHeads, c.sinks = true;
  });
}

void add_memory(Cases& cases) {
  const std::pair<const char*, Layout> layouts[] = {
      {"layout: sequence first", Layout::kSequenceFirst}, {"layout: odd rows", Layout::kOddRows}, {"layout: spread", Layout::kSpread},
      {"layout: reversed", Layout::kReversed},            {"layout: columns", Layout::kColumns}};
  for (const auto& [name, layout] : layouts) {
    const Layout here = layout;
    cases.add(name, {2, 4, 2, 19, 101, 32, 34}, [here](Case& c) { c.q_layout = c.kv_layout = c.out_layout = here, c.sight = Sight::kRagged; });
  }
  cases.add("keys shared by heads and sequences", {2, 4, 2, 20, 70, 8, 8}, [](Case& c) { c.kv_broadcast = kOverBatch | kOverHeads; });
  cases.add("one key repeated", {1, 2, 2, 20, 70, 8, 8}, [](Case& c) { c.kv_broadcast = kOverRows; });
  cases.add("fp32 out", {1, 2, 2, 66, 70, 16, 21}, [](Case& c) { c.fp32_out = true, c.sight = Sight::kCausal; });
  cases.add("no LSE wanted", {1, 2, 2, 66, 70, 8, 8}, [](Case& c) { c.lse_wanted = false; });
  cases.add("no gradient from the LSE, only dq", {1, 2, 2, 20, 300, 8, 8}, [](Case& c) { c.dlse = false, c.wanted = {true, false, false}; });
  cases.add("only dk", {1, 2, 2, 20, 300, 8, 8}, [](Case& c) { c.wanted = {false, true, false}; });
  cases.add("only dv", {1, 2, 2, 20, 300, 8, 8}, [](Case& c) { c.wanted = {false, false, true}; });
  for (const int64_t size : {1, 5, 16, 64}) {
    cases.add("pages", {3, 4, 2, 20, 150, 16, 8}, [size](Case& c) { c.page_size = size, c.sight = Sight::kRagged; });
  }
  cases.add("pages, windows", {2, 2, 2, 66, 300, 7, 9}, [](Case& c) {
    c.page_size = 32, c.sight = Sight::kWindow, c.kv_layout = Layout::kSequenceFirst;
  });
}

void add_not_finite(Cases& cases) {
  const auto unseen = [](Case& c) { c.nan_in_unseen_keys = true; };
  cases.add("NaN behind ragged lengths", {4, 2, 1, 20, 140, 8, 8}, [&](Case& c) { unseen(c), c.sight = Sight::kRagged; });
  cases.add("NaN before a window", {1, 2, 2, 66, 200, 8, 8}, [&](Case& c) { unseen(c), c.sight = Sight::kPrefix; });
  cases.add("NaN between intervals", {2, 2, 2, 20, 300, 8, 8}, [&](Case& c) { unseen(c), c.sight = Sight::kScattered; });
  cases.add("NaN behind a dense mask", {2, 2, 2, 66, 150, 8, 8}, [&](Case& c) { unseen(c), c.dense = kOverRows; });
  cases.add("NaN behind a dense mask, dropout", {1, 2, 2, 66, 150, 8, 8}, [&](Case& c) { unseen(c), c.dense = kOverRows, c.dropout = 0.2f; });
  cases.add("NaN behind a bias", {1, 4, 2, 20, 150, 8, 8}, [&](Case& c) { unseen(c), c.bias = kOverRows; });
  cases.add("NaN in a value of one row", {1, 2, 2, 66, 150, 8, 8}, [](Case& c) { c.sight = Sight::kCausal, c.nan_in_last_value = true; });
  cases.add("NaN in rows that see nothing", {2, 2, 2, 66, 70, 8, 8}, [](Case& c) {
    c.sight = Sight::kScattered, c.nan_in_blind_queries = true;
  });
  cases.add("NaN in pages", {3, 4, 2, 20, 150, 16, 8}, [&](Case& c) { unseen(c), c.page_size = 16, c.sight = Sight::kRagged; });
}

// Few query rows: forward, they go another way than the tiles.
void add_decode(Cases& cases) {
  const size_t before = cases.list.size();
  cases.add("decode", {2, 8, 2, 1, 1100, 32, 16});
  cases.add("decode, one head, many keys", {1, 1, 1, 1, 4200, 16, 16});
  cases.add("decode, three rows, odd dims", {2, 3, 1, 1, 600, 37, 21}, [](Case& c) { c.sight = Sight::kRagged, c.sinks = true; });
  cases.add("decode, sixteen rows, causal", {1, 8, 1, 2, 700, 64, 40}, [](Case& c) { c.sight = Sight::kCausal; });
  cases.add("decode, fifteen rows, window", {1, 3, 1, 5, 530, 16, 128}, [](Case& c) { c.sight = Sight::kWindow; });
  cases.add("decode, scattered intervals", {3, 4, 2, 3, 520, 16, 16}, [](Case& c) { c.sight = Sight::kScattered, c.fp32_out = true; });
  cases.add("decode, dense, bias, softcap", {2, 4, 2, 2, 300, 16, 16}, [](Case& c) {
    c.dense = kOverBatch, c.bias = kOverHeads, c.bias_dtype = kBf16, c.softcap = 2.0f;
  });
  cases.add("decode, negative scale", {1, 2, 1, 1, 260, 512, 512}, [](Case& c) { c.scale = -0.05f; });
  cases.add("decode, spread", {2, 4, 2, 1, 300, 32, 16}, [](Case& c) { c.q_layout = c.kv_layout = c.out_layout = Layout::kSpread; });
  cases.add("decode, reversed", {2, 4, 2, 1, 300, 32, 16}, [](Case& c) { c.q_layout = c.kv_layout = c.out_layout = Layout::kReversed; });
  cases.add("decode, odd rows", {2, 4, 2, 1, 300, 32, 16}, [](Case& c) { c.kv_layout = Layout::kOddRows; });
  cases.add("decode, keys shared by sequences", {2, 4, 2, 1, 300, 32, 16}, [](Case& c) { c.kv_broadcast = kOverBatch | kOverHeads; });
  cases.add("decode, pages", {3, 4, 2, 1, 600, 32, 16}, [](Case& c) { c.page_size = 16, c.sight = Sight::kRagged; });
  cases.add("decode, pages of 5, NaN", {3, 4, 2, 2, 300, 7, 5}, [](Case& c) {
    c.page_size = 5, c.sight = Sight::kRagged, c.nan_in_unseen_keys = true;
  });
  cases.add("decode, NaN behind a dense mask", {1, 4, 1, 2, 520, 16, 32}, [](Case& c) { c.dense = kOverRows, c.nan_in_unseen_keys = true; });
  cases.add("decode, NaN in a value of one row", {1, 2, 1, 4, 300, 16, 16}, [](Case& c) {
    c.sight = Sight::kCausal, c.nan_in_last_value = true;
  });
  for (size_t n = before; n < cases.list.size(); ++n) cases.list[n].backward = n % 4 == 0;
}

}  // namespace

std::vector<Case> all_cases() {
  Cases cases;
  add_shapes(cases);
  add_empty(cases);
  add_masks(cases);
  add_scores(cases);
  add_memory(cases);
  add_not_finite(cases);
  add_decode(cases);
  return cases.list;
}

}  // namespace rooftile::test
