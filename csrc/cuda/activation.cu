#include "elementwise.cuh"

namespace shardzoo {
namespace {

__device__ __forceinline__ float error_function(float x) { return erff(x); }
__device__ __forceinline__ double error_function(double x) { return erf(x); }

constexpr double kSqrtTwoOverPi = 0.79788456080286535588, kSqrtHalf = 0.70710678118654752440;
constexpr double kInvSqrtTwoPi = 0.39894228040143267794, kCubic = 0.044715;

// Computes the activation A and its derivative at z, as csrc/cpu/activations.h does.
template <int A, class C>
__device__ __forceinline__ C activate(C z, C& derivative) {
  if constexpr (A == kGelu) {
    const C cdf = C(0.5) * (1 + error_function(z * C(kSqrtHalf)));
    const C density = exponential(C(-0.5) * z * z) * C(kInvSqrtTwoPi);
    derivative = cdf + (density == 0 ? C(0) : z * density);
    return z * cdf;
  } else {
    C u = z, slope = 1;
    if constexpr (A == kGeluTanh) {
      u = z * (C(2 * kSqrtTwoOverPi) + C(2 * kSqrtTwoOverPi * kCubic) * z * z);
      slope = C(2 * kSqrtTwoOverPi) + C(6 * kSqrtTwoOverPi * kCubic) * z * z;
    }
    const C s = reciprocal(1 + exponential(-u)), bump = s * (1 - s);  // sigmoid
    derivative = s + (bump == 0 ? C(0) : z * bump * slope);
    return z * s;
  }
}
template <int A, class C>
__device__ __forceinline__ C activate(C z) {
  C unused;
  return activate<A>(z, unused);
}

// Reads the bias of a thread's columns, which it adds in every row.
template <class T, int N>
__device__ __forceinline__ void load_bias(const void* from, int64_t column, int64_t columns, Compute<T> (&bias)[N]) {
  if (from != nullptr && column < columns) load<T, N>(bias, at<T>(from, column));
}

template <class T, int N, int A>
__global__ void __launch_bounds__(kThreads, kBlocksEach) gelu_forward_kernel(GeluForward a) {
  const int64_t column = own_column<N>();
  if (column >= a.columns) return;
  Compute<T> bias[N] = {};
  load_bias<T, N>(a.bias, column, a.columns, bias);
  const auto begin = [&](int64_t r) { return fetch<T, N>(at<T>(a.x, r * a.columns + column)); };
  each_row<N>(a.rows, begin, [&](int64_t r, const Pack<T, N>& x) {
    Compute<T> z[N];
    widen<T, N>(x, z);
#pragma unroll
    for (int j = 0; j < N; ++j) z[j] = activate<A>(z[j] + bias[j]);
    store<T, N>(at<T>(a.y, r * a.columns + column), z);
  });
}

template <class T, int N, int A>
__global__ void __launch_bounds__(kTeamThreads, 2) gelu_backward_kernel(GeluBackward a) {
  using C = Compute<T>;
  struct Row {
    Pack<T, N> x, grad;
  };
  const int64_t column = own_column<N>();
  C bias[N] = {}, sums[N] = {};
  load_bias<T, N>(a.bias, column, a.columns, bias);
  const auto begin = [&](int64_t r) {
    const int64_t position = r * a.columns + column;
    return Row{fetch<T, N>(at<T>(a.x, position)), fetch<T, N>(at<T>(a.grad, position))};
  };
  const auto finish = [&](int64_t r, const Row& row) {
    C z[N], grad[N];
    widen<T, N>(row.x, z);
    widen<T, N>(row.grad, grad);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      C derivative;
      activate<A>(z[j] + bias[j], derivative);
      grad[j] *= derivative;
      sums[j] += grad[j];
    }
    store<T, N>(at<T>(a.grad_x, r * a.columns + column), grad);
  };
  each_row_of_chunk<C, N>(a.rows, a.columns, a.chunk_rows, a.partial_bias, sums, begin, finish);
}

template <class T, int N, int A>
__global__ void __launch_bounds__(kThreads, kBlocksEach) glu_forward_kernel(GluForward a) {
  struct Row {
    Pack<T, N> gate, up;
  };
  const int64_t column = own_column<N>();
  if (column >= a.columns) return;
  const auto begin = [&](int64_t r) {
    return Row{fetch<T, N>(at<T>(a.gate, r * a.gate_stride + column)),
               fetch<T, N>(at<T>(a.up, r * a.up_stride + column))};
  };
  each_row<N>(a.rows, begin, [&](int64_t r, const Row& row) {
    Compute<T> gate[N], up[N];
    widen<T, N>(row.gate, gate);
    widen<T, N>(row.up, up);
#pragma unroll
    for (int j = 0; j < N; ++j) up[j] *= activate<A>(gate[j]);
    store<T, N>(at<T>(a.y, r * a.columns + column), up);
  });
}

template <class T, int N, int A>
__global__ void __launch_bounds__(kThreads, kBlocksEach) glu_backward_kernel(GluBackward a) {
  using C = Compute<T>;
  struct Row {
    Pack<T, N> grad, gate, up;
  };
  const int64_t column = own_column<N>();
  if (column >= a.columns) return;
  const auto begin = [&](int64_t r) {
    return Row{fetch<T, N>(at<T>(a.grad, r * a.grad_stride + column)),
               fetch<T, N>(at<T>(a.gate, r * a.gate_stride + column)),
               fetch<T, N>(at<T>(a.up, r * a.up_stride + column))};
  };
  each_row<N>(a.rows, begin, [&](int64_t r, const Row& row) {
    C grad[N], gate[N], up[N];
    widen<T, N>(row.grad, grad);
    widen<T, N>(row.gate, gate);
    widen<T, N>(row.up, up);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      C derivative;
      const C value = activate<A>(gate[j], derivative);
      gate[j] = grad[j] * up[j] * derivative;
      up[j] = grad[j] * value;
    }
    store<T, N>(at<T>(a.grad_gate, r * a.columns + column), gate);
    store<T, N>(at<T>(a.grad_up, r * a.columns + column), up);
  });
}

template <class T>
void launch_gelu_forward(const GeluForward& a, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const bool fit = vectors_fit<T>(a.columns, a.x, a.bias, a.y);
  const Launch l = over_rows(a.rows, a.columns, fit ? N : 1);
  const auto kernel = fit ? (a.tanh ? gelu_forward_kernel<T, N, kGeluTanh> : gelu_forward_kernel<T, N, kGelu>)
                          : (a.tanh ? gelu_forward_kernel<T, 1, kGeluTanh> : gelu_forward_kernel<T, 1, kGelu>);
  kernel<<<l.grid, l.block, 0, stream>>>(a);
}

template <class T>
void launch_gelu_backward(const GeluBackward& a, cudaStream_t stream) {
  constexpr int N = kVector<T>;
  const bool fit = vectors_fit<T>(a.columns, a.grad, a.x, a.bias, a.grad_x);
  const Launch l = over_chunks(a.rows, a.columns, a.chunk_rows, fit ? N : 1);
  const auto kernel = fit ? (a.tanh ? gelu_backward_kernel<T, N, kGeluTanh> : gelu_backward_kernel<T, N, kGelu>)
                          : (a.tanh ? gelu_backward_kernel<T, 1, kGeluTanh> : gelu_backward_kernel<T, 1, kGelu>);
  kernel<<<l.grid, l.block, 0, stream>>>(a);
}

template <class T, int A>
void launch_glu(const GluForward& a, bool fit, cudaStream_t stream) {
  const Launch l = over_rows(a.rows, a.columns, fit ? kVector<T> : 1);
  const auto kernel = fit ? glu_forward_kernel<T, kVector<T>, A> : glu_forward_kernel<T, 1, A>;
  kernel<<<l.grid, l.block, 0, stream>>>(a);
}
template <class T, int A>
void launch_glu(const GluBackward& a, bool fit, cudaStream_t stream) {
  const Launch l = over_rows(a.rows, a.columns, fit ? kVector<T> : 1);
  const auto kernel = fit ? glu_backward_kernel<T, kVector<T>, A> : glu_backward_kernel<T, 1, A>;
  kernel<<<l.grid, l.block, 0, stream>>>(a);
}
template <class T, class Parameters>
void launch_glu(const Parameters& a, bool fit, cudaStream_t stream) {
  if (a.activation == kGelu) launch_glu<T, kGelu>(a, fit, stream);
  if (a.activation == kGeluTanh) launch_glu<T, kGeluTanh>(a, fit, stream);
  if (a.activation == kSilu) launch_glu<T, kSilu>(a, fit, stream);
}

template <class T>
void launch_glu_forward(const GluForward& a, cudaStream_t stream) {
  const bool even = (a.gate_stride | a.up_stride) % kVector<T> == 0;
  launch_glu<T>(a, even && vectors_fit<T>(a.columns, a.gate, a.up, a.y), stream);
}

template <class T>
void launch_glu_backward(const GluBackward& a, cudaStream_t stream) {
  const bool even = (a.grad_stride | a.gate_stride | a.up_stride) % kVector<T> == 0;
  launch_glu<T>(a, even && vectors_fit<T>(a.columns, a.grad, a.gate, a.up, a.grad_gate, a.grad_up), stream);
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CUDA_KERNEL(gelu_forward, GeluForward)
SHARDZOO_CUDA_KERNEL(gelu_backward, GeluBackward)
SHARDZOO_CUDA_KERNEL(glu_forward, GluForward)
SHARDZOO_CUDA_KERNEL(glu_backward, GluBackward)
