// What an optimizer's step on a CPU needs.
#pragma once

#include "launch.h"

namespace shardzoo {

// Returns the sum of the squares of a contiguous tensor. Its order depends only on the size.
double square_sum(const Tensor& x);

// Updates a parameter and its state, contiguous and of one dtype, by the gradient times `factor`, and writes the rounded
// parameter, bf16 or fp16, of an fp32 one.
void adamw(const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
           const OptionalTensor& rounded, double factor, double lr, double beta1, double beta2, double eps,
           double weight_decay, double step);

}  // namespace shardzoo
