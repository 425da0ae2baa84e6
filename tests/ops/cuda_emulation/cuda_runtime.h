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

using cudaStream_t = void*;
enum cudaError_t : int { cudaSuccess = 0 };
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

#define __expf(x) std::exp(static_cast<float>(x))
