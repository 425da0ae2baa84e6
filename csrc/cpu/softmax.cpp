#include "entry.h"
#include "math.h"

namespace shardzoo {
namespace {

INLINE int64_t visible_columns(const SoftmaxForward& a, int64_t b, int64_t q) {
  if (!a.causal) return a.columns;
  int64_t limit = q + a.columns - a.queries + 1;
  if (a.prefix != nullptr && a.prefix[b] > limit) limit = a.prefix[b];
  return limit < 0 ? 0 : limit < a.columns ? limit : a.columns;
}

// The elements of a shared bias, or of its gradient, that are processed at a time: 32 KiB of fp32.
constexpr int64_t kSharedElements = 8192;

struct Place {
  int64_t b, n, q;
};

// Returns the position of the unit-th row to compute. Rows with the same bias are consecutive, so that the bias is in
// the cache for all samples but the first. Several rows of one sample are grouped, so that memory is read in longer
// runs.
INLINE Place find_place(const SoftmaxForward& a, int64_t unit) {
  const int64_t plane = a.heads * a.queries;
  int64_t b = unit / plane, row = unit % plane;
  if (a.bias != nullptr && a.bias_stride[0] == 0) {
    const int64_t together = a.columns < kSharedElements ? kSharedElements / a.columns : 1;
    const int64_t first = unit / (together * a.batch) * together;
    const int64_t rows = plane - first < together ? plane - first : together;
    const int64_t within = unit - first * a.batch;
    b = within / rows, row = first + within % rows;
  }
  return {b, row / a.queries, row % a.queries};
}

template <class T>
INLINE const T* find_scores(const SoftmaxForward& a, const Place& place) {
  return at<T>(a.scores, ((place.b * a.heads + place.n) * a.queries + place.q) * a.columns);
}
template <class T>
INLINE const T* bias_of(const SoftmaxForward& a, const Place& place) {
  return at<T>(a.bias, place.b * a.bias_stride[0] + place.n * a.bias_stride[1] + place.q * a.bias_stride[2]);
}

// Writes scale * scores + bias + mask into `z`, padded with -inf to whole vectors. Returns the largest.
template <class T>
INLINE Compute<T> masked_scores(const SoftmaxForward& a, const Place& place, int64_t limit, Compute<T>* z) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  const T *scores = find_scores<T>(a, place), *bias = bias_of<T>(a, place);
  const int64_t mask_row = place.b * a.mask_stride[0] + place.n * a.mask_stride[1] + place.q * a.mask_stride[2];
  const T* added = a.mask_is_bool ? nullptr : at<T>(a.mask, mask_row);
  const uint8_t* visible = a.mask_is_bool ? at<uint8_t>(a.mask, mask_row) : nullptr;
  const C scale = static_cast<C>(a.scale), lowest = -kInfinity;
  V top = V{} + lowest;
  for_vectors<T>(limit, [&](int64_t i, auto part) LAMBDA {
    V value = load(scores + i, part) * scale;
    if (bias != nullptr) value += load(bias + i, part);
    if (added != nullptr) value += load(added + i, part);
    if (visible != nullptr) value = where<C>(visible + i, part, value, lowest);
    value = keep_lanes<C>(value, part, lowest);
    store(z + i, value, Full{});
    // This ignores a NaN, which reappears in the sum.
    top = larger(value, top);
  });
  return max_lanes<C>(top);
}

template <class T>
void softmax_forward(const SoftmaxForward& a, int64_t begin, int64_t end) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  const Scratch<C> scratch(a.columns);
  C* row = scratch.get();
  for (int64_t unit = begin; unit < end; ++unit) {
    const Place place = find_place(a, unit);
    const auto [b, n, q] = place;
    const int64_t start = ((b * a.heads + n) * a.queries + q) * a.columns;
    const int64_t limit = visible_columns(a, b, q);
    const C top = masked_scores<T>(a, place, limit, row);
    // With shift 0 every exp is 0, or NaN where the score is.
    const ShiftedExp<T, true> shifted_exp(top == -kInfinity ? 0 : top);
    const Place next = find_place(a, unit + 1 < end ? unit + 1 : unit);
    const T* next_scores = find_scores<T>(a, next);
    const T* next_bias = bias_of<T>(a, next);
    V sums = {};
    for (int64_t i = 0; i < limit; i += kLanes<T>) {
      prefetch(next_scores + i);
      if (next_bias != nullptr) prefetch(next_bias + i);
      const V e = shifted_exp.at(load(row + i, Full{}));
      store(row + i, e, Full{});
      sums += e;
    }
    const C total = sum_lanes<C>(sums);
    const C inverse = total == 0 ? 0 : 1 / total;
    T* probs = at<T>(a.probs, start);
    const int64_t elements = a.batch * a.heads * a.queries * a.columns;
    const bool past_cache = beyond_cache(probs, elements);
    for_vectors<T>(limit, [&](int64_t i, auto part) LAMBDA {
      put(probs + i, load(row + i, Full{}) * inverse, part, past_cache);
    });
    for_vectors<T>(a.columns - limit, [&](int64_t i, auto part) LAMBDA {
      // A hidden key has 0, or NaN like the rest of the row.
      store(probs + limit + i, V{} * inverse, part);
    });
    if (a.dropout.keys == nullptr) continue;
    T* dropped = at<T>(a.dropped, start);
    const uint64_t key = row_key(a.dropout.keys[b], attention_row(a.dropout.first_row + n, q, a.queries));
    for (int64_t i = limit; i < a.columns; ++i) row[i] = 0;
    for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
      const V keep = keep_factor<C>(key, i, a.dropout.threshold, a.dropout.keep_scale);
      const V value = load(row + i, Full{}) * inverse;
      store(dropped + i, keep == 0 ? V{} : value * keep, part);
    });
  }
}

template <class T>
INLINE VectorOf<T> dropped_grad(const Dropout& d, uint64_t key, int64_t i, VectorOf<T> value) {
  if (d.keys == nullptr) return value;
  const VectorOf<T> keep = keep_factor<Compute<T>>(key, i, d.threshold, d.keep_scale);
  return keep == 0 ? VectorOf<T>{} : value * keep;
}

INLINE uint64_t key_of_row(const Dropout& d, int64_t b, int64_t unit, int64_t queries) {
  return d.keys == nullptr ? 0 : row_key(d.keys[b], attention_row(d.first_row, unit, queries));
}

// Processes one row. Adds the bias gradient to `bias_sum`, or writes it to `bias_out`, if they are not null.
template <class T>
INLINE void softmax_backward_row(const SoftmaxBackward& a, int64_t b, int64_t unit, Compute<T>* bias_sum) {
  using C = Compute<T>;
  using V = VectorOf<T>;
  const int64_t plane = a.heads * a.queries, row = (b * plane + unit) * a.columns;
  const uint64_t key = key_of_row(a.dropout, b, unit, a.queries);
  const T *grad = at<T>(a.grad, row), *probs = at<T>(a.probs, row);
  V sums = {};
  for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
    sums += load(probs + i, part) * dropped_grad<T>(a.dropout, key, i, load(grad + i, part));
  });
  const C dot = sum_lanes<C>(sums), scale = static_cast<C>(a.scale);
  T* out = at<T>(a.grad_scores, row);
  T* bias_out = a.bias_batch > 1 ? at<T>(a.grad_bias, row) : nullptr;
  const bool past_cache = beyond_cache(out, a.batch * plane * a.columns);
  for_vectors<T>(a.columns, [&](int64_t i, auto part) LAMBDA {
    if (bias_sum != nullptr) {
      prefetch(grad + a.columns + i);
      prefetch(probs + a.columns + i);
    }
    const V g = dropped_grad<T>(a.dropout, key, i, load(grad + i, part));
    const V grad_z = load(probs + i, part) * (g - dot);
    put(out + i, grad_z * scale, part, past_cache);
    if (bias_sum != nullptr) store(bias_sum + i, load(bias_sum + i, part) + grad_z, part);
    if (bias_out != nullptr) store(bias_out + i, grad_z, part);
  });
}

// Several rows of one sample are grouped, so that memory is read in longer runs.
template <class T>
void softmax_backward(const SoftmaxBackward& a, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const bool shared_bias = a.bias_batch == 1;
  const int64_t together = a.columns < kSharedElements ? kSharedElements / a.columns : 1;
  const Scratch<C> scratch(shared_bias ? together * a.columns : 1);
  for (int64_t first = begin; first < end; first += together) {
    const int64_t rows = end - first < together ? end - first : together;
    if (shared_bias) zeroed(scratch.get(), rows * a.columns);
    for (int64_t b = 0; b < a.batch; ++b) {
      for (int64_t row = 0; row < rows; ++row) {
        softmax_backward_row<T>(a, b, first + row, shared_bias ? scratch.get() + row * a.columns : nullptr);
      }
    }
    if (!shared_bias) continue;
    T* out = at<T>(a.grad_bias, first * a.columns);
    for_vectors<T>(rows * a.columns, [&](int64_t i, auto part) LAMBDA {
      store(out + i, load(scratch.get() + i, part), part);
    });
  }
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CPU_KERNEL(softmax_forward, SoftmaxForward)
SHARDZOO_CPU_KERNEL(softmax_backward, SoftmaxBackward)
