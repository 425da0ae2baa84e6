// Vectors in the type of the computation, loaded from and stored to every dtype.
//
// They use the compilers' vector extension instead of intrinsics: the same source is compiled once per instruction set.
// A vector has the size of a register: GCC keeps larger ones in memory. So the order of a sum depends on the set.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "../hash.h"

extern "C" int shardzoo_cpu_is_amd();
extern "C" int shardzoo_cpu_has_amx();

#define INLINE static inline __attribute__((always_inline))
#define LAMBDA __attribute__((always_inline))

namespace shardzoo {
namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;  // SSE2 or NEON
#endif

template <class C>
struct Wide;
template <>
struct Wide<float> {
  static constexpr int lanes = kBytes / 4;
  typedef float V __attribute__((vector_size(kBytes)));
  typedef int32_t I __attribute__((vector_size(kBytes)));
  typedef uint32_t U __attribute__((vector_size(kBytes)));
};
template <>
struct Wide<double> {
  static constexpr int lanes = kBytes / 8;
  typedef double V __attribute__((vector_size(kBytes)));
  typedef int64_t I __attribute__((vector_size(kBytes)));
};
using VF = Wide<float>::V;
using VI = Wide<float>::I;
using VU = Wide<float>::U;
using VD = Wide<double>::V;
typedef uint16_t V16 __attribute__((vector_size(kBytes / 2)));

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <class T>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeType<T>::type;
template <class T>
using VectorOf = typename Wide<Compute<T>>::V;
template <class T>
constexpr int kLanes = Wide<Compute<T>>::lanes;

// The part of a vector that a step uses: all of it, or the first `count` lanes at the end of a row.
struct Full {};
struct Part {
  int count;
};

template <class V, class T>
INLINE V read(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

INLINE VF widen(const float* p) { return read<VF>(p); }
INLINE VD widen(const double* p) { return read<VD>(p); }

// Converts integers of 16 bits to 32 and back with one instruction; GCC's __builtin_convertvector needs several.
INLINE VU extend(const void* p) {
#if defined(__AVX512F__)
  return (VU)_mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (VU)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(read<V16>(p), VU);
#endif
}
INLINE void truncate_to(void* p, VU bits) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(0xFFFF, (__m512i)bits));
#else
  const V16 narrow = __builtin_convertvector(bits, V16);
  std::memcpy(p, &narrow, sizeof narrow);
#endif
}

INLINE VF widen(const BFloat16* p) { return (VF)(extend(p) << 16); }
INLINE VF widen(const Half* p) {
#if defined(__AVX512F__)
  return (VF)_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (VF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const VU h = extend(p);
  const VU magnitude = (h & 0x7FFF) << 13;
  // The exponent's bias differs by 112. Multiplying also normalizes subnormal halves.
  const VU finite = (VU)((VF)magnitude * 0x1p112f);
  const VU value = (VI)((h & 0x7C00) == 0x7C00) ? (magnitude | 0x7F800000u) : finite;
  return (VF)(value | ((h & 0x8000) << 16));
#endif
}

INLINE void narrow_to(float* p, VF v) { std::memcpy(p, &v, sizeof v); }
INLINE void narrow_to(double* p, VD v) { std::memcpy(p, &v, sizeof v); }
INLINE void narrow_to(BFloat16* p, VF v) {
#if defined(__AVX512BF16__)
  // This rounds to nearest, ties to even; denormal numbers become 0.
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &rounded, sizeof rounded);
#else
  const VU u = (VU)v;
  // This rounds to nearest, ties to even.
  const VU rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  truncate_to(p, v != v ? ((u >> 16) | 0x40u) : rounded);
#endif
}
INLINE void narrow_to(Half* p, VF v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xFFFF, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  const VU sign = (VU)v & 0x80000000u, u = (VU)v ^ sign;
  const VU special = (VI)(u > 0x7F800000u) ? (VU{} + 0x7E00u) : (VU{} + 0x7C00u);
  // Adding 0.5 rounds at the half's last place.
  const VU subnormal = (VU)((VF)u + 0.5f) - 0x3F000000u;
  const VU normal = (u + 0xC8000FFFu + ((u >> 13) & 1u)) >> 13;
  VU bits = (VI)(u < 0x38800000u) ? subnormal : normal;
  bits = (VI)(u >= 0x47800000u) ? special : bits;
  truncate_to(p, bits | (sign >> 16));
#endif
}

template <class T>
INLINE VectorOf<T> load(const T* p, Full, Compute<T> = 0) {
  return widen(p);
}
template <class T>
INLINE VectorOf<T> load(const T* p, Part part, Compute<T> fill = 0) {
  T padded[kLanes<T>];
  std::memset(padded, 0, sizeof padded);
  std::memcpy(padded, p, part.count * sizeof(T));
  VectorOf<T> v = widen(padded);
  if (fill != 0) {
    for (int lane = part.count; lane < kLanes<T>; ++lane) v[lane] = fill;
  }
  return v;
}
template <class T>
INLINE void store(T* p, VectorOf<T> v, Full) {
  narrow_to(p, v);
}
template <class T>
INLINE void store(T* p, VectorOf<T> v, Part part) {
  T padded[kLanes<T>];
  narrow_to(padded, v);
  std::memcpy(p, padded, part.count * sizeof(T));
}

// Stores that bypass the caches, for outputs too large for them. This avoids reading each line before writing it.
// `p` must be aligned to a whole vector of T.
template <class T>
INLINE void stream(T* p, VectorOf<T> v) {
  T stored[kLanes<T>];
  narrow_to(stored, v);
#if defined(__AVX512F__)
  if constexpr (sizeof stored == 64) return _mm512_stream_si512((__m512i*)p, _mm512_loadu_si512(stored));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof stored == 32) return _mm256_stream_si256((__m256i*)p, _mm256_loadu_si256((__m256i*)stored));
#endif
#if defined(__SSE2__)
  if constexpr (sizeof stored == 16) return _mm_stream_si128((__m128i*)p, _mm_loadu_si128((__m128i*)stored));
#endif
  std::memcpy(p, stored, sizeof stored);
}

// Prefetches the line at p, for loops that compute so long on data in the cache that memory would be idle. Any address
// is allowed: one after the end of a tensor costs nothing. For short loops, such as those of the norms, the processor's
// own prefetching is better.
INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
// Prefetches into the second-level cache, which can wait for more lines at once.
INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

// Makes streamed stores visible to the thread that uses the result.
INLINE void fence() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// How a row of an output is written: `past_cache` if it may be streamed.
template <class T>
INLINE void put(T* p, VectorOf<T> v, Full, bool past_cache) {
  if (past_cache) {
    stream(p, v);
  } else {
    store(p, v, Full{});
  }
}
template <class T>
INLINE void put(T* p, VectorOf<T> v, Part part, bool) {
  store(p, v, part);
}

// Returns whether to stream a row of a tensor of `elements`: whether the tensor is larger than a share of the
// last-level cache, and the row starts on a vector boundary. Streaming parts of a line is slower than not streaming,
// but for halves on AMD's processors: a quarter of a line from each of two outputs takes twice as long on a Zen 3.
template <class T>
INLINE bool beyond_cache(const T* row, int64_t elements) {
  constexpr int64_t kCacheBytes = 8 << 20, kLine = 64;
  constexpr int64_t kStored = kLanes<T> * sizeof(T);
  static const bool halves = shardzoo_cpu_is_amd();
  if (kStored < (halves ? kLine / 2 : kLine)) return false;
  const bool aligned = reinterpret_cast<uintptr_t>(row) % kStored == 0;
  return aligned && elements * static_cast<int64_t>(sizeof(T)) > kCacheBytes;
}

// Returns the value that a tensor of dtype T would hold after storing v.
template <class T>
INLINE VectorOf<T> round_to(VectorOf<T> v) {
  T stored[kLanes<T>];
  narrow_to(stored, v);
  return widen(stored);
}

// Returns `value` in lanes whose byte of a boolean mask is not 0, `otherwise` in the others.
template <class C, class V>
INLINE V where(const uint8_t* mask, int count, V value, C otherwise) {
  constexpr int lanes = Wide<C>::lanes;
  typedef uint8_t Bytes __attribute__((vector_size(lanes)));
  Bytes bytes = {};
  std::memcpy(&bytes, mask, count);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (lanes == 16) {
    const __mmask16 set = _mm_test_epi8_mask((__m128i)bytes, (__m128i)bytes);
    return (V)_mm512_mask_blend_ps(set, (__m512)(V{} + otherwise), (__m512)value);
  }
#endif
  return __builtin_convertvector(bytes, typename Wide<C>::I) != 0 ? value : V{} + otherwise;
}
template <class C, class V>
INLINE V where(const uint8_t* mask, Full, V value, C otherwise) {
  return where<C>(mask, Wide<C>::lanes, value, otherwise);
}
template <class C, class V>
INLINE V where(const uint8_t* mask, Part part, V value, C otherwise) {
  return where<C>(mask, part.count, value, otherwise);
}

// Calls step(i, Full or Part) for i = 0, kStep, ... over n elements; by default for dtype T's vectors.
template <class T, int kStep = kLanes<T>, class F>
INLINE void for_vectors(int64_t n, F step) {
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) step(i, Full{});
  if (i < n) step(i, Part{static_cast<int>(n - i)});
}

// A sum over vectors as four sums that do not wait for each other: one addition takes longer than a short loop's rest.
template <class T>
struct Sum {
  VectorOf<T> parts[4] = {};
  LAMBDA VectorOf<T> total() const { return (parts[0] + parts[1]) + (parts[2] + parts[3]); }
};

// Calls step(i, Full or Part, part of a Sum) like for_vectors.
template <class T, class F>
INLINE void for_vectors_in_turns(int64_t n, F step) {
  constexpr int64_t lanes = kLanes<T>;
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) step(i + j * lanes, Full{}, j);
  }
  for_vectors<T>(n - i, [&](int64_t rest, auto part) LAMBDA { step(i + rest, part, 0); });
}

// Returns the sum of the two halves of a vector.
template <class C, int bytes, class V>
INLINE auto fold(V v) {
  typedef C Half __attribute__((vector_size(bytes / 2)));
  Half halves[2];
  std::memcpy(halves, &v, bytes);
  return halves[0] + halves[1];
}

// Sums and maxima over the lanes, always in the same order: halves, quarters, ...
template <class C, class V>
INLINE C sum_lanes(V v) {
  if constexpr (sizeof v > 16) return sum_lanes<C>(fold<C, sizeof v>(v));
  else if constexpr (sizeof(C) == 8) return v[0] + v[1];
  else return (v[0] + v[2]) + (v[1] + v[3]);
}
template <class C, class V>
INLINE C max_lanes(V v) {
  C lanes[Wide<C>::lanes];
  std::memcpy(lanes, &v, sizeof v);
#pragma GCC unroll 4
  for (int width = Wide<C>::lanes / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
    for (int lane = 0; lane < width; ++lane) {
      lanes[lane] = lanes[lane + width] > lanes[lane] ? lanes[lane + width] : lanes[lane];
    }
  }
  return lanes[0];
}

// Returns whether every lane of a comparison's result holds.
INLINE bool all_lanes(VI v) {
#if defined(__AVX512F__)
  return _mm512_cmpeq_epi32_mask((__m512i)v, _mm512_setzero_si512()) == 0;
#else
  int32_t lanes[Wide<float>::lanes], all = -1;
  std::memcpy(lanes, &v, sizeof v);
  for (int lane = 0; lane < Wide<float>::lanes; ++lane) all &= lanes[lane];
  return all != 0;
#endif
}

// Returns the larger number, or b if one of them is NaN.
INLINE VD larger(VD a, VD b) { return a > b ? a : b; }
INLINE VF larger(VF a, VF b) {
#if defined(__AVX512F__)
  return (VF)_mm512_maskz_max_ps(0xFFFF, (__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// Returns the smaller number, or b if one of them is NaN.
INLINE VF smaller(VF a, VF b) {
#if defined(__AVX512F__)
  return (VF)_mm512_maskz_min_ps(0xFFFF, (__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

#if defined(__AVX512BF16__)
// Returns sums + the products of pairs of bf16, in fp32.
INLINE VF add_pairs(VF sums, VF x, VF y) { return (VF)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)y); }
#endif

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Returns the multipliers of the lanes from `column` on: keep_scale where the element is kept, else 0.
template <class C>
INLINE typename Wide<C>::V keep_factor(uint64_t key, int64_t column, uint32_t threshold, double keep_scale) {
  static constexpr uint32_t kLane[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const VU hash = element_hash<VU>(key, read<VU>(kLane) + static_cast<uint32_t>(column));
  typename Wide<C>::V factor;
  if constexpr (sizeof(C) == sizeof(float)) {
    factor = (VI)(hash >= threshold) ? (VF{} + static_cast<float>(keep_scale)) : VF{};
  } else {
    for (int i = 0; i < Wide<C>::lanes; ++i) factor[i] = hash[i] >= threshold ? keep_scale : 0;
  }
  return factor;
}

}  // namespace
}  // namespace shardzoo
