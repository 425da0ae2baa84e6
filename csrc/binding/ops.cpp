// The operators `torch.ops.shardzoo_kernels.*`. Their arguments are a kernel's inputs, then the tensors it writes. They
// are private to shardzoo, which validates the arguments and makes the inputs contiguous.
#include "decoding.h"
#include "launch.h"
#include "matrix_product.h"
#include "optimizer.h"
#include "pool.h"

namespace shardzoo {
namespace {

void masked_softmax(const Tensor& scores, const OptionalTensor& mask, const OptionalTensor& bias,
                    const OptionalTensor& prefix, const OptionalTensor& keys, double scale, bool causal, double p,
                    int64_t first_head, const Tensor& probs, const Tensor& dropped) {
  SoftmaxForward a = {};
  a.scores = input(scores), a.mask = input(mask), a.bias = input(bias), a.prefix = integers(prefix);
  a.probs = output(probs), a.dropped = output(dropped);
  a.batch = scores.size(0), a.heads = scores.size(1), a.queries = scores.size(2), a.columns = scores.size(3);
  for (int i = 0; i < 3; ++i) {
    a.mask_stride[i] = mask ? mask->stride(i) : 0;
    a.bias_stride[i] = bias ? bias->stride(i) : 0;
  }
  a.mask_is_bool = mask && mask->scalar_type() == ScalarType::Bool;
  a.causal = causal, a.scale = scale;
  a.dropout = dropout_of(p > 0 ? keys : OptionalTensor(), p, first_head, 0);
  check_sizes(scores.numel(), {mask, bias, probs, p > 0 ? OptionalTensor(dropped) : OptionalTensor()});
  check_sizes(a.batch, {prefix, keys});
  run(kSoftmaxForward, scores, &a, rows_of(scores), a.columns);
}

void masked_softmax_backward(const Tensor& grad, const Tensor& probs, const OptionalTensor& keys, double scale,
                             double p, int64_t first_head, int64_t bias_batch, const Tensor& grad_scores,
                             const Tensor& grad_bias) {
  SoftmaxBackward a = {};
  a.grad = input(grad), a.probs = input(probs);
  a.grad_scores = output(grad_scores), a.grad_bias = output(grad_bias);
  a.batch = probs.size(0), a.heads = probs.size(1), a.queries = probs.size(2), a.columns = probs.size(3);
  a.bias_batch = bias_batch, a.scale = scale;
  a.dropout = dropout_of(p > 0 ? keys : OptionalTensor(), p, first_head, 0);
  check_sizes(probs.numel(), {grad, grad_scores});
  check_sizes(a.batch, {keys});
  check_sizes(bias_batch * a.heads * a.queries * a.columns, {grad_bias});
  run(kSoftmaxBackward, probs, &a, a.heads * a.queries, a.batch * a.columns);
}

void norm(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, const OptionalTensor& bias,
          double eps, const Tensor& y, const Tensor& summed, void* mean, const Tensor& rstd) {
  const NormForward a = {input(x),       input(residual), input(weight), input(bias),   output(y),    output(summed),
                         mean,           output(rstd),    rows_of(x),    columns_of(x), eps};
  check_sizes(x.numel(), {residual, y, residual ? OptionalTensor(summed) : OptionalTensor()});
  check_sizes(a.columns, {weight, bias});
  check_sizes(a.rows, {rstd});
  run(kNormForward, x, &a, a.rows, a.columns);
}

void layer_norm(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, const OptionalTensor& bias,
                double eps, const Tensor& y, const Tensor& summed, const Tensor& mean, const Tensor& rstd) {
  norm(x, residual, weight, bias, eps, y, summed, output(mean), rstd);
}

void rms_norm(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, double eps, const Tensor& y,
              const Tensor& summed, const Tensor& rstd) {
  norm(x, residual, weight, OptionalTensor(), eps, y, summed, nullptr, rstd);
}

void norm_backward(const Tensor& grad, const OptionalTensor& grad_summed, const Tensor& h, const Tensor& weight,
                   const void* mean, const Tensor& rstd, const Tensor& grad_x, const Tensor& grad_weight,
                   const OptionalTensor& grad_bias) {
  const int64_t rows = rows_of(h), columns = columns_of(h);
  const Chunks chunks(h);
  const Tensor partial_weight = partial_sums(h, chunks, columns);
  OptionalTensor partial_bias;
  if (grad_bias) partial_bias = partial_sums(h, chunks, columns);
  const NormBackward a = {input(grad),    input(grad_summed),     input(h),
                          input(weight),  mean,                   input(rstd),
                          output(grad_x), output(partial_weight), partial_bias ? output(*partial_bias) : nullptr,
                          rows,           columns,                chunks.rows_each};
  check_sizes(h.numel(), {grad, grad_summed, grad_x});
  check_sizes(columns, {weight, grad_weight, grad_bias});
  check_sizes(rows, {rstd});
  run(kNormBackward, h, &a, chunks.count, chunks.rows_each * columns);
  sum_columns(partial_weight, grad_weight);
  if (grad_bias) sum_columns(*partial_bias, *grad_bias);
}

void layer_norm_backward(const Tensor& grad, const OptionalTensor& grad_summed, const Tensor& h,
                         const Tensor& weight, const Tensor& mean, const Tensor& rstd, bool has_bias,
                         const Tensor& grad_x, const Tensor& grad_weight, const Tensor& grad_bias) {
  const OptionalTensor written = has_bias ? OptionalTensor(grad_bias) : OptionalTensor();
  norm_backward(grad, grad_summed, h, weight, input(mean), rstd, grad_x, grad_weight, written);
}

void rms_norm_backward(const Tensor& grad, const OptionalTensor& grad_summed, const Tensor& h, const Tensor& weight,
                       const Tensor& rstd, const Tensor& grad_x, const Tensor& grad_weight) {
  norm_backward(grad, grad_summed, h, weight, nullptr, rstd, grad_x, grad_weight, OptionalTensor());
}

void bias_gelu(const Tensor& x, const OptionalTensor& bias, bool tanh, const Tensor& y) {
  const GeluForward a = {input(x), input(bias), output(y), rows_of(x), columns_of(x), tanh};
  check_sizes(x.numel(), {y});
  check_sizes(a.columns, {bias});
  run(kGeluForward, x, &a, a.rows, a.columns);
}

void bias_gelu_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& bias, bool tanh,
                        const Tensor& grad_x, const Tensor& grad_bias) {
  const int64_t rows = rows_of(x), columns = columns_of(x);
  const Chunks chunks(x);
  OptionalTensor partial;
  if (bias) partial = partial_sums(x, chunks, columns);
  const GeluBackward a = {input(grad), input(x), input(bias),      output(grad_x), partial ? output(*partial) : nullptr,
                          rows,        columns,  chunks.rows_each, tanh};
  check_sizes(x.numel(), {grad, grad_x});
  check_sizes(columns, {bias, bias ? OptionalTensor(grad_bias) : OptionalTensor()});
  run(kGeluBackward, x, &a, chunks.count, chunks.rows_each * columns);
  if (bias) sum_columns(*partial, grad_bias);
}

void glu(const Tensor& gate, const Tensor& up, int64_t activation, const Tensor& y) {
  const GluForward a = {input(gate),    input(up),    output(y),
                        gate.size(0),   gate.size(1), gate.stride(0),
                        up.stride(0),   static_cast<int>(activation)};
  check_sizes(gate.numel(), {up, y});
  run(kGluForward, gate, &a, a.rows, a.columns);
}

void glu_backward(const Tensor& grad, const Tensor& gate, const Tensor& up, int64_t activation,
                  const Tensor& grad_gate, const Tensor& grad_up) {
  const GluBackward a = {input(grad),    input(gate),     input(up),    output(grad_gate),
                         output(grad_up), gate.size(0),   gate.size(1), grad.stride(0),
                         gate.stride(0), up.stride(0),    static_cast<int>(activation)};
  check_sizes(gate.numel(), {grad, up, grad_gate, grad_up});
  run(kGluBackward, gate, &a, a.rows, a.columns);
}

void bias_dropout_residual(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual,
                           const OptionalTensor& keys, double p, int64_t first_row, int64_t first_column,
                           const Tensor& y) {
  const int64_t rows = rows_of(x);
  const DropoutForward a = {input(x), input(bias),   input(residual),    output(y),
                            rows,     columns_of(x), rows / x.size(0),
                            dropout_of(p > 0 ? keys : OptionalTensor(), p, first_row, first_column)};
  check_sizes(x.numel(), {residual, y});
  check_sizes(a.columns, {bias});
  check_sizes(x.size(0), {keys});
  run(kDropoutForward, x, &a, a.rows, a.columns);
}

void bias_dropout_residual_backward(const Tensor& grad, const OptionalTensor& keys, double p, int64_t first_row,
                                    int64_t first_column, bool has_bias, const Tensor& grad_x,
                                    const Tensor& grad_bias) {
  const int64_t rows = rows_of(grad), columns = columns_of(grad);
  const Chunks chunks(grad);
  OptionalTensor partial;
  if (has_bias) partial = partial_sums(grad, chunks, columns);
  const DropoutBackward a = {input(grad), output(grad_x),   partial ? output(*partial) : nullptr,
                             rows,        columns,          chunks.rows_each,
                             rows / grad.size(0),
                             dropout_of(p > 0 ? keys : OptionalTensor(), p, first_row, first_column)};
  check_sizes(grad.numel(), {grad_x});
  check_sizes(grad.size(0), {keys});
  check_sizes(columns, {has_bias ? OptionalTensor(grad_bias) : OptionalTensor()});
  run(kDropoutBackward, grad, &a, chunks.count, chunks.rows_each * columns);
  if (has_bias) sum_columns(*partial, grad_bias);
}

void cross_entropy_stats(const Tensor& logits, const Tensor& target, int64_t first, int64_t columns, bool with_sum,
                         const Tensor& maximum, const Tensor& sum_exp, const Tensor& target_logit,
                         const Tensor& sum_logits) {
  const CrossEntropyStats a = {input(logits),        integers(target),   output(maximum), output(sum_exp),
                               output(target_logit), output(sum_logits), logits.size(0),  logits.size(1),
                               first,                columns};
  check_sizes(a.rows, {target, maximum, sum_exp, target_logit});
  check_sizes(with_sum ? a.rows : 0, {sum_logits});
  run(kCrossEntropyStats, logits, &a, a.rows, a.row_stride);
}

void cross_entropy_grad(const Tensor& logits, const Tensor& target, const Tensor& grad, const Tensor& log_z,
                        int64_t first, int64_t columns, int64_t num_classes, double label_smoothing, double z_loss,
                        int64_t ignore_index, const Tensor& grad_logits) {
  const CrossEntropyGrad a = {input(logits),  integers(target), input(grad), input(log_z), output(grad_logits),
                              logits.size(0), logits.size(1),   first,       columns,      num_classes,
                              ignore_index,   label_smoothing,  z_loss};
  check_sizes(a.rows, {target, grad, log_z});
  check_sizes(logits.numel(), {grad_logits});
  run(kCrossEntropyGrad, logits, &a, a.rows, a.row_stride);
}

void copy_strides(const Tensor& tensor, int64_t* strides) {
  for (int i = 0; i < 3; ++i) strides[i] = tensor.stride(i);
  STD_TORCH_CHECK(tensor.stride(3) == 1 || tensor.size(3) == 1, "the numbers of a head's row must be adjacent");
}

AttentionForward attention_of(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                              const OptionalTensor& mask, const OptionalTensor& prefix, const OptionalTensor& lengths,
                              const OptionalTensor& keys, double scale, bool causal, double p, int64_t first_head,
                              int64_t first_row, const Tensor& out, const Tensor& lse) {
  AttentionForward a = {};
  a.q = input(q), a.k = input(k), a.v = input(v), a.mask = input(mask);
  a.bias = static_cast<const float*>(input(bias));
  a.prefix = integers(prefix), a.lengths = integers(lengths), a.out = output(out), a.lse = output(lse);
  a.batch = q.size(0), a.heads = q.size(1), a.key_value_heads = k.size(1);
  a.queries = q.size(2), a.keys = k.size(2), a.size = q.size(3);
  copy_strides(q, a.q_stride), copy_strides(k, a.k_stride);
  copy_strides(v, a.v_stride), copy_strides(out, a.out_stride);
  for (int i = 0; i < 4; ++i) a.mask_stride[i] = mask ? mask->stride(i) : 0;
  a.mask_is_bool = mask && mask->scalar_type() == ScalarType::Bool;
  a.causal = causal, a.scale = scale, a.first_query = first_row;
  a.dropout = dropout_of(p > 0 ? keys : OptionalTensor(), p, first_head, 0);
  const int64_t rows = a.batch * a.heads * a.queries;
  check_sizes(rows * a.size, {out});
  check_sizes(rows, {lse});
  check_sizes(rows * a.keys, {mask});
  check_sizes(a.batch * a.key_value_heads * a.keys * a.size, {k, v});
  check_sizes(a.heads * (a.queries + a.keys - 1), {bias});
  check_sizes(a.batch, {prefix, lengths, keys});
  return a;
}

void attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
               const OptionalTensor& mask, const OptionalTensor& prefix, const OptionalTensor& lengths,
               const OptionalTensor& keys, double scale, bool causal, double p, int64_t first_head, int64_t first_row,
               const Tensor& out, const Tensor& lse) {
  const AttentionForward a = attention_of(q, k, v, bias, mask, prefix, lengths, keys, scale, causal, p, first_head,
                                          first_row, out, lse);
  const int64_t blocks = (a.queries + kAttentionQueries - 1) / kAttentionQueries;
  const int64_t work = a.queries / blocks * a.keys;  // the time of a few queries is that of reading the keys
  run(kAttentionForward, q, &a, a.batch * a.heads * blocks, a.queries <= kFewQueries ? work * a.size : work);
}

void attention_backward(const Tensor& grad, const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k,
                        const Tensor& v, const OptionalTensor& bias, const OptionalTensor& mask,
                        const OptionalTensor& prefix, const OptionalTensor& lengths, const OptionalTensor& keys,
                        double scale, bool causal, double p, int64_t first_head, int64_t first_row,
                        const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v, const Tensor& grad_bias) {
  AttentionBackward a = {};
  a.forward = attention_of(q, k, v, bias, mask, prefix, lengths, keys, scale, causal, p, first_head, first_row, out,
                           lse);
  a.grad = input(grad), a.grad_q = output(grad_q), a.grad_k = output(grad_k), a.grad_v = output(grad_v);
  copy_strides(grad, a.grad_stride);
  check_sizes(q.numel(), {grad, grad_q});
  check_sizes(k.numel(), {grad_k, grad_v});
  const AttentionForward& f = a.forward;
  OptionalTensor partial;
  if (bias) {
    const std::array<int64_t, 2> size = {f.batch, bias->numel()};
    partial = torch::stable::new_empty(q, {size.data(), size.size()}, ScalarType::Float);
    check_sizes(bias->numel(), {grad_bias});
    a.partial_bias = output(*partial);
  }
  run(kAttentionBackward, q, &a, f.batch * f.key_value_heads, f.heads / f.key_value_heads * f.queries * f.keys);
  if (bias) sum_columns(*partial, grad_bias);
}

}  // namespace
}  // namespace shardzoo

STABLE_TORCH_LIBRARY(shardzoo_kernels, m) {
  m.def(
      "masked_softmax(Tensor scores, Tensor? mask, Tensor? bias, Tensor? prefix, Tensor? keys, float scale, "
      "bool causal, float p, int first_head, Tensor(a!) probs, Tensor(b!) dropped) -> ()");
  m.def(
      "masked_softmax_backward(Tensor grad, Tensor probs, Tensor? keys, float scale, float p, int first_head, "
      "int bias_batch, Tensor(a!) grad_scores, Tensor(b!) grad_bias) -> ()");
  m.def(
      "layer_norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, Tensor(a!) y, "
      "Tensor(b!) summed, Tensor(c!) mean, Tensor(d!) rstd) -> ()");
  m.def(
      "layer_norm_backward(Tensor grad, Tensor? grad_summed, Tensor h, Tensor weight, Tensor mean, Tensor rstd, "
      "bool has_bias, Tensor(a!) grad_x, Tensor(b!) grad_weight, Tensor(c!) grad_bias) -> ()");
  m.def(
      "rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, Tensor(a!) y, Tensor(b!) summed, "
      "Tensor(c!) rstd) -> ()");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor? grad_summed, Tensor h, Tensor weight, Tensor rstd, "
      "Tensor(a!) grad_x, Tensor(b!) grad_weight) -> ()");
  m.def("bias_gelu(Tensor x, Tensor? bias, bool tanh, Tensor(a!) y) -> ()");
  m.def(
      "bias_gelu_backward(Tensor grad, Tensor x, Tensor? bias, bool tanh, Tensor(a!) grad_x, "
      "Tensor(b!) grad_bias) -> ()");
  m.def("glu(Tensor gate, Tensor up, int activation, Tensor(a!) y) -> ()");
  m.def(
      "glu_backward(Tensor grad, Tensor gate, Tensor up, int activation, Tensor(a!) grad_gate, "
      "Tensor(b!) grad_up) -> ()");
  m.def(
      "bias_dropout_residual(Tensor x, Tensor? bias, Tensor? residual, Tensor? keys, float p, int first_row, "
      "int first_column, Tensor(a!) y) -> ()");
  m.def(
      "bias_dropout_residual_backward(Tensor grad, Tensor? keys, float p, int first_row, int first_column, "
      "bool has_bias, Tensor(a!) grad_x, Tensor(b!) grad_bias) -> ()");
  m.def(
      "cross_entropy_stats(Tensor logits, Tensor target, int first, int columns, bool with_sum, Tensor(a!) maximum, "
      "Tensor(b!) sum_exp, Tensor(c!) target_logit, Tensor(d!) sum_logits) -> ()");
  m.def(
      "cross_entropy_grad(Tensor logits, Tensor target, Tensor grad, Tensor log_z, int first, int columns, "
      "int num_classes, float label_smoothing, float z_loss, int ignore_index, Tensor(a!) grad_logits) -> ()");
  m.def("linear_of_few_rows(Tensor x, Tensor weight, Tensor? bias, int most_rows) -> Tensor?");
  m.def(
      "norm_of_few_rows(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool centered) -> "
      "(Tensor?, Tensor?)");
  m.def(
      "attention_of_few_queries(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal) -> Tensor?");
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? prefix, Tensor? lengths, "
      "Tensor? keys, float scale, bool causal, float p, int first_head, int first_row, Tensor(a!) out, "
      "Tensor(b!) lse) -> ()");
  m.def(
      "attention_backward(Tensor grad, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor? bias, "
      "Tensor? mask, Tensor? prefix, Tensor? lengths, Tensor? keys, float scale, bool causal, float p, "
      "int first_head, int first_row, Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v, "
      "Tensor(d!) grad_bias) -> ()");
  m.def("matrix_product(Tensor a, Tensor b, Tensor? bias) -> Tensor?");
  m.def("square_sum(Tensor x) -> float");
  m.def(
      "adamw(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? rounded, "
      "float factor, float lr, float beta1, float beta2, float eps, float weight_decay, float step) -> ()");
  m.def("recycled(Tensor like, int[] size) -> Tensor");
  m.def("recycled_idle() -> int");
}

// Both devices use the same functions, which fill a struct; `run` chooses the device of the tensors.
#define SHARDZOO_IMPLEMENTATIONS(m)                                                      \
  m.impl("masked_softmax", TORCH_BOX(&shardzoo::masked_softmax));                        \
  m.impl("masked_softmax_backward", TORCH_BOX(&shardzoo::masked_softmax_backward));      \
  m.impl("layer_norm", TORCH_BOX(&shardzoo::layer_norm));                                \
  m.impl("layer_norm_backward", TORCH_BOX(&shardzoo::layer_norm_backward));              \
  m.impl("rms_norm", TORCH_BOX(&shardzoo::rms_norm));                                    \
  m.impl("rms_norm_backward", TORCH_BOX(&shardzoo::rms_norm_backward));                  \
  m.impl("bias_gelu", TORCH_BOX(&shardzoo::bias_gelu));                                  \
  m.impl("bias_gelu_backward", TORCH_BOX(&shardzoo::bias_gelu_backward));                \
  m.impl("glu", TORCH_BOX(&shardzoo::glu));                                              \
  m.impl("glu_backward", TORCH_BOX(&shardzoo::glu_backward));                            \
  m.impl("bias_dropout_residual", TORCH_BOX(&shardzoo::bias_dropout_residual));          \
  m.impl("bias_dropout_residual_backward", TORCH_BOX(&shardzoo::bias_dropout_residual_backward)); \
  m.impl("cross_entropy_stats", TORCH_BOX(&shardzoo::cross_entropy_stats));              \
  m.impl("cross_entropy_grad", TORCH_BOX(&shardzoo::cross_entropy_grad))

STABLE_TORCH_LIBRARY_IMPL(shardzoo_kernels, CPU, m) {
  SHARDZOO_IMPLEMENTATIONS(m);
  m.impl("linear_of_few_rows", TORCH_BOX(&shardzoo::linear_of_few_rows));
  m.impl("norm_of_few_rows", TORCH_BOX(&shardzoo::norm_of_few_rows));
  m.impl("attention_of_few_queries", TORCH_BOX(&shardzoo::attention_of_few_queries));
  m.impl("attention", TORCH_BOX(&shardzoo::attention));
  m.impl("attention_backward", TORCH_BOX(&shardzoo::attention_backward));
  m.impl("matrix_product", TORCH_BOX(&shardzoo::matrix_product));
  m.impl("square_sum", TORCH_BOX(&shardzoo::square_sum));
  m.impl("adamw", TORCH_BOX(&shardzoo::adamw));
  m.impl("recycled", TORCH_BOX(&shardzoo::recycled));
}
STABLE_TORCH_LIBRARY_IMPL(shardzoo_kernels, CompositeExplicitAutograd, m) {
  m.impl("recycled_idle", TORCH_BOX(&shardzoo::recycled_idle));
}
STABLE_TORCH_LIBRARY_IMPL(shardzoo_kernels, CUDA, m) { SHARDZOO_IMPLEMENTATIONS(m); }
