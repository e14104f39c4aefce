#include "reference.h"

namespace rooftile::test {
namespace {

constexpr double kUnit = 0x1p-24;  // of the sums

// How often a sum in fp32 rounds what enters it first: a chain at every step; tiles of 32 up to 17 times and once for each tile, and
// their products may have an error of their own.
double roundings(int64_t count) { return std::fmax(static_cast<double>(count + 3), static_cast<double>(count / 32 + 22)); }

// sum of a[n] * b[n], and the bound that an fp32 sum of it has.
struct Dot {
  double value = 0.0, error = 0.0;
  Dot(const double* a, const double* b, int64_t count) {
    for (int64_t n = 0; n < count; ++n) {
      value += a[n] * b[n];
      error += std::fabs(a[n] * b[n]);
    }
    error *= kUnit * roundings(count);
  }
};

struct Score {
  int64_t key;
  double value, error;
  double slope, slope_error;  // of the softcap
  double kept;                // 1 / (1 - dropout), or 0 where the pair is dropped
};

class Reference {
 public:
  Reference(const Inputs& inputs, const Arithmetic& rounding)
      : in(inputs), c(inputs.c), s(inputs.c.shape), a(rounding), q(inputs.q.values()), k(inputs.k.values()), v(inputs.v.values()),
        dout(inputs.dout.values()) {
    const int64_t rows = s.batch * s.q_heads * s.q_len, keys = s.batch * s.kv_heads * s.kv_len;
    to.out = Numbers(rows * s.value_dim);
    to.lse = Numbers(rows);
    to.dq = Numbers(rows * s.head_dim);
    to.dk = Numbers(keys * s.head_dim);
    to.dv = Numbers(keys * s.value_dim);
    if (in.bias.present()) {
      to.dbias = Numbers(static_cast<int64_t>(in.bias.memory.size()) / element_size(in.bias.dtype));
      for (int64_t n = 0; n < static_cast<int64_t>(to.dbias.value.size()); ++n) to.dbias.add(n, in.initial_dbias(n), 0.0);
    }
    sums = kUnit * roundings(s.kv_len);
    row_sums = kUnit * roundings(rows);
  }

  Expected run() {
    for (int64_t b = 0; b < s.batch; ++b) {
      for (int64_t h = 0; h < s.q_heads; ++h) {
        for (int64_t i = 0; i < s.q_len; ++i) {
          look(b, h, i);
          forward(h);
          if (!scores.empty()) backward(b, h, i);
        }
      }
    }
    const int32_t out_dtype = c.fp32_out ? kFp32 : in.dtype;
    store(&to.out, out_dtype);
    store(&to.lse, kFp32);
    for (Numbers* gradient : {&to.dq, &to.dk, &to.dv}) store(gradient, in.dtype);
    store(&to.dbias, kFp32);
    return to;
  }

 private:
  const Inputs& in;
  const Case& c;
  const Shape& s;
  const Arithmetic a;
  const std::vector<double> q, k, v, dout;
  double sums, row_sums;
  Expected to;
  int64_t row = 0, head = 0;  // the row, and the first row of its keys
  std::vector<Score> scores;  // of the pairs that are seen

  static void store(Numbers* numbers, int32_t dtype) {
    for (size_t n = 0; n < numbers->value.size(); ++n) {
      numbers->error[n] += unit_roundoff(dtype) * (std::fabs(numbers->value[n]) + numbers->error[n]) + smallest_error(dtype);
    }
  }

  void look(int64_t b, int64_t h, int64_t i) {
    row = (b * s.q_heads + h) * s.q_len + i;
    head = (b * s.kv_heads + h / (s.q_heads / s.kv_heads)) * s.kv_len;
    scores.clear();
    for (int64_t j = 0; j < s.kv_len; ++j) {
      if (!in.sees(b, h, i, j)) continue;
      const Dot product(q.data() + row * s.head_dim, k.data() + (head + j) * s.head_dim, s.head_dim);
      const double scale = c.scale, cap = c.softcap;
      Score score{j, scale * product.value, std::fabs(scale) * product.error, 1.0, 0.0, in.keep_scale()};
      if (cap > 0.0) {
        const double t = std::tanh(score.value / cap);
        score.slope = 1.0 - t * t;
        score.slope_error = 1e-6 + 0.8 * score.error / cap;  // 0.77: the steepest that the slope itself gets
        score.value = cap * t;
        score.error += 4e-7 * cap;
      }
      if (in.bias.present()) {
        const double bias = in.bias.get(b, h, i, j);
        score.value += bias;
        score.error += kUnit * (std::fabs(score.value) + std::fabs(bias));
      }
      if (c.dropout > 0.0f && dropout_bits(in.dropout_seed, b * s.q_heads + h, i, j) < in.drop_below()) score.kept = 0.0;
      scores.push_back(score);
    }
  }

  void forward(int64_t h) {
    double top = -INFINITY, worst = 0.0;
    for (const Score& score : scores) {
      top = std::fmax(top, score.value);
      worst = std::fmax(worst, score.error);
    }
    double total = 0.0, spread = 0.0;
    for (const Score& score : scores) {
      const double p = std::exp(score.value - top);
      total += p;
      if (p > 0.0) spread += p * 3.0 * kUnit * (top - score.value);  // exponents are rounded in proportion to their size
    }
    double lse = scores.empty() ? -INFINITY : top + std::log(total);
    const double common = worst + spread / std::fmax(total, 1.0) + sums + a.probability + a.exponential * (static_cast<double>(s.kv_len) / 64 + 4);
    double lse_error = scores.empty() ? 0.0 : common + 4.0 * kUnit * (std::fabs(top) + std::fabs(lse)), sink_error = 0.0;
    if (c.sinks && in.sinks.as<float>()[h] != -INFINITY) {
      const double sink = in.sinks.as<float>()[h], with_sink = scores.empty() ? sink : std::fmax(lse, sink) + std::log1p(std::exp(-std::fabs(lse - sink)));
      lse_error += 4.0 * kUnit * (1.0 + std::fabs(sink) + std::fabs(with_sink));
      sink_error = 2.0 * lse_error;
      lse = with_sink;
    }
    to.lse.add(row, lse, lse_error);
    for (const Score& score : scores) {
      const double p = std::exp(score.value - lse);
      const double relative = std::expm1(worst + common + 3.0 * kUnit * (top - score.value) + a.probability + sums + sink_error + 4.0 * kUnit);
      for (int64_t d = 0; d < s.value_dim && score.kept != 0.0; ++d) {
        const double term = p * score.kept * v[static_cast<size_t>((head + score.key) * s.value_dim + d)];
        to.out.add(row * s.value_dim + d, term, std::fabs(term) * relative);
      }
    }
  }

  void backward(int64_t b, int64_t h, int64_t i) {
    const double lse = to.lse.value[static_cast<size_t>(row)], lse_error = to.lse.error[static_cast<size_t>(row)];
    const double* const dout_row = dout.data() + row * s.value_dim;
    const Dot own(dout_row, to.out.value.data() + row * s.value_dim, s.value_dim);
    double d_row = own.value, d_error = own.error;
    const double out_unit = unit_roundoff(c.fp32_out ? kFp32 : in.dtype), out_floor = smallest_error(c.fp32_out ? kFp32 : in.dtype);
    for (int64_t d = 0; d < s.value_dim; ++d) {  // O is read back as it was stored
      const size_t at = static_cast<size_t>(row * s.value_dim + d);
      d_error += std::fabs(dout_row[d]) * (to.out.error[at] + out_unit * std::fabs(to.out.value[at]) + out_floor);
    }
    if (c.dlse) {
      const double dlse = in.dlse.as<float>()[row];
      d_row -= dlse;
      d_error += kUnit * std::fabs(dlse);
    }
    for (const Score& score : scores) {
      const int64_t key = head + score.key;
      const Dot dp(dout_row, v.data() + key * s.value_dim, s.value_dim);
      const double p = std::exp(score.value - lse);
      const double p_error = std::expm1(score.error + lse_error + 4.0 * kUnit * (std::fabs(score.value) + std::fabs(lse)) + a.exponential);
      const double used = score.kept == 0.0 ? 0.0 : p * score.kept;
      const double given = score.kept == 0.0 ? 0.0 : score.kept * dp.value, given_error = score.kept * dp.error;
      const double size = std::fabs(given) + std::fabs(d_row);
      double ds = p * (given - d_row);
      double ds_error = p * ((given_error + d_error) * (1.0 + p_error) + (p_error + 5.0 * kUnit) * size);
      if (in.bias.present()) to.dbias.add(in.bias.index(b, h, i, score.key), ds, ds_error + row_sums * std::fabs(ds));
      ds_error = ds_error * (score.slope + score.slope_error) + std::fabs(ds) * score.slope_error;
      ds *= score.slope;
      const double sum_error = ds_error + (a.probability + sums + row_sums) * std::fabs(ds), scale = c.scale;
      for (int64_t d = 0; d < s.head_dim; ++d) {
        const double qd = q[static_cast<size_t>(row * s.head_dim + d)], kd = k[static_cast<size_t>(key * s.head_dim + d)];
        to.dq.add(row * s.head_dim + d, scale * ds * kd, std::fabs(scale * kd) * sum_error);
        to.dk.add(key * s.head_dim + d, scale * ds * qd, std::fabs(scale * qd) * sum_error);
      }
      for (int64_t d = 0; d < s.value_dim; ++d) {
        to.dv.add(key * s.value_dim + d, used * dout_row[d], std::fabs(used * dout_row[d]) * (p_error + a.probability + row_sums));
      }
    }
  }
};

}  // namespace

Expected expected_of(const Inputs& inputs, const Arithmetic& arithmetic) { return Reference(inputs, arithmetic).run(); }

}  // namespace rooftile::test
