// The part of CUDA that csrc/cuda uses, on a CPU: one fiber per thread of a block, blocks one after another.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __device__
#define __forceinline__ inline

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = void*;
enum cudaError_t : int { cudaSuccess = 0 };
enum cudaDeviceAttr : int { cudaDevAttrMultiProcessorCount };
// So few multiprocessors that a persistent block has several rows, even of a small tensor.
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 2, cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

namespace emulation {
extern dim3 thread_index, block_index, block_size, grid_size;

// Runs a kernel. Aborts on a launch that a device would refuse, and on a barrier or shuffle that not all threads reach.
void launch(dim3 grid, dim3 block, const std::function<void()>& kernel);
void block_barrier();

// Called where a kernel declares shared memory, which is static because blocks run one at a time: fills it with NaN
// when a block's first thread gets there. A device does not keep what an earlier block left in it either.
void begin_shared(void* start, size_t bytes);

// Aborts if the block has more threads than the kernel's launch bounds.
void check_bounds(unsigned most_threads);

uint64_t shuffle_xor(unsigned mask, uint64_t bits, int offset);

// What PTX's .ftz does with results too small to be normal.
inline float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? 0.0f * x : x; }
}  // namespace emulation

#define threadIdx (::emulation::thread_index)
#define blockIdx (::emulation::block_index)
#define blockDim (::emulation::block_size)
#define gridDim (::emulation::grid_size)

inline void __syncthreads() { emulation::block_barrier(); }

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = emulation::shuffle_xor(mask, bits, offset);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
T __ldg(const T* from) {
  return *from;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
