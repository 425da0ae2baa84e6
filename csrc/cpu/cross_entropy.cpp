#include "entry.h"
#include "math.h"

namespace shardzoo {
namespace {

constexpr int64_t kBlock = 2048;  // stays in the L1 cache between the passes for the maximum and the sum

// The largest of n numbers, ignoring NaN; -inf if there is none.
template <class T>
INLINE Compute<T> largest_of(const T* x, int64_t n) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  constexpr int64_t lanes = kLanes<T>;
  const C lowest = -kInfinity;
  V top[4] = {V{} + lowest, V{} + lowest, V{} + lowest, V{} + lowest};  // four independent chains of operations
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    for (int j = 0; j < 4; ++j) top[j] = larger(load(x + i + j * lanes, Full{}), top[j]);
  }
  for_vectors<T>(n - i, [&](int64_t k, auto part) LAMBDA {
    top[0] = larger(keep_lanes<C>(load(x + i + k, part), part, lowest), top[0]);
  });
  return max_lanes<C>(larger(larger(top[0], top[1]), larger(top[2], top[3])));
}

template <class T>
void cross_entropy_stats(const CrossEntropyStats& a, int64_t begin, int64_t end) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  const C lowest = -kInfinity;
  for (int64_t r = begin; r < end; ++r) {
    const T* x = at<T>(a.logits, r * a.row_stride);
    C top = lowest;
    V exps = {}, sums = {};
    for (int64_t block = 0; block < a.columns; block += kBlock) {
      const int64_t size = a.columns - block < kBlock ? a.columns - block : kBlock;
      const C largest = largest_of(x + block, size);
      if (largest > top) {
        // Before the first finite logit the sums are 0 (or NaN) and have no scale.
        if (top != lowest) exps *= exp<true>(V{} + (top - largest));
        top = largest;
      }
      const C shift = top == lowest ? 0 : top;
      for_vectors<T>(size, [&](int64_t i, auto part) LAMBDA {
        prefetch(x + block + kBlock + i);
        const V value = load(x + block + i, part);
        exps += exp<true>(keep_lanes<C>(value - shift, part, lowest));
        sums += value;
      });
    }
    const int64_t column = a.target[r] - a.first;
    const bool here = column >= 0 && column < a.columns;
    static_cast<C*>(a.maximum)[r] = top;
    static_cast<C*>(a.sum_exp)[r] = sum_lanes<C>(exps);
    if (a.sum_logits != nullptr) static_cast<C*>(a.sum_logits)[r] = sum_lanes<C>(sums);
    static_cast<C*>(a.target_logit)[r] = here ? load(x + column, Part{1})[0] : 0;
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
      const C target_logit = here ? load(x + column, Part{1})[0] : 0;  // read before it is overwritten
      for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
        put(out + i, exp(load(x + i, part) - log_z) * slope - uniform, part, past_cache);
      });
      if (here) {
        const C hit = scale * static_cast<C>(1 - a.label_smoothing);
        store(out + column, exp(V{} + (target_logit - log_z)) * slope - uniform - hit, Part{1});
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
