#include "common.cuh"

namespace shardzoo {
namespace {

constexpr int kThreads = 512;

// A block processes a row. Rows start on vector boundaries; a partial vector at the end of the valid columns is masked.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) cross_entropy_stats_kernel(CrossEntropyStats a) {
  using C = Compute<T>;
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    const T* x = at<T>(a.logits, r * a.row_stride);
    Pair<C> largest_and_sum = {kLowest, 0};
    C total = 0;
#pragma unroll 2
    for (int64_t column = static_cast<int64_t>(threadIdx.x) * N; column < a.columns; column += kThreads * N) {
      C value[N];
      load<T, N>(value, x + column);
      C top = largest_and_sum.first;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const bool valid = column + j < a.columns;
        total += valid ? value[j] : C(0);
        value[j] = valid ? value[j] : C(kLowest);
        top = value[j] > top ? value[j] : top;
      }
      // before the first finite logit the sum is 0 (or NaN) and has no scale
      if (top > largest_and_sum.first && largest_and_sum.first != C(kLowest)) {
        largest_and_sum.second *= exponential(largest_and_sum.first - top);
      }
      largest_and_sum.first = top;
      const C shift = top == C(kLowest) ? C(0) : top;
#pragma unroll
      for (int j = 0; j < N; ++j) largest_and_sum.second += exponential(value[j] - shift);
    }
    largest_and_sum = reduce_block(largest_and_sum, LogSumExp());
    total = reduce_block(Pair<C>{total, C(0)}, Add()).first;
    if (threadIdx.x != 0) continue;
    const int64_t column = a.target[r] - a.first;
    static_cast<C*>(a.maximum)[r] = largest_and_sum.first;
    static_cast<C*>(a.sum_exp)[r] = largest_and_sum.second;
    static_cast<C*>(a.sum_logits)[r] = total;
    static_cast<C*>(a.target_logit)[r] = column >= 0 && column < a.columns ? widen(x[column]) : C(0);
  }
}

// A block processes a row. Each element is read and written by one thread, so the gradient may overwrite the logits.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) cross_entropy_grad_kernel(CrossEntropyGrad a) {
  using C = Compute<T>;
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    const T* x = at<T>(a.logits, r * a.row_stride);
    T* out = at<T>(a.grad_logits, r * a.row_stride);
    const bool ignored = a.target[r] == a.ignore_index;
    const C scale = static_cast<const C*>(a.grad)[r], log_z = static_cast<const C*>(a.log_z)[r];
    const C slope = scale * (1 + static_cast<C>(2 * a.z_loss) * log_z);
    const C uniform = scale * static_cast<C>(a.label_smoothing / static_cast<double>(a.num_classes));
    const C hit = scale * static_cast<C>(1 - a.label_smoothing);
    const int64_t target = a.target[r] - a.first;
#pragma unroll 2
    for (int64_t column = static_cast<int64_t>(threadIdx.x) * N; column < a.row_stride; column += kThreads * N) {
      C value[N];
      load<T, N>(value, x + column);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const C grad = exponential(value[j] - log_z) * slope - uniform - (column + j == target ? hit : C(0));
        value[j] = ignored || column + j >= a.columns ? C(0) : grad;
      }
      store<T, N>(out + column, value);
    }
  }
}

template <class T>
void launch_cross_entropy_stats(const CrossEntropyStats& a, cudaStream_t stream) {
  const bool fit = vectors_fit<T>(a.row_stride, a.logits);
  const auto kernel = fit ? cross_entropy_stats_kernel<T, kVector<T>> : cross_entropy_stats_kernel<T, 1>;
  kernel<<<blocks_for(a.rows), kThreads, 0, stream>>>(a);
}

template <class T>
void launch_cross_entropy_grad(const CrossEntropyGrad& a, cudaStream_t stream) {
  const bool fit = vectors_fit<T>(a.row_stride, a.logits, a.grad_logits);
  const auto kernel = fit ? cross_entropy_grad_kernel<T, kVector<T>> : cross_entropy_grad_kernel<T, 1>;
  kernel<<<blocks_for(a.rows), kThreads, 0, stream>>>(a);
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CUDA_KERNEL(cross_entropy_stats, CrossEntropyStats)
SHARDZOO_CUDA_KERNEL(cross_entropy_grad, CrossEntropyGrad)
