// Products of large matrices on a CPU.
#pragma once

#include "launch.h"

namespace shardzoo {

// Writes a b + bias to c, of a [M, K], b [K, N], bias [N] and c [M, N], which is contiguous; fp32, bf16 or fp16.
void matrix_product(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const Tensor& c);

}  // namespace shardzoo
