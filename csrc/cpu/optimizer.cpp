#include "entry.h"
#include "math.h"

namespace shardzoo {
namespace {

template <class T>
void square_sums(const SquareSums& a, int64_t begin, int64_t end) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = first_row(block, kOptimizerBlock), end = end_row(block, kOptimizerBlock, a.elements);
    const T* x = at<T>(a.x, first);
    Sum<T> sum;
    for_vectors_in_turns<T>(end - first, [&](int64_t i, auto part, int turn) LAMBDA {
      const V value = load(x + i, part);
      sum.parts[turn] += value * value;
    });
    a.sums[block] = static_cast<double>(sum_lanes<C>(sum.total()));
  }
}

// Updates a vector of numbers in the order of operations of PyTorch's fused AdamW.
template <class T, class Rounded>
INLINE void adamw_block(const AdamW& a, int64_t first, int64_t count) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  T *param = at<T>(a.param, first), *average = at<T>(a.exp_avg, first), *square = at<T>(a.exp_avg_sq, first);
  const T* grad = at<T>(a.grad, first);
  Rounded* rounded = at<Rounded>(a.rounded, first);
  const C decay = static_cast<C>(1 - a.lr * a.weight_decay), rate = static_cast<C>(a.lr / a.bias_correction1);
  const C inverse_root = static_cast<C>(1 / std::sqrt(a.bias_correction2)), eps = static_cast<C>(a.eps);
  const C rest1 = static_cast<C>(1 - a.beta1), beta2 = static_cast<C>(a.beta2), rest2 = static_cast<C>(1 - a.beta2);
  const C factor = static_cast<C>(a.factor);
  for_vectors<T>(count, [&](int64_t i, auto part) LAMBDA {
    const V g = load(grad + i, part) * factor;
    const V m = load(average + i, part), v = load(square + i, part) * beta2 + rest2 * g * g;
    const V new_m = m + (g - m) * rest1;
    const V p = load(param + i, part) * decay - rate * new_m / (root(v) * inverse_root + eps);
    store(average + i, new_m, part);
    store(square + i, v, part);
    store(param + i, p, part);
    if constexpr (sizeof(T) == 4 && sizeof(Rounded) == 2) {
      if (rounded != nullptr) store(rounded + i, p, part);
    }
  });
}

template <class T>
void adamw(const AdamW& a, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = first_row(block, kOptimizerBlock), end = end_row(block, kOptimizerBlock, a.elements);
    if (a.rounds_to_half) {
      adamw_block<T, Half>(a, first, end - first);
    } else {
      adamw_block<T, BFloat16>(a, first, end - first);
    }
  }
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CPU_KERNEL(square_sums, SquareSums)
SHARDZOO_CPU_KERNEL(adamw, AdamW)
