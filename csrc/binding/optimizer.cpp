#include "optimizer.h"

#include <cmath>
#include <vector>

namespace shardzoo {

double square_sum(const Tensor& x) {
  const int64_t blocks = (x.numel() + kOptimizerBlock - 1) / kOptimizerBlock;
  std::vector<double> sums(blocks);
  const SquareSums a = {input(x), sums.data(), x.numel()};
  run(kSquareSums, x, &a, blocks, kOptimizerBlock);
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

void adamw(const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
           const OptionalTensor& rounded, double factor, double lr, double beta1, double beta2, double eps,
           double weight_decay, double step) {
  const int64_t elements = param.numel();
  check_sizes(elements, {grad, exp_avg, exp_avg_sq, rounded});
  for (const Tensor& other : {grad, exp_avg, exp_avg_sq}) {
    STD_TORCH_CHECK(other.scalar_type() == param.scalar_type(), "a state or gradient has another dtype than its parameter");
  }
  STD_TORCH_CHECK(!rounded || rounded->is_contiguous(), "the rounded parameter is not contiguous");
  const bool half = rounded && rounded->scalar_type() == ScalarType::Half;
  STD_TORCH_CHECK(!rounded || half || rounded->scalar_type() == ScalarType::BFloat16, "only bf16 and fp16 are rounded to");
  const AdamW a = {output(param), input(grad), output(exp_avg), output(exp_avg_sq), rounded ? output(*rounded) : nullptr,
                   elements, half, factor, lr, beta1, beta2, eps, weight_decay,
                   1 - std::pow(beta1, step), 1 - std::pow(beta2, step)};
  run(kAdamW, param, &a, (elements + kOptimizerBlock - 1) / kOptimizerBlock, kOptimizerBlock);
}

}  // namespace shardzoo
