// Implements the operators `torch.ops.shardzoo_kernels.*` of operators.h. They are private to shardzoo, which checks
// what the caller passes and makes the inputs contiguous. Here only sizes are checked, so that no kernel leaves a
// tensor's memory.
#include "../matmul/few_rows.h"
#include "../matmul/matrix_product.h"
#include "../matmul/pool.h"
#include "launch.h"
#include "operators.h"
#include "optimizer.h"

namespace shardzoo {
namespace {

// Returns a tensor that a call reads or writes only under a condition.
OptionalTensor only_if(bool condition, const Tensor& tensor) {
  return condition ? OptionalTensor(tensor) : OptionalTensor();
}

void masked_softmax(const Tensor& scores, const OptionalTensor& mask, const OptionalTensor& bias,
                    const OptionalTensor& prefix, const OptionalTensor& keys, double scale, bool causal, double p,
                    int64_t first_head, const Tensor& probs, const Tensor& dropped) {
  SoftmaxForward a = {.scores = input(scores),
                      .mask = input(mask),
                      .bias = input(bias),
                      .prefix = integers(prefix),
                      .probs = output(probs),
                      .dropped = output(dropped),
                      .batch = scores.size(0),
                      .heads = scores.size(1),
                      .queries = scores.size(2),
                      .columns = scores.size(3),
                      .mask_stride = {},
                      .bias_stride = {},
                      .mask_is_bool = mask && mask->scalar_type() == ScalarType::Bool,
                      .causal = causal,
                      .scale = scale,
                      .dropout = make_dropout(keys, p, first_head, 0)};
  for (int i = 0; i < 3; ++i) {
    a.mask_stride[i] = mask ? mask->stride(i) : 0;
    a.bias_stride[i] = bias ? bias->stride(i) : 0;
  }
  check_sizes(scores.numel(), {mask, bias, probs, only_if(p > 0, dropped)});
  check_sizes(a.batch, {prefix, keys});
  run(a, scores, count_rows(scores), a.columns);
}

void masked_softmax_backward(const Tensor& grad, const Tensor& probs, const OptionalTensor& keys, double scale,
                             double p, int64_t first_head, int64_t bias_batch, const Tensor& grad_scores,
                             const Tensor& grad_bias) {
  const SoftmaxBackward a = {.grad = input(grad),
                             .probs = input(probs),
                             .grad_scores = output(grad_scores),
                             .grad_bias = output(grad_bias),
                             .batch = probs.size(0),
                             .heads = probs.size(1),
                             .queries = probs.size(2),
                             .columns = probs.size(3),
                             .bias_batch = bias_batch,
                             .scale = scale,
                             .dropout = make_dropout(keys, p, first_head, 0)};
  check_sizes(probs.numel(), {grad, grad_scores});
  check_sizes(a.batch, {keys});
  check_sizes(bias_batch * a.heads * a.queries * a.columns, {grad_bias});
  run(a, probs, a.heads * a.queries, a.batch * a.columns);
}

// LayerNorm, or RMSNorm if `mean` is absent.
void norm(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, const OptionalTensor& bias,
          double eps, double offset, bool rounds_once, const Tensor& y, const Tensor& summed,
          const OptionalTensor& mean, const Tensor& rstd) {
  const NormForward a = {.x = input(x),
                         .residual = input(residual),
                         .weight = input(weight),
                         .bias = input(bias),
                         .y = output(y),
                         .summed = output(summed),
                         .mean = output(mean),
                         .rstd = output(rstd),
                         .rows = count_rows(x),
                         .columns = count_columns(x),
                         .eps = eps,
                         .offset = offset,
                         .rounds_once = rounds_once};
  check_sizes(x.numel(), {residual, y, only_if(residual.has_value(), summed)});
  check_sizes(a.columns, {weight, bias});
  check_sizes(a.rows, {rstd});
  run(a, x, a.rows, a.columns);
}

void layer_norm(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, const OptionalTensor& bias,
                double eps, const Tensor& y, const Tensor& summed, const Tensor& mean, const Tensor& rstd) {
  norm(x, residual, weight, bias, eps, 0.0, true, y, summed, mean, rstd);
}

void rms_norm(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, double eps, const Tensor& y,
              const Tensor& summed, const Tensor& rstd) {
  norm(x, residual, weight, OptionalTensor(), eps, 0.0, false, y, summed, OptionalTensor(), rstd);
}

void offset_rms_norm(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, double eps, double offset,
                     const Tensor& y, const Tensor& summed, const Tensor& rstd) {
  norm(x, residual, weight, OptionalTensor(), eps, offset, true, y, summed, OptionalTensor(), rstd);
}

void norm_backward(const Tensor& grad, const OptionalTensor& grad_summed, const Tensor& h, const Tensor& weight,
                   const OptionalTensor& mean, const Tensor& rstd, double offset, const Tensor& grad_x,
                   const Tensor& grad_weight, const OptionalTensor& grad_bias) {
  const int64_t columns = count_columns(h);
  const Chunks chunks(h);
  const Tensor partial_weight = partial_sums(h, chunks, columns);
  OptionalTensor partial_bias;
  if (grad_bias) partial_bias = partial_sums(h, chunks, columns);
  const NormBackward a = {.grad = input(grad),
                          .grad_summed = input(grad_summed),
                          .h = input(h),
                          .weight = input(weight),
                          .mean = input(mean),
                          .rstd = input(rstd),
                          .grad_x = output(grad_x),
                          .partial_weight = output(partial_weight),
                          .partial_bias = output(partial_bias),
                          .rows = count_rows(h),
                          .columns = columns,
                          .chunk_rows = chunks.rows_each,
                          .offset = offset};
  check_sizes(h.numel(), {grad, grad_summed, grad_x});
  check_sizes(columns, {weight, grad_weight, grad_bias});
  check_sizes(a.rows, {rstd});
  run(a, h, chunks.count, chunks.rows_each * columns);
  sum_columns(partial_weight, grad_weight);
  if (grad_bias) sum_columns(*partial_bias, *grad_bias);
}

void layer_norm_backward(const Tensor& grad, const OptionalTensor& grad_summed, const Tensor& h,
                         const Tensor& weight, const Tensor& mean, const Tensor& rstd, bool has_bias,
                         const Tensor& grad_x, const Tensor& grad_weight, const Tensor& grad_bias) {
  norm_backward(grad, grad_summed, h, weight, mean, rstd, 0.0, grad_x, grad_weight, only_if(has_bias, grad_bias));
}

void rms_norm_backward(const Tensor& grad, const OptionalTensor& grad_summed, const Tensor& h, const Tensor& weight,
                       const Tensor& rstd, const Tensor& grad_x, const Tensor& grad_weight) {
  norm_backward(grad, grad_summed, h, weight, OptionalTensor(), rstd, 0.0, grad_x, grad_weight, OptionalTensor());
}

void offset_rms_norm_backward(const Tensor& grad, const OptionalTensor& grad_summed, const Tensor& h,
                              const Tensor& weight, const Tensor& rstd, double offset, const Tensor& grad_x,
                              const Tensor& grad_weight) {
  norm_backward(grad, grad_summed, h, weight, OptionalTensor(), rstd, offset, grad_x, grad_weight, OptionalTensor());
}

void bias_gelu(const Tensor& x, const OptionalTensor& bias, bool tanh, const Tensor& y) {
  const GeluForward a = {.x = input(x),
                         .bias = input(bias),
                         .y = output(y),
                         .rows = count_rows(x),
                         .columns = count_columns(x),
                         .tanh = tanh};
  check_sizes(x.numel(), {y});
  check_sizes(a.columns, {bias});
  run(a, x, a.rows, a.columns);
}

void bias_gelu_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& bias, bool tanh,
                        const Tensor& grad_x, const Tensor& grad_bias) {
  const int64_t columns = count_columns(x);
  const Chunks chunks(x);
  OptionalTensor partial_bias;
  if (bias) partial_bias = partial_sums(x, chunks, columns);
  const GeluBackward a = {.grad = input(grad),
                          .x = input(x),
                          .bias = input(bias),
                          .grad_x = output(grad_x),
                          .partial_bias = output(partial_bias),
                          .rows = count_rows(x),
                          .columns = columns,
                          .chunk_rows = chunks.rows_each,
                          .tanh = tanh};
  check_sizes(x.numel(), {grad, grad_x});
  check_sizes(columns, {bias, only_if(bias.has_value(), grad_bias)});
  run(a, x, chunks.count, chunks.rows_each * columns);
  if (bias) sum_columns(*partial_bias, grad_bias);
}

void glu(const Tensor& gate, const Tensor& up, int64_t activation, const Tensor& y) {
  const GluForward a = {.gate = input(gate),
                        .up = input(up),
                        .y = output(y),
                        .rows = gate.size(0),
                        .columns = gate.size(1),
                        .gate_stride = gate.stride(0),
                        .up_stride = up.stride(0),
                        .activation = static_cast<int>(activation)};
  check_sizes(gate.numel(), {up, y});
  run(a, gate, a.rows, a.columns);
}

void glu_backward(const Tensor& grad, const Tensor& gate, const Tensor& up, int64_t activation,
                  const Tensor& grad_gate, const Tensor& grad_up) {
  const GluBackward a = {.grad = input(grad),
                         .gate = input(gate),
                         .up = input(up),
                         .grad_gate = output(grad_gate),
                         .grad_up = output(grad_up),
                         .rows = gate.size(0),
                         .columns = gate.size(1),
                         .grad_stride = grad.stride(0),
                         .gate_stride = gate.stride(0),
                         .up_stride = up.stride(0),
                         .activation = static_cast<int>(activation)};
  check_sizes(gate.numel(), {grad, up, grad_gate, grad_up});
  run(a, gate, a.rows, a.columns);
}

void bias_dropout_residual(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual,
                           const OptionalTensor& keys, double p, int64_t first_row, int64_t first_column,
                           const Tensor& y) {
  const int64_t rows = count_rows(x);
  const DropoutForward a = {.x = input(x),
                            .bias = input(bias),
                            .residual = input(residual),
                            .y = output(y),
                            .rows = rows,
                            .columns = count_columns(x),
                            .rows_per_sample = rows / x.size(0),
                            .dropout = make_dropout(keys, p, first_row, first_column)};
  check_sizes(x.numel(), {residual, y});
  check_sizes(a.columns, {bias});
  check_sizes(x.size(0), {keys});
  run(a, x, rows, a.columns);
}

void bias_dropout_residual_backward(const Tensor& grad, const OptionalTensor& keys, double p, int64_t first_row,
                                    int64_t first_column, bool has_bias, const Tensor& grad_x,
                                    const Tensor& grad_bias) {
  const int64_t rows = count_rows(grad);
  const int64_t columns = count_columns(grad);
  const Chunks chunks(grad);
  OptionalTensor partial_bias;
  if (has_bias) partial_bias = partial_sums(grad, chunks, columns);
  const DropoutBackward a = {.grad = input(grad),
                             .grad_x = output(grad_x),
                             .partial_bias = output(partial_bias),
                             .rows = rows,
                             .columns = columns,
                             .chunk_rows = chunks.rows_each,
                             .rows_per_sample = rows / grad.size(0),
                             .dropout = make_dropout(keys, p, first_row, first_column)};
  check_sizes(grad.numel(), {grad_x});
  check_sizes(grad.size(0), {keys});
  check_sizes(columns, {only_if(has_bias, grad_bias)});
  run(a, grad, chunks.count, chunks.rows_each * columns);
  if (has_bias) sum_columns(*partial_bias, grad_bias);
}

void cross_entropy_stats(const Tensor& logits, const Tensor& target, int64_t first, int64_t columns, bool with_sum,
                         const Tensor& maximum, const Tensor& sum_exp, const Tensor& target_logit,
                         const Tensor& sum_logits) {
  const CrossEntropyStats a = {.logits = input(logits),
                               .target = integers(target),
                               .maximum = output(maximum),
                               .sum_exp = output(sum_exp),
                               .target_logit = output(target_logit),
                               .sum_logits = output(sum_logits),
                               .rows = logits.size(0),
                               .row_stride = logits.size(1),
                               .first = first,
                               .columns = columns};
  check_sizes(a.rows, {target, maximum, sum_exp, target_logit});
  check_sizes(with_sum ? a.rows : 0, {sum_logits});
  run(a, logits, a.rows, a.row_stride);
}

void cross_entropy_grad(const Tensor& logits, const Tensor& target, const Tensor& grad, const Tensor& log_z,
                        int64_t first, int64_t columns, int64_t num_classes, double label_smoothing, double z_loss,
                        int64_t ignore_index, const Tensor& grad_logits) {
  const CrossEntropyGrad a = {.logits = input(logits),
                              .target = integers(target),
                              .grad = input(grad),
                              .log_z = input(log_z),
                              .grad_logits = output(grad_logits),
                              .rows = logits.size(0),
                              .row_stride = logits.size(1),
                              .first = first,
                              .columns = columns,
                              .num_classes = num_classes,
                              .ignore_index = ignore_index,
                              .label_smoothing = label_smoothing,
                              .z_loss = z_loss};
  check_sizes(a.rows, {target, grad, log_z});
  check_sizes(logits.numel(), {grad_logits});
  run(a, logits, a.rows, a.row_stride);
}

// Copies the strides of batch, head and row.
void copy_strides(const Tensor& tensor, int64_t* strides) {
  for (int i = 0; i < 3; ++i) strides[i] = tensor.stride(i);
  STD_TORCH_CHECK(tensor.stride(3) == 1 || tensor.size(3) == 1, "the numbers of a head's row must be adjacent");
}

// Fills in the arguments that the forward and the backward pass of attention share.
AttentionForward attention_arguments(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bias,
                                     const OptionalTensor& mask, const OptionalTensor& prefix,
                                     const OptionalTensor& lengths, const OptionalTensor& keys, double scale,
                                     bool causal, double p, int64_t first_head, int64_t first_row, double softcap,
                                     const Tensor& out, const Tensor& lse) {
  AttentionForward a = {};
  a.q = input(q);
  a.k = input(k);
  a.v = input(v);
  a.mask = input(mask);
  a.bias = static_cast<const float*>(input(bias));
  a.prefix = integers(prefix);
  a.lengths = integers(lengths);
  a.out = output(out);
  a.lse = output(lse);
  a.batch = q.size(0);
  a.heads = q.size(1);
  a.key_value_heads = k.size(1);
  a.queries = q.size(2);
  a.keys = k.size(2);
  a.size = q.size(3);
  copy_strides(q, a.q_stride);
  copy_strides(k, a.k_stride);
  copy_strides(v, a.v_stride);
  copy_strides(out, a.out_stride);
  for (int i = 0; i < 4; ++i) a.mask_stride[i] = mask ? mask->stride(i) : 0;
  a.mask_is_bool = mask && mask->scalar_type() == ScalarType::Bool;
  a.causal = causal;
  a.scale = scale;
  a.softcap = softcap;
  a.first_query = first_row;
  a.dropout = make_dropout(keys, p, first_head, 0);
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
               double softcap, const Tensor& out, const Tensor& lse) {
  const AttentionForward a = attention_arguments(q, k, v, bias, mask, prefix, lengths, keys, scale, causal, p,
                                                 first_head, first_row, softcap, out, lse);
  const int64_t blocks = (a.queries + kAttentionQueries - 1) / kAttentionQueries;
  int64_t work = a.queries / blocks * a.keys;
  // A few queries take the time in which the keys are read.
  if (a.queries <= kFewQueries) work *= a.size;
  run(a, q, a.batch * a.heads * blocks, work);
}

void attention_backward(const Tensor& grad, const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k,
                        const Tensor& v, const OptionalTensor& bias, const OptionalTensor& mask,
                        const OptionalTensor& prefix, const OptionalTensor& lengths, const OptionalTensor& keys,
                        double scale, bool causal, double p, int64_t first_head, int64_t first_row, double softcap,
                        const Tensor& grad_q, const Tensor& grad_k, const Tensor& grad_v, const Tensor& grad_bias) {
  AttentionBackward a = {};
  a.forward = attention_arguments(q, k, v, bias, mask, prefix, lengths, keys, scale, causal, p, first_head, first_row,
                                  softcap, out, lse);
  a.grad = input(grad);
  a.grad_q = output(grad_q);
  a.grad_k = output(grad_k);
  a.grad_v = output(grad_v);
  copy_strides(grad, a.grad_stride);
  check_sizes(q.numel(), {grad, grad_q});
  check_sizes(k.numel(), {grad_k, grad_v});
  const AttentionForward& f = a.forward;
  OptionalTensor partial_bias;
  if (bias) {
    const std::array<int64_t, 2> size = {f.batch, bias->numel()};
    partial_bias = torch::stable::new_empty(q, {size.data(), size.size()}, ScalarType::Float);
    check_sizes(bias->numel(), {grad_bias});
    a.partial_bias = output(partial_bias);
  }
  run(a, q, f.batch * f.key_value_heads, f.heads / f.key_value_heads * f.queries * f.keys);
  if (bias) sum_columns(*partial_bias, grad_bias);
}

}  // namespace
}  // namespace shardzoo

#define SHARDZOO_DEFINE(name, schema) m.def(#name schema);
#define SHARDZOO_IMPLEMENT(name, schema) m.impl(#name, TORCH_BOX(&shardzoo::name));

STABLE_TORCH_LIBRARY(shardzoo_kernels, m) {
  SHARDZOO_OPERATORS_OF_BOTH_DEVICES(SHARDZOO_DEFINE)
  SHARDZOO_OPERATORS_OF_THE_CPU(SHARDZOO_DEFINE)
  SHARDZOO_OPERATORS_OF_NO_DEVICE(SHARDZOO_DEFINE)
}
STABLE_TORCH_LIBRARY_IMPL(shardzoo_kernels, CPU, m) {
  SHARDZOO_OPERATORS_OF_BOTH_DEVICES(SHARDZOO_IMPLEMENT)
  SHARDZOO_OPERATORS_OF_THE_CPU(SHARDZOO_IMPLEMENT)
}
STABLE_TORCH_LIBRARY_IMPL(shardzoo_kernels, CUDA, m) { SHARDZOO_OPERATORS_OF_BOTH_DEVICES(SHARDZOO_IMPLEMENT) }
STABLE_TORCH_LIBRARY_IMPL(shardzoo_kernels, CompositeExplicitAutograd, m) {
  SHARDZOO_OPERATORS_OF_NO_DEVICE(SHARDZOO_IMPLEMENT)
}
