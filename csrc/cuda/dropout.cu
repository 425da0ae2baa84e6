#include "elementwise.cuh"

namespace shardzoo {
namespace {

// Holds the key of a row's sample, and the row within the sample.
struct Key {
  int64_t of_sample, row;
};

// Yields the keys of the rows first, first + step, ...; it divides only at the start.
template <class C>
struct Keys {
  const Dropout& dropout;
  C keep_scale;
  int64_t rows_per_sample, samples_each, rows_each, sample, row;

  __device__ __forceinline__ Keys(const Dropout& d, int64_t rows_per_sample, int64_t first, int64_t step)
      : dropout(d), keep_scale(static_cast<C>(d.keep_scale)), rows_per_sample(rows_per_sample) {
    if (d.keys == nullptr) return;
    samples_each = step / rows_per_sample, rows_each = step % rows_per_sample;
    sample = first / rows_per_sample, row = first % rows_per_sample;
  }
  __device__ __forceinline__ Key next() {
    if (dropout.keys == nullptr) return {0, 0};
    const Key key = {__ldg(dropout.keys + sample), dropout.first_row + row};
    sample += samples_each, row += rows_each;
    if (row >= rows_per_sample) row -= rows_per_sample, ++sample;
    return key;
  }
  template <int N>
  __device__ __forceinline__ void drop_row(Key key, int64_t column, C (&value)[N]) const {
    if (dropout.keys == nullptr) return;
    drop<C, N>(dropout, keep_scale, row_key(key.of_sample, key.row), column, value);
  }
};

template <class T, int N>
struct DropoutRow {
  Pack<T, N> x, residual;
  Key key;
};

template <class T, int N>
__global__ void __launch_bounds__(kThreads, kBlocksEach) dropout_forward_kernel(DropoutForward a) {
  using C = Compute<T>;
  const int64_t column = own_column<N>();
  if (column >= a.columns) return;
  C bias[N] = {};
  if (a.bias != nullptr) load<T, N>(bias, at<T>(a.bias, column));
  Keys<C> keys(a.dropout, a.rows_per_sample, static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y,
               static_cast<int64_t>(gridDim.y) * blockDim.y);
  const auto begin = [&](int64_t r) {
    DropoutRow<T, N> row;
    row.x = fetch<T, N>(at<T>(a.x, r * a.columns + column));
    if (a.residual != nullptr) row.residual = fetch<T, N>(at<T>(a.residual, r * a.columns + column));
    row.key = keys.next();
    return row;
  };
  each_row<N>(a.rows, begin, [&](int64_t r, const DropoutRow<T, N>& row) {
    C value[N], residual[N];
    widen<T, N>(row.x, value);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] += bias[j];
    keys.drop_row(row.key, column, value);
    widen<T, N>(row.residual, residual);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] += residual[j];
    store<T, N>(at<T>(a.y, r * a.columns + column), value);
  });
}

// Computes the gradients of x and of a bias. Without a bias, the forward kernel computes the gradient of x.
template <class T, int N>
__global__ void __launch_bounds__(kTeamThreads, 2) dropout_backward_kernel(DropoutBackward a) {
  using C = Compute<T>;
  const int64_t column = own_column<N>();
  Keys<C> keys(a.dropout, a.rows_per_sample, blockIdx.y * a.chunk_rows + threadIdx.y, blockDim.y);
  C sums[N] = {};
  const auto begin = [&](int64_t r) {
    return DropoutRow<T, N>{fetch<T, N>(at<T>(a.grad, r * a.columns + column)), {}, keys.next()};
  };
  each_row_of_chunk<C, N>(a.rows, a.columns, a.chunk_rows, a.partial_bias, sums, begin,
                          [&](int64_t r, const DropoutRow<T, N>& row) {
                            C value[N];
                            widen<T, N>(row.x, value);
                            keys.drop_row(row.key, column, value);
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
  if (a.partial_bias == nullptr) {
    const DropoutForward same = {a.grad, nullptr, nullptr, a.grad_x, a.rows, a.columns, a.rows_per_sample, a.dropout};
    return launch_dropout_forward<T>(same, stream);
  }
  const bool fit = vectors_fit<T>(a.columns, a.grad, a.grad_x);
  const Launch l = over_chunks(a.rows, a.columns, a.chunk_rows, fit ? kVector<T> : 1);
  const auto kernel = fit ? dropout_backward_kernel<T, kVector<T>> : dropout_backward_kernel<T, 1>;
  kernel<<<l.grid, l.block, 0, stream>>>(a);
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CUDA_KERNEL(dropout_forward, DropoutForward)
SHARDZOO_CUDA_KERNEL(dropout_backward, DropoutBackward)
