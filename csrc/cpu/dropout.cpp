#include "entry.h"

namespace shardzoo {
namespace {

INLINE uint64_t key_of_row(const Dropout& d, int64_t rows_per_sample, int64_t r) {
  return d.keys == nullptr ? 0 : row_key(d.keys[r / rows_per_sample], d.first_row + r % rows_per_sample);
}

// Returns dropout(value) for the columns of a row from i on.
template <class C, class V>
INLINE V drop(const Dropout& d, uint64_t key, int64_t i, V value) {
  if (d.keys == nullptr) return value;
  const V keep = keep_factor<C>(key, d.first_column + i, d.threshold, d.keep_scale);
  // A dropped infinity is 0; its product with 0 would be NaN.
  return keep == 0 ? V{} : value * keep;
}

template <class T>
void dropout_forward(const DropoutForward& a, int64_t begin, int64_t end) {
  using V = VectorOf<T>;
  const T* bias = at<T>(a.bias, 0);
  for (int64_t r = begin; r < end; ++r) {
    const T *x = at<T>(a.x, r * a.columns), *residual = at<T>(a.residual, r * a.columns);
    T* y = at<T>(a.y, r * a.columns);
    const bool past_cache = beyond_cache(y, a.rows * a.columns);
    const uint64_t key = key_of_row(a.dropout, a.rows_per_sample, r);
    for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
      V value = load(x + i, part);
      if (bias != nullptr) value += load(bias + i, part);
      value = drop<Compute<T>>(a.dropout, key, i, value);
      if (residual != nullptr) value += load(residual + i, part);
      put(y + i, value, part, past_cache);
    });
  }
}

template <class T>
void dropout_backward(const DropoutBackward& a, int64_t begin, int64_t end) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    C* sum_bias = zeroed(at<C>(a.partial_bias, chunk * a.columns), a.columns);
    const int64_t stop = end_row(chunk, a.chunk_rows, a.rows);
    for (int64_t r = first_row(chunk, a.chunk_rows); r < stop; ++r) {
      const T* grad = at<T>(a.grad, r * a.columns);
      T* out = at<T>(a.grad_x, r * a.columns);
      const bool past_cache = beyond_cache(out, a.rows * a.columns);
      const uint64_t key = key_of_row(a.dropout, a.rows_per_sample, r);
      for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
        const V value = drop<C>(a.dropout, key, i, load(grad + i, part));
        put(out + i, value, part, past_cache);
        if (sum_bias != nullptr) store(sum_bias + i, load(sum_bias + i, part) + value, part);
      });
    }
  }
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CPU_KERNEL(dropout_forward, DropoutForward)
SHARDZOO_CPU_KERNEL(dropout_backward, DropoutBackward)
