// The operator of products of large matrices on a CPU.
#pragma once

#include <vector>

#include "../binding/launch.h"

namespace shardzoo {

// Returns a b + bias, of a [M, K], b [K, N] and bias [N] of one dtype, which is not fp64; or nothing if the tensors do
// not suit the kernel. The numbers of each factor's rows or columns must be adjacent, and those of the bias.
OptionalTensor matrix_product(const Tensor& a, const Tensor& b, const OptionalTensor& bias);

// Products of stacked matrices: the rows of x [M, C] are divided into groups, counts[g] rows each, and a group has a
// matrix of its own. All tensors are contiguous and of one dtype that is not fp64. Rows of y behind the groups stay as
// they are.

// Sets y [M, F] to the products of each group's rows with its matrix, of weight [G, C, F], or transposed, [G, F, C].
void grouped_product(const Tensor& x, const Tensor& weight, const std::vector<int64_t>& counts, bool transposed,
                     const Tensor& y);

// Sets products [G, C, F] to xᵀ y of each group's rows of x [M, C] and y [M, F]: zeros for a group without rows.
void grouped_outer_product(const Tensor& x, const Tensor& y, const std::vector<int64_t>& counts,
                           const Tensor& products);

}  // namespace shardzoo
