#include "few_rows.h"

#include <vector>

namespace shardzoo {
namespace {

// The norm of a tensor of so many elements takes less time than a call from Python.
constexpr int64_t kFewElements = 1 << 16;

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// Returns a new contiguous CPU tensor. torch::stable::new_empty would go through PyTorch's dispatcher.
Tensor empty(Sizes size, const Tensor& like) {
  std::vector<int64_t> stride(size.size(), 1);
  for (size_t i = size.size() - 1; i > 0; --i) stride[i - 1] = stride[i] * size[i];
  int32_t dtype = 0;
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(size.size()), size.data(), stride.data(),
                                                         dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

bool has_kernels(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ||
         dtype == ScalarType::Double;
}

// Returns whether kernels of `like` can read a dense tensor of `elements` elements. One that is absent always fits.
bool fits(const OptionalTensor& tensor, const Tensor& like, int64_t elements) {
  return !tensor || (tensor->is_cpu() && tensor->scalar_type() == like.scalar_type() && tensor->numel() == elements &&
                     tensor->is_contiguous());
}

// Copies the strides of a tensor's first three dimensions. Returns whether the numbers of a row are adjacent.
bool has_rows(const Tensor& tensor, int64_t* stride) {
  for (int i = 0; i < 3; ++i) stride[i] = tensor.stride(i);
  return tensor.is_cpu() && (tensor.stride(3) == 1 || tensor.size(3) == 1);
}

// Fills in the mask. Returns whether it is of a type that the kernel reads, and broadcasts to the scores.
bool takes_mask(AttentionForward& a, const Tensor& q, const OptionalTensor& mask) {
  if (!mask) return true;
  a.mask_is_bool = mask->scalar_type() == ScalarType::Bool;
  if (!mask->is_cpu() || mask->dim() != 4) return false;
  if (!a.mask_is_bool && mask->scalar_type() != q.scalar_type()) return false;
  const std::array<int64_t, 4> scores = {a.batch, a.heads, a.queries, a.keys};
  for (int i = 0; i < 4; ++i) {
    if (mask->size(i) != 1 && mask->size(i) != scores[i]) return false;
    a.mask_stride[i] = mask->size(i) == 1 ? 0 : mask->stride(i);
  }
  a.mask = input(*mask);
  return true;
}

}  // namespace

OptionalTensor linear_of_few_rows(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                  int64_t most_rows) {
  // A unit of work is so many features: a few of the kernel's tiles, which fit into any second-level cache.
  constexpr int64_t kBlock = 12;
  const int64_t elements = x.numel();
  const int64_t columns = x.dim() == 0 ? 0 : count_columns(x);
  if (elements == 0 || elements > most_rows * columns) return {};
  if (weight.dim() != 2 || weight.size(1) != columns) return {};
  if (bias && bias->dim() != 1) return {};
  const int64_t features = weight.size(0);
  if (!has_kernels(x.scalar_type()) || !fits(weight, x, features * columns) || !fits(bias, x, features)) return {};

  const Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  std::vector<int64_t> size(x.sizes().begin(), x.sizes().end());
  size.back() = features;
  const Tensor y = empty({size.data(), size.size()}, x);
  const LinearOfFewRows a = {.x = input(dense),
                             .weight = input(weight),
                             .bias = input(bias),
                             .y = output(y),
                             .rows = elements / columns,
                             .columns = columns,
                             .features = features,
                             .block = kBlock};
  run(a, x, (features + kBlock - 1) / kBlock, kBlock * columns);
  return y;
}

std::tuple<OptionalTensor, OptionalTensor> norm_of_few_rows(const Tensor& x, const OptionalTensor& residual,
                                                            const Tensor& weight, const OptionalTensor& bias, double eps,
                                                            bool centered) {
  const int64_t elements = x.numel();
  if (elements == 0 || elements > kFewElements || !has_kernels(x.scalar_type())) return {};
  if (!fits(x, x, elements) || !fits(residual, x, elements)) return {};
  const int64_t columns = count_columns(x);
  const int64_t rows = elements / columns;
  if (!fits(weight, x, columns) || !fits(bias, x, columns)) return {};

  const Tensor y = empty(x.sizes(), x);
  OptionalTensor h;
  if (residual) h = empty(x.sizes(), x);
  // Only a gradient would need the statistics of the rows.
  std::vector<double> mean(rows);
  std::vector<double> rstd(rows);
  const NormForward a = {.x = input(x),
                         .residual = input(residual),
                         .weight = input(weight),
                         .bias = input(bias),
                         .y = output(y),
                         .summed = output(h),
                         .mean = centered ? mean.data() : nullptr,
                         .rstd = rstd.data(),
                         .rows = rows,
                         .columns = columns,
                         .eps = eps};
  run(a, x, rows, columns);
  return {y, h};
}

OptionalTensor attention_of_few_queries(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                                        double scale, bool causal, double softcap) {
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4 || q.numel() == 0 || k.numel() == 0) return {};
  AttentionForward a = {};
  a.batch = q.size(0);
  a.heads = q.size(1);
  a.queries = q.size(2);
  a.size = q.size(3);
  a.key_value_heads = k.size(1);
  a.keys = k.size(2);
  a.causal = causal;
  a.scale = scale;
  a.softcap = softcap;
  const ScalarType dtype = q.scalar_type();
  const bool same_dtype = k.scalar_type() == dtype && v.scalar_type() == dtype;
  const bool same_shape = k.size(0) == a.batch && k.size(3) == a.size && k.sizes() == v.sizes();
  if (a.queries > kFewQueries || a.heads % a.key_value_heads != 0 || !same_shape) return {};
  if (!same_dtype || !has_kernels(dtype) || dtype == ScalarType::Double) return {};
  if (!has_rows(q, a.q_stride) || !has_rows(k, a.k_stride) || !has_rows(v, a.v_stride)) return {};
  if (!takes_mask(a, q, mask)) return {};

  const std::array<int64_t, 4> size = {a.batch, a.queries, a.heads, a.size};
  const Tensor out = empty({size.data(), size.size()}, q);
  // Only a gradient would need lse.
  std::vector<float> lse(a.batch * a.heads * a.queries);
  a.q = input(q);
  a.k = input(k);
  a.v = input(v);
  a.out = output(out);
  a.lse = lse.data();
  a.out_stride[0] = a.queries * a.heads * a.size;
  a.out_stride[1] = a.size;
  a.out_stride[2] = a.heads * a.size;
  run(a, q, a.batch * a.heads, a.queries * a.keys * a.size);
  return torch::stable::transpose(out, 1, 2);
}

}  // namespace shardzoo
