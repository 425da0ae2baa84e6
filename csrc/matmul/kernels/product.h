// Products of small matrices that are in the cache, their transposition, and the forms that their factors need.
//
// Sums are in fp32. The factors are in fp32, or where the processor multiplies bf16, pairs of bf16 that are adjacent
// along the dimension which is summed over; a pair takes the place of a float.
#pragma once

#include "../../cpu/entry.h"
#include "../../cpu/math.h"
#include "../../cpu/vector.h"

namespace shardzoo {
namespace {

constexpr int kWidth = Wide<float>::lanes;

// The size of the part of a product whose sums are in registers: rows, and vectors of columns.
#if defined(__AVX512F__)
// The registers hold 24 sums, 4 vectors of b and one number of a.
constexpr int kRows = 6, kColumns = 4;
#elif defined(__AVX2__)
constexpr int kRows = 6, kColumns = 2;
#else
constexpr int kRows = 4, kColumns = 2;
#endif

// Element (row, i) is at p[row * row_step + i * step].
struct Left {
  const float* p;
  int64_t row_step, step;
};

// The numbers of a row are adjacent.
struct Right {
  const float* p;
  int64_t row_step;
};

// Describes a product c = a b, or c += a b. The numbers of a row of c are adjacent.
struct Product {
  Left a;
  Right b;
  float* c;
  int64_t c_step;
  // `columns` is a multiple of a vector's size.
  int64_t rows, columns, depth;
  bool add;
};

// Returns sum + x w, where x and w are floats or pairs. As a float, a pair can be denormal: only integers may be
// computed of it.
template <bool kPairs>
INLINE VF add_product(VF sum, const float* x, VF w) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs) return add_pairs(sum, (VF)(VU{} + read<uint32_t>(x)), w);
#endif
  return sum + *x * w;
}

template <bool kPairs, int Rows, int Columns>
INLINE void product_tile(const Product& p, int64_t row, int64_t column) {
  const float* a = p.a.p + row * p.a.row_step;
  const float* b = p.b.p + column;
  float* c = p.c + row * p.c_step + column;
  VF sums[Rows][Columns] = {};
  if (p.add) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < Columns; ++v) sums[r][v] = widen(c + r * p.c_step + v * kWidth);
    }
  }
  for (int64_t i = 0; i < p.depth; ++i) {
    VF w[Columns];
#pragma GCC unroll 4
    for (int v = 0; v < Columns; ++v) w[v] = widen(b + i * p.b.row_step + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const float* x = a + r * p.a.row_step + i * p.a.step;
#pragma GCC unroll 4
      for (int v = 0; v < Columns; ++v) sums[r][v] = add_product<kPairs>(sums[r][v], x, w[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Columns; ++v) narrow_to(c + r * p.c_step + v * kWidth, sums[r][v]);
  }
}

template <bool kPairs, int Rows, int Columns>
INLINE void product_rows(const Product& p, int64_t row, int64_t column) {
  for (; row + Rows <= p.rows; row += Rows) product_tile<kPairs, Rows, Columns>(p, row, column);
  if constexpr (Rows > 1) product_rows<kPairs, Rows - 1, Columns>(p, row, column);
}

template <bool kPairs>
__attribute__((noinline)) void multiply_vectors(const Product& p) {
  const int64_t vectors = p.columns / kWidth;
  int64_t v = 0;
  for (; v + kColumns <= vectors; v += kColumns) product_rows<kPairs, kRows, kColumns>(p, 0, v * kWidth);
  for (; v < vectors; ++v) product_rows<kPairs, kRows, 1>(p, 0, v * kWidth);
}

// Transposes: out[j * out_step + i] = in[i * in_step + j] for i < rows, j < columns.
void transpose(const float* in, int64_t in_step, int64_t rows, int64_t columns, float* out, int64_t out_step) {
  int64_t whole_rows = 0, whole_columns = 0;
#if defined(__AVX512F__)
  // Four times, the first half of the vectors is interleaved with the second half.
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
  whole_rows = rows / 16 * 16, whole_columns = columns / 16 * 16;
  for (int64_t i = 0; i < whole_rows; i += 16) {
    for (int64_t j = 0; j < whole_columns; j += 16) {
      __m512 v[16], w[16];
#pragma GCC unroll 16
      for (int k = 0; k < 16; ++k) v[k] = _mm512_loadu_ps(in + (i + k) * in_step + j);
#pragma GCC unroll 2
      for (int stage = 0; stage < 2; ++stage) {
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
          w[2 * k] = _mm512_permutex2var_ps(v[k], low, v[k + 8]);
          w[2 * k + 1] = _mm512_permutex2var_ps(v[k], high, v[k + 8]);
        }
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
          v[2 * k] = _mm512_permutex2var_ps(w[k], low, w[k + 8]);
          v[2 * k + 1] = _mm512_permutex2var_ps(w[k], high, w[k + 8]);
        }
      }
#pragma GCC unroll 16
      for (int k = 0; k < 16; ++k) _mm512_storeu_ps(out + (j + k) * out_step + i, v[k]);
    }
  }
#endif
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j) out[j * out_step + i] = in[i * in_step + j];
  }
}

INLINE int64_t whole_vectors(int64_t size) { return (size + kWidth - 1) / kWidth * kWidth; }

// Copies `rows` rows to adjacent rows of whole vectors; the rows up to `padded` and the ends of rows are 0.
template <class T>
INLINE void copy_rows(const T* from, int64_t stride, int64_t rows, int64_t padded, int64_t size, float* to) {
  const int64_t width = whole_vectors(size);
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors<T>(size, [&](int64_t i, auto part) LAMBDA {
      store(to + r * width + i, load(from + r * stride + i, part), Full{});
    });
  }
  if (rows < padded) zeroed(to + rows * width, (padded - rows) * width);
}

// Where a computed matrix of up to 64 rows of 64 numbers is written: in fp32, and as factors of later products.
// Products in fp32 use the plain numbers; otherwise what is null is not needed.
struct Tile {
  float* plain;
  int64_t step;
  float* left;
  int64_t left_step;
  float* right;
};

// Products in fp32 of up to 64 rows of any type. `T* from` with `stride` is a matrix [rows, size], and `memory` holds
// 64 rows. A result may lie in the memory, or be the tile itself.
struct FloatProducts {
  // The numbers in the place of a float.
  static constexpr int kPerUnit = 1;

  static int64_t whole(int64_t size) { return size; }           // what products take of a dimension
  static int64_t width(int64_t size) { return whole_vectors(size); }  // of a row of factors and results

  template <class T>
  static Left left(const T* from, int64_t stride, int64_t rows, int64_t size, float* memory) {
    copy_rows(from, stride, rows, 0, size, memory);
    return {memory, width(size), 1};
  }
  template <class T>
  static Left left_transposed(const T* from, int64_t stride, int64_t rows, int64_t size, float* memory) {
    copy_rows(from, stride, rows, 0, size, memory);
    return {memory, 1, width(size)};
  }
  template <class T>
  static Right right(const T* from, int64_t stride, int64_t rows, int64_t size, float* memory) {
    copy_rows(from, stride, rows, 64, size, memory);
    return {memory, width(size)};
  }
  // [size, 64]; `spare` is memory for 64 rows, too.
  template <class T>
  static Right right_transposed(const T* from, int64_t stride, int64_t rows, int64_t size, float* memory,
                                float* spare) {
    copy_rows(from, stride, rows, 64, size, spare);
    transpose(spare, width(size), 64, size, memory, 64);
    return {memory, 64};
  }
  // Writes the vectors v of two rows of a tile, and makes the rows after the last one fit for products.
  static void put(const Tile& tile, int64_t row, int v, VF even, VF odd) {
    narrow_to(tile.plain + row * tile.step + v * kWidth, even);
    narrow_to(tile.plain + (row + 1) * tile.step + v * kWidth, odd);
  }
  static void finish(const Tile&, int64_t) {}
  static Left make_left(const Tile& tile) { return {tile.plain, tile.step, 1}; }
  static Right make_right(const Tile& tile) { return {tile.plain, tile.step}; }

  // This is as exact as the factors; no x is above 88.
  static LAMBDA VF exp(VF x) { return shardzoo::exp<true>(x); }

  static void multiply(const Product& p) { multiply_vectors<false>(p); }
};

#if defined(__AVX512BF16__)
constexpr int kPairTile = 16;  // rows, and pairs of a row, of a matrix register

// Compilers do not know that the instructions for matrix registers read and write memory.
INLINE void synchronize_memory() { asm volatile("" ::: "memory"); }

// Uses the processor's matrix registers: all dimensions are multiples of 32 numbers.
__attribute__((noinline, target("amx-tile,amx-bf16"))) void multiply_tiles(const Product& p) {
  synchronize_memory();
  const int64_t a_bytes = p.a.row_step * 4, b_bytes = p.b.row_step * 4, c_bytes = p.c_step * 4;
  for (int64_t row = 0; row < p.rows; row += 2 * kPairTile) {
    const float* a = p.a.p + row * p.a.row_step;
    for (int64_t column = 0; column < p.columns; column += 2 * kPairTile) {
      float *c = p.c + row * p.c_step + column, *lower = c + kPairTile * p.c_step;
      if (p.add) {
        _tile_loadd(0, c, c_bytes);
        _tile_loadd(1, c + kPairTile, c_bytes);
        _tile_loadd(2, lower, c_bytes);
        _tile_loadd(3, lower + kPairTile, c_bytes);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t i = 0; i < p.depth; i += kPairTile) {
        const float* b = p.b.p + i * p.b.row_step + column;
        _tile_loadd(4, a + i, a_bytes);
        _tile_loadd(5, a + kPairTile * p.a.row_step + i, a_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_loadd(7, b + kPairTile, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, c, c_bytes);
      _tile_stored(1, c + kPairTile, c_bytes);
      _tile_stored(2, lower, c_bytes);
      _tile_stored(3, lower + kPairTile, c_bytes);
    }
  }
  synchronize_memory();
}

// Configures a thread's matrix registers as long as it exists, and leaves those of a library as they were.
class TileRegisters {
 public:
  TileRegisters() {
    if (shardzoo_cpu_has_amx()) configure();
  }
  ~TileRegisters() {
    if (shardzoo_cpu_has_amx()) restore();
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  struct alignas(64) Configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  __attribute__((target("amx-tile"))) void configure() {
    _tile_storeconfig(&before_);
    synchronize_memory();
    Configuration ours = {};
    ours.palette = 1;
    for (int tile = 0; tile < 8; ++tile) ours.row_bytes[tile] = 64, ours.rows[tile] = kPairTile;
    synchronize_memory();
    _tile_loadconfig(&ours);
  }
  __attribute__((target("amx-tile"))) void restore() {
    if (before_.palette == 0) return _tile_release();
    _tile_loadconfig(&before_);
  }
  Configuration before_ = {};
};

INLINE VU pair_up(VU even, VU odd) { return even | odd << 16; }

// Products in pairs of bf16, to which factors are rounded to nearest; sizes are whole multiples of 32.
struct PairProducts {
  static constexpr int kPerUnit = 2;

  static int64_t whole(int64_t size) { return (size + 31) / 32 * 32; }
  static int64_t width(int64_t size) { return whole(size); }

  static Left left(const BFloat16* from, int64_t stride, int64_t rows, int64_t size, float* memory) {
    const int64_t units = width(size) / 2;
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(memory + r * units, from + r * stride, size * sizeof(BFloat16));
      std::memset(reinterpret_cast<BFloat16*>(memory + r * units) + size, 0, (2 * units - size) * sizeof(BFloat16));
    }
    zeroed(memory + rows * units, (whole(rows) - rows) * units);
    return {memory, units, 1};
  }
  // The first half of the memory holds pairs of rows, the second half their transpose.
  static Left left_transposed(const BFloat16* from, int64_t stride, int64_t rows, int64_t size, float* memory) {
    float* across = memory + 32 * width(size);
    right(from, stride, rows, size, memory);
    transpose(memory, width(size), 32, width(size), across, 32);
    return {across, 32, 1};
  }
  static Right right(const BFloat16* from, int64_t stride, int64_t rows, int64_t size, float* memory) {
    const BFloat16* none = nullptr;
    for (int64_t r = 0; r < 64; r += 2) {
      const BFloat16 *even = r < rows ? from + r * stride : none, *odd = r + 1 < rows ? from + (r + 1) * stride : none;
      float* to = memory + r / 2 * width(size);
      for_vectors<BFloat16>(size, [&](int64_t i, auto part) LAMBDA {
        const VU a = even == none ? VU{} : (VU)load(even + i, part) >> 16;
        const VU b = odd == none ? VU{} : (VU)load(odd + i, part) >> 16;
        store(to + i, (VF)pair_up(a, b), Full{});
      });
      for (int64_t i = whole_vectors(size); i < width(size); i += kWidth) store(to + i, VF{}, Full{});
    }
    return {memory, width(size)};
  }
  static Right right_transposed(const BFloat16* from, int64_t stride, int64_t rows, int64_t size, float* memory,
                                float* spare) {
    const int64_t units = width(size) / 2;
    left(from, stride, rows, size, spare);
    zeroed(spare + whole(rows) * units, (64 - whole(rows)) * units);
    transpose(spare, units, 64, units, memory, 64);
    return {memory, 64};
  }
  static void put(const Tile& tile, int64_t row, int v, VF even, VF odd) {
    const int i = v * kWidth;
    const __m256bh narrow[] = {_mm512_cvtneps_pbh((__m512)even), _mm512_cvtneps_pbh((__m512)odd)};
    if (tile.plain != nullptr) FloatProducts::put(tile, row, v, even, odd);
    const VU pairs = pair_up(extend(narrow), extend(narrow + 1));
    if (tile.right != nullptr) store(tile.right + row * 32 + i, (VF)pairs, Full{});
    if (tile.left == nullptr) return;
    std::memcpy(tile.left + row * tile.left_step + i / 2, narrow, sizeof *narrow);
    std::memcpy(tile.left + (row + 1) * tile.left_step + i / 2, narrow + 1, sizeof *narrow);
  }
  static void finish(const Tile& tile, int64_t rows) {
    const int64_t written = (rows + 1) / 2 * 2, end = whole(rows);
    if (tile.right != nullptr) zeroed(tile.right + written * 32, (end - written) * 32);
    for (int64_t r = written; tile.left != nullptr && r < end; ++r) zeroed(tile.left + r * tile.left_step, 32);
  }
  static Left make_left(const Tile& tile) { return {tile.left, tile.left_step, 1}; }
  static Right make_right(const Tile& tile) { return {tile.right, 64}; }

  static LAMBDA VF exp(VF x) { return ShiftedExp<BFloat16, true>(0).at(x); }

  static void multiply(const Product& p) {
    if (shardzoo_cpu_has_amx()) return multiply_tiles(p);
    multiply_vectors<true>(p);
  }

  TileRegisters registers;
};
#endif

}  // namespace
}  // namespace shardzoo
