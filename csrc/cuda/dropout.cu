#include "elementwise.cuh"

namespace shardzoo {
namespace {

template <class C, int N>
__device__ __forceinline__ void drop(const Dropout& d, int64_t rows_per_sample, int64_t r, int64_t column,
                                     C (&value)[N]) {
  if (d.keys == nullptr) return;
  const uint64_t key = row_key(d.keys[r / rows_per_sample], d.first_row + r % rows_per_sample);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const C keep = keep_factor<C>(d, key, column + j);
    value[j] = keep == 0 ? C(0) : value[j] * keep;
  }
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) dropout_forward_kernel(DropoutForward a) {
  using C = Compute<T>;
  each_row<N>(a.rows, a.columns, [&](int64_t r, int64_t column) {
    C value[N], more[N];
    load<T, N>(value, at<T>(a.x, r * a.columns + column));
    if (a.bias != nullptr) {
      load<T, N>(more, at<T>(a.bias, column));
#pragma unroll
      for (int j = 0; j < N; ++j) value[j] += more[j];
    }
    drop<C, N>(a.dropout, a.rows_per_sample, r, column, value);
    if (a.residual != nullptr) {
      load<T, N>(more, at<T>(a.residual, r * a.columns + column));
#pragma unroll
      for (int j = 0; j < N; ++j) value[j] += more[j];
    }
    store<T, N>(at<T>(a.y, r * a.columns + column), value);
  });
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) dropout_backward_kernel(DropoutBackward a) {
  using C = Compute<T>;
  each_row_of_chunk<C, N>(
      a.rows, a.columns, a.chunk_rows, a.partial_bias, [&](int64_t r, int64_t column, C(&sums)[N]) {
        C value[N];
        load<T, N>(value, at<T>(a.grad, r * a.columns + column));
        drop<C, N>(a.dropout, a.rows_per_sample, r, column, value);
#pragma unroll
        for (int j = 0; j < N; ++j) sums[j] += value[j];
        store<T, N>(at<T>(a.grad_x, r * a.columns + column), value);
      });
}

template <class T>
void launch_dropout_forward(const DropoutForward& a, cudaStream_t stream) {
  const bool fit = vectors_fit<T>(a.columns, a.x, a.bias, a.residual, a.y);
  const Launch l = over_rows(a.rows, a.columns, fit ? kVector<T> : 1);
  const auto kernel = fit ? dropout_forward_kernel<T, kVector<T>> : dropout_forward_kernel<T, 1>;
  kernel<<<l.grid, l.block, 0, stream>>>(a);
}

template <class T>
void launch_dropout_backward(const DropoutBackward& a, cudaStream_t stream) {
  const bool fit = vectors_fit<T>(a.columns, a.grad, a.grad_x);
  const Launch l = over_chunks(a.rows, a.columns, a.chunk_rows, fit ? kVector<T> : 1);
  const auto kernel = fit ? dropout_backward_kernel<T, kVector<T>> : dropout_backward_kernel<T, 1>;
  kernel<<<l.grid, l.block, 0, stream>>>(a);
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CUDA_KERNEL(dropout_forward, DropoutForward)
SHARDZOO_CUDA_KERNEL(dropout_backward, DropoutBackward)
