#include "../../cpu/entry.h"

namespace shardzoo {
namespace {

// The number of sums that fit into registers (32 with AVX-512, elsewhere 16) beside their factors.
#if defined(__AVX512F__)
constexpr int kSums = 24;
#elif defined(__AVX2__)
constexpr int kSums = 12;
#else
constexpr int kSums = 8;
#endif
// The bytes from the weight that is used to the one that is prefetched.
constexpr int64_t kAhead = 16384;

// Says how the factors of a product are loaded and multiplied. In general they are vectors of the type of the
// computation.
template <class T>
struct Factors {
  // The type in which x is copied.
  using X = Compute<T>;
  using V = VectorOf<T>;
  // The elements of a vector.
  static constexpr int kStep = kLanes<T>;
  template <class Element, class Size>
  INLINE V load_vector(const Element* p, Size size) {
    return load(p, size);
  }
  INLINE V add_product(V sum, V x, V w) { return sum + x * w; }
};
#if defined(__AVX512BF16__)
// Where the processor adds the products of pairs of bf16 to sums in fp32, the factors stay bf16.
template <>
struct Factors<BFloat16> {
  using X = BFloat16;
  using V = VF;
  static constexpr int kStep = 2 * kLanes<BFloat16>;
  INLINE V load_vector(const BFloat16* p, Full) { return read<VF>(p); }
  INLINE V load_vector(const BFloat16* p, Part part) {
    V v = {};
    std::memcpy(&v, p, part.count * sizeof *p);
    return v;
  }
  INLINE V add_product(V sum, V x, V w) { return add_pairs(sum, x, w); }
};
#endif
template <class T>
using X = typename Factors<T>::X;
template <class T>
constexpr bool kPairs = Factors<T>::kStep > kLanes<T>;

// Computes the products of `Rows` rows of x (padded to `width`) with `Features` rows of the weight. Every sum has a
// separate register and adds the vectors in order, so that it is the same for any number of rows and in every tile.
template <class T, int Rows, int Features>
INLINE void linear_tile(const LinearOfFewRows& a, const X<T>* x, int64_t width, int64_t row, int64_t feature) {
  using C = Compute<T>;
  using V = typename Factors<T>::V;
  const T *weight = at<T>(a.weight, feature * a.columns), *bias = at<T>(a.bias, feature);
  V sums[Rows][Features] = {};
  for_vectors<T, Factors<T>::kStep>(a.columns, [&](int64_t i, auto part) LAMBDA {
    V w[Features];
#pragma GCC unroll 4
    for (int f = 0; f < Features; ++f) {
      const T* p = weight + f * a.columns + i;
      w[f] = Factors<T>::load_vector(p, part);
      if (row == 0 && i * sizeof(T) % 64 == 0) prefetch_far(reinterpret_cast<const char*>(p) + kAhead);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const V value = Factors<T>::load_vector(x + (row + r) * width + i, Full{});
#pragma GCC unroll 4
      for (int f = 0; f < Features; ++f) sums[r][f] = Factors<T>::add_product(sums[r][f], value, w[f]);
    }
  });
  const Part part{Features};
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    V y = {};
#pragma GCC unroll 4
    for (int f = 0; f < Features; ++f) y[f] = sum_lanes<C>(sums[r][f]);
    if (bias != nullptr) y += load(bias, part);
    store(at<T>(a.y, (row + r) * a.features + feature), y, part);
  }
}

template <class T, int Rows>
INLINE void linear_rows(const LinearOfFewRows& a, const X<T>* x, int64_t width, int64_t row, int64_t feature,
                        int64_t end) {
  // One row, or products of pairs, need so little arithmetic that they wait for memory, which is fastest when it is
  // read in one piece.
  constexpr int kMost = kLanes<T> < 4 ? kLanes<T> : 4;
  constexpr int kFeatures = Rows == 1 || kPairs<T> ? 1 : kSums / Rows < kMost ? kSums / Rows : kMost;
  for (; feature + kFeatures <= end; feature += kFeatures) linear_tile<T, Rows, kFeatures>(a, x, width, row, feature);
  for (; feature < end; ++feature) linear_tile<T, Rows, 1>(a, x, width, row, feature);
}

// Processes `Rows` rows of x at a time, while a block of the weight stays in the cache, and then the rest.
template <class T, int Rows>
INLINE void linear_block(const LinearOfFewRows& a, const X<T>* x, int64_t width, int64_t row, int64_t first,
                         int64_t last) {
  for (; row + Rows <= a.rows; row += Rows) linear_rows<T, Rows>(a, x, width, row, first, last);
  if constexpr (Rows > 1) linear_block<T, Rows == 8 ? 4 : Rows - 1>(a, x, width, row, first, last);
}

template <class T>
void linear_of_few_rows(const LinearOfFewRows& a, int64_t begin, int64_t end) {
  using F = Factors<T>;
  const int64_t width = (a.columns + F::kStep - 1) / F::kStep * F::kStep;
  const Scratch<X<T>> scratch(a.rows * width);
  X<T>* x = scratch.get();
  for (int64_t r = 0; r < a.rows; ++r) {
    for_vectors<T, Factors<T>::kStep>(a.columns, [&](int64_t i, auto part) LAMBDA {
      const typename F::V value = F::load_vector(at<T>(a.x, r * a.columns + i), part);
      std::memcpy(x + r * width + i, &value, sizeof value);
    });
  }
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = first_row(unit, a.block), last = end_row(unit, a.block, a.features);
    // Four rows of many stay in the first-level cache with the block.
    if (a.rows > 8 && !kPairs<T>) linear_block<T, 4>(a, x, width, 0, first, last);
    else linear_block<T, 8>(a, x, width, 0, first, last);
  }
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CPU_KERNEL(linear_of_few_rows, LinearOfFewRows)
