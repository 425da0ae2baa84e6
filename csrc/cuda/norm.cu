#include "common.cuh"

namespace shardzoo {
namespace {

// Adds a residual that has arrived to x, and rounds the sum to the dtype in which it is stored.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> add(const Pack<T, N>& x, const Pack<T, N>& residual) {
  Compute<T> h[N], more[N];
  widen<T, N>(x, h);
  widen<T, N>(residual, more);
#pragma unroll
  for (int j = 0; j < N; ++j) h[j] += more[j];
  return narrow<T, N>(h);
}

// Returns the normalized value times the weight. RMSNorm rounds it before, or adds an offset to the weight.
template <class T, int N, bool Centered>
__device__ __forceinline__ void normalize(const NormForward& a, Compute<T> (&h)[N], Compute<T> mean, Compute<T> rstd,
                                          const Pack<T, N>& weights, int64_t column) {
  using C = Compute<T>;
  C weight[N], shift[N] = {};
  widen<T, N>(weights, weight);
  if (Centered && a.bias != nullptr) load<T, N>(shift, at<T>(a.bias, column));
#pragma unroll
  for (int j = 0; j < N; ++j) h[j] = (h[j] - mean) * rstd;
  if (!Centered && a.rounds_once) {
#pragma unroll
    for (int j = 0; j < N; ++j) weight[j] += static_cast<C>(a.offset);
  } else if (!Centered) {
    widen<T, N>(narrow<T, N>(h), h);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) h[j] = Centered ? h[j] * weight[j] + shift[j] : h[j] * weight[j];
}

// LayerNorm (Centered) or RMSNorm. A block processes a row.
template <class T, int N, bool Centered>
__global__ void __launch_bounds__(kTeamThreads, 1) norm_forward_kernel(NormForward a) {
  using C = Compute<T>;
  constexpr int K = kEach<T, N> / N;
  const C count = static_cast<C>(a.columns);
  int turn = 0;
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    const int64_t start = r * a.columns;
    Pack<T, N> packs[K], weights[K];  // zeros beyond the last column
    each_vector<true, K, N>(a.columns, [&](int k, int64_t column) {
      packs[k] = fetch<T, N>(at<T>(a.x, start + column));
      weights[k] = fetch<T, N>(at<T>(a.weight, column));  // arrives while the sums are computed
    });
    if (a.residual != nullptr) {
      Pack<T, N> residual[K];
      each_vector<true, K, N>(
          a.columns, [&](int k, int64_t column) { residual[k] = fetch<T, N>(at<T>(a.residual, start + column)); });
      each_vector<true, K, N>(a.columns, [&](int k, int64_t column) {
        packs[k] = add<T, N>(packs[k], residual[k]);
        store<T, N>(at<T>(a.summed, start + column), packs[k]);
      });
    }
    C h[K][N];
    C sum = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      widen<T, N>(packs[k], h[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += Centered ? h[k][j] : h[k][j] * h[k][j];
    }
    const C first = reduce_team(sum, Add(), turn) / count;  // the mean, or the mean square
    C variance = first;
    if (Centered) {
      sum = 0;
      each_vector<true, K, N>(a.columns, [&](int k, int64_t) {
#pragma unroll
        for (int j = 0; j < N; ++j) sum += (h[k][j] - first) * (h[k][j] - first);
      });
      variance = reduce_team(sum, Add(), turn) / count;
    }
    const C mean = Centered ? first : C(0), rstd = inverse_root(variance + static_cast<C>(a.eps));
    if (threadIdx.x == 0) {
      if (Centered) static_cast<C*>(a.mean)[r] = mean;
      static_cast<C*>(a.rstd)[r] = rstd;
    }
    each_vector<true, K, N>(a.columns, [&](int k, int64_t column) {
      normalize<T, N, Centered>(a, h[k], mean, rstd, weights[k], column);
      store<T, N>(at<T>(a.y, start + column), h[k]);
    });
  }
}

// Computes either norm of rows too long for registers, which a block reads two or three times.
template <class T, int N, bool Centered>
__global__ void __launch_bounds__(kTeamThreads) long_norm_forward_kernel(NormForward a) {
  using C = Compute<T>;
  const C count = static_cast<C>(a.columns);
  int turn = 0;
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    const int64_t start = r * a.columns;
    const auto load_summed = [&](int64_t column, C(&h)[N]) {
      Pack<T, N> pack = fetch<T, N>(at<T>(a.x, start + column));
      if (a.residual != nullptr) pack = add<T, N>(pack, fetch<T, N>(at<T>(a.residual, start + column)));
      widen<T, N>(pack, h);
      return pack;
    };
    C h[N];
    C sum = 0;
    each_vector<false, 1, N>(a.columns, [&](int, int64_t column) {
      const Pack<T, N> pack = load_summed(column, h);
      if (a.residual != nullptr) store<T, N>(at<T>(a.summed, start + column), pack);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += Centered ? h[j] : h[j] * h[j];
    });
    const C first = reduce_team(sum, Add(), turn) / count;
    C variance = first;
    if (Centered) {
      sum = 0;
      each_vector<false, 1, N>(a.columns, [&](int, int64_t column) {
        load_summed(column, h);
#pragma unroll
        for (int j = 0; j < N; ++j) sum += (h[j] - first) * (h[j] - first);
      });
      variance = reduce_team(sum, Add(), turn) / count;
    }
    const C mean = Centered ? first : C(0), rstd = inverse_root(variance + static_cast<C>(a.eps));
    if (threadIdx.x == 0) {
      if (Centered) static_cast<C*>(a.mean)[r] = mean;
      static_cast<C*>(a.rstd)[r] = rstd;
    }
    each_vector<false, 1, N>(a.columns, [&](int, int64_t column) {
      load_summed(column, h);
      normalize<T, N, Centered>(a, h, mean, rstd, fetch<T, N>(at<T>(a.weight, column)), column);
      store<T, N>(at<T>(a.y, start + column), h);
    });
  }
}

// A thread keeps half as many elements as in the forward pass, because it keeps two column sums for each.
template <class T, int N>
constexpr int kEachBackward = N > 1 ? 8 : sizeof(T) == 8 ? 2 : 4;

// What a thread needs of a row, as it lies in memory.
template <class T, int N, int K>
struct NormRow {
  Pack<T, N> grad[K], h[K];
  Compute<T> mean, rstd;
};

// Reads row r. A row from `stop` on and columns beyond the last are zeros, which add nothing to a sum.
template <class T, int N, int K, bool Centered>
__device__ __forceinline__ NormRow<T, N, K> fetch_row(const NormBackward& a, int64_t r, int64_t stop) {
  using C = Compute<T>;
  NormRow<T, N, K> row = {};
  if (r >= stop) return row;
  each_vector<true, K, N>(a.columns, [&](int k, int64_t column) {
    row.grad[k] = fetch<T, N>(at<T>(a.grad, r * a.columns + column));
    row.h[k] = fetch<T, N>(at<T>(a.h, r * a.columns + column));
  });
  row.mean = Centered ? __ldg(static_cast<const C*>(a.mean) + r) : C(0);
  row.rstd = __ldg(static_cast<const C*>(a.rstd) + r);
  return row;
}

// A block processes a chunk of rows, as many at a time as it has teams; every thread sums its own columns over them, in
// order. Ahead: the next rows are on their way while these are computed, for which 1,024 threads lack registers. With
// as many chunks as the device has multiprocessors, all blocks run at once, and little is left to be summed over them.
template <class T, int N, bool Centered, bool Ahead>
__global__ void __launch_bounds__(Ahead ? kTeamThreads : 1024, 1) norm_backward_kernel(NormBackward a) {
  using C = Compute<T>;
  constexpr int K = kEachBackward<T, N> / N;
  const C share = 1 / static_cast<C>(a.columns);
  const C offset = Centered ? C(0) : static_cast<C>(a.offset);
  const int64_t chunk = blockIdx.x, first = chunk * a.chunk_rows;
  const int64_t stop = first + a.chunk_rows < a.rows ? first + a.chunk_rows : a.rows;
  Pack<T, N> weights[K];
  each_vector<true, K, N>(a.columns,
                          [&](int k, int64_t column) { weights[k] = fetch<T, N>(at<T>(a.weight, column)); });
  C sum_weight[K][N] = {}, sum_bias[K][N] = {};
  int turn = 0;
  NormRow<T, N, K> row;
  if (Ahead) row = fetch_row<T, N, K, Centered>(a, first + threadIdx.y, stop);
  for (int64_t base = first; base < stop; base += blockDim.y) {
    const int64_t r = base + threadIdx.y, start = r * a.columns;
    if (!Ahead) row = fetch_row<T, N, K, Centered>(a, r, stop);
    const C mean = row.mean, rstd = row.rstd;
    C normalized[K][N], weighted[K][N];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      widen<T, N>(row.grad[k], weighted[k]);
      widen<T, N>(row.h[k], normalized[k]);
    }
    if (Ahead) row = fetch_row<T, N, K, Centered>(a, r + blockDim.y, stop);
    Pair<C> sums = {0, 0};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      C weight[N];
      widen<T, N>(weights[k], weight);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        normalized[k][j] = (normalized[k][j] - mean) * rstd;
        sum_weight[k][j] += weighted[k][j] * normalized[k][j];
        if (Centered) sum_bias[k][j] += weighted[k][j];
        weighted[k][j] *= Centered ? weight[j] : weight[j] + offset;
        if (Centered) sums.first += weighted[k][j];
        sums.second += weighted[k][j] * normalized[k][j];
      }
    }
    if (Centered) sums = reduce_team(sums, Add(), turn);
    else sums.second = reduce_team(sums.second, Add(), turn);
    const C mean_weighted = sums.first * share, mean_product = sums.second * share;
    if (r >= stop) continue;
    each_vector<true, K, N>(a.columns, [&](int k, int64_t column) {
      C more[N] = {};
      if (a.grad_summed != nullptr) load<T, N>(more, at<T>(a.grad_summed, start + column));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        weighted[k][j] = (weighted[k][j] - mean_weighted - normalized[k][j] * mean_product) * rstd + more[j];
      }
      store<T, N>(at<T>(a.grad_x, start + column), weighted[k]);
    });
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    add_teams(sum_weight[k]);
    if (Centered && a.partial_bias != nullptr) add_teams(sum_bias[k]);
  }
  if (threadIdx.y != 0) return;
  each_vector<true, K, N>(a.columns, [&](int k, int64_t column) {
    store_wide<C, N>(at<C>(a.partial_weight, chunk * a.columns + column), sum_weight[k]);
    if (!Centered || a.partial_bias == nullptr) return;
    store_wide<C, N>(at<C>(a.partial_bias, chunk * a.columns + column), sum_bias[k]);
  });
}

// Computes the gradients of rows too long for registers: a block reads a row twice, and keeps its sums in memory.
template <class T, int N, bool Centered>
__global__ void __launch_bounds__(1024) long_norm_backward_kernel(NormBackward a) {
  using C = Compute<T>;
  const C share = 1 / static_cast<C>(a.columns);
  const C offset = Centered ? C(0) : static_cast<C>(a.offset);
  const int64_t chunk = blockIdx.x, first = chunk * a.chunk_rows;
  const int64_t stop = first + a.chunk_rows < a.rows ? first + a.chunk_rows : a.rows;
  C* to_weight = at<C>(a.partial_weight, chunk * a.columns);
  C* to_bias = a.partial_bias == nullptr ? nullptr : at<C>(a.partial_bias, chunk * a.columns);
  int turn = 0;
  for (int64_t r = first; r < stop; ++r) {
    const int64_t start = r * a.columns;
    const C mean = Centered ? static_cast<const C*>(a.mean)[r] : C(0), rstd = static_cast<const C*>(a.rstd)[r];
    const auto load_row = [&](int64_t column, C(&grad)[N], C(&normalized)[N], C(&weight)[N]) {
      load<T, N>(grad, at<T>(a.grad, start + column));
      load<T, N>(normalized, at<T>(a.h, start + column));
      load<T, N>(weight, at<T>(a.weight, column));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        normalized[j] = (normalized[j] - mean) * rstd;
        if (!Centered) weight[j] += offset;
      }
    };
    C grad[N], normalized[N], weight[N];
    Pair<C> sums = {0, 0};
    each_vector<false, 1, N>(a.columns, [&](int, int64_t column) {
      load_row(column, grad, normalized, weight);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        to_weight[column + j] = (r > first ? to_weight[column + j] : C(0)) + grad[j] * normalized[j];
        if (to_bias != nullptr) to_bias[column + j] = (r > first ? to_bias[column + j] : C(0)) + grad[j];
        sums.first += grad[j] * weight[j];
        sums.second += grad[j] * weight[j] * normalized[j];
      }
    });
    sums = reduce_team(sums, Add(), turn);
    const C mean_weighted = Centered ? sums.first * share : C(0), mean_product = sums.second * share;
    each_vector<false, 1, N>(a.columns, [&](int, int64_t column) {
      load_row(column, grad, normalized, weight);
      C more[N] = {};
      if (a.grad_summed != nullptr) load<T, N>(more, at<T>(a.grad_summed, start + column));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        grad[j] = (grad[j] * weight[j] - mean_weighted - normalized[j] * mean_product) * rstd + more[j];
      }
      store<T, N>(at<T>(a.grad_x, start + column), grad);
    });
  }
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

template <class T, int N, bool Centered>
void launch_forward(const NormForward& a, cudaStream_t stream) {
  const int threads = threads_for(a.columns, kEach<T, N>, kTeamThreads);
  const bool kept = a.columns <= static_cast<int64_t>(threads) * kEach<T, N>;
  const auto kernel = kept ? norm_forward_kernel<T, N, Centered> : long_norm_forward_kernel<T, N, Centered>;
  kernel<<<blocks_for(a.rows), threads, 0, stream>>>(a);
}

template <class T>
void launch_norm_forward(const NormForward& a, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const bool fit = vectors_fit<T>(a.columns, a.x, a.residual, a.weight, a.bias, a.y, a.summed);
  const auto launch = fit ? (a.mean != nullptr ? launch_forward<T, N, true> : launch_forward<T, N, false>)
                          : (a.mean != nullptr ? launch_forward<T, 1, true> : launch_forward<T, 1, false>);
  launch(a, stream);
}

template <class T, int N, bool Centered>
void launch_backward(const NormBackward& a, cudaStream_t stream) {
  const int threads = threads_for(a.columns, kEachBackward<T, N>, 1024);
  const unsigned chunks = static_cast<unsigned>((a.rows + a.chunk_rows - 1) / a.chunk_rows);
  if (a.columns <= static_cast<int64_t>(threads) * kEachBackward<T, N>) {
    const dim3 block = choose_teams(threads, a.chunk_rows);
    const auto kernel = threads <= kTeamThreads ? norm_backward_kernel<T, N, Centered, true>
                                                : norm_backward_kernel<T, N, Centered, false>;
    kernel<<<chunks, block, 0, stream>>>(a);
  } else {
    const auto kernel = long_norm_backward_kernel<T, N, Centered>;
    kernel<<<chunks, threads, 0, stream>>>(a);
  }
}

template <class T>
void launch_norm_backward(const NormBackward& a, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const bool fit = vectors_fit<T>(a.columns, a.grad, a.grad_summed, a.h, a.weight, a.grad_x);
  const auto launch = fit ? (a.mean != nullptr ? launch_backward<T, N, true> : launch_backward<T, N, false>)
                          : (a.mean != nullptr ? launch_backward<T, 1, true> : launch_backward<T, 1, false>);
  launch(a, stream);
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
