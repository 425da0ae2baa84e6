// Memory for large outputs on the CPU, kept when a tensor is freed and given to the next one of about that size.
//
// The C library returns large blocks to the system at once and maps them afresh, so that every output's first write
// faults its pages in: that takes longer than most kernels here do. A training step asks for the same sizes again
// and again.
#pragma once

#include "launch.h"

namespace shardzoo {

// An uninitialized contiguous CPU tensor of `size` and the dtype of `like`. Its memory is from the pool if it is large.
Tensor recycled(const Tensor& like, const std::vector<int64_t>& size);

// Bytes that are in the pool and in no tensor.
int64_t recycled_idle();

}  // namespace shardzoo
