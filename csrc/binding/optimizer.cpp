#include "optimizer.h"

#include <cmath>
#include <vector>

namespace shardzoo {
namespace {

int64_t count_blocks(int64_t elements) { return (elements + kOptimizerBlock - 1) / kOptimizerBlock; }

}  // namespace

double square_sum(const Tensor& x) {
  const int64_t blocks = count_blocks(x.numel());
  std::vector<double> sums(blocks);
  const SquareSums a = {.x = input(x), .sums = sums.data(), .elements = x.numel()};
  run(a, x, blocks, kOptimizerBlock);
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

void adamw(const Tensor& param, const Tensor& grad, const Tensor& exp_avg, const Tensor& exp_avg_sq,
           const OptionalTensor& rounded, double factor, double lr, double beta1, double beta2, double eps,
           double weight_decay, double step) {
  check_sizes(param.numel(), {grad, exp_avg, exp_avg_sq, rounded});
  for (const Tensor& other : {grad, exp_avg, exp_avg_sq}) {
    STD_TORCH_CHECK(other.scalar_type() == param.scalar_type(),
                    "a state or gradient has another dtype than its parameter");
  }
  const bool rounds_to_half = rounded && rounded->scalar_type() == ScalarType::Half;
  if (rounded) {
    const bool rounds_to_bf16 = rounded->scalar_type() == ScalarType::BFloat16;
    STD_TORCH_CHECK(rounded->is_contiguous(), "the rounded parameter is not contiguous");
    STD_TORCH_CHECK(rounds_to_half || rounds_to_bf16, "only bf16 and fp16 are rounded to");
  }
  const AdamW a = {.param = output(param),
                   .grad = input(grad),
                   .exp_avg = output(exp_avg),
                   .exp_avg_sq = output(exp_avg_sq),
                   .rounded = output(rounded),
                   .elements = param.numel(),
                   .rounds_to_half = rounds_to_half,
                   .factor = factor,
                   .lr = lr,
                   .beta1 = beta1,
                   .beta2 = beta2,
                   .eps = eps,
                   .weight_decay = weight_decay,
                   .bias_correction1 = 1 - std::pow(beta1, step),
                   .bias_correction2 = 1 - std::pow(beta2, step)};
  run(a, param, count_blocks(a.elements), kOptimizerBlock);
}

}  // namespace shardzoo
