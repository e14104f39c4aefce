// Online softmax of one tile of scores [key][lane]: the running maximum m, the row sum l and the factor that older sums shrink by.
//
// Milakov & Gimelshein (2018); FlashAttention Algorithm 1 (Dao et al. 2022). Lanes are queries, so nothing here is horizontal.
#pragma once

#include "attention_gemm.h"
#include "attention_lanes.h"

namespace rooftile {
namespace ROOFTILE_ISA {

constexpr int kStripe = W == 16 ? 4 : 1;  // vectors of lanes in flight: enough independent chains for the latency of an FMA

// tanh to about 2 ulps: an odd polynomial where 1 - 2 / (e^2x + 1) would cancel, that formula elsewhere.
ROOFTILE_INLINE Vf tanh_lanes(Vf x) {
  const Vf magnitude = (Vf)((Vu)x & set1(0x7fffffffu));
  const Vf bounded = select((Vu)(magnitude > set1(10.0f)), set1(10.0f), magnitude);
  const Vf e = exp2_lanes(bounded * set1(2.0f * kLog2E));
  const Vf large = set1(1.0f) - set1(2.0f) / (e + set1(1.0f));
  const Vf z = magnitude * magnitude;  // Cephes' rational form of tanh below 0.625
  Vf q = fma(set1(-5.70498872745e-3f), z, set1(2.06390887954e-2f));
  q = fma(q, z, set1(-5.37397155531e-2f));
  q = fma(q, z, set1(1.33314422036e-1f));
  q = fma(q, z, set1(-3.33332819422e-1f));
  const Vf small = fma(q * z, magnitude, magnitude);
  const Vf y = select((Vu)(magnitude < set1(0.625f)), small, large);
  return (Vf)((Vu)select((Vu)(x != x), x, y) | ((Vu)x & set1(0x80000000u)));
}

// Scores as the definition has them, where they are more than scale * x: softcap, then bias.
inline void cap_and_bias(const AttentionProblem& p, int vecs, int64_t keys, float* s, const float* bias) {
  const Vf scale = set1(p.scale);
  for (int64_t k = 0; k < keys; ++k) {
    for (int n = 0; n < vecs; ++n) {
      float* at = s + k * kLanes + n * W;
      Vf x = load(at) * scale;
      if (p.softcap > 0.0f) x = set1(p.softcap) * tanh_lanes(x / set1(p.softcap));
      if (bias != nullptr) x = x + load(bias + k * kLanes + n * W);
      store(at, x);
    }
  }
}

// New maximum of the stripe's lanes; hidden scores become -inf.
template <int Vecs, bool Masked>
ROOFTILE_INLINE void stripe_maximum(int64_t keys, float* s, const uint32_t* visible, Vf m[Vecs]) {
  for (int64_t k = 0; k < keys; ++k) {
    for (int n = 0; n < Vecs; ++n) {
      Vf x = load(s + k * kLanes + n * W);
      if (Masked) {
        x = select(load(visible + k * kLanes + n * W), x, set1(-kInfinity));
        store(s + k * kLanes + n * W, x);
      }
      m[n] = max_or_second(x, m[n]);
    }
  }
}

// m and the factor of the older sums, before the tile's probabilities are taken. `c` turns a score into an exponent of 2.
template <int Vecs>
ROOFTILE_INLINE void shift_maximum(const Vf m[Vecs], float c, float* running, float* factor, Vf shift[Vecs]) {
  for (int n = 0; n < Vecs; ++n) {
    const Vf old = load(running + n * W);
    shift[n] = select((Vu)(m[n] == set1(-kInfinity)), Vf{}, m[n]);  // a lane that has seen nothing: -inf - 0, not -inf - -inf
    store(factor + n * W, exp2_lanes((old - shift[n]) * set1(c)));
    store(running + n * W, m[n]);
  }
}

// fp32 probabilities in place of the scores. The row sum adds them in the order in which the product with V will: with V = 1 both
// are the same number, bit by bit.
template <int Vecs, bool Masked>
ROOFTILE_INLINE void softmax_stripe_fp32(int64_t keys, float c, float* s, const uint32_t* visible, float* running, float* l, float* factor) {
  Vf m[Vecs], shift[Vecs], sum[Vecs] = {};
  for (int n = 0; n < Vecs; ++n) m[n] = load(running + n * W);
  stripe_maximum<Vecs, Masked>(keys, s, visible, m);
  shift_maximum<Vecs>(m, c, running, factor, shift);
  for (int64_t k = 0; k < keys; ++k) {
    for (int n = 0; n < Vecs; ++n) {
      const Vf p = exp2_lanes((load(s + k * kLanes + n * W) - shift[n]) * set1(c));
      store(s + k * kLanes + n * W, p);
      sum[n] = sum[n] + p;
    }
  }
  for (int n = 0; n < Vecs; ++n) store(l + n * W, fma(load(l + n * W), load(factor + n * W), sum[n]));
}

template <bool Masked>
ROOFTILE_NOINLINE void softmax_fp32(int vecs, int64_t keys, float c, float* s, const uint32_t* visible, float* m, float* l, float* factor) {
  int n = 0;
  for (; n + kStripe <= vecs; n += kStripe) {
    softmax_stripe_fp32<kStripe, Masked>(keys, c, s + n * W, visible + n * W, m + n * W, l + n * W, factor + n * W);
  }
  for (; n < vecs; ++n) {
    softmax_stripe_fp32<1, Masked>(keys, c, s + n * W, visible + n * W, m + n * W, l + n * W, factor + n * W);
  }
}

// The sink: one more key with this score and no value. O shrinks by `shrink`.
inline void add_sink(float sink, float* lse, float* shrink) {
  if (sink == -kInfinity) return;
  if (*lse == -kInfinity) {
    *lse = sink;
    return;
  }
  const float top = *lse > sink ? *lse : sink;
  const float total = top + std::log(std::exp(*lse - top) + std::exp(sink - top));
  *shrink = std::exp(*lse - total);
  *lse = total;
}

}  // namespace ROOFTILE_ISA
}  // namespace rooftile
