#include "common.cuh"

namespace shardzoo {
namespace {

// Computes x + residual, rounds it to the dtype in which it is stored, and stores it.
template <class T, int N>
__device__ __forceinline__ void load_summed(const NormForward& a, int64_t position, bool store_sum,
                                            Compute<T> (&h)[N]) {
  load<T, N>(h, at<T>(a.x, position));
  if (a.residual == nullptr) return;
  Compute<T> residual[N];
  load<T, N>(residual, at<T>(a.residual, position));
#pragma unroll
  for (int j = 0; j < N; ++j) h[j] = widen(narrow<T>(h[j] + residual[j]));
  if (store_sum) store<T, N>(at<T>(a.summed, position), h);
}

template <class T, int N, bool Kept>
__global__ void __launch_bounds__(1024) norm_forward_kernel(NormForward a) {
  using C = Compute<T>;
  constexpr int K = Kept ? kEach<T, N> / N : 1;
  const bool centered = a.mean != nullptr;
  const C count = static_cast<C>(a.columns);
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    const int64_t start = r * a.columns;
    C h[K][N];
    C sum = 0;
    each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
      load_summed<T, N>(a, start + column, true, h[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += centered ? h[k][j] : h[k][j] * h[k][j];
    });
    const C first = reduce_block(Pair<C>{sum, C(0)}, Add()).first / count;  // the mean, or the mean square
    C variance = first;
    if (centered) {
      sum = 0;
      each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
        if (!Kept) load_summed<T, N>(a, start + column, false, h[k]);
#pragma unroll
        for (int j = 0; j < N; ++j) sum += (h[k][j] - first) * (h[k][j] - first);
      });
      variance = reduce_block(Pair<C>{sum, C(0)}, Add()).first / count;
    }
    const C mean = centered ? first : C(0), rstd = inverse_root(variance + static_cast<C>(a.eps));
    if (threadIdx.x == 0) {
      if (centered) static_cast<C*>(a.mean)[r] = mean;
      static_cast<C*>(a.rstd)[r] = rstd;
    }
    each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
      if (!Kept) load_summed<T, N>(a, start + column, false, h[k]);
      C weight[N];
      load<T, N>(weight, at<T>(a.weight, column));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const C normalized = (h[k][j] - mean) * rstd;
        h[k][j] = weight[j] * (centered ? normalized : widen(narrow<T>(normalized)));
      }
      if (a.bias != nullptr) {
        C bias[N];
        load<T, N>(bias, at<T>(a.bias, column));
#pragma unroll
        for (int j = 0; j < N; ++j) h[k][j] += bias[j];
      }
      store<T, N>(at<T>(a.y, start + column), h[k]);
    });
  }
}

// A thread keeps half as many elements as in the forward pass, because it keeps two column sums for each.
template <class T, int N>
constexpr int kEachBackward = N > 1 ? 8 : 4;

// A block processes a chunk of rows; every thread sums its own columns over them, in order.
template <class T, int N, bool Kept>
__global__ void __launch_bounds__(1024) norm_backward_kernel(NormBackward a) {
  using C = Compute<T>;
  constexpr int K = Kept ? kEachBackward<T, N> / N : 1;
  const bool centered = a.mean != nullptr;
  const C count = static_cast<C>(a.columns);
  const int64_t chunk = blockIdx.x, first = chunk * a.chunk_rows;
  const int64_t stop = first + a.chunk_rows < a.rows ? first + a.chunk_rows : a.rows;
  C* to_weight = at<C>(a.partial_weight, chunk * a.columns);
  C* to_bias = at<C>(a.partial_bias, chunk * a.columns);
  C sum_weight[K][N] = {}, sum_bias[K][N] = {};
  for (int64_t r = first; r < stop; ++r) {
    const int64_t start = r * a.columns;
    const C mean = centered ? static_cast<const C*>(a.mean)[r] : C(0), rstd = static_cast<const C*>(a.rstd)[r];
    C normalized[K][N], weighted[K][N];
    Pair<C> sums = {0, 0};
    each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
      C weight[N];
      load<T, N>(weighted[k], at<T>(a.grad, start + column));
      load<T, N>(normalized[k], at<T>(a.h, start + column));
      load<T, N>(weight, at<T>(a.weight, column));
      if (!Kept && r > first) {
        for (int j = 0; j < N; ++j) sum_weight[0][j] = to_weight[column + j];
        for (int j = 0; j < N && to_bias != nullptr; ++j) sum_bias[0][j] = to_bias[column + j];
      } else if (!Kept) {
        for (int j = 0; j < N; ++j) sum_weight[0][j] = sum_bias[0][j] = 0;
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        normalized[k][j] = (normalized[k][j] - mean) * rstd;
        sum_weight[k][j] += weighted[k][j] * normalized[k][j];
        sum_bias[k][j] += weighted[k][j];
        weighted[k][j] *= weight[j];
        sums.first += weighted[k][j];
        sums.second += weighted[k][j] * normalized[k][j];
      }
      if (!Kept) {
        for (int j = 0; j < N; ++j) to_weight[column + j] = sum_weight[0][j];
        for (int j = 0; j < N && to_bias != nullptr; ++j) to_bias[column + j] = sum_bias[0][j];
      }
    });
    sums = reduce_block(sums, Add());
    const C mean_weighted = centered ? sums.first / count : C(0), mean_product = sums.second / count;
    each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
      if (!Kept) {
        C weight[N];
        load<T, N>(weighted[k], at<T>(a.grad, start + column));
        load<T, N>(normalized[k], at<T>(a.h, start + column));
        load<T, N>(weight, at<T>(a.weight, column));
#pragma unroll
        for (int j = 0; j < N; ++j) {
          normalized[k][j] = (normalized[k][j] - mean) * rstd;
          weighted[k][j] *= weight[j];
        }
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        weighted[k][j] = (weighted[k][j] - mean_weighted - normalized[k][j] * mean_product) * rstd;
      }
      if (a.grad_summed != nullptr) {
        C more[N];
        load<T, N>(more, at<T>(a.grad_summed, start + column));
#pragma unroll
        for (int j = 0; j < N; ++j) weighted[k][j] += more[j];
      }
      store<T, N>(at<T>(a.grad_x, start + column), weighted[k]);
    });
  }
  if (!Kept) return;
  each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      to_weight[column + j] = sum_weight[k][j];
      if (to_bias != nullptr) to_bias[column + j] = sum_bias[k][j];
    }
  });
}

// 32 columns per block; warp w sums the chunks w, w + 32, ..., and the warps' sums are added in order.
template <class T>
__global__ void __launch_bounds__(1024) column_sum_kernel(ColumnSum a) {
  using C = Compute<T>;
  __shared__ C of_warps[32][33];
  const int lane = threadIdx.x, warp = threadIdx.y;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  C sum = 0;
  if (column < a.columns) {
    for (int64_t chunk = warp; chunk < a.chunks; chunk += 32) sum += at<C>(a.partial, chunk * a.columns)[column];
  }
  of_warps[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= a.columns) return;
  for (int w = 1; w < 32; ++w) sum += of_warps[w][lane];
  static_cast<T*>(a.out)[column] = narrow<T>(sum);
}

template <class T>
void launch_norm_forward(const NormForward& a, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const bool fit = vectors_fit<T>(a.columns, a.x, a.residual, a.weight, a.bias, a.y, a.summed);
  const int each = fit ? kEach<T, N> : kEach<T, 1>, threads = threads_for(a.columns, each, 1024);
  const bool kept = a.columns <= static_cast<int64_t>(threads) * each;
  const auto kernel = fit ? (kept ? norm_forward_kernel<T, N, true> : norm_forward_kernel<T, N, false>)
                          : (kept ? norm_forward_kernel<T, 1, true> : norm_forward_kernel<T, 1, false>);
  kernel<<<blocks_for(a.rows), threads, 0, stream>>>(a);
}

template <class T>
void launch_norm_backward(const NormBackward& a, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const bool fit = vectors_fit<T>(a.columns, a.grad, a.grad_summed, a.h, a.weight, a.grad_x);
  const int each = fit ? kEachBackward<T, N> : kEachBackward<T, 1>, threads = threads_for(a.columns, each, 1024);
  const bool kept = a.columns <= static_cast<int64_t>(threads) * each;
  const auto kernel = fit ? (kept ? norm_backward_kernel<T, N, true> : norm_backward_kernel<T, N, false>)
                          : (kept ? norm_backward_kernel<T, 1, true> : norm_backward_kernel<T, 1, false>);
  const int64_t chunks = (a.rows + a.chunk_rows - 1) / a.chunk_rows;
  kernel<<<static_cast<unsigned>(chunks), threads, 0, stream>>>(a);
}

template <class T>
void launch_column_sum(const ColumnSum& a, cudaStream_t stream) {
  column_sum_kernel<T><<<static_cast<unsigned>((a.columns + 31) / 32), dim3(32, 32), 0, stream>>>(a);
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CUDA_KERNEL(norm_forward, NormForward)
SHARDZOO_CUDA_KERNEL(norm_backward, NormBackward)
SHARDZOO_CUDA_KERNEL(column_sum, ColumnSum)
