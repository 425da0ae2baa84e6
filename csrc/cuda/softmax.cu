#include "common.cuh"

namespace shardzoo {
namespace {

// Calls step(b, n, q) for this block's samples, heads and queries. The grid has these dimensions, so that no row has to
// be divided into them.
template <class F>
__device__ __forceinline__ void each_attention_row(int64_t batch, int64_t heads, int64_t queries, F step) {
  for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
    for (int64_t n = blockIdx.y; n < heads; n += gridDim.y) {
      for (int64_t q = blockIdx.x; q < queries; q += gridDim.x) step(b, n, q);
    }
  }
}

// Returns how many first keys of a row the causal rule or the prefix leaves visible.
__device__ __forceinline__ int64_t visible_columns(const SoftmaxForward& a, int64_t b, int64_t q) {
  if (!a.causal) return a.columns;
  int64_t limit = q + a.columns - a.queries + 1;
  if (a.prefix != nullptr && a.prefix[b] > limit) limit = a.prefix[b];
  return limit < 0 ? 0 : limit < a.columns ? limit : a.columns;
}

// Pointers to one row of the scores, the bias and the mask.
template <class T>
struct Row {
  const T *scores, *bias, *added;
  const uint8_t* visible;
  int64_t limit;
};

template <class T>
__device__ __forceinline__ const T* row_at(const void* base, const int64_t (&stride)[3], int64_t b, int64_t n,
                                           int64_t q) {
  return base == nullptr ? nullptr : at<T>(base, b * stride[0] + n * stride[1] + q * stride[2]);
}

template <class T>
__device__ __forceinline__ Row<T> find_row(const SoftmaxForward& a, int64_t start, int64_t b, int64_t n, int64_t q) {
  return {at<T>(a.scores, start), row_at<T>(a.bias, a.bias_stride, b, n, q),
          a.mask_is_bool ? nullptr : row_at<T>(a.mask, a.mask_stride, b, n, q),
          a.mask_is_bool ? row_at<uint8_t>(a.mask, a.mask_stride, b, n, q) : nullptr, visible_columns(a, b, q)};
}

// Holds the bytes of a boolean mask for N keys.
template <int N>
struct alignas(N) Bytes {
  uint8_t values[N];
};

// Computes z = scale * scores + bias + mask; -inf where a key is not allowed.
template <class T, int N>
__device__ __forceinline__ void masked_scores(const Row<T>& row, Compute<T> scale, int64_t column,
                                              Compute<T> (&z)[N]) {
  using C = Compute<T>;
  if (column >= row.limit) {
#pragma unroll
    for (int j = 0; j < N; ++j) z[j] = kLowest;
    return;
  }
  load<T, N>(z, row.scores + column);
#pragma unroll
  for (int j = 0; j < N; ++j) z[j] *= scale;
  C more[N];
  if (row.bias != nullptr) {
    load<T, N>(more, row.bias + column);
#pragma unroll
    for (int j = 0; j < N; ++j) z[j] += more[j];
  }
  if (row.added != nullptr) {
    load<T, N>(more, row.added + column);
#pragma unroll
    for (int j = 0; j < N; ++j) z[j] += more[j];
  }
  if (row.visible != nullptr) {
    const Bytes<N> visible = *reinterpret_cast<const Bytes<N>*>(row.visible + column);
#pragma unroll
    for (int j = 0; j < N; ++j) z[j] = visible.values[j] ? z[j] : C(kLowest);
  }
  if (row.limit - column >= N) return;
  const int left = static_cast<int>(row.limit - column);
#pragma unroll
  for (int j = 1; j < N; ++j) z[j] = j < left ? z[j] : C(kLowest);
}

// A block processes a row: one query (x), head (y) and sample (z) of the grid.
template <class T, int N, bool Kept>
__global__ void __launch_bounds__(kTeamThreads) softmax_forward_kernel(SoftmaxForward a) {
  using C = Compute<T>;
  constexpr int K = Kept ? kEach<T, N> / N : 1;
  const C scale = static_cast<C>(a.scale), keep_scale = static_cast<C>(a.dropout.keep_scale);
  int turn = 0;
  each_attention_row(a.batch, a.heads, a.queries, [&](int64_t b, int64_t n, int64_t q) {
    const int64_t start = ((b * a.heads + n) * a.queries + q) * a.columns;
    const Row<T> row = find_row<T>(a, start, b, n, q);
    C z[K][N];
    C top = kLowest;
    each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
      masked_scores<T, N>(row, scale, column, z[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) top = larger(top, z[k][j]);  // a NaN reappears in the sum
    });
    top = reduce_team(top, Maximum(), turn);
    const C shift = top == C(kLowest) ? C(0) : top;
    C sum = 0;
    each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
      if (!Kept) masked_scores<T, N>(row, scale, column, z[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += z[k][j] = exponential(z[k][j] - shift);
    });
    const C total = reduce_team(sum, Add(), turn);
    const C inverse = total == 0 ? C(0) : reciprocal(total);
    const bool drops = a.dropout.keys != nullptr;
    const uint64_t key = drops ? row_key(a.dropout.keys[b], head_row(a.dropout.first_row + n, q)) : 0;
    each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
      if (!Kept) {
        masked_scores<T, N>(row, scale, column, z[k]);
#pragma unroll
        for (int j = 0; j < N; ++j) z[k][j] = exponential(z[k][j] - shift);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) z[k][j] *= inverse;
      store<T, N>(at<T>(a.probs, start + column), z[k]);
      if (!drops) return;
      drop<C, N>(a.dropout, keep_scale, key, column, z[k]);
      store<T, N>(at<T>(a.dropped, start + column), z[k]);
    });
  });
}

// Reads the gradient of a row's probabilities before dropout, and the probabilities.
template <class T>
struct GradRow {
  const T *grad, *probs;
  bool drops;
  Compute<T> keep_scale;
  uint64_t key;

  __device__ __forceinline__ GradRow(const SoftmaxBackward& a, int64_t start, int64_t b, int64_t n, int64_t q)
      : grad(at<T>(a.grad, start)), probs(at<T>(a.probs, start)), drops(a.dropout.keys != nullptr),
        keep_scale(static_cast<Compute<T>>(a.dropout.keep_scale)) {
    key = drops ? row_key(a.dropout.keys[b], head_row(a.dropout.first_row + n, q)) : 0;
  }
  template <int N>
  __device__ __forceinline__ void load(const Dropout& d, int64_t column, Compute<T> (&g)[N], Compute<T> (&p)[N]) const {
    const Pack<T, N> grads = fetch<T, N>(grad + column), probabilities = fetch<T, N>(probs + column);
    widen<T, N>(grads, g);
    widen<T, N>(probabilities, p);
    if (drops) drop<Compute<T>, N>(d, keep_scale, key, column, g);
  }
};

// A team processes a row. If the batch shares a bias (Shared), a block's teams take its samples in turns, and add up
// their sums in order; otherwise a block is one team, and the samples are the grid's third dimension.
template <class T, int N, bool Kept, bool Shared>
__global__ void __launch_bounds__(kTeamThreads) softmax_backward_kernel(SoftmaxBackward a) {
  using C = Compute<T>;
  constexpr int K = Kept ? kEach<T, N> / N : 1;
  const C scale = static_cast<C>(a.scale);
  int turn = 0;
  each_attention_row(Shared ? 1 : a.batch, a.heads, a.queries, [&](int64_t sample, int64_t n, int64_t q) {
    C bias_sum[K][N] = {};
    for (int64_t base = sample; base < (Shared ? a.batch : sample + 1); base += blockDim.y) {
      const int64_t b = base + threadIdx.y;
      const bool is_row = b < a.batch;  // the last samples may not need all teams
      const int64_t start = (((is_row ? b : 0) * a.heads + n) * a.queries + q) * a.columns;
      const GradRow<T> row(a, start, is_row ? b : 0, n, q);
      C g[K][N], p[K][N];
      C dot = 0;
      each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
        row.template load<N>(a.dropout, column, g[k], p[k]);
#pragma unroll
        for (int j = 0; j < N; ++j) dot += p[k][j] * g[k][j];
      });
      dot = reduce_team(dot, Add(), turn);
      if (!is_row) continue;
      each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
        if (!Kept) row.template load<N>(a.dropout, column, g[k], p[k]);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          p[k][j] *= g[k][j] - dot;
          g[k][j] = p[k][j] * scale;
          if (Shared) bias_sum[k][j] += p[k][j];
        }
        store<T, N>(at<T>(a.grad_scores, start + column), g[k]);
        if (!Shared && a.bias_batch > 1) store<T, N>(at<T>(a.grad_bias, start + column), p[k]);
      });
    }
    if constexpr (Shared) {
#pragma unroll
      for (int k = 0; k < K; ++k) add_teams(bias_sum[k]);
      if (threadIdx.y != 0) return;
      each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
        store<T, N>(at<T>(a.grad_bias, (n * a.queries + q) * a.columns + column), bias_sum[k]);
      });
    }
  });
}

// Computes the gradient of a bias shared by the batch, for rows too long to keep. A sum over grad_scores / scale would
// round twice, so every sample's term is computed again from its dot product.
template <class T>
__global__ void __launch_bounds__(kTeamThreads) long_bias_kernel(SoftmaxBackward a) {
  using C = Compute<T>;
  int turn = 0;
  each_attention_row(1, a.heads, a.queries, [&](int64_t, int64_t n, int64_t q) {
    for (int64_t first = 0; first < a.columns; first += blockDim.x) {
      const int64_t mine = first + threadIdx.x;
      C sum = 0;
      for (int64_t b = 0; b < a.batch; ++b) {
        const GradRow<T> row(a, ((b * a.heads + n) * a.queries + q) * a.columns, b, n, q);
        C g[1], p[1];
        C dot = 0;
        each_vector<false, 1, 1>(a.columns, [&](int, int64_t column) {
          row.template load<1>(a.dropout, column, g, p);
          dot += p[0] * g[0];
        });
        dot = reduce_team(dot, Add(), turn);
        if (mine < a.columns) {
          row.template load<1>(a.dropout, mine, g, p);
          sum += p[0] * (g[0] - dot);
        }
      }
      if (mine < a.columns) at<T>(a.grad_bias, (n * a.queries + q) * a.columns)[mine] = narrow<T>(sum);
    }
  });
}

// Returns whether a mask or bias can be read in vectors at every row.
template <class T>
bool strides_fit(const void* tensor, const int64_t (&strides)[3], int64_t element_bytes) {
  const int n = kVector<T>;
  return tensor == nullptr || (aligned(tensor, n * static_cast<int>(element_bytes)) && strides[0] % n == 0 &&
                               strides[1] % n == 0 && strides[2] % n == 0);
}

dim3 attention_grid(int64_t batch, int64_t heads, int64_t queries) {
  const auto limited = [](int64_t size) { return static_cast<unsigned>(size < 65535 ? size : 65535); };
  return dim3(blocks_for(queries), limited(heads), limited(batch));
}

template <class T>
void launch_softmax_forward(const SoftmaxForward& a, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const bool fit = vectors_fit<T>(a.columns, a.scores, a.probs, a.dropped) &&
                   strides_fit<T>(a.bias, a.bias_stride, sizeof(T)) &&
                   strides_fit<T>(a.mask, a.mask_stride, a.mask_is_bool ? 1 : sizeof(T));
  const int each = fit ? kEach<T, N> : kEach<T, 1>, threads = threads_for(a.columns, each, kTeamThreads);
  const bool kept = a.columns <= static_cast<int64_t>(threads) * each;
  const auto kernel = fit ? (kept ? softmax_forward_kernel<T, N, true> : softmax_forward_kernel<T, N, false>)
                          : (kept ? softmax_forward_kernel<T, 1, true> : softmax_forward_kernel<T, 1, false>);
  const dim3 grid = attention_grid(a.batch, a.heads, a.queries);
  kernel<<<grid, threads, 0, stream>>>(a);
}

template <class T, int N>
void launch_backward(const SoftmaxBackward& a, cudaStream_t stream) {
  const int threads = threads_for(a.columns, kEach<T, N>, kTeamThreads);
  const bool kept = a.columns <= static_cast<int64_t>(threads) * kEach<T, N>, shared = a.bias_batch == 1;
  const dim3 block = kept && shared ? choose_teams(threads, a.batch) : dim3(threads);
  const dim3 grid = attention_grid(kept && shared ? 1 : a.batch, a.heads, a.queries);
  const auto kernel = kept ? (shared ? softmax_backward_kernel<T, N, true, true> : softmax_backward_kernel<T, N, true, false>)
                           : softmax_backward_kernel<T, N, false, false>;
  kernel<<<grid, block, 0, stream>>>(a);
  const dim3 planes = attention_grid(1, a.heads, a.queries);
  if (!kept && shared) long_bias_kernel<T><<<planes, kTeamThreads, 0, stream>>>(a);
}

template <class T>
void launch_softmax_backward(const SoftmaxBackward& a, cudaStream_t stream) {
  if (vectors_fit<T>(a.columns, a.grad, a.probs, a.grad_scores, a.grad_bias)) launch_backward<T, kVector<T>>(a, stream);
  else launch_backward<T, 1>(a, stream);
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CUDA_KERNEL(softmax_forward, SoftmaxForward)
SHARDZOO_CUDA_KERNEL(softmax_backward, SoftmaxBackward)
