#include "elementwise.cuh"

namespace shardzoo {
namespace {

__device__ __forceinline__ float error_function(float x) { return erff(x); }
__device__ __forceinline__ double error_function(double x) { return erf(x); }

template <class C>
__device__ __forceinline__ C sigmoid(C x) {
  return 1 / (1 + exponential(-x));
}

constexpr double kSqrtTwoOverPi = 0.79788456080286535588, kSqrtHalf = 0.70710678118654752440;
constexpr double kInvSqrtTwoPi = 0.39894228040143267794, kCubic = 0.044715;

// An activation and its derivative at z, as in csrc/cpu/math.h.
template <class C>
__device__ __forceinline__ C activate(C z, int activation, C& derivative) {
  if (activation == kGelu) {
    const C cdf = C(0.5) * (1 + error_function(z * C(kSqrtHalf)));
    const C density = exponential(C(-0.5) * z * z) * C(kInvSqrtTwoPi);
    derivative = cdf + (density == 0 ? C(0) : z * density);
    return z * cdf;
  }
  C u = z, slope = 1;
  if (activation == kGeluTanh) {
    u = C(2 * kSqrtTwoOverPi) * (z + C(kCubic) * z * z * z);
    slope = C(2 * kSqrtTwoOverPi) * (1 + C(3 * kCubic) * z * z);
  }
  const C s = sigmoid(u), bump = s * (1 - s);
  derivative = s + (bump == 0 ? C(0) : z * bump * slope);
  return z * s;
}
template <class C>
__device__ __forceinline__ C activate(C z, int activation) {
  C unused;
  return activate(z, activation, unused);
}

template <class T, int N>
__device__ __forceinline__ void load_biased(const void* x, const void* bias, int64_t position, int64_t column,
                                            Compute<T> (&z)[N]) {
  load<T, N>(z, at<T>(x, position));
  if (bias == nullptr) return;
  Compute<T> more[N];
  load<T, N>(more, at<T>(bias, column));
#pragma unroll
  for (int j = 0; j < N; ++j) z[j] += more[j];
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) gelu_forward_kernel(GeluForward a) {
  const int activation = a.tanh ? kGeluTanh : kGelu;
  each_row<N>(a.rows, a.columns, [&](int64_t r, int64_t column) {
    Compute<T> z[N];
    load_biased<T, N>(a.x, a.bias, r * a.columns + column, column, z);
#pragma unroll
    for (int j = 0; j < N; ++j) z[j] = activate(z[j], activation);
    store<T, N>(at<T>(a.y, r * a.columns + column), z);
  });
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) gelu_backward_kernel(GeluBackward a) {
  using C = Compute<T>;
  const int activation = a.tanh ? kGeluTanh : kGelu;
  each_row_of_chunk<C, N>(
      a.rows, a.columns, a.chunk_rows, a.partial_bias, [&](int64_t r, int64_t column, C(&sums)[N]) {
        C z[N], grad[N];
        load_biased<T, N>(a.x, a.bias, r * a.columns + column, column, z);
        load<T, N>(grad, at<T>(a.grad, r * a.columns + column));
#pragma unroll
        for (int j = 0; j < N; ++j) {
          C derivative;
          activate(z[j], activation, derivative);
          grad[j] *= derivative;
          sums[j] += grad[j];
        }
        store<T, N>(at<T>(a.grad_x, r * a.columns + column), grad);
      });
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) glu_forward_kernel(GluForward a) {
  each_row<N>(a.rows, a.columns, [&](int64_t r, int64_t column) {
    Compute<T> gate[N], up[N];
    load<T, N>(gate, at<T>(a.gate, r * a.gate_stride + column));
    load<T, N>(up, at<T>(a.up, r * a.up_stride + column));
#pragma unroll
    for (int j = 0; j < N; ++j) up[j] *= activate(gate[j], a.activation);
    store<T, N>(at<T>(a.y, r * a.columns + column), up);
  });
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) glu_backward_kernel(GluBackward a) {
  using C = Compute<T>;
  each_row<N>(a.rows, a.columns, [&](int64_t r, int64_t column) {
    C grad[N], gate[N], up[N];
    load<T, N>(grad, at<T>(a.grad, r * a.grad_stride + column));
    load<T, N>(gate, at<T>(a.gate, r * a.gate_stride + column));
    load<T, N>(up, at<T>(a.up, r * a.up_stride + column));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      C derivative;
      const C value = activate(gate[j], a.activation, derivative);
      gate[j] = grad[j] * up[j] * derivative;
      up[j] = grad[j] * value;
    }
    store<T, N>(at<T>(a.grad_gate, r * a.columns + column), gate);
    store<T, N>(at<T>(a.grad_up, r * a.columns + column), up);
  });
}

template <class T>
void launch_gelu_forward(const GeluForward& a, cudaStream_t stream) {
  const bool fit = vectors_fit<T>(a.columns, a.x, a.bias, a.y);
  const Launch l = over_rows(a.rows, a.columns, fit ? kVector<T> : 1);
  const auto kernel = fit ? gelu_forward_kernel<T, kVector<T>> : gelu_forward_kernel<T, 1>;
  kernel<<<l.grid, l.block, 0, stream>>>(a);
}

template <class T>
void launch_gelu_backward(const GeluBackward& a, cudaStream_t stream) {
  const bool fit = vectors_fit<T>(a.columns, a.grad, a.x, a.bias, a.grad_x);
  const Launch l = over_chunks(a.rows, a.columns, a.chunk_rows, fit ? kVector<T> : 1);
  const auto kernel = fit ? gelu_backward_kernel<T, kVector<T>> : gelu_backward_kernel<T, 1>;
  kernel<<<l.grid, l.block, 0, stream>>>(a);
}

template <class T>
void launch_glu_forward(const GluForward& a, cudaStream_t stream) {
  const bool even = (a.gate_stride | a.up_stride) % kVector<T> == 0;
  const bool fit = even && vectors_fit<T>(a.columns, a.gate, a.up, a.y);
  const Launch l = over_rows(a.rows, a.columns, fit ? kVector<T> : 1);
  const auto kernel = fit ? glu_forward_kernel<T, kVector<T>> : glu_forward_kernel<T, 1>;
  kernel<<<l.grid, l.block, 0, stream>>>(a);
}

template <class T>
void launch_glu_backward(const GluBackward& a, cudaStream_t stream) {
  const bool even = (a.grad_stride | a.gate_stride | a.up_stride) % kVector<T> == 0;
  const bool fit = even && vectors_fit<T>(a.columns, a.grad, a.gate, a.up, a.grad_gate, a.grad_up);
  const Launch l = over_rows(a.rows, a.columns, fit ? kVector<T> : 1);
  const auto kernel = fit ? glu_backward_kernel<T, kVector<T>> : glu_backward_kernel<T, 1>;
  kernel<<<l.grid, l.block, 0, stream>>>(a);
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CUDA_KERNEL(gelu_forward, GeluForward)
SHARDZOO_CUDA_KERNEL(gelu_backward, GeluBackward)
SHARDZOO_CUDA_KERNEL(glu_forward, GluForward)
SHARDZOO_CUDA_KERNEL(glu_backward, GluBackward)
