#include "decoding.h"

#include <vector>

namespace shardzoo {
namespace {

constexpr int64_t kFewElements = 1 << 16;

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// A new contiguous CPU tensor. torch::stable::new_empty would go through PyTorch's dispatcher.
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

// Whether kernels of `like` can read a dense tensor of `elements` elements. None always fits.
bool fits(const OptionalTensor& tensor, const Tensor& like, int64_t elements) {
  return !tensor || (tensor->is_cpu() && tensor->scalar_type() == like.scalar_type() && tensor->numel() == elements &&
                     tensor->is_contiguous());
}

// Copies the strides of a tensor's first three dimensions. Returns whether the numbers of a row are adjacent.
bool has_rows(const Tensor& tensor, int64_t* stride) {
  for (int i = 0; i < 3; ++i) stride[i] = tensor.stride(i);
  return tensor.is_cpu() && (tensor.stride(3) == 1 || tensor.size(3) == 1);
}

// Fills in the mask, if it is of a type that the kernel reads and broadcasts to the scores.
bool takes_mask(AttentionForward& a, const Tensor& q, const OptionalTensor& mask) {
  if (!mask) return true;
  a.mask_is_bool = mask->scalar_type() == ScalarType::Bool;
  if (!mask->is_cpu() || mask->dim() != 4 || !(a.mask_is_bool || mask->scalar_type() == q.scalar_type())) return false;
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
  constexpr int64_t block = 12;  // a few of the kernel's tiles, which fit into any second-level cache
  const int64_t elements = x.numel(), columns = x.dim() == 0 ? 0 : columns_of(x);
  if (elements == 0 || elements > most_rows * columns || weight.dim() != 2 || weight.size(1) != columns) return {};
  const int64_t features = weight.size(0), rows = elements / columns;
  if (!has_kernels(x.scalar_type()) || !fits(weight, x, features * columns) || !fits(bias, x, features)) return {};
  if (bias && bias->dim() != 1) return {};
  const Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  std::vector<int64_t> size(x.sizes().begin(), x.sizes().end());
  size.back() = features;
  const Tensor y = empty({size.data(), size.size()}, x);
  const LinearForward a = {input(dense), input(weight), input(bias), output(y), rows, columns, features, block};
  run(kLinearForward, x, &a, (features + block - 1) / block, block * columns);
  return y;
}

std::tuple<OptionalTensor, OptionalTensor> norm_of_few_rows(const Tensor& x, const OptionalTensor& residual,
                                                            const Tensor& weight, const OptionalTensor& bias, double eps,
                                                            bool centered) {
  const int64_t elements = x.numel();
  if (elements == 0 || elements > kFewElements || !has_kernels(x.scalar_type())) return {};
  if (!fits(x, x, elements) || !fits(residual, x, elements)) return {};
  const int64_t columns = columns_of(x), rows = elements / columns;
  if (!fits(weight, x, columns) || !fits(bias, x, columns)) return {};
  const Tensor y = empty(x.sizes(), x);
  OptionalTensor h;
  if (residual) h = empty(x.sizes(), x);
  std::vector<double> statistics(2 * rows);  // which only the gradient needs
  const NormForward a = {input(x),  input(residual), input(weight), input(bias),
                         output(y), h ? output(*h) : nullptr,
                         centered ? statistics.data() + rows : nullptr, statistics.data(), rows, columns, eps};
  run(kNormForward, x, &a, rows, columns);
  return {y, h};
}

OptionalTensor attention_of_few_queries(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                                        double scale, bool causal) {
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4 || q.numel() == 0 || k.numel() == 0) return {};
  AttentionForward a = {};
  a.batch = q.size(0), a.heads = q.size(1), a.queries = q.size(2), a.size = q.size(3);
  a.key_value_heads = k.size(1), a.keys = k.size(2), a.causal = causal, a.scale = scale;
  const bool fit = a.queries <= kFewQueries && a.heads % a.key_value_heads == 0 && k.size(0) == a.batch &&
                   k.size(3) == a.size && k.sizes() == v.sizes() && q.scalar_type() == k.scalar_type() &&
                   q.scalar_type() == v.scalar_type() && has_kernels(q.scalar_type()) &&
                   q.scalar_type() != ScalarType::Double;
  if (!fit || !has_rows(q, a.q_stride) || !has_rows(k, a.k_stride) || !has_rows(v, a.v_stride)) return {};
  if (!takes_mask(a, q, mask)) return {};
  const std::array<int64_t, 4> size = {a.batch, a.queries, a.heads, a.size};
  const Tensor out = empty({size.data(), size.size()}, q);
  std::vector<float> lse(a.batch * a.heads * a.queries);  // which only the gradient needs
  a.q = input(q), a.k = input(k), a.v = input(v), a.out = output(out), a.lse = lse.data();
  a.out_stride[0] = a.queries * a.heads * a.size, a.out_stride[1] = a.size, a.out_stride[2] = a.heads * a.size;
  run(kAttentionForward, q, &a, a.batch * a.heads, a.queries * a.keys * a.size);
  return torch::stable::transpose(out, 1, 2);
}

}  // namespace shardzoo
