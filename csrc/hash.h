// Computes the dropout hash of ops/dropout_mask.py, for scalars and for vectors of uint32 alike.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SHARDZOO_HASH __host__ __device__ __forceinline__
#else
#define SHARDZOO_HASH static inline __attribute__((always_inline))
#endif

namespace shardzoo {
namespace {

// Returns the key of a row from the key of its sample; `row` counts within the unsplit sample.
SHARDZOO_HASH uint64_t row_key(int64_t sample_key, int64_t row) {
  uint64_t z = static_cast<uint64_t>(sample_key) + 0x9E3779B97F4A7C15u * (static_cast<uint64_t>(row) + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Returns the row of attention probabilities of a query of a head, as counted in the unsplit tensor.
SHARDZOO_HASH int64_t head_row(int64_t head, int64_t query) { return (head << 32) + query; }

// Returns the row of attention probabilities of the unit-th (head, query) of a tensor whose first head is `first_head`.
// It does not depend on the number of queries, which padding changes.
SHARDZOO_HASH int64_t attention_row(int64_t first_head, int64_t unit, int64_t queries) {
  return head_row(first_head + unit / queries, unit % queries);
}

// Returns the hash of the element in `column` of a row whose key has these halves. Either the column or the halves may
// be vectors, of several columns or of several rows.
template <class Half, class U>
SHARDZOO_HASH auto element_hash(Half low, Half high, U column) {
  auto h = column + low;
  h = (h ^ (h >> 16)) * 0x21F0AAADu;
  h = h ^ high;
  h = (h ^ (h >> 15)) * 0x735A2D97u;
  return h ^ (h >> 15);
}

// Returns the hash of the element in `column` (U: uint32_t or a vector of them).
template <class U>
SHARDZOO_HASH U element_hash(uint64_t key, U column) {
  return element_hash(static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), column);
}

}  // namespace
}  // namespace shardzoo
