// exp, tanh, sigmoid and the normal distribution on vectors. Single precision uses polynomials and ratios of them.
// Double precision, which only gradient checks need, uses the C library, lane by lane.
#pragma once

#include <cmath>

#include "../kernels.h"
#include "vector.h"

namespace shardzoo {
namespace {

// e^-87.33 is the smallest normal number.
constexpr float kSmallestExponent = 87.33f;

// Returns exp(x), by Cody-Waite reduction to |r| <= ln(2) / 2 and the polynomial of Cephes' expf. Results that would be
// denormal are 0: Intel's processors need more than a hundred cycles for a vector with one of them. `kNegative` means
// that no x is far above 0 (88), so one bound is not needed.
template <bool kNegative = false>
INLINE VF exp(VF x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x / ln 2) in the low bits
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)(VF{} - kSmallestExponent), _CMP_NLT_UQ);  // or NaN
  // Beyond this bound scalef gives infinity.
  if constexpr (!kNegative) x = smaller(VF{} + 100.0f, x);
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
  return (VF)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
  VF y = (VF)((VI)p + ((VI)t << 23));
  y = x < -kSmallestExponent ? VF{} : y;
  if constexpr (!kNegative) y = x > 88.7228f ? VF{} + kInfinity : y;
  return x != x ? x : y;
#endif
}
#if defined(__AVX512F__)
// Returns 2^x to 3e-6, for results that are rounded to bf16: 2^f by a minimax fit on [0, 1), scaled by 2^floor(x).
INLINE VF short_exp2(VF x) {
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)(VF{} - 126.0f), _CMP_NLT_UQ);  // or NaN
  // This is x - floor(x), and 0 for infinity.
  const VF f = (VF)_mm512_maskz_reduce_ps(0xFFFF, (__m512)x, _MM_FROUND_TO_NEG_INF);
  VF p = 1.353416792e-02f * f + 5.201146061e-02f;
  p = p * f + 2.414427569e-01f;
  p = p * f + 6.930038345e-01f;
  p = p * f + 1.000002593f;
  return (VF)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
}
#endif
template <bool kNegative = false>
INLINE VD exp(VD x) {
  for (int i = 0; i < Wide<double>::lanes; ++i) x[i] = std::exp(x[i]);
  return x;
}

INLINE VF root(VF x) {
#if defined(__AVX512F__)
  return (VF)_mm512_maskz_sqrt_ps(0xFFFF, (__m512)x);
#elif defined(__AVX2__)
  return (VF)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < Wide<float>::lanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}
INLINE VD root(VD x) {
  for (int i = 0; i < Wide<double>::lanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
}

// Whether results are rounded to bf16 and the processor has a reciprocal of 14 bits, which is quicker than a division.
template <class T>
constexpr bool kShort = false;
#if defined(__AVX512F__)
template <>
constexpr bool kShort<BFloat16> = true;
#endif

template <class T, class V>
INLINE V reciprocal(V x) {
#if defined(__AVX512F__)
  if constexpr (kShort<T>) return (V)_mm512_maskz_rcp14_ps(0xFFFF, (__m512)x);
#endif
  return 1 / x;
}
// Computes exp(x - shift) for results of type T. `kNegative` is that of exp.
template <class T, bool kNegative = false>
class ShiftedExp {
 public:
  explicit ShiftedExp(Compute<T> shift) : shift_(shift) {}
  LAMBDA VectorOf<T> at(VectorOf<T> x) const {
#if defined(__AVX512F__)
    // The difference is exact where it matters.
    if constexpr (kShort<T>) return short_exp2(kLog2E * (x - shift_));
#endif
    return exp<kNegative>(x - shift_);
  }

 private:
  static constexpr Compute<T> kLog2E = 1.44269504088896340736;
  Compute<T> shift_;
};

// Returns tanh(x) to 4e-7 of its value, from -1 to 1: x P(x^2) / Q(x^2), a minimax fit to 2.1e-8 on [0, 9], where tanh
// rounds to 1.
INLINE VF tanh(VF x) {
  const VI sign = (VI)x & INT32_MIN;
  const VF m = smaller(VF{} + 9.0f, (VF)((VI)x ^ sign)), s = m * m;
  VF p = 1.33190206e-08f * s + 2.05834415e-05f;
  p = p * s + 3.49403204e-03f;
  p = p * s + 1.33797158e-01f;
  p = p * s + 9.99999979e-01f;
  VF q = 7.76199763e-07f * s + 3.28308879e-04f;
  q = q * s + 2.58710635e-02f;
  q = q * s + 4.67130310e-01f;
  q = q * s + 1.0f;
  // The ratio of two rounded numbers may be a little larger than 1.
  const VF share = smaller(VF{} + 1.0f, m * p / q);
  return (VF)((VI)share ^ sign);
}

template <class T, class V>
INLINE V sigmoid(V x) {
  return reciprocal<T>(1 + ShiftedExp<T>(0).at(-x));
}

constexpr double kSqrtHalf = 0.70710678118654752440, kInvSqrtTwoPi = 0.39894228040143267794;

// Returns the normal distribution function to 2e-7, exactly 0 and 1 beyond 5.5: z P(z^2) / Q(z^2), a minimax fit.
INLINE VF normal_cdf(VF z) {
  const VI sign = (VI)z & INT32_MIN;
  const VF m = (VF)((VI)z ^ sign), s = m * m;
  VF p = 2.274935085e-08f * s + 6.352071978e-06f;
  p = p * s + 1.688235352e-04f;
  p = p * s + 4.677247256e-03f;
  p = p * s + 3.385246918e-02f;
  p = p * s + 3.989422321e-01f;
  VF q = 1.197500069e-06f * s + 7.364665362e-05f;
  q = q * s + 1.884432859e-03f;
  q = q * s + 2.864576504e-02f;
  q = q * s + 2.515214682e-01f;
  q = q * s + 1.0f;
  // This is the probability between 0 and |z|.
  const VF inner = m >= 5.5f ? VF{} + 0.5f : m * p / q;
  return 0.5f + (VF)((VI)inner ^ sign);
}
INLINE VD normal_cdf(VD z) {
  for (int i = 0; i < Wide<double>::lanes; ++i) z[i] = 0.5 * (1 + std::erf(z[i] * kSqrtHalf));
  return z;
}

// Returns the normal density at z to 1e-7, and writes the distribution function to 3e-7; they share an exponential.
//
// The density is 2^n times a minimax fit of 2^f / sqrt(2 pi) on |f| <= 1/2; the distribution function is that of
// Abramowitz and Stegun 26.2.17.
INLINE VF normal_density(VF z, VF& cdf) {
  // Adding 1.5 * 2^23 rounds to an integer, as in exp. The density is 2^x / sqrt(2 pi).
  const float shift = 12582912.0f;
  VF x = z * z * -0.72134752044f;
  const VF t = x + shift, n = t - shift, f = x - n;
  VF density = 5.291827838e-04f * f + 3.858400742e-03f;
  density = density * f + 2.214422636e-02f;
  density = density * f + 9.583487362e-02f;
  density = density * f + 2.765256464e-01f;
  density = density * f + 3.989422917e-01f;
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)(VF{} - 120.0f), _CMP_NLT_UQ);  // or NaN
  density = (VF)_mm512_maskz_scalef_ps(normal, (__m512)density, (__m512)n);
#else
  density = (VF)((VI)density + ((VI)t << 23));
  density = x < -120.0f ? VF{} : density;
  density = x != x ? x : density;
#endif
  const VI sign = (VI)z & INT32_MIN;
  const VF u = 1 / (1 + 0.2316419f * (VF)((VI)z ^ sign));
  VF p = 1.330274429f * u - 1.821255978f;
  p = p * u + 1.781477937f;
  p = p * u - 0.356563782f;
  p = p * u + 0.319381530f;
  const VF inner = 0.5f - density * p * u;
  cdf = 0.5f + (VF)((VI)inner ^ sign);
  return density;
}
INLINE VD normal_density(VD z, VD& cdf) {
  cdf = normal_cdf(z);
  return exp(-0.5 * z * z) * kInvSqrtTwoPi;
}

}  // namespace
}  // namespace shardzoo
