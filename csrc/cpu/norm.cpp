#include <cmath>

#include "entry.h"

namespace shardzoo {
namespace {

// Writes h = x + residual into `row` (padded with 0) and into `summed`. Returns its mean, or its mean square.
template <class T>
INLINE Compute<T> load_row(const NormForward& a, int64_t r, Compute<T>* row, bool squares) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  const T *x = at<T>(a.x, r * a.columns), *residual = at<T>(a.residual, r * a.columns);
  T* summed = at<T>(a.summed, r * a.columns);
  const bool past_cache = beyond_cache(summed, a.rows * a.columns);
  Sum<T> sum;
  for_vectors_in_turns<T>(a.columns, [&](int64_t i, auto part, int turn) LAMBDA {
    V h = load(x + i, part);
    if (residual != nullptr) {
      h = round_to<T>(h + load(residual + i, part));
      put(summed + i, h, part, past_cache);
    }
    store(row + i, h, Full{});
    sum.parts[turn] += squares ? h * h : h;
  });
  return sum_lanes<C>(sum.total()) / static_cast<C>(a.columns);
}

template <class T>
INLINE void layer_norm_row(const NormForward& a, int64_t r, Compute<T>* row) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  const T *weight = at<T>(a.weight, 0), *bias = at<T>(a.bias, 0);
  const C mean = load_row<T>(a, r, row, false);
  Sum<T> squares;
  for_vectors_in_turns<T>(a.columns, [&](int64_t i, auto part, int turn) LAMBDA {
    const V centered = keep_lanes<C>(load(row + i, Full{}) - mean, part, C(0));
    squares.parts[turn] += centered * centered;
  });
  const C rstd = 1 / std::sqrt(sum_lanes<C>(squares.total()) / static_cast<C>(a.columns) + static_cast<C>(a.eps));
  static_cast<C*>(a.mean)[r] = mean;
  static_cast<C*>(a.rstd)[r] = rstd;
  T* y = at<T>(a.y, r * a.columns);
  const bool past_cache = beyond_cache(y, a.rows * a.columns);
  for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
    V value = (load(row + i, Full{}) - mean) * rstd * load(weight + i, part);
    if (bias != nullptr) value += load(bias + i, part);
    put(y + i, value, part, past_cache);
  });
}

template <class T>
INLINE void rms_norm_row(const NormForward& a, int64_t r, Compute<T>* row) {
  using C = Compute<T>;
  const T* weight = at<T>(a.weight, 0);
  const C rstd = 1 / std::sqrt(load_row<T>(a, r, row, true) + static_cast<C>(a.eps));
  static_cast<C*>(a.rstd)[r] = rstd;
  T* y = at<T>(a.y, r * a.columns);
  const bool past_cache = beyond_cache(y, a.rows * a.columns);
  if (a.rounds_once) {
    const C offset = static_cast<C>(a.offset);
    for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
      put(y + i, (load(weight + i, part) + offset) * (load(row + i, Full{}) * rstd), part, past_cache);
    });
    return;
  }
  for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
    put(y + i, load(weight + i, part) * round_to<T>(load(row + i, Full{}) * rstd), part, past_cache);
  });
}

template <class T>
void norm_forward(const NormForward& a, int64_t begin, int64_t end) {
  const Scratch<Compute<T>> scratch(a.columns);
  for (int64_t r = begin; r < end; ++r) {
    if (a.mean != nullptr) {
      layer_norm_row<T>(a, r, scratch.get());
    } else {
      rms_norm_row<T>(a, r, scratch.get());
    }
  }
}

template <class T>
INLINE void norm_backward_row(const NormBackward& a, int64_t r, Compute<T>* sum_weight, Compute<T>* sum_bias) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  const int64_t start = r * a.columns;
  const T *grad = at<T>(a.grad, start), *h = at<T>(a.h, start), *weight = at<T>(a.weight, 0);
  const T* grad_summed = at<T>(a.grad_summed, start);
  const bool centered = a.mean != nullptr;
  const C mean = centered ? static_cast<const C*>(a.mean)[r] : 0;
  const C rstd = static_cast<const C*>(a.rstd)[r];
  const C offset = static_cast<C>(a.offset);
  Sum<T> sum, product;
  for_vectors_in_turns<T>(a.columns, [&](int64_t i, auto part, int turn) LAMBDA {
    const V dy = load(grad + i, part), normalized = (load(h + i, part) - mean) * rstd;
    const V weighted = dy * (load(weight + i, part) + offset);
    sum.parts[turn] += weighted;
    product.parts[turn] += weighted * normalized;
    store(sum_weight + i, load(sum_weight + i, part) + dy * normalized, part);
    if (sum_bias != nullptr) store(sum_bias + i, load(sum_bias + i, part) + dy, part);
  });
  const C mean_weighted = centered ? sum_lanes<C>(sum.total()) / static_cast<C>(a.columns) : 0;
  const C mean_product = sum_lanes<C>(product.total()) / static_cast<C>(a.columns);
  T* out = at<T>(a.grad_x, start);
  const bool past_cache = beyond_cache(out, a.rows * a.columns);
  for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
    const V normalized = (load(h + i, part) - mean) * rstd;
    const V weighted = load(grad + i, part) * (load(weight + i, part) + offset);
    V value = (weighted - mean_weighted - normalized * mean_product) * rstd;
    if (grad_summed != nullptr) value += load(grad_summed + i, part);
    put(out + i, value, part, past_cache);
  });
}

template <class T>
void norm_backward(const NormBackward& a, int64_t begin, int64_t end) {
  using C = Compute<T>;
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    C* sum_weight = zeroed(at<C>(a.partial_weight, chunk * a.columns), a.columns);
    C* sum_bias = zeroed(at<C>(a.partial_bias, chunk * a.columns), a.columns);
    const int64_t stop = end_row(chunk, a.chunk_rows, a.rows);
    for (int64_t r = first_row(chunk, a.chunk_rows); r < stop; ++r) norm_backward_row<T>(a, r, sum_weight, sum_bias);
  }
}

template <class T>
void column_sum(const ColumnSum& a, int64_t begin, int64_t end) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  const C* partial = static_cast<const C*>(a.partial);
  T* out = static_cast<T*>(a.out);
  for_vectors<T>(end - begin, [&](int64_t i, auto part) LAMBDA {
    V sum = {};
    for (int64_t chunk = 0; chunk < a.chunks; ++chunk) sum += load(partial + chunk * a.columns + begin + i, part);
    store(out + begin + i, sum, part);
  });
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CPU_KERNEL(norm_forward, NormForward)
SHARDZOO_CPU_KERNEL(norm_backward, NormBackward)
SHARDZOO_CPU_KERNEL(column_sum, ColumnSum)
