// Attention by tiles of 64 queries and 64 keys, which stay in the second-level cache; see ops/attention.py.
//
// The scores of a tile are kept transposed: a row holds one key, and its lanes the queries. So the sums and maxima of
// the softmax need no steps across lanes, and the numbers of a relative bias are adjacent. Products are in fp32, and
// those of bf16 in bf16 where the processor has instructions for it.
#include "attention_rules.h"
#include "entry.h"
#include "few_queries.h"
#include "math.h"
#include "../matmul/kernels/product.h"

namespace shardzoo {
namespace {

constexpr int kQueries = 64, kKeys = 64;
// The panels of queries that use a tile of keys together.
constexpr int kPanels = kAttentionQueries / kQueries;
constexpr int kVectors = kQueries / kWidth;
// A row of gradients between zeros, so that sums along diagonals need no bounds.
constexpr int kPadded = kQueries + 2 * kWidth;

// Up to 64 consecutive queries of a head, none of which sees a key from `keys` on.
struct Panel {
  int64_t first, count, keys;
  // The halves of the keys of dropout's rows.
  uint32_t low[kQueries], high[kQueries];
  // In the forward pass: the largest score, and the sum of exp(score - top).
  float top[kQueries], sum[kQueries];
  // In the backward pass: log(sum(exp(score))), and the product grad · out.
  float lse[kQueries], delta[kQueries];
};

// What is added to the scores of one key, and which queries it is hidden from. `bias` and `mask` have a number for each
// query, or are null; `added` is the same for all queries. The first `hidden` queries of the panel do not see the key.
struct KeyRow {
  const float *bias, *mask;
  float added;
  int hidden;
};

// The rules for one head of one sample. T is the type of a mask of numbers.
template <class T>
class Head {
 public:
  explicit Head(const AttentionForward& a)
      : a_(a),
        bias_(a.bias == nullptr ? 0 : a.queries + a.keys + kQueries),
        mask_(kKeys * kQueries),
        rows_(kKeys * kQueries) {}

  void choose(int64_t b, int64_t n) {
    b_ = b, n_ = n;
    limit_ = key_limit(a_, b), prefix_ = find_prefix(a_, b);
    while (masks_keys() && a_.mask_is_bool && limit_ > 0 && !*mask_at<uint8_t>(a_, b, n, 0, limit_ - 1)) --limit_;
    if (a_.bias == nullptr) return;
    const int64_t distances = a_.queries + a_.keys - 1;
    const float* bias = a_.bias + n * distances;
    for (int64_t i = 0; i < distances; ++i) bias_.get()[i] = bias[distances - 1 - i];
    for (int64_t i = 0; i <= kQueries; ++i) bias_.get()[distances + i] = 0;
  }

  void start(Panel& panel, int64_t first) const {
    panel.first = first, panel.count = smaller(kQueries, a_.queries - first);
    panel.keys = keys_before(a_, limit_, prefix_, first + panel.count);
    for (int i = 0; i < kQueries; ++i) {
      panel.top[i] = -kInfinity, panel.sum[i] = 0;
      if (a_.dropout.keys == nullptr) continue;
      const int64_t row = ((a_.dropout.first_row + n_) << 32) + a_.first_query + first + i;
      const uint64_t key = row_key(a_.dropout.keys[b_], row);
      panel.low[i] = static_cast<uint32_t>(key), panel.high[i] = static_cast<uint32_t>(key >> 32);
    }
  }

  // Prepares the mask of the keys [first, end) for `row`.
  void open(const Panel& panel, int64_t first, int64_t end) {
    if (a_.mask == nullptr || masks_keys()) return;
    for (int64_t i = 0; i < panel.count; ++i) {
      float* row = rows_.get() + i * kKeys;
      if (a_.mask_stride[3] == 1) {
        for_vectors<float>(end - first, [&](int64_t j, auto part) LAMBDA {
          narrow_to(row + j, added(panel.first + i, first + j, part));
        });
      } else {
        for (int64_t j = first; j < end; ++j) row[j - first] = added(panel.first + i, j);
      }
    }
    zeroed(rows_.get() + panel.count * kKeys, (kQueries - panel.count) * kKeys);
    transpose(rows_.get(), kKeys, kQueries, kKeys, mask_.get(), kQueries);
  }

  KeyRow row(const Panel& panel, int64_t first, int64_t key) const {
    KeyRow row = {nullptr, nullptr, 0, 0};
    if (a_.bias != nullptr) row.bias = bias_.get() + a_.keys - 1 - key + panel.first;
    if (a_.mask != nullptr && !masks_keys()) row.mask = mask_.get() + (key - first) * kQueries;
    if (a_.mask != nullptr && masks_keys()) row.added = added(0, key);
    const int64_t hidden = a_.causal && key >= prefix_ ? key + a_.queries - a_.keys - panel.first : 0;
    row.hidden = static_cast<int>(hidden > 0 ? smaller(hidden, kQueries) : 0);
    return row;
  }

  float* bias() const { return bias_.get(); }

 private:
  bool masks_keys() const { return a_.mask != nullptr && a_.mask_stride[2] == 0; }
  float added(int64_t query, int64_t key) const {
    if (a_.mask_is_bool) return *mask_at<uint8_t>(a_, b_, n_, query, key) ? 0 : -kInfinity;
    return first_lane(mask_at<T>(a_, b_, n_, query, key));
  }
  template <class P>
  VF added(int64_t query, int64_t key, P part) const {
    if (a_.mask_is_bool) return where(mask_at<uint8_t>(a_, b_, n_, query, key), part, VF{}, -kInfinity);
    return load(mask_at<T>(a_, b_, n_, query, key), part);
  }
  static float first_lane(const T* p) { return load(p, Part{1})[0]; }

  const AttentionForward& a_;
  int64_t b_ = 0, n_ = 0, limit_ = 0, prefix_ = 0;
  const Scratch<float> bias_, mask_, rows_;
};

INLINE VF scaled_and_masked(const KeyRow& row, int v, VF z, float scale) {
  static constexpr int32_t kLane[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  z = z * scale + row.added;
  if (row.bias != nullptr) z += widen(row.bias + v * kWidth);
  if (row.mask != nullptr) z += widen(row.mask + v * kWidth);
  if (row.hidden > v * kWidth) z = read<VI>(kLane) + v * kWidth >= row.hidden ? z : VF{} - kInfinity;
  return z;
}

// Replaces the products of a tile's keys with the queries by capped scores.
INLINE void cap_scores(const AttentionForward& a, int64_t keys, float* z) {
  const SoftCap cap(a);
  for (int64_t i = 0; i < keys * kQueries; i += kWidth) narrow_to(z + i, cap.at(widen(z + i)));
}

// Returns which queries' probabilities of a key dropout keeps, as lanes with all bits or none.
INLINE VI kept(const Dropout& d, const Panel& panel, int v, int64_t key) {
  const VU low = read<VU>(panel.low + v * kWidth), high = read<VU>(panel.high + v * kWidth);
  return (VI)(element_hash(low, high, static_cast<uint32_t>(key)) >= d.threshold);
}

template <class T>
INLINE void store_rows(const float* from, int64_t width, int64_t rows, int64_t size, float scale, T* to,
                       int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors<T>(size, [&](int64_t i, auto part) LAMBDA {
      store(to + r * stride + i, load(from + r * width + i, Full{}) * scale, part);
    });
  }
}

// A top is kept until the exponents would grow beyond kMostAboveTop: rescaling takes as long as computing weights.
constexpr float kMostAboveTop = 8;

// The factors of the next products, which are brought into the first-level cache while weights are computed.
struct NextFactors {
  const float *v, *q, *k;
};

// Turns the products z of the keys [first, end) into weights exp(z - top) with dropout, and rescales the output to a new
// top.
template <class T, class Products>
INLINE void softmax_tile(const AttentionForward& a, Head<T>& head, Panel& panel, int64_t first, int64_t end, float* z,
                         const Tile& weights, float* out, const NextFactors& next) {
  const float scale = scale_after_cap(a);
  if (a.softcap != 0) cap_scores(a, end - first, z);
  head.open(panel, first, end);
  VF top[kVectors], shift[kVectors], sums[kVectors];
  for (int v = 0; v < kVectors; ++v) top[v] = widen(panel.top + v * kWidth), sums[v] = VF{};
  for (int64_t key = first; key < end; ++key) {
    const KeyRow row = head.row(panel, first, key);
    float* of_key = z + (key - first) * kQueries;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const VF value = scaled_and_masked(row, v, widen(of_key + v * kWidth), scale);
      narrow_to(of_key + v * kWidth, value);
      top[v] = larger(value, top[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const VF before = widen(panel.top + v * kWidth);
    const bool keeps_top = all_lanes(top[v] <= before + kMostAboveTop);
    if (keeps_top) top[v] = before;
    shift[v] = top[v] == -kInfinity ? VF{} : top[v];
    if (keeps_top) continue;
    const VF factor = exp<true>(before - shift[v]);
    narrow_to(panel.top + v * kWidth, top[v]);
    narrow_to(panel.sum + v * kWidth, widen(panel.sum + v * kWidth) * factor);
    if (first == 0) continue;
    for (int64_t i = 0; i < a.size; ++i) {
      float* sum = out + i * kQueries + v * kWidth;
      narrow_to(sum, widen(sum) * factor);
    }
  }
  const auto weight = [&](int64_t key, int v) LAMBDA {
    const VF e = Products::exp(widen(z + (key - first) * kQueries + v * kWidth) - shift[v]);
    sums[v] += e;
    return a.dropout.keys == nullptr || kept(a.dropout, panel, v, key) ? e : VF{};
  };
  for (int64_t key = first; key < end; key += 2) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const VF even = weight(key, v);
      Products::put(weights, key - first, v, even, key + 1 < end ? weight(key + 1, v) : VF{});
      const int64_t line = ((key - first) / 2 * kVectors + v) * 16;
      prefetch(next.v + line);
      prefetch(next.q + line);
      prefetch(next.k + line);
      prefetch(out + 2 * line);
      prefetch(out + 2 * line + 16);
    }
  }
  Products::finish(weights, end - first);
  for (int v = 0; v < kVectors; ++v) narrow_to(panel.sum + v * kWidth, widen(panel.sum + v * kWidth) + sums[v]);
}

template <class T>
INLINE void finish_panel(const AttentionForward& a, int64_t b, int64_t n, const Panel& panel, float* out, float* rows) {
  const float keep_scale = a.dropout.keys == nullptr ? 1 : static_cast<float>(a.dropout.keep_scale);
  float* lse = static_cast<float*>(a.lse) + (b * a.heads + n) * a.queries + panel.first;
  float factor[kQueries];
  for (int i = 0; i < kQueries; ++i) {
    const bool empty = panel.sum[i] == 0;
    factor[i] = empty ? 0 : keep_scale / panel.sum[i];
    if (i < panel.count) lse[i] = empty ? -kInfinity : panel.top[i] + std::log(panel.sum[i]);
  }
  for (int64_t i = 0; i < a.size * kQueries; i += kWidth) {
    narrow_to(out + i, widen(out + i) * widen(factor + i % kQueries));
  }
  const int64_t width = whole_vectors(a.size);
  transpose(out, kQueries, a.size, kQueries, rows, width);
  T* to = row_at(static_cast<T*>(a.out), a.out_stride, b, n, panel.first);
  store_rows(rows, width, panel.count, a.size, 1, to, a.out_stride[2]);
}

template <class T, class Products>
void forward(const AttentionForward& a, int64_t begin, int64_t end) {
  const Products products{};
  constexpr int kUnit = Products::kPerUnit;
  const int64_t width = Products::width(a.size), area = kQueries * width, size = Products::whole(a.size);
  const int64_t blocks = (a.queries + kAttentionQueries - 1) / kAttentionQueries;
  const Scratch<float> q_memory(kPanels * area), out(kPanels * area), rows(area), k_memory(area), v_memory(area);
  const Scratch<float> z(kKeys * kQueries), factor(kKeys * kQueries / kUnit);
  const Tile weights = {kUnit == 1 ? z.get() : nullptr, kQueries, nullptr, 0, factor.get()};
  Panel panels[kPanels];
  Right q[kPanels];
  Head<T> head(a);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t n = unit / blocks % a.heads, b = unit / blocks / a.heads, group = n / (a.heads / a.key_value_heads);
    const int64_t start = unit % blocks * kAttentionQueries;
    if (unit == begin || unit % blocks == 0) head.choose(b, n);
    int64_t keys = 0;
    const int count = static_cast<int>((smaller(kAttentionQueries, a.queries - start) + kQueries - 1) / kQueries);
    for (int p = 0; p < count; ++p) {
      Panel& panel = panels[p];
      head.start(panel, start + p * kQueries);
      if (panel.keys > keys) keys = panel.keys;
      const T* from = row_at<T>(a.q, a.q_stride, b, n, panel.first);
      q[p] = products.right_transposed(from, a.q_stride[2], panel.count, a.size, q_memory.get() + p * area, rows.get());
    }
    zeroed(out.get(), count * area);
    for (int64_t first = 0; first < keys; first += kKeys) {
      const int64_t last = smaller(first + kKeys, keys);
      const T* k_rows = row_at<T>(a.k, a.k_stride, b, group, first);
      const T* v_rows = row_at<T>(a.v, a.v_stride, b, group, first);
      const Left k = products.left(k_rows, a.k_stride[2], last - first, a.size, k_memory.get());
      const Left v = products.left_transposed(v_rows, a.v_stride[2], last - first, a.size, v_memory.get());
      for (int p = 0; p < count; ++p) {
        const int64_t seen = smaller(last, panels[p].keys) - first, tile = Products::whole(seen);
        if (seen <= 0) continue;
        float* sums = out.get() + p * area;
        products.multiply({k, q[p], z.get(), kQueries, tile, kQueries, size / kUnit, false});
        const NextFactors next = {v.p, q[p + 1 < count ? p + 1 : 0].p, k.p};
        softmax_tile<T, Products>(a, head, panels[p], first, first + seen, z.get(), weights, sums, next);
        products.multiply({v, products.make_right(weights), sums, kQueries, size, kQueries, tile / kUnit, true});
      }
    }
    for (int p = 0; p < count; ++p) finish_panel<T>(a, b, n, panels[p], out.get() + p * area, rows.get());
  }
}

// The matrices of a panel of queries for the backward pass. The right factors of consecutive panels are adjacent.
struct Rows {
  // The queries, and the gradient of the output.
  Right q, grad;
  // The same matrices, transposed.
  Right across_q, across_grad;
  float* grad_q;  // [size, kQueries]
};

constexpr int kMatrices = 5;
// The keys whose scores a panel computes at a time.
constexpr int kStrip = 32;
// The pairs of bf16 in a row of factors for all panels.
constexpr int64_t kPairs = kPanels * kQueries / 2;

template <class T, class Products>
INLINE void load_panel(const AttentionBackward& a, const Products& products, int64_t b, int64_t n, Panel& panel,
                       int64_t p, float* memory, float* spare, Rows& rows) {
  const AttentionForward& f = a.forward;
  const T* q = row_at<T>(f.q, f.q_stride, b, n, panel.first);
  const T* grad = row_at<T>(a.grad, a.grad_stride, b, n, panel.first);
  const T* out = row_at<T>(f.out, f.out_stride, b, n, panel.first);
  const float* lse = static_cast<const float*>(f.lse) + (b * f.heads + n) * f.queries + panel.first;
  const int64_t area = kQueries * Products::width(f.size), count = panel.count;
  const auto matrix = [&](int number) { return memory + number * kPanels * area + p * area / Products::kPerUnit; };
  rows.q = products.right(q, f.q_stride[2], count, f.size, matrix(0));
  rows.grad = products.right(grad, a.grad_stride[2], count, f.size, matrix(1));
  rows.across_q = products.right_transposed(q, f.q_stride[2], count, f.size, matrix(2), spare);
  rows.across_grad = products.right_transposed(grad, a.grad_stride[2], count, f.size, matrix(3), spare);
  rows.grad_q = zeroed(memory + (4 * kPanels + p) * area, area);
  for (int i = 0; i < kQueries; ++i) {
    // A query that is missing, or sees no key, gets an infinite lse, so that its probabilities are 0.
    panel.lse[i] = i < count && lse[i] != -kInfinity ? lse[i] : kInfinity;
    panel.delta[i] = 0;
    if (i >= count) continue;
    VF sums = {};
    for_vectors<T>(f.size, [&](int64_t d, auto part) LAMBDA {
      sums += load(out + i * f.out_stride[2] + d, part) * load(grad + i * a.grad_stride[2] + d, part);
    });
    panel.delta[i] = sum_lanes<float>(sums);
  }
}

// Turns the products z and the gradients g of the weights into the weights and the gradients of the scaled products.
// `grad_capped`, which may be null, gets those of the capped scores, which are also the bias's.
template <class T, class Products, bool kCapped>
INLINE void backward_tile(const AttentionForward& f, Head<T>& head, const Panel& panel, int64_t first, int64_t end,
                          const float* z, const float* g, const Tile& weights, const Tile& grad_scores,
                          float* grad_capped) {
  const float keep_scale = static_cast<float>(f.dropout.keep_scale), scale = scale_after_cap(f);
  const SoftCap cap(f);
  head.open(panel, first, end);
  const auto compute = [&](const KeyRow& row, int64_t key, int v, VF& weight, VF& grad) LAMBDA {
    const int64_t at = (key - first) * kPadded + v * kWidth;
    VF product = widen(z + at), slope;
    if constexpr (kCapped) product = cap.at(product, slope);
    const VF score = scaled_and_masked(row, v, product, scale);
    const VF p = Products::exp(score - widen(panel.lse + v * kWidth));
    weight = p, grad = widen(g + (key - first) * kQueries + v * kWidth);
    if (f.dropout.keys != nullptr) {
      const VI keep = kept(f.dropout, panel, v, key);
      grad = keep ? grad * keep_scale : VF{};
      weight = keep ? p * keep_scale : VF{};
    }
    grad = p * (grad - widen(panel.delta + v * kWidth));
    if constexpr (kCapped) {
      if (grad_capped != nullptr) narrow_to(grad_capped + at, grad);
      grad *= slope;
    }
  };
  for (int64_t key = first; key < end; key += 2) {
    const bool two = key + 1 < end;
    const KeyRow even = head.row(panel, first, key), odd = two ? head.row(panel, first, key + 1) : even;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      VF weight[2] = {}, grad[2] = {};
      compute(even, key, v, weight[0], grad[0]);
      if (two) compute(odd, key + 1, v, weight[1], grad[1]);
      Products::put(weights, key - first, v, weight[0], weight[1]);
      Products::put(grad_scores, key - first, v, grad[0], grad[1]);
    }
  }
  Products::finish(weights, end - first);
  Products::finish(grad_scores, end - first);
}

// Adds a tile's sums along diagonals to `sums`, where the bias of the last key and first query begins.
INLINE void add_diagonals(const float* z, int64_t keys, float* sums) {
  for (int64_t x = 0; x < keys - 1 + kQueries; x += kWidth) {
    // Row r is read from column shift + r on.
    const int64_t shift = x - (keys - 1);
    const int64_t begin = shift < -kWidth ? -kWidth - shift : 0;
    const int64_t end = smaller(keys, kQueries - shift);
    VF even = {}, odd = {};
    int64_t r = begin;
    for (; r + 2 <= end; r += 2) {
      even += widen(z + r * kPadded + shift + r);
      odd += widen(z + (r + 1) * kPadded + shift + r + 1);
    }
    if (r < end) even += widen(z + r * kPadded + shift + r);
    narrow_to(sums + x, widen(sums + x) + (even + odd));
  }
}

// What a thread holds while it processes the heads that share a key-value head.
template <class T, class Products>
struct BackwardMemory {
  explicit BackwardMemory(const AttentionForward& f)
      : width(Products::width(f.size)),
        area(kQueries * width),
        head(f),
        panels(kMatrices * kPanels * area),
        k(area),
        across_k(area),
        v(area),
        spare(area),
        z(kKeys * kPadded),
        g(kKeys * kQueries),
        weights(Products::kPerUnit == 1 ? 0 : kKeys * kPairs),
        grad_scores(Products::kPerUnit == 1 ? 0 : kKeys * kPairs),
        grad_capped(needs_grad_capped(f) ? kStrip * kPadded : 0),
        grad_of_keys(kKeys * kQueries / Products::kPerUnit),
        grad_k((f.keys + kKeys) * width),
        grad_v((f.keys + kKeys) * width),
        diagonals(f.bias == nullptr ? 0 : f.queries + f.keys + 2 * kQueries) {
    zeroed(z.get(), kKeys * kPadded);
    if (needs_grad_capped(f)) zeroed(grad_capped.get(), kStrip * kPadded);
  }
  // Whether the bias's gradients are not those of the products.
  static bool needs_grad_capped(const AttentionForward& f) { return f.softcap != 0 && f.bias != nullptr; }
  bool some_panel_sees_less(int count, int64_t keys) const {
    for (int p = 0; p < count; ++p) {
      if (panel[p].keys < keys) return true;
    }
    return false;
  }
  const Products products{};
  int64_t width, area;
  Head<T> head;
  const Scratch<float> panels, k, across_k, v, spare, z, g, weights, grad_scores, grad_capped, grad_of_keys;
  const Scratch<float> grad_k, grad_v, diagonals;
  Panel panel[kPanels];
  Rows rows[kPanels];
};

struct Keys {
  Left k, across_k, v;
  int64_t first;
};

// Adds to the gradients of a tile of keys what they owe to the panels from p on.
template <class T, class Products>
INLINE void add_gradients_of_keys(const BackwardMemory<T, Products>& m, int p, int panels, const Left& weights,
                                  const Left& grad_scores, int64_t first, int64_t keys) {
  const int64_t at = first * m.width, tile = Products::whole(keys), depth = panels * kQueries / Products::kPerUnit;
  m.products.multiply({weights, m.rows[p].grad, m.grad_v.get() + at, m.width, tile, m.width, depth, true});
  m.products.multiply({grad_scores, m.rows[p].q, m.grad_k.get() + at, m.width, tile, m.width, depth, true});
}

// Adds to the gradients of a panel's queries and of the bias what they owe to a tile of keys. Computes the weights and
// the gradients of the scores in strips, whose products are still in the first-level cache.
template <class T, class Products>
INLINE void backward_panel(const AttentionForward& f, BackwardMemory<T, Products>& m, int p, const Keys& keys,
                           int64_t seen) {
  constexpr int kUnit = Products::kPerUnit;
  constexpr bool kInPlace = kUnit == 1;
  const Rows& rows = m.rows[p];
  const Products& products = m.products;
  const int64_t size = Products::whole(f.size), first = keys.first;
  const bool in_fp32 = kInPlace || f.bias != nullptr;
  for (int64_t strip = 0; strip < seen; strip += kStrip) {
    const int64_t count = smaller(kStrip, seen - strip), tile = Products::whole(count), at = kInPlace ? strip : 0;
    float *z = m.z.get() + kWidth + at * kPadded, *g = m.g.get() + at * kQueries;
    const int64_t left = strip * kPairs + p * kQueries / 2;
    const Tile weights = {kInPlace ? g : nullptr, kQueries, m.weights.get() + left, kPairs, nullptr};
    const Tile grad_scores = {in_fp32 ? z : nullptr, kPadded, m.grad_scores.get() + left, kPairs,
                              m.grad_of_keys.get() + strip * kQueries / kUnit};
    const Left k = {keys.k.p + strip * keys.k.row_step, keys.k.row_step, 1};
    const Left v = {keys.v.p + strip * keys.v.row_step, keys.v.row_step, 1};
    products.multiply({k, rows.across_q, z, kPadded, tile, kQueries, size / kUnit, false});
    products.multiply({v, rows.across_grad, g, kQueries, tile, kQueries, size / kUnit, false});
    const int64_t start = first + strip;
    float* grad_capped = m.needs_grad_capped(f) ? m.grad_capped.get() + kWidth : nullptr;
    if (f.softcap == 0) {
      backward_tile<T, Products, false>(f, m.head, m.panel[p], start, start + count, z, g, weights, grad_scores, nullptr);
    } else {
      backward_tile<T, Products, true>(f, m.head, m.panel[p], start, start + count, z, g, weights, grad_scores,
                                       grad_capped);
    }
    const float* grad_bias = grad_capped == nullptr ? z : grad_capped;
    if (f.bias != nullptr) add_diagonals(grad_bias, count, m.diagonals.get() + f.keys - start - count + m.panel[p].first);
  }
  const Tile all = {m.z.get() + kWidth, kPadded, nullptr, 0, m.grad_of_keys.get()};
  const int64_t depth = Products::whole(seen) / kUnit;
  products.multiply({keys.across_k, products.make_right(all), rows.grad_q, kQueries, size, kQueries, depth, true});
  if constexpr (kInPlace) {
    add_gradients_of_keys(m, p, 1, {m.g.get(), kQueries, 1}, products.make_left(all), first, seen);
  }
}

// Processes kPanels panels of queries of a head from `start` on.
template <class T, class Products>
INLINE void backward_block(const AttentionBackward& a, BackwardMemory<T, Products>& m, int64_t b, int64_t n,
                           int64_t start) {
  const AttentionForward& f = a.forward;
  const Products& products = m.products;
  const int64_t group = n / (f.heads / f.key_value_heads);
  const int count = static_cast<int>((smaller(kAttentionQueries, f.queries - start) + kQueries - 1) / kQueries);
  int64_t end = 0;
  for (int p = 0; p < count; ++p) {
    m.head.start(m.panel[p], start + p * kQueries);
    load_panel<T>(a, products, b, n, m.panel[p], p, m.panels.get(), m.spare.get(), m.rows[p]);
    if (m.panel[p].keys > end) end = m.panel[p].keys;
  }
  for (int64_t first = 0; first < end; first += kKeys) {
    const int64_t last = smaller(first + kKeys, end), rows = last - first;
    const T* k = row_at<T>(f.k, f.k_stride, b, group, first);
    const T* v = row_at<T>(f.v, f.v_stride, b, group, first);
    const Keys keys = {products.left(k, f.k_stride[2], rows, f.size, m.k.get()),
                       products.left_transposed(k, f.k_stride[2], rows, f.size, m.across_k.get()),
                       products.left(v, f.v_stride[2], rows, f.size, m.v.get()), first};
    if (Products::kPerUnit > 1 && m.some_panel_sees_less(count, last)) {
      zeroed(m.weights.get(), kKeys * kPairs);
      zeroed(m.grad_scores.get(), kKeys * kPairs);
    }
    for (int p = 0; p < count; ++p) {
      const int64_t seen = smaller(last, m.panel[p].keys) - first;
      if (seen > 0) backward_panel(f, m, p, keys, seen);
    }
    if constexpr (Products::kPerUnit > 1) {
      add_gradients_of_keys(m, 0, count, {m.weights.get(), kPairs, 1}, {m.grad_scores.get(), kPairs, 1}, first, rows);
    }
  }
  for (int p = 0; p < count; ++p) {
    transpose(m.rows[p].grad_q, kQueries, f.size, kQueries, m.spare.get(), m.width);
    T* to = static_cast<T*>(a.grad_q) + ((b * f.queries + m.panel[p].first) * f.heads + n) * f.size;
    store_rows(m.spare.get(), m.width, m.panel[p].count, f.size, static_cast<float>(f.scale), to, f.heads * f.size);
  }
}

template <class T, class Products>
void backward(const AttentionBackward& a, int64_t begin, int64_t end) {
  const AttentionForward& f = a.forward;
  const int64_t served = f.heads / f.key_value_heads, distances = f.queries + f.keys - 1;
  BackwardMemory<T, Products> m(f);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t b = unit / f.key_value_heads, group = unit % f.key_value_heads;
    const int64_t first = (b * f.keys * f.key_value_heads + group) * f.size, stride = f.key_value_heads * f.size;
    zeroed(m.grad_k.get(), f.keys * m.width);
    zeroed(m.grad_v.get(), f.keys * m.width);
    for (int64_t n = group * served; n < (group + 1) * served; ++n) {
      m.head.choose(b, n);
      if (f.bias != nullptr) zeroed(m.diagonals.get(), distances + 2 * kQueries);
      for (int64_t start = 0; start < f.queries; start += kAttentionQueries) backward_block(a, m, b, n, start);
      if (f.bias == nullptr) continue;
      float* sums = static_cast<float*>(a.partial_bias) + (b * f.heads + n) * distances;
      for (int64_t i = 0; i < distances; ++i) sums[i] = m.diagonals.get()[distances - 1 - i];
    }
    const float scale = static_cast<float>(f.scale);
    store_rows(m.grad_k.get(), m.width, f.keys, f.size, scale, static_cast<T*>(a.grad_k) + first, stride);
    store_rows(m.grad_v.get(), m.width, f.keys, f.size, 1, static_cast<T*>(a.grad_v) + first, stride);
  }
}

template <class T>
struct ProductsOf {
  using type = FloatProducts;
};
#if defined(__AVX512BF16__)
template <>
struct ProductsOf<BFloat16> {
  using type = PairProducts;
};
#endif

template <class T>
void attention_forward(const AttentionForward& a, int64_t begin, int64_t end) {
  if constexpr (sizeof(Compute<T>) == 4) {
    if (a.queries <= kFewQueries && a.dropout.keys == nullptr) return attend_few_queries<T>(a, begin, end);
    forward<T, typename ProductsOf<T>::type>(a, begin, end);
  }
}

template <class T>
void attention_backward(const AttentionBackward& a, int64_t begin, int64_t end) {
  if constexpr (sizeof(Compute<T>) == 4) backward<T, typename ProductsOf<T>::type>(a, begin, end);
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CPU_KERNEL(attention_forward, AttentionForward)
SHARDZOO_CPU_KERNEL(attention_backward, AttentionBackward)
