// Index building for packed and sentence-wise datasets: the loops of data/indexed/index_building.py, equal in every value.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <typename T>
Array<T> to_array(const std::vector<T>& values, py::ssize_t columns) {
  Array<T> out({static_cast<py::ssize_t>(values.size()) / columns, columns});
  std::copy(values.begin(), values.end(), out.mutable_data());
  return out;
}

// Sample k begins at token first + k * stride of the concatenated documents: (document, offset in it), [count, 2].
Array<int64_t> sample_index(const Array<int64_t>& lengths, int64_t first, int64_t stride, int64_t count) {
  const int64_t* length = lengths.data();
  const int64_t documents = lengths.size();
  if (first < 0 || stride < 1 || count < 0) throw std::invalid_argument("first and count must be at least 0, and stride at least 1");
  Array<int64_t> out({static_cast<py::ssize_t>(count), static_cast<py::ssize_t>(2)});
  int64_t* row = out.mutable_data();
  bool inside = true;
  {
    py::gil_scoped_release release;
    int64_t document = 0, offset = first;
    for (int64_t k = 0; k < count && inside; ++k) {
      while (document < documents && offset >= length[document]) offset -= length[document++];
      inside = document < documents;
      *row++ = document;
      *row++ = offset;
      offset += stride;
    }
  }
  if (!inside) throw std::invalid_argument("a sample begins after the last document");
  return out;
}

// splitmix64 (Steele, Lea, Flood 2014): returns number n of the stream of a seed, without state.
inline uint64_t draw(uint64_t seed, uint64_t n) {
  uint64_t z = seed + (n + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Returns the runs of sentences that fill a sample: (first sentence, last sentence + 1, target length), [samples, 3].
Array<int64_t> sentence_index(const Array<int32_t>& sizes, const Array<int64_t>& marks, int64_t max_length,
                              double short_probability, int64_t least_sentences, uint64_t seed) {
  const int32_t* size = sizes.data();
  const int64_t* mark = marks.data();
  const int64_t documents = marks.size() - 1;
  if (max_length < 2) throw std::invalid_argument("max_length must be at least 2");
  for (int64_t d = 0; d <= documents; ++d)
    if (mark[d] < 0 || mark[d] > sizes.size() || (d && mark[d] < mark[d - 1]))
      throw std::invalid_argument("document marks out of order");
  std::vector<int64_t> out;
  {
    py::gil_scoped_release release;
    uint64_t drawn = 0;
    auto next_target = [&]() -> int64_t {
      const double u = (draw(seed, drawn++) >> 11) * 0x1.0p-53;
      if (u >= short_probability) return max_length;
      return 2 + static_cast<int64_t>(draw(seed, drawn++) % static_cast<uint64_t>(max_length - 1));
    };
    for (int64_t d = 0; d < documents; ++d) {
      const int64_t last = mark[d + 1];
      if (last - mark[d] < least_sentences) continue;
      int64_t first = mark[d], tokens = 0, target = next_target();
      for (int64_t s = first; s < last; ++s) {
        tokens += size[s];
        const int64_t rest = last - s - 1;
        const bool full = tokens >= target && s + 1 - first >= least_sentences && rest >= least_sentences;
        if (full || rest == 0) {
          if (tokens > 0) {
            out.push_back(first);
            out.push_back(s + 1);
            out.push_back(target);
          }
          first = s + 1;
          tokens = 0;
          target = next_target();
        }
      }
    }
  }
  return to_array(out, 3);
}

}  // namespace

PYBIND11_MODULE(_index, module) {
  module.doc() = "Compiled index building; data/indexed/index_building.py holds the readable equivalent.";
  module.def("sample_index", &sample_index, py::arg("lengths"), py::arg("first"), py::arg("stride"), py::arg("count"));
  module.def("sentence_index", &sentence_index, py::arg("sizes"), py::arg("marks"), py::arg("max_length"),
             py::arg("short_probability"), py::arg("least_sentences"), py::arg("seed"));
}
