// Attention by tiles of 64 queries and 64 keys, which stay in the second-level cache; see ops/attention.py.
//
// The scores of a tile are kept transposed: a row holds one key, and its lanes the queries. So the sums and maxima of
// the softmax need no steps across lanes, the numbers of a relative bias are adjacent, and no product needs k or v in
// another order. 16-bit types have no kernel: their products are fastest in a library that knows the processor's
// instructions for them.
#include "entry.h"
#include "math.h"
#include "product.h"

namespace shardzoo {
namespace {

constexpr int kQueries = 64, kKeys = 64;
constexpr int kPanels = kAttentionQueries / kQueries;  // panels of queries that use a tile of keys together
constexpr int kVectors = kQueries / kWidth;
constexpr int kPadded = kQueries + 2 * kWidth;  // a row of gradients between zeros, for sums along diagonals

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t whole_vectors(int64_t size) { return (size + kWidth - 1) / kWidth * kWidth; }

// Up to 64 consecutive queries.
struct Panel {
  int64_t first, count, keys;  // no query sees a later key
  uint32_t low[kQueries], high[kQueries];  // the keys of dropout's rows
  float top[kQueries], sum[kQueries];      // forward: the largest score, and the sum of exp(score - top)
  float lse[kQueries], delta[kQueries];    // backward; delta = grad · out
};

// What is added to the scores of one key, and which queries it is hidden from.
struct KeyRow {
  const float *bias, *mask;  // by query, or null
  float added;               // the same for all queries
  int hidden;                // the number of the panel's first queries that do not see the key
};

// The rules for one head of one sample.
class Head {
 public:
  explicit Head(const AttentionForward& a)
      : a_(a), bias_(a.bias == nullptr ? 0 : a.queries + a.keys + kQueries), mask_(kKeys * kQueries) {}

  void choose(int64_t b, int64_t n) {
    b_ = b, n_ = n;
    limit_ = a_.lengths == nullptr ? a_.keys : smaller(a_.lengths[b], a_.keys);
    prefix_ = a_.prefix == nullptr ? 0 : a_.prefix[b];
    while (masks_keys() && a_.mask_is_bool && limit_ > 0 && !*mask_at<uint8_t>(0, limit_ - 1)) --limit_;
    if (a_.bias == nullptr) return;
    const int64_t distances = a_.queries + a_.keys - 1;
    const float* bias = a_.bias + n * distances;
    for (int64_t i = 0; i < distances; ++i) bias_.get()[i] = bias[distances - 1 - i];
    for (int64_t i = 0; i <= kQueries; ++i) bias_.get()[distances + i] = 0;
  }

  void start(Panel& panel, int64_t first) const {
    panel.first = first, panel.count = smaller(kQueries, a_.queries - first);
    const int64_t diagonal = first + panel.count + a_.keys - a_.queries;
    panel.keys = a_.causal ? smaller(limit_, diagonal > prefix_ ? diagonal : prefix_) : limit_;
    if (panel.keys < 0) panel.keys = 0;
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
    if (panel.count < kQueries) zeroed(mask_.get(), kKeys * kQueries);
    for (int64_t i = 0; i < panel.count; ++i) {
      for (int64_t j = first; j < end; ++j) mask_.get()[(j - first) * kQueries + i] = added(panel.first + i, j);
    }
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
  template <class M>
  const M* mask_at(int64_t query, int64_t key) const {
    const int64_t* stride = a_.mask_stride;
    return static_cast<const M*>(a_.mask) + b_ * stride[0] + n_ * stride[1] + query * stride[2] + key * stride[3];
  }
  float added(int64_t query, int64_t key) const {
    if (a_.mask_is_bool) return *mask_at<uint8_t>(query, key) ? 0 : -kInfinity;
    return *mask_at<float>(query, key);
  }

  const AttentionForward& a_;
  int64_t b_ = 0, n_ = 0, limit_ = 0, prefix_ = 0;
  const Scratch<float> bias_, mask_;
};

INLINE VF masked(const KeyRow& row, int v, VF z) {
  static constexpr int32_t kLane[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  z += row.added;
  if (row.bias != nullptr) z += widen(row.bias + v * kWidth);
  if (row.mask != nullptr) z += widen(row.mask + v * kWidth);
  if (row.hidden > v * kWidth) z = read<VI>(kLane) + v * kWidth >= row.hidden ? z : VF{} - kInfinity;
  return z;
}

// Which queries' probabilities of a key are kept: all bits or none.
INLINE VI kept(const Dropout& d, const Panel& panel, int v, int64_t key) {
  const VU low = read<VU>(panel.low + v * kWidth), high = read<VU>(panel.high + v * kWidth);
  return (VI)(element_hash(low, high, static_cast<uint32_t>(key)) >= d.threshold);
}

// Copies `rows` rows, times `scale`, to adjacent rows of whole vectors; the rows up to `padded` and the ends of rows are 0.
INLINE void pack_rows(const float* from, int64_t stride, int64_t rows, int64_t padded, int64_t size, float scale,
                       float* to) {
  const int64_t width = whole_vectors(size);
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors<float>(size, [&](int64_t i, auto part) LAMBDA {
      store(to + r * width + i, load(from + r * stride + i, part) * scale, Full{});
    });
  }
  if (rows < padded) zeroed(to + rows * width, (padded - rows) * width);
}

INLINE void unpack_rows(const float* from, int64_t rows, int64_t size, float* to, int64_t stride) {
  const int64_t width = whole_vectors(size);
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors<float>(size, [&](int64_t i, auto part) LAMBDA {
      store(to + r * stride + i, load(from + r * width + i, Full{}), part);
    });
  }
}

template <class T>
INLINE T* row_at(T* base, const int64_t* stride, int64_t b, int64_t head, int64_t row) {
  return base + b * stride[0] + head * stride[1] + row * stride[2];
}

// Turns the scores z of the keys [first, end) into exp(z - top) with dropout, and rescales the output to the new top.
INLINE void softmax_tile(const AttentionForward& a, Head& head, Panel& panel, int64_t first, int64_t end, float* z,
                         float* out) {
  head.open(panel, first, end);
  VF top[kVectors], shift[kVectors], sums[kVectors];
  for (int v = 0; v < kVectors; ++v) top[v] = widen(panel.top + v * kWidth), sums[v] = VF{};
  for (int64_t key = first; key < end; ++key) {
    const KeyRow row = head.row(panel, first, key);
    float* of_key = z + (key - first) * kQueries;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const VF value = masked(row, v, widen(of_key + v * kWidth));
      narrow_to(of_key + v * kWidth, value);
      top[v] = larger(value, top[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    shift[v] = top[v] == -kInfinity ? VF{} : top[v];
    const VF factor = exp<true>(widen(panel.top + v * kWidth) - shift[v]);
    narrow_to(panel.top + v * kWidth, top[v]);
    narrow_to(panel.sum + v * kWidth, widen(panel.sum + v * kWidth) * factor);
    if (first == 0) continue;
    for (int64_t i = 0; i < a.size; ++i) {
      float* sum = out + i * kQueries + v * kWidth;
      narrow_to(sum, widen(sum) * factor);
    }
  }
  for (int64_t key = first; key < end; ++key) {
    float* of_key = z + (key - first) * kQueries;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const VF e = exp<true>(widen(of_key + v * kWidth) - shift[v]);
      sums[v] += e;
      narrow_to(of_key + v * kWidth, a.dropout.keys == nullptr || kept(a.dropout, panel, v, key) ? e : VF{});
    }
  }
  for (int v = 0; v < kVectors; ++v) narrow_to(panel.sum + v * kWidth, widen(panel.sum + v * kWidth) + sums[v]);
}

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
  transpose(out, kQueries, a.size, kQueries, rows, whole_vectors(a.size));
  unpack_rows(rows, panel.count, a.size, row_at(static_cast<float*>(a.out), a.out_stride, b, n, panel.first), a.out_stride[2]);
}

void attention_forward(const AttentionForward& a, int64_t begin, int64_t end) {
  const int64_t width = whole_vectors(a.size), area = kQueries * width;
  const int64_t blocks = (a.queries + kAttentionQueries - 1) / kAttentionQueries;
  const Scratch<float> q(kPanels * area), out(kPanels * area), rows(area), k(kKeys * width), v(kKeys * width);
  const Scratch<float> z(kKeys * kQueries);
  Panel panels[kPanels];
  Head head(a);
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
      const float* from = row_at(static_cast<const float*>(a.q), a.q_stride, b, n, panel.first);
      pack_rows(from, a.q_stride[2], panel.count, kQueries, a.size, static_cast<float>(a.scale), rows.get());
      transpose(rows.get(), width, kQueries, a.size, q.get() + p * area, kQueries);
    }
    zeroed(out.get(), count * area);
    for (int64_t first = 0; first < keys; first += kKeys) {
      const int64_t last = smaller(first + kKeys, keys);
      const float* k_rows = row_at(static_cast<const float*>(a.k), a.k_stride, b, group, first);
      const float* v_rows = row_at(static_cast<const float*>(a.v), a.v_stride, b, group, first);
      pack_rows(k_rows, a.k_stride[2], last - first, 0, a.size, 1, k.get());
      pack_rows(v_rows, a.v_stride[2], last - first, 0, a.size, 1, v.get());
      for (int p = 0; p < count; ++p) {
        const int64_t seen = smaller(last, panels[p].keys) - first;
        if (seen <= 0) continue;
        float* sums = out.get() + p * area;
        multiply({k.get(), width, 1, q.get() + p * area, kQueries, z.get(), kQueries, seen, kQueries, a.size, false});
        softmax_tile(a, head, panels[p], first, first + seen, z.get(), sums);
        multiply({v.get(), 1, width, z.get(), kQueries, sums, kQueries, a.size, kQueries, seen, true});
      }
    }
    for (int p = 0; p < count; ++p) finish_panel(a, b, n, panels[p], out.get() + p * area, rows.get());
  }
}

// The matrices of a panel of queries for the backward pass, in fp32.
struct Rows {
  int64_t width;  // of a row: the size in whole vectors
  float *q, *grad;                   // [kQueries, width]; q is scaled, and grad that of the output
  float *across_q, *across_grad;     // the same transposed, [size, kQueries]
  float* grad_q;                     // [size, kQueries]
};

INLINE Rows rows_of(float* memory, int64_t width) {
  const int64_t area = kQueries * width;
  return {width, memory, memory + area, memory + 2 * area, memory + 3 * area, memory + 4 * area};
}

INLINE void load_panel(const AttentionBackward& a, int64_t b, int64_t n, Panel& panel, const Rows& rows) {
  const AttentionForward& f = a.forward;
  const float* q = row_at(static_cast<const float*>(f.q), f.q_stride, b, n, panel.first);
  const float* grad = row_at(static_cast<const float*>(a.grad), a.grad_stride, b, n, panel.first);
  const float* out = row_at(static_cast<const float*>(f.out), f.out_stride, b, n, panel.first);
  const float* lse = static_cast<const float*>(f.lse) + (b * f.heads + n) * f.queries + panel.first;
  pack_rows(q, f.q_stride[2], panel.count, kQueries, f.size, static_cast<float>(f.scale), rows.q);
  pack_rows(grad, a.grad_stride[2], panel.count, kQueries, f.size, 1, rows.grad);
  transpose(rows.q, rows.width, kQueries, f.size, rows.across_q, kQueries);
  transpose(rows.grad, rows.width, kQueries, f.size, rows.across_grad, kQueries);
  zeroed(rows.grad_q, kQueries * rows.width);
  for (int i = 0; i < kQueries; ++i) {
    panel.lse[i] = i < panel.count && lse[i] != -kInfinity ? lse[i] : kInfinity;  // so that probabilities are 0
    panel.delta[i] = 0;
    if (i >= panel.count) continue;
    VF sums = {};
    for_vectors<float>(f.size, [&](int64_t d, auto part) LAMBDA {
      sums += load(out + i * f.out_stride[2] + d, part) * widen(rows.grad + i * rows.width + d);
    });
    panel.delta[i] = sum_lanes<float>(sums);
  }
}

// Turns the scores z and the gradients g of the weights into the gradients of the scores and the weights.
INLINE void backward_tile(const AttentionForward& f, Head& head, const Panel& panel, int64_t first, int64_t end,
                          float* z, float* g) {
  const float keep_scale = static_cast<float>(f.dropout.keep_scale);
  head.open(panel, first, end);
  for (int64_t key = first; key < end; ++key) {
    const KeyRow row = head.row(panel, first, key);
    float *z_row = z + (key - first) * kPadded, *g_row = g + (key - first) * kQueries;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int i = v * kWidth;
      const VF p = exp<true>(masked(row, v, widen(z_row + i)) - widen(panel.lse + i));
      VF grad = widen(g_row + i), weight = p;
      if (f.dropout.keys != nullptr) {
        const VI keep = kept(f.dropout, panel, v, key);
        grad = keep ? grad * keep_scale : VF{};
        weight = keep ? p * keep_scale : VF{};
      }
      narrow_to(g_row + i, weight);
      narrow_to(z_row + i, p * (grad - widen(panel.delta + i)));
    }
  }
}

// Adds a tile's sums along diagonals to `sums`, where the bias of the last key and first query begins.
INLINE void add_diagonals(const float* z, int64_t keys, float* sums) {
  for (int64_t x = 0; x < keys - 1 + kQueries; x += kWidth) {
    const int64_t shift = x - (keys - 1);  // of the first row
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
struct BackwardMemory {
  explicit BackwardMemory(const AttentionForward& f)
      : width(whole_vectors(f.size)),
        head(f),
        panels(5 * kPanels * kQueries * width),
        k(kKeys * width),
        v(kKeys * width),
        z(kKeys * kPadded),
        g(kKeys * kQueries),
        grad_k(f.keys * width),
        grad_v(f.keys * width),
        diagonals(f.bias == nullptr ? 0 : f.queries + f.keys + 2 * kQueries) {
    zeroed(z.get(), kKeys * kPadded);
    for (int p = 0; p < kPanels; ++p) rows[p] = rows_of(panels.get() + 5 * p * kQueries * width, width);
  }
  int64_t width;
  Head head;
  const Scratch<float> panels, k, v, z, g, grad_k, grad_v, diagonals;
  Panel panel[kPanels];
  Rows rows[kPanels];
};

INLINE void backward_products(const AttentionForward& f, BackwardMemory& m, int p, int64_t first, int64_t end) {
  const Rows& rows = m.rows[p];
  const int64_t keys = end - first, width = m.width;
  float *z = m.z.get() + kWidth, *g = m.g.get(), *k = m.k.get();
  multiply({k, width, 1, rows.across_q, kQueries, z, kPadded, keys, kQueries, f.size, false});
  multiply({m.v.get(), width, 1, rows.across_grad, kQueries, g, kQueries, keys, kQueries, f.size, false});
  backward_tile(f, m.head, m.panel[p], first, end, z, g);
  multiply({g, kQueries, 1, rows.grad, width, m.grad_v.get() + first * width, width, keys, width, kQueries, true});
  multiply({z, kPadded, 1, rows.q, width, m.grad_k.get() + first * width, width, keys, width, kQueries, true});
  multiply({k, 1, width, z, kPadded, rows.grad_q, kQueries, f.size, kQueries, keys, true});
  if (f.bias != nullptr) add_diagonals(z, keys, m.diagonals.get() + f.keys - end + m.panel[p].first);
}

// Processes kPanels panels of queries of a head from `start` on.
INLINE void backward_block(const AttentionBackward& a, BackwardMemory& m, int64_t b, int64_t n, int64_t start) {
  const AttentionForward& f = a.forward;
  const int64_t group = n / (f.heads / f.key_value_heads);
  const int count = static_cast<int>((smaller(kAttentionQueries, f.queries - start) + kQueries - 1) / kQueries);
  int64_t keys = 0;
  for (int p = 0; p < count; ++p) {
    m.head.start(m.panel[p], start + p * kQueries);
    load_panel(a, b, n, m.panel[p], m.rows[p]);
    if (m.panel[p].keys > keys) keys = m.panel[p].keys;
  }
  for (int64_t first = 0; first < keys; first += kKeys) {
    const int64_t last = smaller(first + kKeys, keys);
    const float* k = row_at(static_cast<const float*>(f.k), f.k_stride, b, group, first);
    const float* v = row_at(static_cast<const float*>(f.v), f.v_stride, b, group, first);
    pack_rows(k, f.k_stride[2], last - first, 0, f.size, 1, m.k.get());
    pack_rows(v, f.v_stride[2], last - first, 0, f.size, 1, m.v.get());
    for (int p = 0; p < count; ++p) {
      if (m.panel[p].keys > first) backward_products(f, m, p, first, smaller(last, m.panel[p].keys));
    }
  }
  for (int p = 0; p < count; ++p) {
    const Rows& rows = m.rows[p];
    for (int64_t i = 0; i < f.size * kQueries; i += kWidth) {
      narrow_to(rows.grad_q + i, widen(rows.grad_q + i) * static_cast<float>(f.scale));
    }
    transpose(rows.grad_q, kQueries, f.size, kQueries, rows.q, m.width);
    float* to = static_cast<float*>(a.grad_q) + ((b * f.heads + n) * f.queries + m.panel[p].first) * f.size;
    unpack_rows(rows.q, m.panel[p].count, f.size, to, f.size);
  }
}

void attention_backward(const AttentionBackward& a, int64_t begin, int64_t end) {
  const AttentionForward& f = a.forward;
  const int64_t served = f.heads / f.key_value_heads, distances = f.queries + f.keys - 1;
  BackwardMemory m(f);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t b = unit / f.key_value_heads, group = unit % f.key_value_heads;
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
    unpack_rows(m.grad_k.get(), f.keys, f.size, static_cast<float*>(a.grad_k) + unit * f.keys * f.size, f.size);
    unpack_rows(m.grad_v.get(), f.keys, f.size, static_cast<float*>(a.grad_v) + unit * f.keys * f.size, f.size);
  }
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CPU_KERNEL_IN_FLOAT(attention_forward, AttentionForward)
SHARDZOO_CPU_KERNEL_IN_FLOAT(attention_backward, AttentionBackward)
