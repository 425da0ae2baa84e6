// Kernels without a reduction along the row: a thread processes one vector of columns in many rows.
#pragma once

#include "common.cuh"

namespace shardzoo {
namespace {

constexpr int kThreads = 256;   // of a block without column sums; with them it has up to kTeamThreads
constexpr int kBlocksEach = 4;  // blocks of a multiprocessor

// A thread's first column.
template <int N>
__device__ __forceinline__ int64_t own_column() {
  return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
}

// Calls finish(row, begin(row)) for the rows first, first + step, ... below `stop`. Begins two rows before it finishes
// them, so that the loads of both are under way.
template <int N, class Begin, class Finish>
__device__ __forceinline__ void two_at_a_time(int64_t first, int64_t step, int64_t stop, Begin begin, Finish finish) {
  int64_t r = first;
  if constexpr (N > 1) {
    for (; r + step < stop; r += 2 * step) {
      const auto one = begin(r), two = begin(r + step);
      finish(r, one);
      finish(r + step, two);
    }
  }
  for (; r < stop; r += step) finish(r, begin(r));
}

// Calls begin and finish for the rows of this thread's column, which it shares with the blocks above and below.
template <int N, class Begin, class Finish>
__device__ __forceinline__ void each_row(int64_t rows, Begin begin, Finish finish) {
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  two_at_a_time<N>(static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y, step, rows, begin, finish);
}

// Calls begin and finish for the rows of a chunk, blockIdx.y, which the block's teams take in turns. Then it writes the
// sums of the thread's columns, which `finish` adds up in `sums`. All threads of the block must call it.
template <class C, int N, class Begin, class Finish>
__device__ __forceinline__ void each_row_of_chunk(int64_t rows, int64_t columns, int64_t chunk_rows, void* partial,
                                                  C (&sums)[N], Begin begin, Finish finish) {
  const int64_t column = own_column<N>(), chunk = blockIdx.y, first = chunk * chunk_rows;
  const int64_t stop = first + chunk_rows < rows ? first + chunk_rows : rows;
  if (column < columns) two_at_a_time<N>(first + threadIdx.y, blockDim.y, stop, begin, finish);
  if (partial == nullptr) return;
  add_teams(sums);
  if (threadIdx.y != 0 || column >= columns) return;
  store_wide<C, N>(at<C>(partial, chunk * columns + column), sums);
}

struct Launch {
  dim3 grid, block;
};

// Returns the threads along the columns: whole warps, and as many in every block of a row.
inline Launch across(int64_t columns, int n, int most) {
  const int64_t vectors = (columns + n - 1) / n, tiles = (vectors + most - 1) / most;
  return {dim3(static_cast<unsigned>(tiles)), dim3(threads_for((vectors + tiles - 1) / tiles, 1, most))};
}

// Returns the launch for each_row: as many blocks as the device runs at a time, so that a thread prepares once for many
// rows.
inline Launch over_rows(int64_t rows, int64_t columns, int n) {
  Launch l = across(columns, n, kThreads);
  l.block.y = kThreads / l.block.x;
  const int64_t bands = (rows + l.block.y - 1) / l.block.y;
  const int64_t room = (static_cast<int64_t>(multiprocessors()) * kBlocksEach + l.grid.x - 1) / l.grid.x;
  l.grid.y = static_cast<unsigned>(bands < room ? bands : room);
  return l;
}

// Returns the launch for each_row_of_chunk: the binding creates at most 65535 chunks.
inline Launch over_chunks(int64_t rows, int64_t columns, int64_t chunk_rows, int n) {
  Launch l = across(columns, n, kThreads);
  l.block = choose_teams(l.block.x, chunk_rows);
  l.grid.y = static_cast<unsigned>((rows + chunk_rows - 1) / chunk_rows);
  return l;
}

}  // namespace
}  // namespace shardzoo
