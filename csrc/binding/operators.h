// Lists every operator of `torch.ops.shardzoo_kernels` once: X(its name, its schema). The C++ function that computes it
// has its name. Arguments are a kernel's inputs, then the tensors that it writes.
#pragma once

// These operators take CPU and CUDA tensors. The function fills in a kernel's arguments, and the kernel runs on the
// tensors' device.
#define SHARDZOO_OPERATORS_OF_BOTH_DEVICES(X)                                                                     \
  X(masked_softmax,                                                                                               \
    "(Tensor scores, Tensor? mask, Tensor? bias, Tensor? prefix, Tensor? keys, float scale, bool causal, "        \
    "float p, int first_head, Tensor(a!) probs, Tensor(b!) dropped) -> ()")                                       \
  X(masked_softmax_backward,                                                                                      \
    "(Tensor grad, Tensor probs, Tensor? keys, float scale, float p, int first_head, int bias_batch, "            \
    "Tensor(a!) grad_scores, Tensor(b!) grad_bias) -> ()")                                                        \
  X(layer_norm,                                                                                                   \
    "(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, Tensor(a!) y, Tensor(b!) summed, "      \
    "Tensor(c!) mean, Tensor(d!) rstd) -> ()")                                                                    \
  X(layer_norm_backward,                                                                                          \
    "(Tensor grad, Tensor? grad_summed, Tensor h, Tensor weight, Tensor mean, Tensor rstd, bool has_bias, "       \
    "Tensor(a!) grad_x, Tensor(b!) grad_weight, Tensor(c!) grad_bias) -> ()")                                     \
  X(rms_norm,                                                                                                     \
    "(Tensor x, Tensor? residual, Tensor weight, float eps, Tensor(a!) y, Tensor(b!) summed, Tensor(c!) rstd) "   \
    "-> ()")                                                                                                      \
  X(rms_norm_backward,                                                                                            \
    "(Tensor grad, Tensor? grad_summed, Tensor h, Tensor weight, Tensor rstd, Tensor(a!) grad_x, "                \
    "Tensor(b!) grad_weight) -> ()")                                                                              \
  X(offset_rms_norm,                                                                                              \
    "(Tensor x, Tensor? residual, Tensor weight, float eps, float offset, Tensor(a!) y, Tensor(b!) summed, "      \
    "Tensor(c!) rstd) -> ()")                                                                                     \
  X(offset_rms_norm_backward,                                                                                     \
    "(Tensor grad, Tensor? grad_summed, Tensor h, Tensor weight, Tensor rstd, float offset, "                     \
    "Tensor(a!) grad_x, Tensor(b!) grad_weight) -> ()")                                                           \
  X(bias_gelu, "(Tensor x, Tensor? bias, bool tanh, Tensor(a!) y) -> ()")                                         \
  X(bias_gelu_backward,                                                                                           \
    "(Tensor grad, Tensor x, Tensor? bias, bool tanh, Tensor(a!) grad_x, Tensor(b!) grad_bias) -> ()")            \
  X(glu, "(Tensor gate, Tensor up, int activation, Tensor(a!) y) -> ()")                                          \
  X(glu_backward,                                                                                                 \
    "(Tensor grad, Tensor gate, Tensor up, int activation, Tensor(a!) grad_gate, Tensor(b!) grad_up) -> ()")      \
  X(bias_dropout_residual,                                                                                        \
    "(Tensor x, Tensor? bias, Tensor? residual, Tensor? keys, float p, int first_row, int first_column, "         \
    "Tensor(a!) y) -> ()")                                                                                        \
  X(bias_dropout_residual_backward,                                                                               \
    "(Tensor grad, Tensor? keys, float p, int first_row, int first_column, bool has_bias, Tensor(a!) grad_x, "    \
    "Tensor(b!) grad_bias) -> ()")                                                                                \
  X(cross_entropy_stats,                                                                                          \
    "(Tensor logits, Tensor target, int first, int columns, bool with_sum, Tensor(a!) maximum, "                  \
    "Tensor(b!) sum_exp, Tensor(c!) target_logit, Tensor(d!) sum_logits) -> ()")                                  \
  X(cross_entropy_grad,                                                                                           \
    "(Tensor logits, Tensor target, Tensor grad, Tensor log_z, int first, int columns, int num_classes, "         \
    "float label_smoothing, float z_loss, int ignore_index, Tensor(a!) grad_logits) -> ()")

// These operators take CPU tensors alone.
#define SHARDZOO_OPERATORS_OF_THE_CPU(X)                                                                          \
  X(attention,                                                                                                    \
    "(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? prefix, Tensor? lengths, Tensor? keys, "  \
    "float scale, bool causal, float p, int first_head, int first_row, float softcap, Tensor(a!) out, "           \
    "Tensor(b!) lse) -> ()")                                                                                      \
  X(attention_backward,                                                                                           \
    "(Tensor grad, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, "            \
    "Tensor? prefix, Tensor? lengths, Tensor? keys, float scale, bool causal, float p, int first_head, "          \
    "int first_row, float softcap, Tensor(a!) grad_q, Tensor(b!) grad_k, Tensor(c!) grad_v, "                     \
    "Tensor(d!) grad_bias) -> ()")                                                                                \
  X(linear_of_few_rows, "(Tensor x, Tensor weight, Tensor? bias, int most_rows) -> Tensor?")                      \
  X(norm_of_few_rows,                                                                                             \
    "(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool centered) -> (Tensor?, Tensor?)")  \
  X(attention_of_few_queries,                                                                                     \
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, float softcap) -> Tensor?")           \
  X(matrix_product, "(Tensor a, Tensor b, Tensor? bias) -> Tensor?")                                              \
  X(grouped_product,                                                                                              \
    "(Tensor x, Tensor weight, int[] counts, bool transposed, Tensor(a!) y) -> ()")                               \
  X(grouped_outer_product, "(Tensor x, Tensor y, int[] counts, Tensor(a!) products) -> ()")                       \
  X(square_sum, "(Tensor x) -> float")                                                                            \
  X(adamw,                                                                                                        \
    "(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? rounded, "            \
    "float factor, float lr, float beta1, float beta2, float eps, float weight_decay, float step) -> ()")         \
  X(recycled, "(Tensor like, int[] size) -> Tensor")

// These operators have no tensor that tells a device.
#define SHARDZOO_OPERATORS_OF_NO_DEVICE(X) X(recycled_idle, "() -> int")
