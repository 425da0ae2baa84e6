// Runs CUDA kernels by number.
#include "common.cuh"

extern "C" int shardzoo_cuda_run(int kernel, int dtype, const void* p, void* stream_handle) {
  using namespace shardzoo;
  if (dtype < 0 || dtype >= kDTypes) return -1;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
#define SHARDZOO_CASE(number, name, Parameters) \
  case number:                                  \
    return cuda_##name(dtype, *static_cast<const Parameters*>(p), stream)
  switch (kernel) {
    SHARDZOO_CASE(kSoftmaxForward, softmax_forward, SoftmaxForward);
    SHARDZOO_CASE(kSoftmaxBackward, softmax_backward, SoftmaxBackward);
    SHARDZOO_CASE(kNormForward, norm_forward, NormForward);
    SHARDZOO_CASE(kNormBackward, norm_backward, NormBackward);
    SHARDZOO_CASE(kColumnSum, column_sum, ColumnSum);
    SHARDZOO_CASE(kGeluForward, gelu_forward, GeluForward);
    SHARDZOO_CASE(kGeluBackward, gelu_backward, GeluBackward);
    SHARDZOO_CASE(kGluForward, glu_forward, GluForward);
    SHARDZOO_CASE(kGluBackward, glu_backward, GluBackward);
    SHARDZOO_CASE(kDropoutForward, dropout_forward, DropoutForward);
    SHARDZOO_CASE(kDropoutBackward, dropout_backward, DropoutBackward);
    SHARDZOO_CASE(kCrossEntropyStats, cross_entropy_stats, CrossEntropyStats);
    SHARDZOO_CASE(kCrossEntropyGrad, cross_entropy_grad, CrossEntropyGrad);
    default:
      return -1;
  }
#undef SHARDZOO_CASE
}

extern "C" int shardzoo_cuda_multiprocessors() { return shardzoo::multiprocessors(); }

extern "C" const char* shardzoo_cuda_error(int code) {
  return code < 0 ? "no such kernel" : cudaGetErrorString(static_cast<cudaError_t>(code));
}
