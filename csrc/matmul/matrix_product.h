// The operator of products of large matrices on a CPU.
#pragma once

#include "../binding/launch.h"

namespace shardzoo {

// Returns a b + bias, of a [M, K], b [K, N] and bias [N] of one dtype, which is not fp64; or nothing if the tensors do
// not suit the kernel. The numbers of each factor's rows or columns must be adjacent, and those of the bias.
OptionalTensor matrix_product(const Tensor& a, const Tensor& b, const OptionalTensor& bias);

}  // namespace shardzoo
