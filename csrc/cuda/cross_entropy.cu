#include "common.cuh"

namespace shardzoo {
namespace {

constexpr int kThreads = 512;

// The largest logit that a thread has seen, the sum of exp(x - largest), and the sum of the logits.
template <class C>
struct Seen {
  C largest, sum_exp, sum_logits;
};

// This needs no branch: before the first finite logit the sum is 0 (or NaN), and stays so when it is scaled.
template <bool WithSum, class C, int M>
__device__ __forceinline__ void see(Seen<C>& seen, const C (&value)[M]) {
  C top = seen.largest;
#pragma unroll
  for (int j = 0; j < M; ++j) top = larger(top, value[j]);  // a NaN reappears in the sum
  const C shift = top == C(kLowest) ? C(0) : top;
  seen.sum_exp *= exponential(seen.largest - shift);
  seen.largest = top;
#pragma unroll
  for (int j = 0; j < M; ++j) {
    seen.sum_exp += exponential(value[j] - shift);
    if (WithSum) seen.sum_logits += value[j];
  }
}

// A block processes a row: two vectors at a time, then one, then the elements after the last whole vector.
template <class T, int N, bool WithSum>
__global__ void __launch_bounds__(kThreads) cross_entropy_stats_kernel(CrossEntropyStats a) {
  using C = Compute<T>;
  const int64_t whole = a.columns / N * N;
  int turn = 0;
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    const T* x = at<T>(a.logits, r * a.row_stride);
    Seen<C> seen = {kLowest, 0, 0};
    int64_t column = static_cast<int64_t>(threadIdx.x) * N;
    for (; column + kThreads * N < whole; column += 2 * kThreads * N) {
      const Pack<T, N> packs[2] = {fetch<T, N>(x + column), fetch<T, N>(x + column + kThreads * N)};
      C value[2][N];
      widen<T, N>(packs[0], value[0]);
      widen<T, N>(packs[1], value[1]);
      see<WithSum, C, 2 * N>(seen, reinterpret_cast<const C(&)[2 * N]>(value));
    }
    if (column < whole) {
      C value[N];
      load<T, N>(value, x + column);
      see<WithSum, C, N>(seen, value);
    }
    if (const int64_t last = whole + threadIdx.x; last < a.columns) {
      const C value[1] = {widen(x[last])};
      see<WithSum, C, 1>(seen, value);
    }
    const Pair<C> all = reduce_team(Pair<C>{seen.largest, seen.sum_exp}, LogSumExp(), turn);
    const C total = WithSum ? reduce_team(seen.sum_logits, Add(), turn) : C(0);
    if (threadIdx.x != 0) continue;
    const int64_t target = a.target[r] - a.first;
    static_cast<C*>(a.maximum)[r] = all.first;
    static_cast<C*>(a.sum_exp)[r] = all.second;
    if (WithSum) static_cast<C*>(a.sum_logits)[r] = total;
    static_cast<C*>(a.target_logit)[r] = target >= 0 && target < a.columns ? widen(x[target]) : C(0);
  }
}

// Computes the gradient of a row's logits but for the target's share.
template <class C>
struct Slope {
  C log_z, slope, uniform;
  template <int N>
  __device__ __forceinline__ void apply(C (&value)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = exponential(value[j] - log_z) * slope - uniform;
  }
};

// Sets the columns from `first` on to 0; `first` is a multiple of N.
template <class T, int N>
__device__ __forceinline__ void write_zeros(T* out, int64_t first, int64_t columns) {
  const Compute<T> zero[N] = {};
  for (int64_t column = first + static_cast<int64_t>(threadIdx.x) * N; column < columns; column += kThreads * N) {
    store<T, N>(out + column, zero);
  }
}

// A block processes a row. Each element is read and written by one thread, so the gradient may overwrite the logits.
// The thread that writes the target's element reads it before, and writes it again after the others: so the loop tests
// no element.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, 2) cross_entropy_grad_kernel(CrossEntropyGrad a) {
  using C = Compute<T>;
  const int64_t whole = a.columns / N * N;
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    const T* x = at<T>(a.logits, r * a.row_stride);
    T* out = at<T>(a.grad_logits, r * a.row_stride);
    if (a.target[r] == a.ignore_index) {
      write_zeros<T, N>(out, 0, a.row_stride);
      continue;
    }
    const C scale = static_cast<const C*>(a.grad)[r], log_z = static_cast<const C*>(a.log_z)[r];
    const C slope = scale * (1 + static_cast<C>(2 * a.z_loss) * log_z);
    const Slope<C> of_row = {log_z, slope, scale * static_cast<C>(a.label_smoothing / static_cast<double>(a.num_classes))};
    const int64_t target = a.target[r] - a.first;
    const int64_t writer = target < whole ? target / N % kThreads : target - whole;
    const bool is_mine = target >= 0 && target < a.columns && writer == threadIdx.x;
    C hit[1] = {is_mine ? widen(x[target]) : C(0)};
    int64_t column = static_cast<int64_t>(threadIdx.x) * N;
    for (; column + kThreads * N < whole; column += 2 * kThreads * N) {
      const Pack<T, N> packs[2] = {fetch_mutable<T, N>(x + column), fetch_mutable<T, N>(x + column + kThreads * N)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        C value[N];
        widen<T, N>(packs[i], value);
        of_row.apply(value);
        store<T, N>(out + column + i * kThreads * N, value);
      }
    }
    if (column < whole) {
      C value[N];
      widen<T, N>(fetch_mutable<T, N>(x + column), value);
      of_row.apply(value);
      store<T, N>(out + column, value);
    }
    for (int64_t last = whole + threadIdx.x; last < a.row_stride; last += kThreads) {
      C value[1] = {widen(x[last])};
      of_row.apply(value);
      out[last] = narrow<T>(last < a.columns ? value[0] : C(0));
    }
    if (is_mine) {
      of_row.apply(hit);
      out[target] = narrow<T>(hit[0] - scale * static_cast<C>(1 - a.label_smoothing));
    }
  }
}

template <class T, int N>
void launch_stats(const CrossEntropyStats& a, cudaStream_t stream) {
  const auto kernel =
      a.sum_logits == nullptr ? cross_entropy_stats_kernel<T, N, false> : cross_entropy_stats_kernel<T, N, true>;
  kernel<<<blocks_for(a.rows), kThreads, 0, stream>>>(a);
}

template <class T>
void launch_cross_entropy_stats(const CrossEntropyStats& a, cudaStream_t stream) {
  if (vectors_fit<T>(a.row_stride, a.logits)) launch_stats<T, kVector<T>>(a, stream);
  else launch_stats<T, 1>(a, stream);
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
