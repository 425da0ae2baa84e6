#include "matrix_product.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "pool.h"

namespace shardzoo {
namespace {

// The workspace of the products that a thread starts. It is as large as the largest needed, and kept for the next one:
// new memory from the system causes page faults.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace() { std::free(data_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Returns memory for so many floats, whose contents are undefined.
  float* reserve(int64_t floats) {
    constexpr size_t kHugePage = size_t{2} << 20;
    const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + kHugePage - 1) / kHugePage * kHugePage;
    if (bytes > bytes_) {
      std::free(data_);
      data_ = std::aligned_alloc(kHugePage, bytes);
      bytes_ = data_ == nullptr ? 0 : bytes;
      STD_TORCH_CHECK(data_ != nullptr, "no memory for the workspace of a matrix product: ", bytes, " bytes");
      // This is optional: if it fails, the pages are small.
      madvise(data_, bytes, MADV_HUGEPAGE);
    }
    return static_cast<float*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

int64_t divide_up(int64_t size, int64_t parts) { return (size + parts - 1) / parts; }
int64_t round_up(int64_t size, int64_t tile) { return divide_up(size, tile) * tile; }

// Divides the result among the threads so that they pack little: each packs its rows of a and its columns of b.
void divide_among_threads(MatrixProduct& m, int64_t threads) {
  constexpr int64_t kRowsEach = 32;
  constexpr int64_t kColumnsEach = 16;
  // Packing a number takes the time of so many multiplications.
  constexpr int64_t kPacking = 16;
  int64_t best = 0;
  for (int64_t row_parts = 1; row_parts <= threads; ++row_parts) {
    if (threads % row_parts != 0) continue;
    const int64_t column_parts = threads / row_parts;
    const int64_t part_rows = round_up(divide_up(m.rows, row_parts), kRowsEach);
    const int64_t part_columns = round_up(divide_up(m.columns, column_parts), kColumnsEach);
    const int64_t cost = part_rows * part_columns + kPacking * (part_rows + part_columns);
    if (best != 0 && cost >= best) continue;
    best = cost;
    m.part_rows = part_rows;
    m.part_columns = part_columns;
  }
  m.row_parts = divide_up(m.rows, m.part_rows);
  m.column_parts = divide_up(m.columns, m.part_columns);
}

// Returns the floats that a part needs: the packed factors, the sums, and what whole tiles and vectors add.
int64_t count_workspace_floats(const MatrixProduct& m) {
  const int64_t rows = std::min(m.part_rows, kMostProductRows);
  const int64_t columns = std::min(m.part_columns, kMostProductColumns);
  const int64_t lines = rows + std::min(columns, kProductColumns) + 2 * kProductTile;
  const int64_t packed = lines * std::min(m.depth, kProductDepth);
  const int64_t sums = round_up(rows, kProductTile) * round_up(columns, kProductTile);
  return round_up(packed + sums, kProductTile) + kProductTile;
}

// Copies a matrix's strides. Returns whether the numbers of its rows or of its columns are adjacent.
bool copy_strides(const Tensor& matrix, int64_t* strides) {
  for (int i = 0; i < 2; ++i) strides[i] = matrix.stride(i);
  return strides[0] == 1 || strides[1] == 1;
}

bool is_like(const Tensor& tensor, const Tensor& first) {
  return tensor.is_cpu() && tensor.scalar_type() == first.scalar_type();
}

// Runs a product whose factors, strides, sizes and result are set.
void run_product(MatrixProduct& m, const Tensor& like) {
  divide_among_threads(m, torch::stable::get_num_threads());
  m.workspace_floats = count_workspace_floats(m);
  const int64_t units = m.row_parts * m.column_parts;
  thread_local Workspace workspace;
  m.workspace = workspace.reserve(units * m.workspace_floats);
  run(m, like, units, m.part_rows * m.part_columns * m.depth);
}

// Requires that the kernel can compute products of these matrices, and that the counts are those of their rows.
void check_groups(const Tensor& first, const Tensor& second, const Tensor& third, const std::vector<int64_t>& counts,
                  int64_t groups, int64_t rows) {
  STD_TORCH_CHECK(first.is_cpu() && first.scalar_type() != ScalarType::Double && is_like(second, first) &&
                      is_like(third, first),
                  "grouped products need CPU tensors of one dtype that is not fp64");
  STD_TORCH_CHECK(first.is_contiguous() && second.is_contiguous() && third.is_contiguous(),
                  "grouped products need contiguous tensors");
  int64_t sum = 0;
  bool negative = false;
  for (const int64_t count : counts) sum += count, negative |= count < 0;
  STD_TORCH_CHECK(static_cast<int64_t>(counts.size()) == groups && !negative && sum <= rows, counts.size(),
                  " groups of ", sum, " rows do not suit ", groups, " matrices and ", rows, " rows");
}

}  // namespace

OptionalTensor matrix_product(const Tensor& a, const Tensor& b, const OptionalTensor& bias) {
  if (a.dim() != 2 || b.dim() != 2 || a.size(1) != b.size(0)) return {};
  if (a.numel() == 0 || b.numel() == 0) return {};
  if (!a.is_cpu() || a.scalar_type() == ScalarType::Double || !is_like(b, a)) return {};
  MatrixProduct m = {};
  m.a = input(a);
  m.b = input(b);
  m.bias = input(bias);
  m.rows = a.size(0);
  m.depth = a.size(1);
  m.columns = b.size(1);
  if (!copy_strides(a, m.a_stride) || !copy_strides(b, m.b_stride)) return {};
  if (bias && !(bias->dim() == 1 && bias->size(0) == m.columns && bias->is_contiguous() && is_like(*bias, a))) return {};

  const Tensor c = recycled(a, {m.rows, m.columns});
  m.c = output(c);
  run_product(m, a);
  return c;
}

void grouped_product(const Tensor& x, const Tensor& weight, const std::vector<int64_t>& counts, bool transposed,
                     const Tensor& y) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 3 && y.dim() == 2, "grouped products need rows and stacked matrices");
  const int64_t depth = weight.size(transposed ? 2 : 1), columns = weight.size(transposed ? 1 : 2);
  STD_TORCH_CHECK(x.size(1) == depth && y.size(1) == columns && y.size(0) == x.size(0), "sizes do not match");
  check_groups(x, weight, y, counts, weight.size(0), x.size(0));
  const int64_t itemsize = static_cast<int64_t>(x.element_size());
  const char* a = static_cast<const char*>(input(x));
  const char* b = static_cast<const char*>(input(weight));
  char* c = static_cast<char*>(y.mutable_data_ptr());
  int64_t row = 0;
  for (size_t group = 0; group < counts.size(); row += counts[group], ++group) {
    if (counts[group] == 0 || depth == 0 || columns == 0) continue;
    MatrixProduct m = {};
    m.a = a + row * depth * itemsize;
    m.b = b + static_cast<int64_t>(group) * depth * columns * itemsize;
    m.c = c + row * columns * itemsize;
    m.rows = counts[group];
    m.depth = depth;
    m.columns = columns;
    m.a_stride[0] = depth;
    m.a_stride[1] = 1;
    m.b_stride[0] = transposed ? 1 : columns;
    m.b_stride[1] = transposed ? depth : 1;
    run_product(m, x);
  }
}

void grouped_outer_product(const Tensor& x, const Tensor& y, const std::vector<int64_t>& counts,
                           const Tensor& products) {
  STD_TORCH_CHECK(x.dim() == 2 && y.dim() == 2 && products.dim() == 3, "grouped products need rows");
  const int64_t rows = x.size(1), columns = y.size(1);
  STD_TORCH_CHECK(products.size(1) == rows && products.size(2) == columns && x.size(0) == y.size(0),
                  "sizes do not match");
  check_groups(x, y, products, counts, products.size(0), x.size(0));
  const int64_t itemsize = static_cast<int64_t>(x.element_size());
  const char* a = static_cast<const char*>(input(x));
  const char* b = static_cast<const char*>(input(y));
  char* c = static_cast<char*>(products.mutable_data_ptr());
  const int64_t bytes = rows * columns * itemsize;
  int64_t row = 0;
  for (size_t group = 0; group < counts.size(); row += counts[group], ++group) {
    if (bytes == 0) continue;
    char* own = c + static_cast<int64_t>(group) * bytes;
    if (counts[group] == 0) {
      std::memset(own, 0, static_cast<size_t>(bytes));
      continue;
    }
    MatrixProduct m = {};
    m.a = a + row * rows * itemsize;
    m.b = b + row * columns * itemsize;
    m.c = own;
    m.rows = rows;
    m.depth = counts[group];
    m.columns = columns;
    m.a_stride[0] = 1;
    m.a_stride[1] = rows;
    m.b_stride[0] = columns;
    m.b_stride[1] = 1;
    run_product(m, x);
  }
}

}  // namespace shardzoo
