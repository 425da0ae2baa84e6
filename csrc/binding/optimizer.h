// Declares the operators of an optimizer's step on a CPU.
#pragma once

#include "launch.h"

namespace shardzoo {

// Returns the sum of the squares of a contiguous tensor. The order of the additions depends only on its size.
double square_sum(const Tensor& x);

// Updates a parameter and its state by the gradient times `factor`; all four are contiguous and of one dtype. For an
// fp32 parameter it also writes `rounded`, a copy in bf16 or fp16.
void adamw(const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
           const OptionalTensor& rounded, double factor, double lr, double beta1, double beta2, double eps,
           double weight_decay, double step);

}  // namespace shardzoo
