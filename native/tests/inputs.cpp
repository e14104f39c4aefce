#include "inputs.h"

#include <algorithm>
#include <cstdio>

namespace rooftile::test {
namespace {

[[noreturn]] void impossible(const Case& c, const char* why) {
  std::printf("the case '%s' is wrong: %s\n", c.name.c_str(), why);
  std::exit(2);
}

void fill_row(Tensor* tensor, int64_t b, int64_t h, int64_t i, double x) {
  for (int64_t d = 0; d < tensor->size(3); ++d) tensor->set(b, h, i, d, x);
}

}  // namespace

Inputs::Inputs(const Case& described, int32_t type, uint64_t seed) : c(described), dtype(type) {
  const Shape& s = c.shape;
  Random random(seed);
  const auto normal = [&] { return random.normal() * c.magnitude; };
  q = Tensor(dtype, {s.batch, s.q_heads, s.q_len, s.head_dim}, c.q_layout);
  k = Tensor(dtype, {s.batch, s.kv_heads, s.kv_len, s.head_dim}, c.kv_layout, c.kv_broadcast);
  v = Tensor(dtype, {s.batch, s.kv_heads, s.kv_len, s.value_dim}, c.kv_layout, c.kv_broadcast);
  dout = Tensor(dtype, {s.batch, s.q_heads, s.q_len, s.value_dim}, c.out_layout);
  for (Tensor* tensor : {&q, &k, &v, &dout}) tensor->fill(normal);

  const Sizes square = {s.batch, s.q_heads, s.q_len, s.kv_len};
  if (c.bias != kAbsent) {
    bias = Tensor(c.bias_dtype, square, Layout::kContiguous, static_cast<unsigned>(c.bias));
    bias.fill([&] { return random.below(9) == 0 ? -INFINITY : random.normal(); });
  }
  if (c.dense != kAbsent) {
    dense = Tensor(kByte, square, Layout::kContiguous, static_cast<unsigned>(c.dense));
    dense.fill([&] { return random.below(3) == 0 ? 0.0 : 1.0 + static_cast<double>(random.below(255)); });
  }
  if (c.sinks) {
    sinks = Exact(s.q_heads * 4);
    for (int64_t h = 0; h < s.q_heads; ++h) sinks.as<float>()[h] = h % 3 == 2 ? -INFINITY : static_cast<float>(random.normal());
  }
  if (c.dlse) {
    dlse = Exact(s.batch * s.q_heads * s.q_len * 4);
    for (size_t n = 0; n < dlse.size() / 4; ++n) dlse.as<float>()[n] = static_cast<float>(normal());
  }
  choose_intervals(&random);
  poison();
  if (c.page_size > 0) store_in_pages(&random);
}

void Inputs::choose_intervals(Random* random) {
  const Shape& s = c.shape;
  if (c.sight == Sight::kAll) return;
  interval_stride = c.shared_intervals ? 0 : s.q_len + 3;  // what lies between two sequences is no interval
  const int64_t sequences = c.shared_intervals ? 1 : s.batch, count = s.q_len == 0 || sequences == 0 ? 0 : (sequences - 1) * interval_stride + s.q_len;
  if (c.sight != Sight::kRagged) lo = Exact(count * 4);
  if (c.sight != Sight::kPrefix) hi = Exact(count * 4);
  for (int64_t b = 0; b < sequences; ++b) {
    for (int64_t i = 0; i < s.q_len; ++i) {
      const auto inside = [&](int64_t j) { return std::clamp<int64_t>(j, 0, s.kv_len); };
      int64_t from = 0, to = inside(s.kv_len - s.q_len + i + 1);
      if (c.sight == Sight::kWindow) from = inside(to - 33);
      if (c.sight == Sight::kPrefix) from = inside(11);
      if (c.sight == Sight::kRagged) to = b == 1 ? 0 : inside(s.kv_len - 9 - 37 * b);
      if (c.sight == Sight::kScattered) {
        const int64_t gap = s.kv_len / 3, behind = inside(gap + 10);
        const bool early = random->below(2) == 0;
        from = early ? random->below(gap + 1) : behind + random->below(s.kv_len - behind + 1);
        to = from + random->below((early ? gap : s.kv_len) - from + 1);
        if (i % 11 == 5) std::swap(from, to);
        if (i % 11 == 7) from = to;
      }
      const int64_t at = b * interval_stride + i;
      if (lo.size() > 0) lo.as<int32_t>()[at] = static_cast<int32_t>(from);
      if (hi.size() > 0) hi.as<int32_t>()[at] = static_cast<int32_t>(to);
    }
  }
}

int64_t Inputs::interval(const Exact& of, int64_t b, int64_t i, int64_t otherwise) const {
  return of.size() == 0 ? otherwise : of.as<int32_t>()[b * interval_stride + i];
}

bool Inputs::sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
  if (j < interval(lo, b, i, 0) || j >= interval(hi, b, i, c.shape.kv_len)) return false;
  if (dense.present() && dense.get(b, h, i, j) == 0.0) return false;
  return !bias.present() || bias.get(b, h, i, j) != -INFINITY;
}

void Inputs::poison() {
  const Shape& s = c.shape;
  const int64_t group = s.q_heads / s.kv_heads;
  int64_t poisoned = 0;
  if (c.nan_in_last_value) {
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t h = 0; h < s.kv_heads; ++h) v.set(b, h, s.kv_len - 1, 0, NAN);
    }
  }
  for (int64_t b = 0; c.nan_in_unseen_keys && b < s.batch; ++b) {
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      for (int64_t j = 0; j < s.kv_len; ++j) {
        bool seen = false;
        for (int64_t row = 0; row < group * s.q_len; ++row) seen = seen || sees(b, h * group + row / s.q_len, row % s.q_len, j);
        if (seen) continue;
        ++poisoned;
        fill_row(&k, b, h, j, j % 2 == 0 ? NAN : INFINITY);
        fill_row(&v, b, h, j, j % 3 == 0 ? NAN : -INFINITY);
      }
    }
  }
  for (int64_t b = 0; c.nan_in_blind_queries && b < s.batch; ++b) {
    for (int64_t row = 0; row < s.q_heads * s.q_len; ++row) {
      bool sees_any = false;
      for (int64_t j = 0; j < s.kv_len; ++j) sees_any = sees_any || sees(b, row / s.q_len, row % s.q_len, j);
      if (sees_any) continue;
      ++poisoned;
      fill_row(&q, b, row / s.q_len, row % s.q_len, NAN);
      fill_row(&dout, b, row / s.q_len, row % s.q_len, INFINITY);
    }
  }
  if ((c.nan_in_unseen_keys || c.nan_in_blind_queries) && poisoned == 0) impossible(c, "nothing in it is hidden");
}

// Pages in any order; one more page, of NaN, stands in the table wherever no row of the sequence sees a key.
void Inputs::store_in_pages(Random* random) {
  const Shape& s = c.shape;
  const int64_t size = c.page_size, per_sequence = (s.kv_len + size - 1) / size, pages = s.batch * per_sequence + 1;
  k_pages = Tensor(dtype, {pages, s.kv_heads, size, s.head_dim}, c.kv_layout);
  v_pages = Tensor(dtype, {pages, s.kv_heads, size, s.value_dim}, c.kv_layout);
  pages_stride = per_sequence + 1;
  table = Exact(((s.batch - 1) * pages_stride + per_sequence) * 4);
  std::vector<int32_t> free(static_cast<size_t>(pages));
  for (size_t n = 0; n < free.size(); ++n) free[n] = static_cast<int32_t>(n);
  for (size_t n = free.size() - 1; n > 0; --n) std::swap(free[n], free[static_cast<size_t>(random->below(static_cast<int64_t>(n) + 1))]);
  const int32_t nan_page = free.back();
  free.pop_back();
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t n = 0; n < per_sequence; ++n) {
      bool seen = false;
      for (int64_t j = n * size; j < std::min((n + 1) * size, s.kv_len); ++j) {
        for (int64_t row = 0; row < s.q_heads * s.q_len; ++row) seen = seen || sees(b, row / s.q_len, row % s.q_len, j);
      }
      const int32_t page = seen ? free.back() : nan_page;
      table.as<int32_t>()[b * pages_stride + n] = page;
      if (!seen) continue;
      free.pop_back();
      for (int64_t j = n * size; j < std::min((n + 1) * size, s.kv_len); ++j) {
        for (int64_t h = 0; h < s.kv_heads; ++h) {
          for (int64_t d = 0; d < s.head_dim; ++d) k_pages.set(page, h, j % size, d, k.get(b, h, j, d));
          for (int64_t d = 0; d < s.value_dim; ++d) v_pages.set(page, h, j % size, d, v.get(b, h, j, d));
        }
      }
    }
  }
}

uint32_t Inputs::drop_below() const { return static_cast<uint32_t>(std::nearbyint(std::ldexp(static_cast<double>(c.dropout), 32))); }

Outputs Inputs::outputs() const {
  const Shape& s = c.shape;
  return {Tensor(c.fp32_out ? kFp32 : dtype, {s.batch, s.q_heads, s.q_len, s.value_dim}, c.out_layout),
          Exact(c.lse_wanted ? s.batch * s.q_heads * s.q_len * 4 : 0)};
}

Gradients Inputs::gradients() const {
  const Shape& s = c.shape;
  Gradients to;
  if (c.wanted[0]) to.dq = Tensor(dtype, q.sizes, c.q_layout);
  if (c.wanted[1]) to.dk = Tensor(dtype, k.sizes, c.kv_layout);
  if (c.wanted[2]) to.dv = Tensor(dtype, v.sizes, c.kv_layout);
  if (c.bias != kAbsent && c.bias_gradient) {
    to.dbias = Tensor(kFp32, {s.batch, s.q_heads, s.q_len, s.kv_len}, Layout::kContiguous, static_cast<unsigned>(c.bias));
    for (size_t n = 0; n < to.dbias.memory.size() / 4; ++n) to.dbias.memory.as<float>()[n] = static_cast<float>(initial_dbias(static_cast<int64_t>(n)));
  }
  return to;
}

AttentionProblem Inputs::problem(const Outputs& to, int32_t path, int32_t threads) const {
  const Shape& s = c.shape;
  AttentionProblem p{};
  p.batch = s.batch, p.q_heads = s.q_heads, p.kv_heads = s.kv_heads, p.q_len = s.q_len, p.kv_len = s.kv_len;
  p.head_dim = s.head_dim, p.value_dim = s.value_dim;
  p.dtype = dtype, p.out_dtype = to.out.dtype, p.bias_dtype = c.bias_dtype;
  p.path = path, p.threads = threads;
  p.drop_below = drop_below(), p.seed = dropout_seed, p.keep_scale = keep_scale();
  p.scale = c.scale, p.softcap = c.softcap;
  p.page_size = static_cast<int32_t>(c.page_size), p.pages = table.as<int32_t>(), p.pages_stride = pages_stride;
  p.q = q.view(), p.k = c.page_size > 0 ? k_pages.view() : k.view(), p.v = c.page_size > 0 ? v_pages.view() : v.view();
  p.out = to.out.view(), p.lse = to.lse.as<float>();
  p.lo = lo.as<int32_t>(), p.hi = hi.as<int32_t>(), p.interval_stride = interval_stride;
  p.dense = dense.view(), p.bias = bias.view(), p.sinks = sinks.as<float>();
  return p;
}

AttentionGradients Inputs::wanted(const Gradients& to) const {
  return {dout.view(), dlse.as<float>(), to.dq.view(), to.dk.view(), to.dv.view(), to.dbias.view()};
}

}  // namespace rooftile::test
