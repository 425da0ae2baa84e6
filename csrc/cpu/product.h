// Products of small matrices in fp32 that are in the cache, and their transposition.
#pragma once

#include "vector.h"

namespace shardzoo {
namespace {

constexpr int kWidth = Wide<float>::lanes;

// The size of the part of a product whose sums are in registers: rows, and vectors of columns.
#if defined(__AVX512F__)
constexpr int kRows = 6, kColumns = 4;  // 24 sums, 4 vectors of b and one number of a
#elif defined(__AVX2__)
constexpr int kRows = 6, kColumns = 2;
#else
constexpr int kRows = 4, kColumns = 2;
#endif

// c = a b, or c += a b. Element (row, i) of a is at a[row * row_step + i * step]; rows of b and c are adjacent numbers.
struct Product {
  const float* a;
  int64_t row_step, step;
  const float* b;
  int64_t b_step;
  float* c;
  int64_t c_step;
  int64_t rows, columns, depth;  // `columns` are whole vectors
  bool add;
};

template <int Rows, int Columns>
INLINE void product_tile(const Product& p, int64_t row, int64_t column) {
  const float* a = p.a + row * p.row_step;
  const float* b = p.b + column;
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
    for (int v = 0; v < Columns; ++v) w[v] = widen(b + i * p.b_step + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const float x = a[r * p.row_step + i * p.step];
#pragma GCC unroll 4
      for (int v = 0; v < Columns; ++v) sums[r][v] += x * w[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Columns; ++v) narrow_to(c + r * p.c_step + v * kWidth, sums[r][v]);
  }
}

template <int Rows, int Columns>
INLINE void product_rows(const Product& p, int64_t row, int64_t column) {
  for (; row + Rows <= p.rows; row += Rows) product_tile<Rows, Columns>(p, row, column);
  if constexpr (Rows > 1) product_rows<Rows - 1, Columns>(p, row, column);
}

__attribute__((noinline)) void multiply(const Product& p) {
  const int64_t vectors = p.columns / kWidth;
  int64_t v = 0;
  for (; v + kColumns <= vectors; v += kColumns) product_rows<kRows, kColumns>(p, 0, v * kWidth);
  for (; v < vectors; ++v) product_rows<kRows, 1>(p, 0, v * kWidth);
}

// out[j * out_step + i] = in[i * in_step + j] for i < rows, j < columns.
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

}  // namespace
}  // namespace shardzoo
