// Launches a CUDA kernel by its number.
#include "common.cuh"

extern "C" int shardzoo_cuda_run(int kernel, int dtype, const void* arguments, void* stream_handle) {
  using namespace shardzoo;
  if (dtype < 0 || dtype >= kDTypes) return -1;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  switch (kernel) {
#define SHARDZOO_CASE(name, Arguments) \
  case k##Arguments:                   \
    return cuda_##name(dtype, *static_cast<const Arguments*>(arguments), stream);
    SHARDZOO_KERNELS_OF_BOTH_DEVICES(SHARDZOO_CASE)
#undef SHARDZOO_CASE
    default:
      return -1;
  }
}

extern "C" int shardzoo_cuda_multiprocessors() { return shardzoo::multiprocessors(); }

extern "C" const char* shardzoo_cuda_error(int code) {
  if (code < 0) return "no such kernel";
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
