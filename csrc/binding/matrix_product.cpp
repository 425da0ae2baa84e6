#include "matrix_product.h"

#include "pool.h"

namespace shardzoo {
namespace {

int64_t whole(int64_t size, int64_t tile) { return (size + tile - 1) / tile * tile; }

// Divides the result among the threads so that they pack little: each packs its rows of a and its columns of b.
void divide(MatrixProduct& m, int64_t threads) {
  constexpr int64_t rows_each = 32, columns_each = 16, packing = 16;  // multiplications in the time of packing a number
  int64_t best = 0;
  for (int64_t row_parts = 1; row_parts <= threads; ++row_parts) {
    if (threads % row_parts != 0) continue;
    const int64_t part_rows = whole((m.rows + row_parts - 1) / row_parts, rows_each);
    const int64_t column_parts = threads / row_parts;
    const int64_t part_columns = whole((m.columns + column_parts - 1) / column_parts, columns_each);
    const int64_t cost = part_rows * part_columns + packing * (part_rows + part_columns);
    if (best != 0 && cost >= best) continue;
    best = cost;
    m.part_rows = part_rows, m.part_columns = part_columns;
  }
  m.row_parts = (m.rows + m.part_rows - 1) / m.part_rows;
  m.column_parts = (m.columns + m.part_columns - 1) / m.part_columns;
}

// The packed factors, the sums, and what whole tiles and vectors add.
int64_t workspace_floats(const MatrixProduct& m) {
  const int64_t rows = std::min(m.part_rows, kMostProductRows), columns = std::min(m.part_columns, kMostProductColumns);
  const int64_t packed = (rows + columns + 2 * kProductTile) * std::min(m.depth, kProductDepth);
  return whole(packed + whole(rows, kProductTile) * whole(columns, kProductTile), kProductTile) + kProductTile;
}

void copy_strides(const Tensor& matrix, int64_t* strides) {
  for (int i = 0; i < 2; ++i) strides[i] = matrix.stride(i);
  STD_TORCH_CHECK(strides[0] == 1 || strides[1] == 1, "the numbers of a matrix's rows or columns must be adjacent");
}

}  // namespace

void matrix_product(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const Tensor& c) {
  MatrixProduct m = {};
  m.a = input(a), m.b = input(b), m.bias = input(bias), m.c = output(c);
  m.rows = a.size(0), m.depth = a.size(1), m.columns = b.size(1);
  STD_TORCH_CHECK(a.numel() > 0 && b.numel() > 0 && b.size(0) == m.depth, "the sizes of the factors do not fit");
  for (const OptionalTensor& other : {OptionalTensor(a), OptionalTensor(b), bias}) {
    STD_TORCH_CHECK(!other || other->scalar_type() == c.scalar_type(), "a factor or bias has another dtype than the result");
  }
  STD_TORCH_CHECK(c.scalar_type() != ScalarType::Double, "fp64 products are not implemented");
  STD_TORCH_CHECK(c.is_contiguous() && (!bias || bias->is_contiguous()), "a result or bias is not contiguous");
  check_sizes(m.rows * m.columns, {c});
  check_sizes(m.columns, {bias});
  copy_strides(a, m.a_stride), copy_strides(b, m.b_stride);
  divide(m, torch::stable::get_num_threads());
  m.workspace_floats = workspace_floats(m);
  const int64_t units = m.row_parts * m.column_parts;
  const int64_t per_float = static_cast<int64_t>(sizeof(float) / c.element_size());
  const Tensor workspace = recycled(c, {units * m.workspace_floats * per_float});
  m.workspace = static_cast<float*>(output(workspace));
  run(kMatrixProduct, c, &m, units, m.part_rows * m.part_columns * m.depth);
}

}  // namespace shardzoo
