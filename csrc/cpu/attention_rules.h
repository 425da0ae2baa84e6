// Where attention finds its rows, and which keys its rules leave a query, however the scores are computed.
#pragma once

#include "entry.h"
#include "math.h"

namespace shardzoo {
namespace {

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
INLINE T* row_at(T* base, const int64_t* stride, int64_t b, int64_t head, int64_t row) {
  return base + b * stride[0] + head * stride[1] + row * stride[2];
}
template <class T>
INLINE const T* row_at(const void* base, const int64_t* stride, int64_t b, int64_t head, int64_t row) {
  return row_at(static_cast<const T*>(base), stride, b, head, row);
}

// The soft cap of the scores (Gemma 2), which is applied to products of queries and keys.
class SoftCap {
 public:
  explicit SoftCap(const AttentionForward& a)
      : cap_(static_cast<float>(a.softcap)), factor_(static_cast<float>(a.scale / a.softcap)) {}

  // Returns cap(scale * product), and writes the derivative of cap there.
  LAMBDA VF at(VF product, VF& slope) const {
    const VF share = tanh(product * factor_);
    slope = 1 - share * share;
    return cap_ * share;
  }
  LAMBDA VF at(VF product) const { return cap_ * tanh(product * factor_); }

 private:
  float cap_, factor_;
};

// Returns what the products of queries and keys are still to be multiplied by: a soft cap contains the scale.
INLINE float scale_after_cap(const AttentionForward& a) { return a.softcap == 0 ? static_cast<float>(a.scale) : 1; }

// Returns the mask of a query from `key` on, of booleans or of numbers.
template <class M>
INLINE const M* mask_at(const AttentionForward& a, int64_t b, int64_t n, int64_t query, int64_t key) {
  return row_at<M>(a.mask, a.mask_stride, b, n, query) + key * a.mask_stride[3];
}

INLINE int64_t find_prefix(const AttentionForward& a, int64_t b) { return a.prefix == nullptr ? 0 : a.prefix[b]; }
INLINE int64_t key_limit(const AttentionForward& a, int64_t b) {
  return a.lengths == nullptr ? a.keys : smaller(a.lengths[b], a.keys);
}

// Returns the number of keys, at most `limit`, that the queries before `end` can see; they see no later key.
INLINE int64_t keys_before(const AttentionForward& a, int64_t limit, int64_t prefix, int64_t end) {
  const int64_t diagonal = end + a.keys - a.queries;
  const int64_t keys = a.causal ? smaller(limit, diagonal > prefix ? diagonal : prefix) : limit;
  return keys < 0 ? 0 : keys;
}

}  // namespace
}  // namespace shardzoo
