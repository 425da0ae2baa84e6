#include "entry.h"

namespace shardzoo {
namespace {

// The number of sums that fit into registers: 16 of 32 with AVX-512; elsewhere a vector takes two or four registers.
#ifdef __AVX512F__
constexpr int kSums = 16;
#else
constexpr int kSums = 4;
#endif
constexpr int kTileRows = 4;

// Products of `Rows` rows of x (wide, padded to `width`) with `Features` rows of the weight. Every sum has a separate
// register and adds the vectors in order, so that it is the same for any number of rows and in every tile.
template <class T, int Rows, int Features>
INLINE void linear_tile(const LinearForward& a, const Compute<T>* x, int64_t width, int64_t row, int64_t feature) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  const T *weight = at<T>(a.weight, feature * a.columns), *bias = at<T>(a.bias, feature);
  V sums[Rows][Features] = {};
  for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
    V w[Features];
#pragma GCC unroll 4
    for (int f = 0; f < Features; ++f) {
      w[f] = load(weight + f * a.columns + i, part);
      if constexpr (Rows == kTileRows) prefetch(weight + (Features + f) * a.columns + i);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const V value = load(x + (row + r) * width + i, Full{});
#pragma GCC unroll 4
      for (int f = 0; f < Features; ++f) sums[r][f] += value * w[f];
    }
  });
  const Part part{Features};
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    V y = {};
#pragma GCC unroll 4
    for (int f = 0; f < Features; ++f) y[f] = sum_lanes<C>(sums[r][f]);
    if (bias != nullptr) y += load(bias, part);
    store(at<T>(a.y, (row + r) * a.features + feature), y, part);
  }
}

template <class T, int Rows>
INLINE void linear_rows(const LinearForward& a, const Compute<T>* x, int64_t width, int64_t row, int64_t feature,
                        int64_t end) {
  // One row needs so little arithmetic that it waits for memory, which is fastest when it is read in one piece.
  constexpr int kFeatures = Rows == 1 ? 1 : kSums / Rows < 4 ? kSums / Rows : 4;
  for (; feature + kFeatures <= end; feature += kFeatures) linear_tile<T, Rows, kFeatures>(a, x, width, row, feature);
  for (; feature < end; ++feature) linear_tile<T, Rows, 1>(a, x, width, row, feature);
}

// Processes four rows of x at a time, while a block of the weight stays in the cache.
template <class T>
void linear_forward(const LinearForward& a, int64_t begin, int64_t end) {
  const int64_t width = (a.columns + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  const Scratch<Compute<T>> scratch(a.rows * width);
  Compute<T>* x = scratch.get();
  for (int64_t r = 0; r < a.rows; ++r) {
    for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
      store(x + r * width + i, load(at<T>(a.x, r * a.columns + i), part), Full{});
    });
  }
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t first = first_row(unit, a.block), last = end_row(unit, a.block, a.features);
    int64_t row = 0;
    for (; row + kTileRows <= a.rows; row += kTileRows) linear_rows<T, kTileRows>(a, x, width, row, first, last);
    if (a.rows - row == 3) linear_rows<T, 3>(a, x, width, row, first, last);
    if (a.rows - row == 2) linear_rows<T, 2>(a, x, width, row, first, last);
    if (a.rows - row == 1) linear_rows<T, 1>(a, x, width, row, first, last);
  }
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CPU_KERNEL(linear_forward, LinearForward)
