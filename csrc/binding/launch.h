// Leads from tensors to kernels: fills in the plain structs of kernels.h, and runs kernels on the tensors' device.
//
// This uses only libtorch's stable ABI, so that one library works with several versions of torch.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <optional>

#include "../kernels.h"

namespace shardzoo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline DType find_dtype(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return kFloat;
    case ScalarType::BFloat16:
      return kBFloat16;
    case ScalarType::Half:
      return kHalf;
    case ScalarType::Double:
      return kDouble;
    default:
      STD_TORCH_CHECK(false, "no kernel for this dtype");
      return kDTypes;
  }
}

inline const void* input(const Tensor& tensor) { return tensor.const_data_ptr(); }
inline const void* input(const OptionalTensor& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }
inline const int64_t* integers(const OptionalTensor& tensor) { return static_cast<const int64_t*>(input(tensor)); }

// An output that a call does not need is a tensor without elements, and a null pointer for the kernel.
inline void* output(const Tensor& tensor) { return tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr(); }
inline void* output(const OptionalTensor& tensor) { return tensor ? output(*tensor) : nullptr; }

inline int64_t count_columns(const Tensor& tensor) { return tensor.size(tensor.dim() - 1); }
inline int64_t count_rows(const Tensor& tensor) { return tensor.numel() / count_columns(tensor); }

// Requires that each of these tensors, if it is present, has `size` elements: the kernels do not check sizes.
inline void check_sizes(int64_t size, std::initializer_list<OptionalTensor> tensors) {
  for (const OptionalTensor& tensor : tensors) {
    STD_TORCH_CHECK(!tensor || tensor->numel() == size, "a tensor has ", tensor->numel(), " elements instead of ", size);
  }
}

// Describes the dropout of a tensor that begins at `first_row` and `first_column` of its sample. With p = 0 there is
// none.
inline Dropout make_dropout(const OptionalTensor& keys, double p, int64_t first_row, int64_t first_column) {
  const double threshold = std::min(std::nearbyint(p * 4294967296.0), 4294967295.0);
  return {.keys = p > 0 ? integers(keys) : nullptr,
          .threshold = static_cast<uint32_t>(threshold),
          .keep_scale = 1.0 / (1.0 - p),
          .first_row = first_row,
          .first_column = first_column};
}

// Runs `units` units of a kernel, of `unit_size` elements each, on the device and in the dtype of `like`.
void run_kernel(Kernel kernel, const void* arguments, const Tensor& like, int64_t units, int64_t unit_size);

// Runs the kernel that takes these arguments.
template <class Arguments>
void run(const Arguments& arguments, const Tensor& like, int64_t units, int64_t unit_size) {
  run_kernel(find_kernel(arguments), &arguments, like, units, unit_size);
}

// Column sums are computed over chunks of rows: on a GPU one for each multiprocessor, on a CPU more than it has
// threads. Their size depends only on the shape and the device, so results are the same in every run and for any number
// of threads.
struct Chunks {
  explicit Chunks(const Tensor& x);
  int64_t rows_each;
  int64_t count;
};

// Returns an uninitialized tensor [chunks, columns] in the type of the computation, for partial column sums.
Tensor partial_sums(const Tensor& like, const Chunks& chunks, int64_t columns);

// Sets out[column] to the sum over the chunks of partial[chunk, column].
void sum_columns(const Tensor& partial, const Tensor& out);

}  // namespace shardzoo
