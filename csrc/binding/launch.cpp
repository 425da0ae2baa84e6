#include "launch.h"

#include <dlfcn.h>

namespace shardzoo {
namespace {

// For fewer elements, waking a thread costs more than it saves.
constexpr int64_t kGrain = 32768;

#ifdef SHARDZOO_WITH_CUDA
// The stable ABI of torch before 2.13 does not provide the handle of the current CUDA stream, but torch's own library
// exports a function for it. A weak symbol would stay null, because the library is loaded before this one asks.
void* current_cuda_stream(int32_t device) {
  using Getter = int32_t (*)(int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  STD_TORCH_CHECK(getter != nullptr, "libtorch_cuda.so does not tell the current CUDA stream");
  void* stream = nullptr;
  STD_TORCH_CHECK(getter(device, &stream) == 0, "no current CUDA stream");
  return stream;
}

int64_t multiprocessors(const Tensor& like) {
  const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
  return shardzoo_cuda_multiprocessors();
}

void run_on_cuda(Kernel kernel, const void* arguments, const Tensor& like) {
  const int32_t device = like.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int error = shardzoo_cuda_run(kernel, find_dtype(like), arguments, current_cuda_stream(device));
  STD_TORCH_CHECK(error == 0, "CUDA kernel ", kKernelNames[kernel], ": ", shardzoo_cuda_error(error));
}
#else
int64_t multiprocessors(const Tensor&) { return 1; }
void run_on_cuda(Kernel, const void*, const Tensor&) { STD_TORCH_CHECK(false, "built without CUDA kernels"); }
#endif

}  // namespace

void run_kernel(Kernel kernel, const void* arguments, const Tensor& like, int64_t units, int64_t unit_size) {
  if (!like.is_cpu()) return run_on_cuda(kernel, arguments, like);
  const int dtype = find_dtype(like);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(unit_size, 1));
  torch::stable::parallel_for(0, units, grain, [&](int64_t begin, int64_t end) {
    // This cannot fail: `kernel` and `dtype` exist.
    shardzoo_cpu_run(kernel, dtype, arguments, begin, end);
  });
}

Chunks::Chunks(const Tensor& x) {
  const int64_t rows = count_rows(x);
  const int64_t most_chunks = x.is_cpu() ? 256 : multiprocessors(x);
  const int64_t least_rows = x.is_cpu() ? 32 : 8;
  rows_each = std::max(least_rows, (rows + most_chunks - 1) / most_chunks);
  count = (rows + rows_each - 1) / rows_each;
}

Tensor partial_sums(const Tensor& like, const Chunks& chunks, int64_t columns) {
  const std::array<int64_t, 2> size = {chunks.count, columns};
  const bool is_double = like.scalar_type() == ScalarType::Double;
  return torch::stable::new_empty(like, {size.data(), size.size()}, is_double ? ScalarType::Double : ScalarType::Float);
}

void sum_columns(const Tensor& partial, const Tensor& out) {
  const ColumnSum a = {
      .partial = input(partial), .out = output(out), .chunks = partial.size(0), .columns = partial.size(1)};
  run(a, out, a.columns, a.chunks);
}

}  // namespace shardzoo

extern "C" int shardzoo_has_cuda() {
#ifdef SHARDZOO_WITH_CUDA
  return 1;
#else
  return 0;
#endif
}
