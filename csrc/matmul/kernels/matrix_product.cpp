// Products of large matrices, as in Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication".
//
// A block of columns of b is packed into panels: what a tile of the result needs is adjacent, unit by unit along the
// depth (which is summed over), and stays in the second-level cache while all rows of a are multiplied with it. A unit
// is a float, or where the processor multiplies them, a pair of bf16. Rows of a whose units are adjacent are read where
// they are; others are packed, too. Every sum adds its units in order and is rounded once, so it does not depend on the
// number of rows, columns or threads.
#include "product.h"

namespace shardzoo {
namespace {

// A tile's sums and the vectors of b fill the registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 8, kTileVectors = 3;
#elif defined(__AVX2__)
constexpr int kTileRows = 4, kTileVectors = 3;
#else
constexpr int kTileRows = 4, kTileVectors = 2;
#endif
// A block of b is narrow and deep where the second-level cache is small. Reading rows of a where they are and
// prefetching b save time on a Zen 5, and cost time on a Zen 3. A depth of up to kMostUnits is one block; a larger one
// is blocks of up to kBlockUnits, between which sums are kept.
#if defined(__AVX512F__)
constexpr int64_t kBlockColumns = 192, kMostUnits = 512, kBlockUnits = 384;
constexpr bool kReadsRows = true, kPrefetches = true;
#else
constexpr int64_t kBlockColumns = 48, kMostUnits = 768, kBlockUnits = 768;
constexpr bool kReadsRows = false, kPrefetches = false;
#endif
constexpr int kTileColumns = kTileVectors * kWidth;
// A panel of a is one or two tiles.
constexpr int kPanelRows = kWidth;
// The units that are packed at once.
constexpr int64_t kChunk = 64;
constexpr int64_t kBlockRows = 128;
static_assert(kPanelRows % kTileRows == 0 && kPanelRows <= kProductTile && kTileColumns <= kProductTile);
static_assert(kBlockUnits <= kMostUnits && kMostUnits <= kProductDepth && kBlockColumns <= kProductColumns);
static_assert(kBlockColumns % kTileColumns == 0 && kMostProductColumns % kBlockColumns == 0);

#if defined(__AVX512BF16__)
template <class T>
constexpr bool kInPairs = std::is_same_v<T, BFloat16>;
#else
template <class T>
constexpr bool kInPairs = false;
#endif
template <class T>
constexpr int64_t kPerUnit = kInPairs<T> ? 2 : 1;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t count(int64_t size, int64_t each) { return (size + each - 1) / each; }
INLINE int64_t whole(int64_t size, int64_t each) { return count(size, each) * each; }
template <class T>
INLINE int64_t count_units(int64_t elements) {
  return count(elements, kPerUnit<T>);
}

// The lines of a factor: rows of a, or columns of b. Element i of a line is summed over.
template <class T>
struct Lines {
  const T* p;
  // One of them is 1.
  int64_t line_step, step;
  LAMBDA const T* at(int64_t line, int64_t i) const { return p + line * line_step + i * step; }
};

// Returns whether `size` adjacent elements of a line are whole units, as a product reads them.
template <class T>
INLINE bool are_units(const Lines<T>& from, int64_t size) {
  const bool whole_units = from.line_step % kPerUnit<T> == 0 && size % kPerUnit<T> == 0;
  const bool aligned = reinterpret_cast<uintptr_t>(from.p) % sizeof(float) == 0;
  return (std::is_same_v<T, float> || kInPairs<T>) && from.step == 1 && whole_units && aligned;
}

// The units of lines whose elements are adjacent: where they are, or converted in the spare memory.
template <class T>
INLINE Left rows_of_units(const Lines<T>& from, int64_t line, int64_t lines, int64_t start, int64_t size,
                          float* spare) {
  const T* p = from.at(line, start);
  if (are_units(from, size)) return {reinterpret_cast<const float*>(p), from.line_step / kPerUnit<T>, 1};
#if defined(__AVX512BF16__)
  if constexpr (kInPairs<T>) return PairProducts::left(p, from.line_step, lines, size, spare);
#endif
  return FloatProducts::left(p, from.line_step, lines, size, spare);
}

// The memory of a part of a factor, of which each tile prefetches a share while it computes: packing only waits for it.
class Ahead {
 public:
  template <class T>
  Ahead(const Lines<T>& from, int64_t line, int64_t lines, int64_t start, int64_t size, int64_t tiles) {
    const bool across = from.step != 1;
    p_ = reinterpret_cast<const char*>(from.at(line, start));
    step_ = (across ? from.step : from.line_step) * static_cast<int64_t>(sizeof(T));
    bytes_ = (across ? lines : size) * static_cast<int64_t>(sizeof(T));
    rows_ = !kPrefetches || size == 0 ? 0 : across ? size : lines;
    each_ = count(rows_ * (bytes_ / kLine + 1), tiles);
  }
  LAMBDA void prefetch_share() {
    for (int64_t i = 0; i < each_ && rows_ > 0; ++i) {
      prefetch_far(p_ + offset_);
      offset_ += kLine;
      if (offset_ >= bytes_ + kLine) offset_ = 0, p_ += step_, --rows_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes of a line of the cache
  const char* p_;
  int64_t step_, bytes_, rows_, each_, offset_ = 0;
};

// Writes `size` elements of `lines` lines to out [units][kLines], up to kChunk units; what is not there is 0. The spare
// memory holds kLines rows of 2 kChunk floats.
template <class T, int kLines>
INLINE void pack_chunk(const Lines<T>& from, int64_t line, int64_t lines, int64_t start, int64_t size, float* spare,
                       float* out) {
  const int64_t units = count_units<T>(size);
  if (lines < kLines) zeroed(out, units * kLines);
  if (from.step == 1) {
    const Left rows = rows_of_units(from, line, lines, start, size, spare);
    return transpose(rows.p, rows.row_step, lines, units, out, kLines);
  }
  const auto pack_across = [&](int64_t count) LAMBDA {
    for (int64_t unit = 0; unit < units; ++unit) {
      const T* first = from.at(line, start + unit * kPerUnit<T>);
      for_vectors<T>(count, [&](int64_t i, auto part) LAMBDA {
        VF value = load(first + i, part);
#if defined(__AVX512BF16__)
        if constexpr (kInPairs<T>) {
          const VU second = unit * 2 + 1 < size ? (VU)load(first + from.step + i, part) : VU{};
          value = (VF)((VU)value >> 16 | second);
        }
#endif
        store(out + unit * kLines + i, value, Full{});
      });
    }
  };
  // With a constant, the loop over vectors is unrolled.
  if (lines == kLines) pack_across(kLines);
  else pack_across(lines);
}

// Packs `lines` lines into panels [units][kPanel], in the order in which the processor's prefetching follows.
template <class T, int kPanel>
__attribute__((noinline)) void pack(const Lines<T>& from, int64_t line, int64_t lines, int64_t start, int64_t size,
                                    float* out) {
  alignas(64) float spare[kProductTile * 2 * kChunk];
  constexpr int64_t kElements = kChunk * kPerUnit<T>;
  const int64_t units = count_units<T>(size);
  const auto pack_part = [&](int64_t i, int64_t l) LAMBDA {
    float* to = out + l * units + i / kPerUnit<T> * kPanel;
    pack_chunk<T, kPanel>(from, line + l, least(kPanel, lines - l), start + i, least(kElements, size - i), spare, to);
  };
  if (from.step == 1) {
    for (int64_t l = 0; l < lines; l += kPanel) {
      for (int64_t i = 0; i < size; i += kElements) pack_part(i, l);
    }
  } else {
    for (int64_t i = 0; i < size; i += kElements) {
      for (int64_t l = 0; l < lines; l += kPanel) pack_part(i, l);
    }
  }
}

// Adds the product of `rows` rows and packed columns to a block of sums, or sets it. Of a, whole panels are read at
// `direct`, if it is not null, and the rest is packed.
template <class T>
__attribute__((noinline)) void multiply_block(const float* packed_a, const Left& direct, const float* packed_b,
                                              int64_t rows, int64_t columns, int64_t units, float* sums, int64_t step,
                                              bool add, Ahead& ahead) {
  for (int64_t column = 0; column < columns; column += kTileColumns) {
    const int64_t vectors = count(least(kTileColumns, columns - column), kWidth);
    const Right b = {packed_b + column * units, kTileColumns};
    const auto tile = [&](const Left& a, int64_t row) LAMBDA {
      ahead.prefetch_share();
      const Product p = {a, b, sums + row * step + column, step, kTileRows, kTileColumns, units, add};
      if (vectors == kTileVectors) product_tile<kInPairs<T>, kTileRows, kTileVectors>(p, 0, 0);
      else if (vectors == 2) product_tile<kInPairs<T>, kTileRows, 2>(p, 0, 0);
      else product_tile<kInPairs<T>, kTileRows, 1>(p, 0, 0);
    };
    const int64_t read = direct.p == nullptr ? 0 : rows / kPanelRows * kPanelRows;
    for (int64_t row = 0; row < read; row += kTileRows) {
      tile({direct.p + row * direct.row_step, direct.row_step, 1}, row);
    }
    for (int64_t row = read; row < rows; row += kTileRows) {
      tile({packed_a + row / kPanelRows * kPanelRows * units + row % kPanelRows, 1, kPanelRows}, row);
    }
  }
}

template <class T>
INLINE void write_block(const MatrixProduct& m, const float* sums, int64_t step, int64_t row, int64_t rows,
                        int64_t column, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    T* c = at<T>(m.c, (row + r) * m.columns + column);
    for_vectors<T>(columns, [&](int64_t i, auto part) LAMBDA {
      VF value = widen(sums + r * step + i);
      if (m.bias != nullptr) value += load(at<T>(m.bias, column + i), part);
      store(c + i, value, part);
    });
  }
}

// Computes rows and columns that fit the workspace.
template <class T>
INLINE void multiply_part(const MatrixProduct& m, float* workspace, int64_t row, int64_t rows, int64_t column,
                          int64_t columns) {
  const Lines<T> a = {at<T>(m.a, 0), m.a_stride[0], m.a_stride[1]}, b = {at<T>(m.b, 0), m.b_stride[1], m.b_stride[0]};
  const int64_t all = count_units<T>(m.depth), parts = all <= kMostUnits ? 1 : count(all, kBlockUnits);
  const int64_t most_units = count(all, parts), most = most_units * kPerUnit<T>;
  float* packed_a = workspace;
  float* packed_b = packed_a + whole((rows + kProductTile) * most_units, kWidth);
  float* sums = packed_b + whole((least(columns, kBlockColumns) + kProductTile) * most_units, kWidth);
  // With one part, the sums of a block are needed no longer than its product takes.
  const bool keeps_sums = parts > 1;
  const int64_t step = whole(keeps_sums ? columns : least(columns, kBlockColumns), kProductTile);
  for (int64_t i = 0; i < m.depth; i += most) {
    const int64_t size = least(most, m.depth - i), units = count_units<T>(size);
    const bool direct = kReadsRows && are_units(a, size);
    // So many rows are read where they are.
    const int64_t read = direct ? rows / kPanelRows * kPanelRows : 0;
    pack<T, kPanelRows>(a, row + read, rows - read, i, size, packed_a + read * units);
    for (int64_t c = 0; c < columns; c += kBlockColumns) {
      const int64_t block_columns = least(kBlockColumns, columns - c);
      pack<T, kTileColumns>(b, column + c, block_columns, i, size, packed_b);
      const bool ends = c + kBlockColumns >= columns;
      const int64_t next_c = ends ? 0 : c + kBlockColumns, next_i = ends ? i + size : i;
      const int64_t tiles = count(rows, kTileRows) * count(block_columns, kTileColumns);
      Ahead ahead(b, column + next_c, least(kBlockColumns, columns - next_c), next_i, least(most, m.depth - next_i),
                  tiles);
      for (int64_t r = 0; r < rows; r += kBlockRows) {
        const int64_t block_rows = least(kBlockRows, rows - r);
        float* block = keeps_sums ? sums + r * step + c : sums;
        const float* rows_of_a = direct ? reinterpret_cast<const float*>(a.at(row + r, i)) : nullptr;
        const Left left = {rows_of_a, a.line_step / kPerUnit<T>, 1};
        multiply_block<T>(packed_a + r * units, left, packed_b, block_rows, block_columns, units, block, step, i > 0,
                          ahead);
        if (i + size == m.depth) write_block<T>(m, block, step, row + r, block_rows, column + c, block_columns);
      }
    }
  }
}

template <class T>
void matrix_product(const MatrixProduct& m, int64_t begin, int64_t end) {
  if constexpr (!std::is_same_v<T, double>) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first_row = unit / m.column_parts * m.part_rows, last_row = least(first_row + m.part_rows, m.rows);
      const int64_t first = unit % m.column_parts * m.part_columns, last = least(first + m.part_columns, m.columns);
      float* workspace = m.workspace + unit * m.workspace_floats;
      for (int64_t row = first_row; row < last_row; row += kMostProductRows) {
        for (int64_t column = first; column < last; column += kMostProductColumns) {
          const int64_t rows = least(kMostProductRows, last_row - row);
          multiply_part<T>(m, workspace, row, rows, column, least(kMostProductColumns, last - column));
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardzoo

SHARDZOO_CPU_KERNEL(matrix_product, MatrixProduct)
