// The operators of a decoding step on a CPU. They check their arguments and allocate their results in C++, because
// Python would take longer to do so than the kernels run.
#pragma once

#include "launch.h"

namespace shardzoo {

// Returns x weightᵀ + bias, or nothing if x has more than `most_rows` rows or the tensors do not suit the kernel.
OptionalTensor linear_of_few_rows(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t most_rows);

// Returns (norm(h), h) with h = x + residual, or no h without a residual; nothing if the tensors do not suit the kernel
// or are so large that the time of the call does not matter. LayerNorm if `centered`, else RMSNorm.
std::tuple<OptionalTensor, OptionalTensor> norm_of_few_rows(const Tensor& x, const OptionalTensor& residual,
                                                            const Tensor& weight, const OptionalTensor& bias, double eps,
                                                            bool centered);

// Returns softmax(scale q kᵀ + mask) v of at most kFewQueries queries, q [B, N, Sq, D] and k, v [B, K, Sk, D]; nothing if
// the tensors do not suit the kernel. The heads of a position are adjacent in the result, so that merging them copies
// nothing. The mask is bool or in the dtype of q, and has four dimensions, of which any may be 1.
OptionalTensor attention_of_few_queries(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                                        double scale, bool causal);

}  // namespace shardzoo
