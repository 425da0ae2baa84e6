// Kernels without a reduction along the row: a thread processes one vector of columns in all rows.
#pragma once

#include "common.cuh"

namespace shardzoo {
namespace {

constexpr int kThreads = 256;

// Calls step(row, column) for a block's rows. Blocks are kThreads threads, `width` of them along the columns.
template <int N, class F>
__device__ __forceinline__ void each_row(int64_t rows, int64_t columns, F step) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (column >= columns) return;
  const int64_t stride = static_cast<int64_t>(gridDim.y) * blockDim.y;
#pragma unroll(N > 1 ? 2 : 1)
  for (int64_t r = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; r < rows; r += stride) {
    step(r, column);
  }
}

// Calls step(row, column, sums) for a chunk of rows, blockIdx.y, then writes the sums of the columns.
template <class C, int N, class F>
__device__ __forceinline__ void each_row_of_chunk(int64_t rows, int64_t columns, int64_t chunk_rows, void* partial,
                                                  F step) {
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (column >= columns) return;
  const int64_t chunk = blockIdx.y, first = chunk * chunk_rows;
  const int64_t stop = first + chunk_rows < rows ? first + chunk_rows : rows;
  C sums[N] = {};
#pragma unroll(N > 1 ? 2 : 1)
  for (int64_t r = first; r < stop; ++r) step(r, column, sums);
  if (partial == nullptr) return;
#pragma unroll
  for (int j = 0; j < N; ++j) at<C>(partial, chunk * columns + column)[j] = sums[j];
}

struct Launch {
  dim3 grid, block;
};

// For each_row: narrow rows share a block.
inline Launch over_rows(int64_t rows, int64_t columns, int n) {
  const int64_t vectors = (columns + n - 1) / n;
  int width = 32;
  while (width < kThreads && width < vectors) width *= 2;
  const int height = kThreads / width;
  const int64_t tiles = (vectors + width - 1) / width, bands = (rows + height - 1) / height;
  return {dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(bands < 65535 ? bands : 65535)),
          dim3(width, height)};
}

// For each_row_of_chunk: the binding creates at most 65535 chunks.
inline Launch over_chunks(int64_t rows, int64_t columns, int64_t chunk_rows, int n) {
  const int64_t vectors = (columns + n - 1) / n;
  const int width = threads_for(vectors, 1, kThreads);
  const int64_t tiles = (vectors + width - 1) / width, chunks = (rows + chunk_rows - 1) / chunk_rows;
  return {dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(chunks)), dim3(width)};
}

}  // namespace
}  // namespace shardzoo
