// The module `shardzoo.data._index`: builds the indexes of packed and sentence-wise datasets.
//
// These are the loops of data/indexed/index_building.py, which is the reference, and equal to them in every value.
// Other threads run Python in the meantime.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <string>

namespace py = pybind11;

namespace {

// splitmix64 (Steele, Lea, Flood 2014): returns number n of the stream of a seed, without state.
inline uint64_t draw(uint64_t seed, uint64_t n) {
  uint64_t z = seed + (n + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Returns the numbers of an array. Raises ValueError unless it is one contiguous row of type T.
template <class T>
const T* read(const py::array& array, const char* name, const char* type) {
  const bool is_row = array.ndim() == 1 && (array.flags() & py::array::c_style) != 0;
  const bool is_aligned = reinterpret_cast<uintptr_t>(array.data()) % alignof(T) == 0;
  if (!is_row || !is_aligned || !py::isinstance<py::array_t<T>>(array)) {
    throw py::value_error(std::string(name) + " must be a contiguous array of one dimension and of type " + type);
  }
  return static_cast<const T*>(array.data());
}

// Writes where samples begin: sample k at token first + k * stride, as (document, offset in it) in rows [count, 2].
// Returns how many samples begin in a document: count, or fewer.
int64_t write_samples(const int64_t* lengths, int64_t documents, int64_t first, int64_t stride, int64_t count,
                      int64_t* row) {
  int64_t document = 0;
  int64_t offset = first;
  for (int64_t k = 0; k < count; ++k) {
    while (document < documents && offset >= lengths[document]) offset -= lengths[document++];
    if (document == documents) return k;
    *row++ = document;
    *row++ = offset;
    offset += stride;
  }
  return count;
}

// Writes the runs of sentences that fill a sample, as (first sentence, last sentence + 1, target length) in rows
// [samples, 3]. There is room for a sample of each sentence. Returns the number of samples.
int64_t write_runs(const int32_t* sizes, const int64_t* marks, int64_t documents, int64_t max_length,
                   double short_probability, int64_t least_sentences, uint64_t seed, int64_t* row) {
  uint64_t drawn = 0;
  int64_t samples = 0;
  const auto next_target = [&]() -> int64_t {
    const double u = (draw(seed, drawn++) >> 11) * 0x1.0p-53;
    if (u >= short_probability) return max_length;
    return 2 + static_cast<int64_t>(draw(seed, drawn++) % static_cast<uint64_t>(max_length - 1));
  };
  for (int64_t d = 0; d < documents; ++d) {
    const int64_t last = marks[d + 1];
    if (last - marks[d] < least_sentences) continue;
    int64_t first = marks[d];
    int64_t tokens = 0;
    int64_t target = next_target();
    for (int64_t s = first; s < last; ++s) {
      tokens += sizes[s];
      const int64_t rest = last - s - 1;
      const bool is_full = tokens >= target && s + 1 - first >= least_sentences && rest >= least_sentences;
      if (is_full || rest == 0) {
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

py::array_t<int64_t> sample_index(const py::array& lengths, int64_t first, int64_t stride, int64_t count) {
  const int64_t* length = read<int64_t>(lengths, "lengths", "int64");
  const int64_t documents = lengths.size();
  if (first < 0 || stride < 1 || count < 0) {
    throw py::value_error("first and count must be at least 0, and stride at least 1");
  }
  py::array_t<int64_t> rows({count, int64_t{2}});
  int64_t* row = rows.mutable_data();
  int64_t built = 0;
  {
    const py::gil_scoped_release without_python;
    built = write_samples(length, documents, first, stride, count, row);
  }
  if (built < count) throw py::value_error("a sample begins after the last document");
  return rows;
}

py::array_t<int64_t> sentence_index(const py::array& sizes, const py::array& marks, int64_t max_length,
                                    double short_probability, int64_t least_sentences, uint64_t seed) {
  const int32_t* size = read<int32_t>(sizes, "sizes", "int32");
  const int64_t* mark = read<int64_t>(marks, "marks", "int64");
  const int64_t sentences = sizes.size();
  const int64_t documents = static_cast<int64_t>(marks.size()) - 1;
  if (max_length < 2) throw py::value_error("max_length must be at least 2");
  bool in_order = documents >= 0 && mark[0] >= 0 && mark[documents] <= sentences;
  for (int64_t d = 0; d < documents; ++d) in_order = in_order && mark[d] <= mark[d + 1];
  if (!in_order) throw py::value_error("document marks out of order");

  // A sample has a sentence at least. The system gives memory only for the rows that are written.
  py::array_t<int64_t> room({sentences, int64_t{3}});
  int64_t* row = room.mutable_data();
  int64_t samples = 0;
  {
    const py::gil_scoped_release without_python;
    samples = write_runs(size, mark, documents, max_length, short_probability, least_sentences, seed, row);
  }
  py::array_t<int64_t> rows({samples, int64_t{3}});
  std::memcpy(rows.mutable_data(), room.data(), static_cast<size_t>(samples) * 3 * sizeof(int64_t));
  return rows;
}

}  // namespace

PYBIND11_MODULE(_index, m) {
  m.doc() = "Builds sample and sentence indexes; data/indexed/index_building.py is the reference.";
  m.def("sample_index", &sample_index, py::arg("lengths"), py::arg("first"), py::arg("stride"), py::arg("count"),
        R"(Returns where samples begin in the concatenation of documents: sample k at token first + k * stride.

Args:
    lengths: Tokens of each document in reading order, int64 [documents].

Returns:
    (document, offset in it) of each sample, int64 [count, 2].

Raises:
    ValueError: An argument is of another type or out of range, or a sample begins after the last document.)");
  m.def("sentence_index", &sentence_index, py::arg("sizes"), py::arg("marks"), py::arg("max_length"),
        py::arg("short_probability"), py::arg("least_sentences"), py::arg("seed"),
        R"(Cuts documents into runs of consecutive sentences; each run is a sample.

Args:
    sizes: Tokens of each sentence, int32 [sentences].
    marks: The first sentence of each document, and the end, int64 [documents + 1].
    max_length: The tokens that a run should have.
    short_probability: How often a run should be shorter, of 2 to max_length tokens.
    least_sentences: Of a run. A document with fewer is left out.
    seed: Of the lengths of short runs.

Returns:
    (first sentence, last sentence + 1, target number of tokens) of each sample, int64 [samples, 3].

Raises:
    ValueError: An argument is of another type or out of range, or the marks are out of order.)");
}
