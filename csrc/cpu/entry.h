// Defines what every file of kernels for the CPU needs. Such a file is compiled once for each instruction set, which
// the macro SHARDZOO_ISA names: v4bf16, v4, v3 or baseline.
//
// Everything in such a file but its kernels has internal linkage. Otherwise the linker could let code that was made for
// one instruction set serve another. For the same reason these files use no containers of the standard library.
#pragma once

#include <cstdlib>

#include "../kernels.h"
#include "vector.h"

// Defines the kernel `name` of this instruction set, for dispatch.cpp. It calls the template `name` above it in the
// type of the tensors.
#define SHARDZOO_CPU_KERNEL(name, Arguments)                                            \
  namespace shardzoo::SHARDZOO_ISA {                                                    \
  void name(int dtype, const Arguments& a, int64_t begin, int64_t end);                 \
  void name(int dtype, const Arguments& a, int64_t begin, int64_t end) {                \
    if (dtype == kFloat) shardzoo::name<float>(a, begin, end);                          \
    if (dtype == kBFloat16) shardzoo::name<BFloat16>(a, begin, end);                    \
    if (dtype == kHalf) shardzoo::name<Half>(a, begin, end);                            \
    if (dtype == kDouble) shardzoo::name<double>(a, begin, end);                        \
    fence();                                                                            \
  }                                                                                     \
  }

namespace shardzoo {
namespace {

// A thread's row of intermediate values, padded to whole vectors.
template <class C>
class Scratch {
 public:
  explicit Scratch(int64_t columns) : data_(allocate(columns)) {}
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  C* get() const { return data_; }

 private:
  static C* allocate(int64_t columns) {
    const size_t bytes = (static_cast<size_t>(columns) * sizeof(C) / 64 + 1) * 64;
    void* data = std::aligned_alloc(64, bytes);
    // Without a few KiB of memory, even an error report would fail.
    if (data == nullptr) std::abort();
    return static_cast<C*>(data);
  }
  C* data_;
};

template <class C, class V>
INLINE V keep_lanes(V v, Full, C) {
  return v;
}
// Replaces the lanes after the end of a row.
template <class C, class V>
INLINE V keep_lanes(V v, Part part, C fill) {
  for (int lane = part.count; lane < Wide<C>::lanes; ++lane) v[lane] = fill;
  return v;
}

// A row of a tensor that may be absent: at(nullptr, ...) is null.
template <class T>
INLINE const T* at(const void* base, int64_t offset) {
  return base == nullptr ? nullptr : static_cast<const T*>(base) + offset;
}
template <class T>
INLINE T* at(void* base, int64_t offset) {
  return base == nullptr ? nullptr : static_cast<T*>(base) + offset;
}

// Returns the first row of a chunk, or of any other block, and one past its last row.
INLINE int64_t first_row(int64_t chunk, int64_t chunk_rows) { return chunk * chunk_rows; }
INLINE int64_t end_row(int64_t chunk, int64_t chunk_rows, int64_t rows) {
  const int64_t end = (chunk + 1) * chunk_rows;
  return end < rows ? end : rows;
}

template <class C>
INLINE C* zeroed(C* row, int64_t columns) {
  if (row != nullptr) std::memset(row, 0, columns * sizeof(C));
  return row;
}

}  // namespace
}  // namespace shardzoo
