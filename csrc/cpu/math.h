// exp, erf and the activations on vectors. Single precision: polynomials, about 1 ulp (exp) and 2e-7 absolute (erf).
// Double precision, which only gradient checks use: the C library, lane by lane.
#pragma once

#include <cmath>

#include "vector.h"

namespace shardzoo {
namespace {

// Cody-Waite reduction to |r| <= ln(2) / 2 and the polynomial of Cephes' expf.
INLINE VF exp(VF x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x / ln 2) in the low bits
#if defined(__AVX512F__)
  // bounds beyond which scalef gives exactly 0 and infinity; max and min return their second operand if it is NaN
  x = (VF)_mm512_maskz_max_ps(0xFFFF, (__m512)(VF{} - 110.0f), (__m512)x);
  x = (VF)_mm512_maskz_min_ps(0xFFFF, (__m512)(VF{} + 100.0f), (__m512)x);
#endif
  const VF t = x * 1.44269504f + shift;
  const VF n = t - shift;
  const VF r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  VF p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  return (VF)_mm512_maskz_scalef_ps(0xFFFF, (__m512)p, (__m512)n);
#else
  VF y = (VF)((VI)p + ((VI)t << 23));
  y = x < -87.33f ? VF{} : y;
  y = x > 88.7228f ? VF{} + kInfinity : y;
  return x != x ? x : y;
#endif
}
INLINE VD exp(VD x) {
  for (int i = 0; i < 8; ++i) x[i] = std::exp(x[i]);
  return x;
}

// Rational approximation on [-4, 4], beyond which erf is 1 to single precision (coefficients: Eigen's perf).
INLINE VF erf(VF x) {
  x = x > 4.0f ? VF{} + 4.0f : x;
  x = x < -4.0f ? VF{} - 4.0f : x;
  const VF s = x * x;
  VF p = -2.72614225801306e-10f * s + 2.77068142495902e-08f;
  p = p * s + -2.10102402082508e-06f;
  p = p * s + -5.69250639462346e-05f;
  p = p * s + -7.34990630326855e-04f;
  p = p * s + -2.95459980854025e-03f;
  p = p * s + -1.60960333262415e-02f;
  VF q = -1.45660718464996e-05f * s + -2.13374055278905e-04f;
  q = q * s + -1.68282697438203e-03f;
  q = q * s + -7.37332916720468e-03f;
  q = q * s + -1.42647390514189e-02f;
  return x * p / q;
}
INLINE VD erf(VD x) {
  for (int i = 0; i < 8; ++i) x[i] = std::erf(x[i]);
  return x;
}

template <class V>
INLINE V sigmoid(V x) {
  return 1 / (1 + exp(-x));
}

constexpr double kSqrtTwoOverPi = 0.79788456080286535588, kSqrtHalf = 0.70710678118654752440;
constexpr double kInvSqrtTwoPi = 0.39894228040143267794, kCubic = 0.044715;

// The normal distribution function, given its density at z, to 7.5e-8 (Abramowitz and Stegun 26.2.17).
INLINE VF normal_cdf(VF z, VF density) {
  const VF t = 1 / (1 + 0.2316419f * (z < 0 ? -z : z));
  VF p = 1.330274429f * t - 1.821255978f;
  p = p * t + 1.781477937f;
  p = p * t - 0.356563782f;
  p = p * t + 0.319381530f;
  const VF tail = density * p * t;
  return z < 0 ? tail : 1 - tail;
}
INLINE VD normal_cdf(VD z, VD) { return 0.5 * (1 + erf(z * kSqrtHalf)); }

// An activation and its derivative at z. C is the lanes' type.
template <class C, class V>
INLINE V activate(V z, int activation) {
  if (activation == 2) return z * sigmoid(z);
  if (activation == 1) {
    const V u = C(2 * kSqrtTwoOverPi) * (z + C(kCubic) * z * z * z);
    return z * sigmoid(u);  // (1 + tanh(u / 2)) / 2 = sigmoid(u)
  }
  return C(0.5) * z * (1 + erf(z * C(kSqrtHalf)));
}

template <class C, class V>
INLINE V activate_with_derivative(V z, int activation, V& derivative) {
  if (activation == 0) {
    const V density = exp(C(-0.5) * z * z) * C(kInvSqrtTwoPi);
    const V cdf = normal_cdf(z, density);  // the exponential serves both
    derivative = cdf + (density == 0 ? V{} : z * density);
    return z * cdf;
  }
  V u = z, slope = V{} + 1;
  if (activation == 1) {
    u = C(2 * kSqrtTwoOverPi) * (z + C(kCubic) * z * z * z);
    slope = C(2 * kSqrtTwoOverPi) * (1 + C(3 * kCubic) * z * z);
  }
  const V s = sigmoid(u), bump = s * (1 - s);
  derivative = s + (bump == 0 ? V{} : z * bump * slope);  // where s is 0 or 1, z * slope may be infinite
  return z * s;
}

}  // namespace
}  // namespace shardzoo
