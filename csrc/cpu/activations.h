// The activations and their derivatives on vectors, for results of type T.
#pragma once

#include "math.h"

namespace shardzoo {
namespace {

constexpr double kSqrtTwoOverPi = 0.79788456080286535588, kCubic = 0.044715;

// Returns the activation at z, and writes its derivative there.
template <class T, int kActivation, class V>
INLINE V activate(V z, V& derivative) {
  using C = Compute<T>;
  if constexpr (kActivation == kGelu) {
    V cdf;
    const V density = normal_density(z, cdf);
    derivative = cdf + (density == 0 ? V{} : z * density);
    return z * cdf;
  }
  V u = z, slope = V{} + 1;
  if constexpr (kActivation == kGeluTanh) {
    u = C(2 * kSqrtTwoOverPi) * (z + C(kCubic) * z * z * z);
    slope = C(2 * kSqrtTwoOverPi) * (1 + C(3 * kCubic) * z * z);
  }
  const V s = sigmoid<T>(u), bump = s * (1 - s);
  // Where s is 0 or 1, z * slope may be infinite, and its product with 0 would be NaN.
  derivative = s + (bump == 0 ? V{} : z * bump * slope);
  return z * s;
}
template <class T, int kActivation, class V>
INLINE V activate(V z) {
  if constexpr (kActivation == kGelu) return z * normal_cdf(z);
  // The compiler drops the derivative, because nothing reads it.
  V derivative;
  return activate<T, kActivation>(z, derivative);
}

// The activation as an object, which a kernel makes before its loop.
template <class T, int kActivation>
struct ActivationOf {
  template <class V>
  LAMBDA V at(V z) const {
    return activate<T, kActivation>(z);
  }
  template <class V>
  LAMBDA V at(V z, V& derivative) const {
    return activate<T, kActivation>(z, derivative);
  }
};

#if defined(__AVX512F__)
// An odd function f with f(z) = 1/2 beyond 6, as polynomials of degree 4 on pieces of [0, 6], to 1e-7. Registers hold
// one coefficient of all pieces, so that looking it up is one instruction. For results in bf16, this is half the time
// of exponentials and divisions.
constexpr int kPieces = 32, kDegree = 4;  // the last piece is constant
constexpr float kPieceWidth = 6 / 30.5;   // piece n is the points around n * kPieceWidth

struct OddPieces {
  alignas(64) float coefficients[kDegree + 1][kPieces];

  // Interpolates f at the Chebyshev points of each piece.
  explicit OddPieces(double (*f)(double)) {
    constexpr int kPoints = kDegree + 1;
    for (int n = 0; n < kPieces; ++n) {
      double point[kPoints], divided[kPoints], power[kPoints] = {};
      for (int i = 0; i < kPoints; ++i) {
        point[i] = std::cos((2 * i + 1) * M_PI / (2 * kPoints)) / 2;
        divided[i] = n == kPieces - 1 ? 0.5 : f((n + point[i]) * kPieceWidth);
      }
      for (int order = 1; order < kPoints; ++order) {
        for (int i = kDegree; i >= order; --i) {
          divided[i] = (divided[i] - divided[i - 1]) / (point[i] - point[i - order]);
        }
      }
      for (int i = kDegree; i >= 0; --i) {  // Newton's form by Horner's rule: power = power * (x - point) + divided
        for (int j = kDegree; j > 0; --j) power[j] = power[j - 1] - point[i] * power[j];
        power[0] = divided[i] - point[i] * power[0];
      }
      for (int i = 0; i < kPoints; ++i) coefficients[i][n] = static_cast<float>(power[i]);
    }
  }
};

class OddCurve {
 public:
  explicit OddCurve(const OddPieces& pieces) {
    for (int i = 0; i <= kDegree; ++i) {
      first_[i] = _mm512_load_ps(pieces.coefficients[i]), last_[i] = _mm512_load_ps(pieces.coefficients[i] + kPieces / 2);
    }
  }
  LAMBDA VF at(VF z) const {
    // Adding 1.5 * 2^23 rounds to an integer, as in exp.
    const float shift = 12582912.0f;
    const VI sign = (VI)z & INT32_MIN;
    const VF m = smaller(VF{} + (kPieces - 1) * kPieceWidth, (VF)((VI)z ^ sign));
    // The low bits of t are the number of the piece.
    const VF t = m * (1 / kPieceWidth) + shift;
    const VF f = m * (1 / kPieceWidth) - (t - shift);
    VF p = coefficient(kDegree, t);
#pragma GCC unroll 4
    for (int i = kDegree - 1; i >= 0; --i) p = p * f + coefficient(i, t);
    return (VF)((VI)p ^ sign);
  }

 private:
  LAMBDA VF coefficient(int i, VF t) const {
    return (VF)_mm512_maskz_permutex2var_ps(0xFFFF, first_[i], (__m512i)t, last_[i]);
  }
  __m512 first_[kDegree + 1], last_[kDegree + 1];
};

// The distribution function that GELU multiplies z by, and GELU's derivative, both less 1/2.
INLINE double gelu_factor(double z) { return std::erf(z * kSqrtHalf) / 2; }
INLINE double gelu_slope(double z) { return gelu_factor(z) + z * std::exp(-z * z / 2) * kInvSqrtTwoPi; }
INLINE double gelu_tanh_factor(double z) { return std::tanh(kSqrtTwoOverPi * (z + kCubic * z * z * z)) / 2; }
INLINE double gelu_tanh_slope(double z) {
  const double factor = gelu_tanh_factor(z), inner = kSqrtTwoOverPi * (1 + 3 * kCubic * z * z);
  return factor + z * (0.5 - 2 * factor * factor) * inner;
}

// Returns the pieces of f, which are made when they are first needed: a static initializer would run on processors that
// lack these instructions.
template <double (*f)(double)>
const OddPieces& make_pieces() {
  static const OddPieces pieces(f);
  return pieces;
}

template <double (*factor)(double), double (*slope)(double)>
struct Gelu {
  OddCurve factor_less_half{make_pieces<factor>()}, slope_less_half{make_pieces<slope>()};
  LAMBDA VF at(VF z) const { return z * (0.5f + factor_less_half.at(z)); }
  LAMBDA VF at(VF z, VF& derivative) const {
    derivative = 0.5f + slope_less_half.at(z);
    return at(z);
  }
};
template <>
struct ActivationOf<BFloat16, kGelu> : Gelu<gelu_factor, gelu_slope> {};
template <>
struct ActivationOf<BFloat16, kGeluTanh> : Gelu<gelu_tanh_factor, gelu_tanh_slope> {};
#endif

}  // namespace
}  // namespace shardzoo
