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

// Two 16-bit numbers in a word, the first in its lower half. A bf16 is the upper half of a float.
template <class T>
__device__ __forceinline__ void widen_word(uint32_t word, float& first, float& second);
template <>
__device__ __forceinline__ void widen_word<BFloat16>(uint32_t word, float& first, float& second) {
  first = __uint_as_float(word << 16);
  second = __uint_as_float(word & 0xFFFF0000u);
}
template <>
__device__ __forceinline__ void widen_word<Half>(uint32_t word, float& first, float& second) {
  __half2 pair;
  memcpy(&pair, &word, sizeof(word));
  first = __low2float(pair);
  second = __high2float(pair);
}
__device__ __forceinline__ __nv_bfloat162 narrow_pair(float first, float second, BFloat16) {
  return __floats2bfloat162_rn(first, second);
}
__device__ __forceinline__ __half2 narrow_pair(float first, float second, Half) {
  return __floats2half2_rn(first, second);
}
template <class T>
__device__ __forceinline__ uint32_t narrow_word(float first, float second) {
  const auto pair = narrow_pair(first, second, T());
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

// N elements as they lie in memory: 16 bytes, or one element. Zero unless something is fetched.
template <class T, int N>
struct Pack {
  uint4 bits = {0, 0, 0, 0};
};
template <class T>
struct Pack<T, 1> {
  T value = T();
};

// Reads what the kernel does not write. __ldg says so to the compiler, which `__restrict__` cannot for a pointer in a
// struct: loads may then move ahead of stores.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> fetch(const T* from) {
  if constexpr (N == 1) return {__ldg(from)};
  else return {__ldg(reinterpret_cast<const uint4*>(from))};
}
// Reads what this thread may overwrite later.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> fetch_mutable(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <class T, int N>
__device__ __forceinline__ void widen(const Pack<T, N>& pack, Compute<T> (&to)[N]) {
  if constexpr (N == 1) {
    to[0] = widen(pack.value);
  } else {
    const uint32_t words[4] = {pack.bits.x, pack.bits.y, pack.bits.z, pack.bits.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (N == 4) to[j] = __uint_as_float(words[j]);
      else widen_word<T>(words[j], to[2 * j], to[2 * j + 1]);
    }
  }
}
template <class T, int N>
__device__ __forceinline__ void load(Compute<T> (&to)[N], const T* from) {
  widen<T, N>(fetch<T, N>(from), to);
}
// Rounds to the dtype.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> narrow(const Compute<T> (&from)[N]) {
  if constexpr (N == 1) {
    return {narrow<T>(from[0])};
  } else {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (N == 4) words[j] = __float_as_uint(from[j]);
      else words[j] = narrow_word<T>(from[2 * j], from[2 * j + 1]);
    }
    return {{words[0], words[1], words[2], words[3]}};
  }
}

// The compiler splits some plain stores of a uint4.
__device__ __forceinline__ void store_bits(void* to, uint4 bits) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
}
template <class T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  if constexpr (N == 1) *to = pack.value;
  else store_bits(to, pack.bits);
}
template <class T, int N>
__device__ __forceinline__ void store(T* to, const Compute<T> (&from)[N]) {
  store<T, N>(to, narrow<T, N>(from));
}
// Writes sums in the type of the computation.
template <class C, int N>
__device__ __forceinline__ void store_wide(C* to, const C (&from)[N]) {
#pragma unroll
  for (int j = 0; j < N; j += 4) {
    if constexpr (N == 1) to[j] = from[j];
    else store_bits(to + j, {__float_as_uint(from[j]), __float_as_uint(from[j + 1]), __float_as_uint(from[j + 2]),
                             __float_as_uint(from[j + 3])});
  }
}

// One instruction each. Results below 2^-126 become 0, which no sum with a term of 1, and no 16-bit type, notices.
__device__ __forceinline__ float exponential_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double reciprocal(double x) { return 1 / x; }
__device__ __forceinline__ float exponential(float x) { return exponential_of_2(x * 1.4426950408889634f); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }
__device__ __forceinline__ double inverse_root(double x) { return 1.0 / sqrt(x); }
// Returns the larger number; a NaN only if both are.
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

constexpr float kLowest = -__builtin_huge_valf();

template <class C>
struct Pair {
  C first, second;
};
template <class C>
__device__ __forceinline__ Pair<C> shuffle(Pair<C> value, int offset) {
  return {__shfl_xor_sync(0xFFFFFFFFu, value.first, offset), __shfl_xor_sync(0xFFFFFFFFu, value.second, offset)};
}
template <class C>
__device__ __forceinline__ C shuffle(C value, int offset) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, offset);
}

template <class C>
__device__ __forceinline__ void clear(C& value, float nothing) {
  value = nothing;
}
template <class C>
__device__ __forceinline__ void clear(Pair<C>& value, float nothing) {
  value = {nothing, C(0)};
}

// An operation combines values in either order; kNothing changes none of them.
struct Add {
  static constexpr float kNothing = 0;
  template <class C>
  __device__ __forceinline__ C operator()(C a, C b) const {
    return a + b;
  }
  template <class C>
  __device__ __forceinline__ Pair<C> operator()(Pair<C> a, Pair<C> b) const {
    return {a.first + b.first, a.second + b.second};
  }
};
struct Maximum {
  static constexpr float kNothing = kLowest;
  template <class C>
  __device__ __forceinline__ C operator()(C a, C b) const {
    return larger(a, b);
  }
};
// Combines (largest, sum of exp(x - largest)) of two sets of numbers. A NaN stays in the sum.
struct LogSumExp {
  static constexpr float kNothing = kLowest;
  template <class C>
  __device__ __forceinline__ Pair<C> operator()(Pair<C> a, Pair<C> b) const {
    const C top = larger(a.first, b.first);
    const C from_a = a.first == top ? a.second : a.second * exponential(a.first - top);
    const C from_b = b.first == top ? b.second : b.second * exponential(b.first - top);
    return {top, from_a + from_b};
  }
};

// Threads that process a row at the same time are a team: those of one threadIdx.y, in whole warps. A block has one or
// more teams of equal size, of kTeamThreads threads together if there are several.
constexpr int kTeamThreads = 512;

// Combines the values of a warp's lanes. Operations are symmetric, so all lanes get the same bits.
template <class Value, class Operation>
__device__ __forceinline__ Value reduce_warp(Value value, Operation combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = combine(value, shuffle(value, offset));
  return value;
}

// Combines the values of a team's threads, in the same order every time, and returns the result to all of them. All
// threads of the block must call it, with a `turn` that is 0 before the kernel's first call.
template <class Value, class Operation>
__device__ __forceinline__ Value reduce_team(Value value, Operation combine, int& turn) {
  __shared__ Value of_warps[2][32];
  value = reduce_warp(value, combine);
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (warps == 1) return value;
  // The values of the call before may still be read, but not those before them: a barrier lies between.
  Value* const of_team = of_warps[turn ^= 1] + threadIdx.y * warps;
  if (lane == 0) of_team[threadIdx.x / 32] = value;
  __syncthreads();
  if (lane < warps) value = of_team[lane];
  else clear(value, Operation::kNothing);
  return reduce_warp(value, combine);
}

// Adds up the sums that the teams hold of the same columns, team by team. The first team gets the result. All threads
// of the block must call it.
template <class C, int M>
__device__ __forceinline__ void add_teams(C (&sums)[M]) {
  __shared__ C of_threads[M][kTeamThreads];
  if (blockDim.y == 1) return;
  __syncthreads();  // of_threads may still be read by the call before
#pragma unroll
  for (int j = 0; j < M; ++j) of_threads[j][threadIdx.y * blockDim.x + threadIdx.x] = sums[j];
  __syncthreads();
  if (threadIdx.y != 0) return;
#pragma unroll 1
  for (int team = 1; team < blockDim.y; ++team) {
#pragma unroll
    for (int j = 0; j < M; ++j) sums[j] += of_threads[j][team * blockDim.x + threadIdx.x];
  }
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
  return static_cast<const T*>(base) + offset;
}
template <class T>
__device__ __forceinline__ T* at(void* base, int64_t offset) {
  return static_cast<T*>(base) + offset;
}

// Drops the elements from `column` on of a row with this key, and scales the others.
template <class C, int N>
__device__ __forceinline__ void drop(const Dropout& d, C keep_scale, uint64_t key, int64_t column, C (&value)[N]) {
  const uint32_t first = static_cast<uint32_t>(d.first_column + column);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    value[j] = element_hash<uint32_t>(key, first + j) >= d.threshold ? value[j] * keep_scale : C(0);
  }
}

// The rest of this file runs on the host.

inline bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Returns whether rows of `columns` elements in all these tensors start on vector boundaries.
template <class T, class... Pointers>
bool vectors_fit(int64_t columns, Pointers... pointers) {
  return columns % kVector<T> == 0 && (aligned(pointers, 16) && ...);
}

inline int multiprocessors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

inline unsigned blocks_for(int64_t count) { return static_cast<unsigned>(count < 0x40000000 ? count : 0x40000000); }

// Returns the threads of a block, in whole warps and at most `limit`, so that each has at most `each` elements of a
// row.
inline int threads_for(int64_t columns, int each, int limit) {
  const int64_t threads = (columns + each - 1) / each;
  const int64_t warps = (threads + 31) / 32 * 32;
  return static_cast<int>(warps < limit ? warps : limit);
}

// Returns the threads of a block: as many teams of `threads` as there is room and work for.
inline dim3 choose_teams(int threads, int64_t rows) {
  const int64_t teams = kTeamThreads / threads;
  return dim3(threads, static_cast<unsigned>(teams < 1 ? 1 : teams < rows ? teams : rows));
}

}  // namespace

// Declares cuda_<name>, which queues a kernel and returns a cudaError_t.
#define SHARDZOO_DECLARE(name, Arguments) int cuda_##name(int dtype, const Arguments& a, cudaStream_t stream);
SHARDZOO_KERNELS_OF_BOTH_DEVICES(SHARDZOO_DECLARE)
#undef SHARDZOO_DECLARE

}  // namespace shardzoo

// Defines shardzoo::cuda_<name>, which calls launch_<name><T> for the type T of the tensors.
#define SHARDZOO_CUDA_KERNEL(name, Arguments)                                       \
  int shardzoo::cuda_##name(int dtype, const Arguments& a, cudaStream_t stream) {   \
    if (dtype == kFloat) launch_##name<float>(a, stream);                           \
    if (dtype == kBFloat16) launch_##name<BFloat16>(a, stream);                     \
    if (dtype == kHalf) launch_##name<Half>(a, stream);                             \
    if (dtype == kDouble) launch_##name<double>(a, stream);                         \
    return cudaGetLastError();                                                      \
  }
