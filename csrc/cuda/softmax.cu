#include "common.cuh"

namespace shardzoo {
namespace {

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
__device__ __forceinline__ Row<T> row_of(const SoftmaxForward& a, int64_t unit) {
  const int64_t q = unit % a.queries, n = unit / a.queries % a.heads, b = unit / a.queries / a.heads;
  const int64_t mask = b * a.mask_stride[0] + n * a.mask_stride[1] + q * a.mask_stride[2];
  const int64_t bias = b * a.bias_stride[0] + n * a.bias_stride[1] + q * a.bias_stride[2];
  return {at<T>(a.scores, unit * a.columns), at<T>(a.bias, bias), a.mask_is_bool ? nullptr : at<T>(a.mask, mask),
          a.mask_is_bool ? at<uint8_t>(a.mask, mask) : nullptr, visible_columns(a, b, q)};
}

// z = scale * scores + bias + mask; -inf where a key is not allowed.
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
    const Pack<uint8_t, N> visible = *reinterpret_cast<const Pack<uint8_t, N>*>(row.visible + column);
#pragma unroll
    for (int j = 0; j < N; ++j) z[j] = visible.values[j] ? z[j] : C(kLowest);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) z[j] = column + j < row.limit ? z[j] : C(kLowest);
}

__device__ __forceinline__ uint64_t key_of_row(const Dropout& d, int64_t b, int64_t row) {
  return d.keys == nullptr ? 0 : row_key(d.keys[b], row);
}

template <class T, int N, bool Kept>
__global__ void __launch_bounds__(1024) softmax_forward_kernel(SoftmaxForward a, int64_t rows) {
  using C = Compute<T>;
  constexpr int K = Kept ? kEach<T, N> / N : 1;
  const C scale = static_cast<C>(a.scale);
  for (int64_t unit = blockIdx.x; unit < rows; unit += gridDim.x) {
    const Row<T> row = row_of<T>(a, unit);
    C z[K][N];
    C top = kLowest;
    each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
      masked_scores<T, N>(row, scale, column, z[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) top = z[k][j] > top ? z[k][j] : top;  // a NaN reappears in the sum
    });
    top = reduce_block(Pair<C>{top, C(0)}, Maximum()).first;
    const C shift = top == C(kLowest) ? C(0) : top;
    C sum = 0;
    each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
      if (!Kept) masked_scores<T, N>(row, scale, column, z[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += z[k][j] = exponential(z[k][j] - shift);
    });
    const C total = reduce_block(Pair<C>{sum, C(0)}, Add()).first;
    const C inverse = total == 0 ? C(0) : 1 / total;
    const int64_t plane = a.heads * a.queries;
    const uint64_t key =
        key_of_row(a.dropout, unit / plane, attention_row(a.dropout.first_row, unit % plane, a.queries));
    each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
      if (!Kept) {
        masked_scores<T, N>(row, scale, column, z[k]);
#pragma unroll
        for (int j = 0; j < N; ++j) z[k][j] = exponential(z[k][j] - shift);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) z[k][j] *= inverse;
      store<T, N>(at<T>(a.probs, unit * a.columns + column), z[k]);
      if (a.dropout.keys == nullptr) return;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const C keep = keep_factor<C>(a.dropout, key, column + j);
        z[k][j] = keep == 0 ? C(0) : z[k][j] * keep;
      }
      store<T, N>(at<T>(a.dropped, unit * a.columns + column), z[k]);
    });
  }
}

// The gradient of the probabilities before dropout.
template <class T, int N>
__device__ __forceinline__ void dropped_grad(const Dropout& d, uint64_t key, int64_t column, const T* grad,
                                             Compute<T> (&g)[N]) {
  using C = Compute<T>;
  load<T, N>(g, grad + column);
  if (d.keys == nullptr) return;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const C keep = keep_factor<C>(d, key, column + j);
    g[j] = keep == 0 ? C(0) : g[j] * keep;
  }
}

// A block processes one (n, q). If the batch shares a bias, it sums over the batch in order; otherwise the samples
// are independent and are the grid's second dimension.
template <class T, int N, bool Kept>
__global__ void __launch_bounds__(512) softmax_backward_kernel(SoftmaxBackward a) {
  using C = Compute<T>;
  constexpr int K = Kept ? kEach<T, N> / N : 1;
  const bool shared_bias = a.bias_batch == 1;
  const C scale = static_cast<C>(a.scale);
  const int64_t plane = a.heads * a.queries;
  for (int64_t unit = blockIdx.x; unit < plane; unit += gridDim.x) {
    const int64_t row = attention_row(a.dropout.first_row, unit, a.queries);
    C bias_sum[K][N] = {};
    for (int64_t b = blockIdx.y; b < a.batch; b += gridDim.y) {
      const int64_t start = (b * plane + unit) * a.columns;
      const T *grad = at<T>(a.grad, start), *probs = at<T>(a.probs, start);
      const uint64_t key = key_of_row(a.dropout, b, row);
      C g[K][N], p[K][N];
      C dot = 0;
      each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
        dropped_grad<T, N>(a.dropout, key, column, grad, g[k]);
        load<T, N>(p[k], probs + column);
#pragma unroll
        for (int j = 0; j < N; ++j) dot += p[k][j] * g[k][j];
      });
      dot = reduce_block(Pair<C>{dot, C(0)}, Add()).first;
      each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
        if (!Kept) {
          dropped_grad<T, N>(a.dropout, key, column, grad, g[k]);
          load<T, N>(p[k], probs + column);
        }
        C scaled[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
          p[k][j] *= g[k][j] - dot;
          scaled[j] = p[k][j] * scale;
          if (Kept) bias_sum[k][j] += p[k][j];
        }
        store<T, N>(at<T>(a.grad_scores, start + column), scaled);
        if (a.bias_batch > 1) store<T, N>(at<T>(a.grad_bias, start + column), p[k]);
      });
    }
    if (!Kept || !shared_bias) continue;
    each_vector<Kept, K, N>(a.columns, [&](int k, int64_t column) {
      store<T, N>(at<T>(a.grad_bias, unit * a.columns + column), bias_sum[k]);
    });
  }
}

// The gradient of a bias shared by the batch, for rows too long to keep. A sum over grad_scores / scale would round
// twice, so every sample's term is computed again from its dot product.
template <class T>
__global__ void __launch_bounds__(512) long_bias_kernel(SoftmaxBackward a) {
  using C = Compute<T>;
  const int64_t plane = a.heads * a.queries;
  for (int64_t unit = blockIdx.x; unit < plane; unit += gridDim.x) {
    const int64_t row = attention_row(a.dropout.first_row, unit, a.queries);
    for (int64_t first = 0; first < a.columns; first += blockDim.x) {
      const int64_t mine = first + threadIdx.x;
      C sum = 0;
      for (int64_t b = 0; b < a.batch; ++b) {
        const int64_t start = (b * plane + unit) * a.columns;
        const T *grad = at<T>(a.grad, start), *probs = at<T>(a.probs, start);
        const uint64_t key = key_of_row(a.dropout, b, row);
        C dot = 0;
        for (int64_t column = threadIdx.x; column < a.columns; column += blockDim.x) {
          C g[1];
          dropped_grad<T, 1>(a.dropout, key, column, grad, g);
          dot += widen(probs[column]) * g[0];
        }
        dot = reduce_block(Pair<C>{dot, C(0)}, Add()).first;
        if (mine < a.columns) {
          C g[1];
          dropped_grad<T, 1>(a.dropout, key, mine, grad, g);
          sum += widen(probs[mine]) * (g[0] - dot);
        }
      }
      if (mine < a.columns) at<T>(a.grad_bias, unit * a.columns)[mine] = narrow<T>(sum);
    }
  }
}

// Whether a mask or bias can be read in vectors at every row.
template <class T>
bool strides_fit(const void* tensor, const int64_t (&strides)[3], int64_t element_bytes) {
  const int n = kVector<T>;
  return tensor == nullptr || (aligned(tensor, n * static_cast<int>(element_bytes)) && strides[0] % n == 0 &&
                               strides[1] % n == 0 && strides[2] % n == 0);
}

template <class T>
void launch_softmax_forward(const SoftmaxForward& a, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const int64_t rows = a.batch * a.heads * a.queries;
  const bool fit = vectors_fit<T>(a.columns, a.scores, a.probs, a.dropped) &&
                   strides_fit<T>(a.bias, a.bias_stride, sizeof(T)) &&
                   strides_fit<T>(a.mask, a.mask_stride, a.mask_is_bool ? 1 : sizeof(T));
  const int each = fit ? kEach<T, N> : kEach<T, 1>, threads = threads_for(a.columns, each, 1024);
  const bool kept = a.columns <= static_cast<int64_t>(threads) * each;
  const auto kernel = fit ? (kept ? softmax_forward_kernel<T, N, true> : softmax_forward_kernel<T, N, false>)
                          : (kept ? softmax_forward_kernel<T, 1, true> : softmax_forward_kernel<T, 1, false>);
  kernel<<<blocks_for(rows), threads, 0, stream>>>(a, rows);
}

template <class T>
void launch_softmax_backward(const SoftmaxBackward& a, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const bool fit = vectors_fit<T>(a.columns, a.grad, a.probs, a.grad_scores, a.grad_bias);
  const int each = fit ? kEach<T, N> : kEach<T, 1>, threads = threads_for(a.columns, each, 512);
  const bool kept = a.columns <= static_cast<int64_t>(threads) * each;
  const auto kernel = fit ? (kept ? softmax_backward_kernel<T, N, true> : softmax_backward_kernel<T, N, false>)
                          : (kept ? softmax_backward_kernel<T, 1, true> : softmax_backward_kernel<T, 1, false>);
  const int64_t samples = kept && a.bias_batch == 1 ? 1 : a.batch < 65535 ? a.batch : 65535;
  const dim3 grid(blocks_for(a.heads * a.queries), static_cast<unsigned>(samples));
  kernel<<<grid, threads, 0, stream>>>(a);
  if (!kept && a.bias_batch == 1) long_bias_kernel<T><<<grid.x, 512, 0, stream>>>(a);
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CUDA_KERNEL(softmax_forward, SoftmaxForward)
SHARDZOO_CUDA_KERNEL(softmax_backward, SoftmaxBackward)
