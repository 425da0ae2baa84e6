// The operators of a decoding step on a CPU, which works on a few rows. They check their arguments and allocate their
// results in C++, because Python would take longer to do so than the kernels run.
//
// Each returns nothing if the tensors do not suit its kernel, so that the caller goes on in Python.
#pragma once

#include <tuple>

#include "../binding/launch.h"

namespace shardzoo {

// Returns x weightᵀ + bias of x [..., columns], weight [features, columns] and bias [features]; nothing if x has more
// than `most_rows` rows.
OptionalTensor linear_of_few_rows(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t most_rows);

// Returns (norm(h), h) with h = x + residual, or no h without a residual. It is LayerNorm if `centered`, else RMSNorm.
// Returns nothing for tensors so large that the time of the call does not matter.
std::tuple<OptionalTensor, OptionalTensor> norm_of_few_rows(const Tensor& x, const OptionalTensor& residual,
                                                            const Tensor& weight, const OptionalTensor& bias, double eps,
                                                            bool centered);

// Returns softmax(cap(scale q kᵀ) + mask) v of at most kFewQueries queries, of q [B, N, Sq, D] and k, v [B, K, Sk, D],
// with cap(x) = softcap tanh(x / softcap), or x if softcap is 0. The heads of a position are adjacent in the result, so that merging them copies nothing. The mask is bool or in the dtype
// of q, and has four dimensions, of which any may be 1.
OptionalTensor attention_of_few_queries(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                                        double scale, bool causal, double softcap);

}  // namespace shardzoo
