// Helpers of the CUDA kernels: 16-byte vectors, reductions in a fixed order, and launches.
//
// A kernel is instantiated per dtype T with N elements per vector: as many as fit into 16 bytes if every row starts on
// a 16-byte boundary, else 1. Offsets are 64-bit; a grid-stride loop processes the rows, so that no grid is too large.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../hash.h"
#include "../kernels.h"

namespace shardzoo {
namespace {

using BFloat16 = __nv_bfloat16;
using Half = __half;

template <class T>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeType<T>::type;

template <class T>
constexpr int kVector = sizeof(T) == 8 ? 1 : 16 / sizeof(T);

// Elements of a row that a thread keeps in registers. Scalar access needs registers for addresses as well.
template <class T, int N>
constexpr int kEach = N > 1 ? 16 : 2;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(BFloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(Half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T narrow(Compute<T> x) {
  return x;
}
template <>
__device__ __forceinline__ BFloat16 narrow<BFloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ Half narrow<Half>(float x) {
  return __float2half_rn(x);
}

// N elements that are loaded and stored as one.
template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
  T values[N];
};

template <class T, int N>
__device__ __forceinline__ void load(Compute<T> (&to)[N], const T* from) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
  for (int j = 0; j < N; ++j) to[j] = widen(pack.values[j]);
}
template <class T, int N>
__device__ __forceinline__ void store(T* to, const Compute<T> (&from)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int j = 0; j < N; ++j) pack.values[j] = narrow<T>(from[j]);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

__device__ __forceinline__ float exponential(float x) { return __expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float inverse_root(float x) { return 1.0f / sqrtf(x); }
__device__ __forceinline__ double inverse_root(double x) { return 1.0 / sqrt(x); }

constexpr float kLowest = -__builtin_huge_valf();

// Sum of a pair of numbers over the block, in the same order every time. All threads get it.
template <class C>
struct Pair {
  C first, second;
};
struct Add {
  template <class C>
  __device__ __forceinline__ Pair<C> operator()(Pair<C> a, Pair<C> b) const {
    return {a.first + b.first, a.second + b.second};
  }
};
struct Maximum {
  template <class C>
  __device__ __forceinline__ Pair<C> operator()(Pair<C> a, Pair<C> b) const {
    return {a.first > b.first ? a.first : b.first, C(0)};
  }
};
// (largest, sum of exp(x - largest)) of two sets of numbers. A NaN stays in the sum.
struct LogSumExp {
  template <class C>
  __device__ __forceinline__ Pair<C> operator()(Pair<C> a, Pair<C> b) const {
    const C top = a.first > b.first ? a.first : b.first;
    const C from_a = a.first == top ? a.second : a.second * exponential(a.first - top);
    const C from_b = b.first == top ? b.second : b.second * exponential(b.first - top);
    return {top, from_a + from_b};
  }
};

template <class C, class Operation>
__device__ __forceinline__ Pair<C> reduce_block(Pair<C> value, Operation combine) {
  __shared__ Pair<C> of_warps[32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Pair<C> other = {__shfl_xor_sync(0xFFFFFFFFu, value.first, offset),
                           __shfl_xor_sync(0xFFFFFFFFu, value.second, offset)};
    // lower lanes combine in the same order as upper ones, so that all of them hold the same bits
    value = threadIdx.x & offset ? combine(other, value) : combine(value, other);
  }
  const int warps = blockDim.x / 32;
  if (warps == 1) return value;
  __syncthreads();  // of_warps may still be read by the reduction before this one
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warps[0];
  for (int warp = 1; warp < warps; ++warp) value = combine(value, of_warps[warp]);
  return value;
}

// Calls step(k, column) for a thread's vectors of a row. Kept: at most K of them, k is a register array's index and
// the loop is unrolled. Otherwise a row of any length, and k is always 0.
template <bool Kept, int K, int N, class F>
__device__ __forceinline__ void each_vector(int64_t columns, F step) {
  if constexpr (Kept) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int64_t column = (static_cast<int64_t>(k) * blockDim.x + threadIdx.x) * N;
      if (column < columns) step(k, column);
    }
  } else {
    for (int64_t column = static_cast<int64_t>(threadIdx.x) * N; column < columns; column += blockDim.x * N) {
      step(0, column);
    }
  }
}

template <class T>
__device__ __forceinline__ const T* at(const void* base, int64_t offset) {
  return base == nullptr ? nullptr : static_cast<const T*>(base) + offset;
}
template <class T>
__device__ __forceinline__ T* at(void* base, int64_t offset) {
  return base == nullptr ? nullptr : static_cast<T*>(base) + offset;
}

// Multiplier of an element: keep_scale or 0.
template <class C>
__device__ __forceinline__ C keep_factor(const Dropout& d, uint64_t key, int64_t column) {
  const uint32_t hash = element_hash<uint32_t>(key, static_cast<uint32_t>(d.first_column + column));
  return hash >= d.threshold ? static_cast<C>(d.keep_scale) : C(0);
}

// ---- host ----

inline bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether rows of `columns` elements in all these tensors start on vector boundaries.
template <class T, class... Pointers>
bool vectors_fit(int64_t columns, Pointers... pointers) {
  return columns % kVector<T> == 0 && (aligned(pointers, 16) && ...);
}

inline unsigned blocks_for(int64_t count) { return static_cast<unsigned>(count < 0x40000000 ? count : 0x40000000); }

// The threads of a block, in whole warps and at most `limit`, so that each has at most `each` elements of a row.
inline int threads_for(int64_t columns, int each, int limit) {
  const int64_t threads = (columns + each - 1) / each;
  const int64_t warps = (threads + 31) / 32 * 32;
  return static_cast<int>(warps < limit ? warps : limit);
}

}  // namespace

int cuda_softmax_forward(int dtype, const SoftmaxForward& a, cudaStream_t stream);
int cuda_softmax_backward(int dtype, const SoftmaxBackward& a, cudaStream_t stream);
int cuda_norm_forward(int dtype, const NormForward& a, cudaStream_t stream);
int cuda_norm_backward(int dtype, const NormBackward& a, cudaStream_t stream);
int cuda_column_sum(int dtype, const ColumnSum& a, cudaStream_t stream);
int cuda_gelu_forward(int dtype, const GeluForward& a, cudaStream_t stream);
int cuda_gelu_backward(int dtype, const GeluBackward& a, cudaStream_t stream);
int cuda_glu_forward(int dtype, const GluForward& a, cudaStream_t stream);
int cuda_glu_backward(int dtype, const GluBackward& a, cudaStream_t stream);
int cuda_dropout_forward(int dtype, const DropoutForward& a, cudaStream_t stream);
int cuda_dropout_backward(int dtype, const DropoutBackward& a, cudaStream_t stream);
int cuda_cross_entropy_stats(int dtype, const CrossEntropyStats& a, cudaStream_t stream);
int cuda_cross_entropy_grad(int dtype, const CrossEntropyGrad& a, cudaStream_t stream);

}  // namespace shardzoo

// Defines shardzoo::cuda_<name>, which launches launch_<name><T> for a dtype.
#define SHARDZOO_CUDA_KERNEL(name, Parameters)                                      \
  int shardzoo::cuda_##name(int dtype, const Parameters& a, cudaStream_t stream) {  \
    if (dtype == kFloat) launch_##name<float>(a, stream);                           \
    if (dtype == kBFloat16) launch_##name<BFloat16>(a, stream);                     \
    if (dtype == kHalf) launch_##name<Half>(a, stream);                             \
    if (dtype == kDouble) launch_##name<double>(a, stream);                         \
    return cudaGetLastError();                                                      \
  }
