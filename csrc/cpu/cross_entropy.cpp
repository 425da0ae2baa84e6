#include "entry.h"
#include "math.h"

namespace shardzoo {
namespace {

// A block stays in the L1 cache between the passes for the maximum and the sum.
constexpr int64_t kBlock = 2048;
// Logits this far above the reference of the sum could make it overflow.
constexpr float kFarAbove = 40;

// Returns the largest of n numbers, ignoring NaN; -inf if there is none.
template <class T>
INLINE Compute<T> find_largest(const T* x, int64_t n) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  const C lowest = -kInfinity;
  V top = V{} + lowest;
  for_vectors<T>(n, [&](int64_t i, auto part) LAMBDA {
    top = larger(keep_lanes<C>(load(x + i, part), part, lowest), top);
  });
  return max_lanes<C>(top);
}

// Adds exp(x - reference) and, if wanted, x of n logits to the sums. Returns the largest as find_largest does.
template <class T, bool kWithSum>
INLINE Compute<T> add_logits(const T* x, int64_t n, Compute<T> reference, VectorOf<T>& exps, VectorOf<T>& sums) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  const C lowest = -kInfinity;
  const ShiftedExp<T> shifted_exp(reference);
  V top = V{} + lowest;
  for_vectors<T>(n, [&](int64_t i, auto part) LAMBDA {
    prefetch(x + kBlock + i);
    const V value = load(x + i, part), kept = keep_lanes<C>(value, part, lowest);
    exps += shifted_exp.at(kept);
    if constexpr (kWithSum) sums += value;
    top = larger(kept, top);
  });
  return max_lanes<C>(top);
}

// Computes the statistics of row r. The sum of exponentials is relative to a reference, which is the largest logit of
// the first block with a finite one, until a logit is far above it. So a block is read once.
template <class T, bool kWithSum>
INLINE void cross_entropy_row(const CrossEntropyStats& a, int64_t r) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  const T* x = at<T>(a.logits, r * a.row_stride);
  const C lowest = -kInfinity;
  C reference = lowest, top = lowest;
  V exps = {}, sums = {};
  for (int64_t block = 0; block < a.columns; block += kBlock) {
    const int64_t size = a.columns - block < kBlock ? a.columns - block : kBlock;
    if (reference == lowest) reference = find_largest(x + block, size);
    // Without a finite logit the exponentials are 0 (or NaN) for any reference.
    const V exps_before = exps, sums_before = sums;
    C largest = add_logits<T, kWithSum>(x + block, size, reference == lowest ? 0 : reference, exps, sums);
    if (largest > reference + kFarAbove) {
      exps = exps_before * exp<true>(V{} + (reference - largest)), sums = sums_before;
      reference = largest;
      largest = add_logits<T, kWithSum>(x + block, size, reference, exps, sums);
    }
    top = largest > top ? largest : top;
  }
  const int64_t column = a.target[r] - a.first;
  const bool here = column >= 0 && column < a.columns;
  static_cast<C*>(a.maximum)[r] = top;
  static_cast<C*>(a.sum_exp)[r] = sum_lanes<C>(exps) * (top == reference ? C(1) : std::exp(reference - top));
  if (kWithSum) static_cast<C*>(a.sum_logits)[r] = sum_lanes<C>(sums);
  static_cast<C*>(a.target_logit)[r] = here ? load(x + column, Part{1})[0] : 0;
}

template <class T>
void cross_entropy_stats(const CrossEntropyStats& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    if (a.sum_logits != nullptr) {
      cross_entropy_row<T, true>(a, r);
    } else {
      cross_entropy_row<T, false>(a, r);
    }
  }
}

template <class T>
void cross_entropy_grad(const CrossEntropyGrad& a, int64_t begin, int64_t end) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  for (int64_t r = begin; r < end; ++r) {
    const T* x = at<T>(a.logits, r * a.row_stride);
    T* out = at<T>(a.grad_logits, r * a.row_stride);
    const bool past_cache = out != x && beyond_cache(out, a.rows * a.row_stride);
    int64_t written = 0;
    if (a.target[r] != a.ignore_index) {
      const C scale = static_cast<const C*>(a.grad)[r], log_z = static_cast<const C*>(a.log_z)[r];
      const C slope = scale * (1 + static_cast<C>(2 * a.z_loss) * log_z);
      const C uniform = scale * static_cast<C>(a.label_smoothing / static_cast<double>(a.num_classes));
      const int64_t column = a.target[r] - a.first;
      const bool here = column >= 0 && column < a.columns;
      // The gradient may overwrite the logits, so the target's is read first.
      const C target_logit = here ? load(x + column, Part{1})[0] : 0;
      const ShiftedExp<T> shifted_exp(log_z);
      for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
        put(out + i, shifted_exp.at(load(x + i, part)) * slope - uniform, part, past_cache);
      });
      if (here) {
        const C hit = scale * static_cast<C>(1 - a.label_smoothing);
        store(out + column, shifted_exp.at(V{} + target_logit) * slope - uniform - hit, Part{1});
      }
      written = a.columns;
    }
    for_vectors<T>(a.row_stride - written, [&](int64_t i, auto part) LAMBDA { store(out + written + i, V{}, part); });
  }
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CPU_KERNEL(cross_entropy_stats, CrossEntropyStats)
SHARDZOO_CPU_KERNEL(cross_entropy_grad, CrossEntropyGrad)
