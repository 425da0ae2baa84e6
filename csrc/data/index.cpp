// Index building for packed and sentence-wise datasets: the loops of data/indexed/index_building.py, equal in every value.
//
// data/indexed/index_building.py checks the arguments and calls these functions by ctypes. Arrays are contiguous.
#include <cstdint>

namespace {

// splitmix64 (Steele, Lea, Flood 2014): returns number n of the stream of a seed, without state.
inline uint64_t draw(uint64_t seed, uint64_t n) {
  uint64_t z = seed + (n + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Sample k begins at token first + k * stride of the concatenated documents: (document, offset in it), rows [count, 2].
// Returns how many samples begin in a document: count, or fewer.
EXPORT int64_t shardzoo_sample_index(const int64_t* lengths, int64_t documents, int64_t first, int64_t stride,
                                     int64_t count, int64_t* row) {
  int64_t document = 0, offset = first;
  for (int64_t k = 0; k < count; ++k) {
    while (document < documents && offset >= lengths[document]) offset -= lengths[document++];
    if (document == documents) return k;
    *row++ = document;
    *row++ = offset;
    offset += stride;
  }
  return count;
}

// Writes the runs of sentences that fill a sample: (first sentence, last sentence + 1, target length), rows
// [samples, 3]. There is room for a sample of each sentence. Returns the number of samples.
EXPORT int64_t shardzoo_sentence_index(const int32_t* sizes, const int64_t* marks, int64_t documents,
                                       int64_t max_length, double short_probability, int64_t least_sentences,
                                       uint64_t seed, int64_t* row) {
  uint64_t drawn = 0;
  int64_t samples = 0;
  auto next_target = [&]() -> int64_t {
    const double u = (draw(seed, drawn++) >> 11) * 0x1.0p-53;
    if (u >= short_probability) return max_length;
    return 2 + static_cast<int64_t>(draw(seed, drawn++) % static_cast<uint64_t>(max_length - 1));
  };
  for (int64_t d = 0; d < documents; ++d) {
    const int64_t last = marks[d + 1];
    if (last - marks[d] < least_sentences) continue;
    int64_t first = marks[d], tokens = 0, target = next_target();
    for (int64_t s = first; s < last; ++s) {
      tokens += sizes[s];
      const int64_t rest = last - s - 1;
      const bool full = tokens >= target && s + 1 - first >= least_sentences && rest >= least_sentences;
      if (full || rest == 0) {
        if (tokens > 0) {
          *row++ = first;
          *row++ = s + 1;
          *row++ = target;
          ++samples;
        }
        first = s + 1;
        tokens = 0;
        target = next_target();
      }
    }
  }
  return samples;
}
}
