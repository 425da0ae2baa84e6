// Attention of a few queries, as in decoding. Reading the keys and the values takes most of the time, so they are used
// as they are stored, one query after the other: the tiles of attention.cpp would first be arranged for products.
#pragma once

#include "attention_rules.h"
#include "math.h"

namespace shardzoo {
namespace {

// Computes the scores of a query with the keys [0, count), as dot products.
template <class T>
INLINE void compute_scores(const AttentionForward& a, const T* q, const T* k, int64_t count, float* out) {
  const float scale = scale_after_cap(a);
  for (int64_t key = 0; key < count; ++key) {
    const T* row = k + key * a.k_stride[2];
    VF sums = {};
    for_vectors<T>(a.size, [&](int64_t i, auto part) LAMBDA { sums += load(q + i, part) * load(row + i, part); });
    out[key] = sum_lanes<float>(sums) * scale;
  }
  if (a.softcap == 0) return;
  const SoftCap cap(a);
  for_vectors<float>(count, [&](int64_t key, auto part) LAMBDA {
    store(out + key, cap.at(load(out + key, part)), part);
  });
}

// Adds the mask of a query to its scores, or hides what it does not allow. T is the type of a mask of numbers.
template <class T>
INLINE void add_mask(const AttentionForward& a, int64_t b, int64_t n, int64_t query, int64_t count, float* scores) {
  const int64_t step = a.mask_stride[3];
  const auto* allowed = mask_at<uint8_t>(a, b, n, query, 0);
  const auto* added = mask_at<T>(a, b, n, query, 0);
  if (step != 1) {
    for (int64_t key = 0; key < count; ++key) {
      if (!a.mask_is_bool) scores[key] += load(added + key * step, Part{1})[0];
      else if (!allowed[key * step]) scores[key] = -kInfinity;
    }
    return;
  }
  for_vectors<float>(count, [&](int64_t key, auto part) LAMBDA {
    const VF score = load(scores + key, part);
    store(scores + key, a.mask_is_bool ? where(allowed + key, part, score, -kInfinity) : score + load(added + key, part),
          part);
  });
}

// Turns scores into exp(score - top), and returns top and the sum. `scores` has room for whole vectors.
INLINE void exponentials(float* scores, int64_t count, float& top, float& sum) {
  VF tops = VF{} - kInfinity, sums = {};
  for_vectors<float>(count, [&](int64_t i, auto part) LAMBDA {
    const VF score = load(scores + i, part, -kInfinity);
    store(scores + i, score, Full{});
    tops = larger(score, tops);
  });
  top = max_lanes<float>(tops);
  const float shift = top == -kInfinity ? 0 : top;
  for (int64_t i = 0; i < count; i += kLanes<float>) {
    const VF e = exp<true>(load(scores + i, Full{}) - shift);
    store(scores + i, e, Full{});
    sums += e;
  }
  sum = sum_lanes<float>(sums);
}

// Sets out[0, size) to factor * the weighted sum of the values [0, count). Four vectors are the usual size of a head.
template <class T>
INLINE void weighted_sum(const float* weights, const T* v, int64_t v_stride, int64_t count, int64_t size, float factor,
                         T* out) {
  constexpr int kAtOnce = 4;
  int64_t i = 0;
  for (; i + kAtOnce * kLanes<T> <= size; i += kAtOnce * kLanes<T>) {
    VF sums[kAtOnce] = {};
    for (int64_t key = 0; key < count; ++key) {
#pragma GCC unroll 4
      for (int j = 0; j < kAtOnce; ++j) {
        sums[j] += weights[key] * load(v + key * v_stride + i + j * kLanes<T>, Full{});
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < kAtOnce; ++j) store(out + i + j * kLanes<T>, sums[j] * factor, Full{});
  }
  for_vectors<T>(size - i, [&](int64_t rest, auto part) LAMBDA {
    VF sum = {};
    for (int64_t key = 0; key < count; ++key) sum += weights[key] * load(v + key * v_stride + i + rest, part);
    store(out + i + rest, sum * factor, part);
  });
}

// Computes attention without dropout for the units [begin, end), each of which is a head of a sample.
template <class T>
void attend_few_queries(const AttentionForward& a, int64_t begin, int64_t end) {
  const Scratch<float> scratch(a.keys + kLanes<float>);
  float* scores = scratch.get();
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t n = unit % a.heads, b = unit / a.heads, group = n / (a.heads / a.key_value_heads);
    const T* k = row_at<T>(a.k, a.k_stride, b, group, 0);
    const T* v = row_at<T>(a.v, a.v_stride, b, group, 0);
    for (int64_t query = 0; query < a.queries; ++query) {
      const int64_t count = keys_before(a, key_limit(a, b), find_prefix(a, b), query + 1);
      const T* q = row_at<T>(a.q, a.q_stride, b, n, query);
      compute_scores(a, q, k, count, scores);
      if (a.bias != nullptr) {
        // The bias has a number for each distance key - query.
        const float* bias = a.bias + n * (a.queries + a.keys - 1) + a.queries - 1 - query;
        for (int64_t key = 0; key < count; ++key) scores[key] += bias[key];
      }
      if (a.mask != nullptr) add_mask<T>(a, b, n, query, count, scores);
      float top = 0, sum = 0;
      exponentials(scores, count, top, sum);
      weighted_sum(scores, v, a.v_stride[2], count, a.size, sum == 0 ? 0 : 1 / sum,
                   row_at(static_cast<T*>(a.out), a.out_stride, b, n, query));
      static_cast<float*>(a.lse)[unit * a.queries + query] = sum == 0 ? -kInfinity : top + std::log(sum);
    }
  }
}

}  // namespace
}  // namespace shardzoo
