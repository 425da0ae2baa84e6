// A pool of memory for large CPU outputs. It keeps the memory of a freed tensor for the next tensor of about that size.
//
// The C library returns large blocks to the system at once and maps new ones, so the first write to every output causes
// page faults, which take longer than most kernels here. A training step allocates the same sizes repeatedly.
#pragma once

#include <vector>

#include "../binding/launch.h"

namespace shardzoo {

// Returns an uninitialized contiguous CPU tensor of `size` in the dtype of `like`. A large one uses the pool.
Tensor recycled(const Tensor& like, const std::vector<int64_t>& size);

// Returns the bytes of the pool that no tensor uses.
int64_t recycled_idle();

}  // namespace shardzoo
