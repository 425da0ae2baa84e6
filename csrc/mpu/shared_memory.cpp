// The module `shardzoo.mpu._shared_memory`: collectives of processes on one host, through memory that they share.
// mpu/shared_memory.py opens the memory and says when it is used.
//
// Every rank has a ring of slots that it alone writes and all ranks read. A message is cut into chunks of at most a
// slot, which get consecutive numbers. Chunk n of a rank is in slot n modulo the number of slots. A rank publishes how
// many chunks it has
//   posted    copied into its slots,
//   reduced   replaced its part of by the sum over the ranks (sums over more than two ranks), and
//   consumed  read from all ranks, so that their slots may be written again.
// All ranks start the same collectives in the same order, so the numbers agree. Chunks are small enough to stay in a
// core's cache between writing and reading.
//
// A sum adds the ranks' values in rank order, 16-bit floats in fp32, and rounds once. So it has the same bits on every
// rank, in every run, and however a message is cut.
//
// While a thread copies, adds or waits, other threads run Python. A thread that waits looks for signals, so that a
// handler of Python can interrupt it.

#include <linux/futex.h>
#include <poll.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

enum Kind : uint32_t { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kKinds };
constexpr const char* kKindNames[] = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"};
enum DType : uint32_t { kFloat32, kFloat64, kBFloat16, kFloat16, kInt32, kInt64, kDTypes };
constexpr size_t kWidths[] = {4, 8, 2, 2, 4, 8};

constexpr size_t kLine = 64;           // bytes; every part begins at a cache line
constexpr size_t kTwoPhases = 16384;   // bytes; larger sums over three ranks and more divide the additions
constexpr size_t kAhead = 3;           // chunks that a waiting rank has posted and not consumed: they fit into its cache
constexpr int kMostRanks = 64;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PER_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PER_PROCESSOR
#endif
#define INLINE inline __attribute__((always_inline))

struct BFloat16 {
  uint16_t bits;
};

INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }
INLINE int32_t widen(int32_t x) { return x; }
INLINE int64_t widen(int64_t x) { return x; }
INLINE float widen(_Float16 x) { return static_cast<float>(x); }
INLINE float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <class T, class W>
INLINE void narrow(W wide, T& out) {
  out = static_cast<T>(wide);
}
// Rounds to the nearest, ties to even; a NaN stays one.
INLINE void narrow(float wide, BFloat16& out) {
  uint32_t bits;
  std::memcpy(&bits, &wide, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  out.bits = static_cast<uint16_t>(wide != wide ? 0x7FC0 : rounded);
}

// Sets out[i] to the sum over the ranks of sources[rank][i]; `out` may be one of the sources.
template <class T>
INLINE void add(const char* const* sources, int size, char* out, size_t count) {
  using Wide = decltype(widen(T()));
  constexpr size_t kBlock = 128;
  Wide sum[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t length = std::min(kBlock, count - begin);
    for (int rank = 0; rank < size; ++rank) {
      const T* source = reinterpret_cast<const T*>(sources[rank]) + begin;
      if (rank == 0) {
        for (size_t i = 0; i < length; ++i) sum[i] = widen(source[i]);
      } else {
        for (size_t i = 0; i < length; ++i) sum[i] += widen(source[i]);
      }
    }
    T* target = reinterpret_cast<T*>(out) + begin;
    for (size_t i = 0; i < length; ++i) narrow(sum[i], target[i]);
  }
}

#define ADD(name, T) \
  PER_PROCESSOR void name(const char* const* s, int size, char* out, size_t count) { add<T>(s, size, out, count); }
ADD(add_float32, float)
ADD(add_float64, double)
ADD(add_bfloat16, BFloat16)
ADD(add_float16, _Float16)
ADD(add_int32, int32_t)
ADD(add_int64, int64_t)
constexpr void (*kAdd[])(const char* const*, int, char*, size_t) = {add_float32, add_float64, add_bfloat16,
                                                                   add_float16, add_int32,   add_int64};

using Count = std::atomic<uint64_t>;
using Futex = std::atomic<uint32_t>;
static_assert(Count::is_always_lock_free && Futex::is_always_lock_free && sizeof(Futex) == 4);

struct alignas(kLine) Progress {
  Count posted, reduced, consumed;  // the number after the last such chunk
  Futex events;                     // changes with every one of the above
  std::atomic<uint32_t> sleepers;   // ranks that wait for this one in the kernel
};

// What a rank posted, so that ranks in different collectives notice it.
struct alignas(kLine) Label {
  uint32_t kind, dtype;
  uint64_t bytes, chunk;
  bool operator==(const Label& other) const {
    return kind == other.kind && dtype == other.dtype && bytes == other.bytes && chunk == other.chunk;
  }
};

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

INLINE void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  Kind kind;
  DType dtype;
  const char* in;
  char* out;
  py::object tensors;    // keeps `in` and `out` alive; made and given up where this thread runs Python
  size_t count = 0;      // elements: of the tensor, of each piece of a reduce-scatter, or of the longest of an all-to-all
  std::vector<size_t> sent, received;  // elements for and from each rank, in an all-to-all
  size_t per_chunk = 0;  // elements
  uint64_t first = 0;    // number of its first chunk
  size_t chunks = 0, posted = 0, reduced = 0, consumed = 0;
  int64_t id = 0;
  size_t width() const { return kWidths[dtype]; }
  size_t begin(size_t chunk) const { return chunk * per_chunk; }
  size_t length(size_t chunk) const { return std::min(per_chunk, count - begin(chunk)); }
};

class Channel {
 public:
  // Returns the bytes of a channel; `capacity` are the bytes of a slot.
  static size_t count_bytes(size_t size, size_t capacity, size_t slots) {
    return size * (sizeof(Progress) + slots * (sizeof(Label) + capacity));
  }

  Channel(int descriptor, int rank, std::vector<int> processes, size_t capacity, size_t slots, double timeout, double spin)
      : rank_(rank),
        size_(static_cast<int>(processes.size())),
        capacity_(capacity),
        slots_(slots),
        timeout_(timeout),
        spin_(spin),
        processes_(std::move(processes)) {
    if (size_ > kMostRanks || rank < 0 || rank >= size_) {
      throw std::invalid_argument("a channel has at most " + std::to_string(kMostRanks) + " ranks, of which this is one");
    }
    if (capacity % kLine || capacity < kLine * static_cast<size_t>(size_)) {
      throw std::invalid_argument("a slot must be a multiple of 64 bytes, and at least 64 per rank");
    }
    if (slots == 0) throw std::invalid_argument("a rank must have at least one slot");
    bytes_ = count_bytes(static_cast<size_t>(size_), capacity, slots);
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) throw std::runtime_error(std::string("mmap: ") + std::strerror(errno));
    memory_ = static_cast<char*>(memory);
    for (int process : processes_) handles_.push_back(static_cast<int>(syscall(SYS_pidfd_open, process, 0)));
  }
  ~Channel() {
    munmap(memory_, bytes_);
    for (int handle : handles_) {
      if (handle >= 0) close(handle);
    }
  }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Starts a collective and returns its number. It posts what fits into free slots, and waits for nothing but earlier
  // collectives that did not fit.
  int64_t start(uint32_t kind, uint32_t dtype, const py::object& tensor, const py::object& out, size_t count) {
    if (kind >= kAllToAll) throw std::invalid_argument("there is no collective of this number");
    if (dtype >= kDTypes) throw std::invalid_argument("there is no dtype of this number");
    const size_t bytes = count * kWidths[dtype];
    const size_t all = bytes * static_cast<size_t>(size_);
    Job job;
    job.kind = static_cast<Kind>(kind);
    job.dtype = static_cast<DType>(dtype);
    job.in = read_address(tensor, kind == kReduceScatter ? all : bytes);
    const bool is_in_place = kind == kAllReduce && out.is(tensor);
    job.out = is_in_place ? const_cast<char*>(job.in) : read_address(out, kind == kAllGather ? all : bytes);
    job.tensors = py::make_tuple(tensor, out);
    job.count = count;
    return begin(std::move(job));
  }

  // Starts an exchange: `sent` and `received` are the elements for and from each rank, in rank order in the tensors, and
  // `longest` is the largest number that a rank sends to another.
  int64_t start_all_to_all(uint32_t dtype, const py::object& tensor, const py::object& out, std::vector<size_t> sent,
                           std::vector<size_t> received, size_t longest) {
    if (dtype >= kDTypes) throw std::invalid_argument("there is no dtype of this number");
    const size_t ranks = static_cast<size_t>(size_);
    if (sent.size() != ranks || received.size() != ranks) {
      throw std::invalid_argument("an all-to-all needs a number for each of the " + std::to_string(size_) + " ranks");
    }
    Job job;
    job.kind = kAllToAll;
    job.dtype = static_cast<DType>(dtype);
    job.in = read_address(tensor, std::accumulate(sent.begin(), sent.end(), size_t{0}) * kWidths[dtype]);
    job.out = read_address(out, std::accumulate(received.begin(), received.end(), size_t{0}) * kWidths[dtype]);
    job.tensors = py::make_tuple(tensor, out);
    job.count = longest;
    for (size_t rank = 0; rank < ranks; ++rank) {
      const bool is_own = rank == static_cast<size_t>(rank_);
      if (is_own ? sent[rank] != received[rank] : std::max(sent[rank], received[rank]) > longest) {
        throw std::invalid_argument("the numbers of elements of an all-to-all do not agree");
      }
    }
    job.sent = std::move(sent);
    job.received = std::move(received);
    return begin(std::move(job));
  }

  // Waits until collective `id` has ended.
  void finish(int64_t id) {
    std::vector<py::object> ended;  // given up as in `begin`
    const Turn turn(*this);
    complete(id, ended);
  }

  void set_timeout(double seconds) { timeout_ = seconds; }

 private:
  // Cuts a collective into chunks, posts what fits, and returns its number.
  int64_t begin(Job job) {
    const bool has_pieces = job.kind == kReduceScatter || job.kind == kAllToAll;
    const size_t pieces = has_pieces ? static_cast<size_t>(size_) : 1;
    job.per_chunk = capacity_ / pieces / kLine * kLine / job.width();
    job.chunks = (job.count + job.per_chunk - 1) / job.per_chunk;
    if (job.kind == kAllToAll) copy_own(job);

    std::vector<py::object> ended;  // given up after this thread's turn, when it runs Python again
    const Turn turn(*this);
    if (!jobs_.empty() && jobs_.back().posted < jobs_.back().chunks) complete(jobs_.back().id, ended);
    job.first = next_;
    job.id = next_id_++;
    next_ += job.chunks;
    jobs_.push_back(std::move(job));
    post(jobs_.back(), slots_);
    return jobs_.back().id;
  }

  // Returns where the elements for or from a rank begin, of which `counts` has a number for each rank.
  static size_t find_start(const std::vector<size_t>& counts, int rank) {
    return std::accumulate(counts.begin(), counts.begin() + rank, size_t{0});
  }

  // Returns how many of the elements for or from a rank are in a chunk.
  static size_t part(const Job& job, size_t chunk, size_t count) {
    return std::min(count, job.begin(chunk) + job.per_chunk) - std::min(count, job.begin(chunk));
  }

  // Copies what this rank keeps in an all-to-all.
  void copy_own(const Job& job) {
    const size_t count = job.sent[static_cast<size_t>(rank_)];
    const char* from = job.in + find_start(job.sent, rank_) * job.width();
    if (count) std::memcpy(job.out + find_start(job.received, rank_) * job.width(), from, count * job.width());
  }

  // A thread's turn: only one thread at a time has it. A signal handler that runs while this thread waits cannot have a
  // turn.
  class Turn {
   public:
    explicit Turn(Channel& channel) : channel_(channel) {
      if (channel.holder_ == std::this_thread::get_id()) {
        throw std::runtime_error("a signal handler called a collective while this thread waits for one");
      }
      channel.mutex_.lock();
      channel.holder_ = std::this_thread::get_id();
    }
    ~Turn() {
      channel_.holder_ = std::thread::id();
      channel_.mutex_.unlock();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    const py::gil_scoped_release without_python_;  // ends last, when others may have their turn
    Channel& channel_;
  };

  // Returns where the numbers of a tensor are. Its Python methods say so, because no header of torch is used here.
  // Their names are made once: a small message takes a few microseconds.
  static char* read_address(const py::object& tensor, size_t bytes) {
    static PyObject* const is_contiguous = PyUnicode_InternFromString("is_contiguous");
    static PyObject* const nbytes = PyUnicode_InternFromString("nbytes");
    static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
    if (!call(tensor, is_contiguous).cast<bool>()) {
      throw std::invalid_argument("the tensors of a collective must be contiguous");
    }
    const size_t given = py::getattr(tensor, nbytes).cast<size_t>();
    if (given != bytes) {
      throw std::invalid_argument("a tensor of the collective has " + std::to_string(given) + " bytes instead of " +
                                  std::to_string(bytes));
    }
    return reinterpret_cast<char*>(call(tensor, data_ptr).cast<uintptr_t>());
  }

  static py::object call(const py::object& object, PyObject* method) {
    PyObject* const result = PyObject_CallMethodNoArgs(object.ptr(), method);
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  }

  // Runs the handlers of signals that have arrived. Throws what a handler raises.
  static void check_signals() {
    const py::gil_scoped_acquire python;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }

  Progress& progress(int rank) { return reinterpret_cast<Progress*>(memory_)[rank]; }
  char* slot(int rank, uint64_t number) {
    const size_t index = static_cast<size_t>(rank) * slots_ + number % slots_;
    return memory_ + static_cast<size_t>(size_) * sizeof(Progress) + index * (sizeof(Label) + capacity_);
  }
  char* data(int rank, uint64_t number) { return slot(rank, number) + sizeof(Label); }
  Label& label(int rank, uint64_t number) { return *reinterpret_cast<Label*>(slot(rank, number)); }

  static bool reached(const Count& count, uint64_t number) { return count.load(std::memory_order_acquire) >= number; }

  void publish(Count Progress::*count, uint64_t number) {
    Progress& own = progress(rank_);
    (own.*count).store(number, std::memory_order_release);
    own.events.fetch_add(1, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, &own.events, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  // Waits until all ranks have reached `number` of a count.
  void wait(Count Progress::*count, uint64_t number, const Job& job) {
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_ && !reached(progress(rank).*count, number)) wait_for(rank, progress(rank).*count, number, job);
    }
  }

  void wait_for(int rank, const Count& count, uint64_t number, const Job& job) {
    const double begin = now();
    for (double time = begin; time - begin < spin_; time = now()) {
      for (int i = 0; i < 64; ++i) {
        if (reached(count, number)) return;
        relax();
      }
    }
    Progress& other = progress(rank);
    double looked = now();
    while (true) {
      const uint32_t seen = other.events.load(std::memory_order_seq_cst);
      other.sleepers.fetch_add(1, std::memory_order_seq_cst);
      if (!reached(count, number)) {
        const timespec longest{0, 20'000'000};
        syscall(SYS_futex, &other.events, FUTEX_WAIT, seen, &longest, nullptr, 0);
      }
      other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
      if (reached(count, number)) return;
      const double time = now();
      if (time - looked < 0.05) continue;
      looked = time;
      check_signals();
      if (has_ended(rank)) {
        if (reached(count, number)) return;  // it ended after its part was done
        fail(job, rank, "has ended");
      }
      if (time - begin > timeout_) fail(job, rank, "did not take part within " + seconds(timeout_));
    }
  }

  static std::string seconds(double value) {
    std::string text = std::to_string(value);
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
    return text + " seconds";
  }

  bool has_ended(int rank) const {
    pollfd query{handles_[static_cast<size_t>(rank)], POLLIN, 0};
    if (query.fd >= 0) return poll(&query, 1, 0) == 1;
    return kill(processes_[static_cast<size_t>(rank)], 0) != 0 && errno == ESRCH;  // a kernel without such handles
  }

  [[noreturn]] void fail(const Job& job, int rank, const std::string& reason) {
    throw std::runtime_error(std::string(kKindNames[job.kind]) + " of " + std::to_string(job.count * job.width()) +
                             " bytes: rank " + std::to_string(rank) + " of the group (process " +
                             std::to_string(processes_[static_cast<size_t>(rank)]) + ") " + reason);
  }

  Label make_label(const Job& job, size_t chunk) const { return {job.kind, job.dtype, job.count * job.width(), chunk}; }

  // Copies chunks into this rank's slots while these are free, at most `ahead` before the one that it consumes next.
  void post(Job& job, size_t ahead) {
    for (; job.posted < std::min(job.chunks, job.consumed + ahead); ++job.posted) {
      const uint64_t number = job.first + job.posted;
      for (int rank = 0; rank < size_; ++rank) {
        if (!reached(progress(rank).consumed, freed_for(number))) return;
      }
      label(rank_, number) = make_label(job, job.posted);
      const size_t offset = job.begin(job.posted) * job.width(), bytes = job.length(job.posted) * job.width();
      char* target = data(rank_, number);
      if (job.kind == kReduceScatter) {
        for (int piece = 0; piece < size_; ++piece) {
          if (piece == rank_) continue;
          const size_t from = static_cast<size_t>(piece) * job.count * job.width() + offset;
          std::memcpy(target + static_cast<size_t>(piece) * job.per_chunk * job.width(), job.in + from, bytes);
        }
      } else if (job.kind == kAllToAll) {
        size_t start = 0;  // of the elements for a rank
        for (int rank = 0; rank < size_; ++rank) {
          const size_t count = job.sent[static_cast<size_t>(rank)], length = part(job, job.posted, count);
          if (rank != rank_ && length) {
            const char* from = job.in + (start + job.begin(job.posted)) * job.width();
            std::memcpy(target + static_cast<size_t>(rank) * job.per_chunk * job.width(), from, length * job.width());
          }
          start += count;
        }
      } else {
        std::memcpy(target, job.in + offset, bytes);
      }
      publish(&Progress::posted, number + 1);
    }
  }

  // Returns how many chunks all ranks must have consumed before chunk `number` can be written.
  uint64_t freed_for(uint64_t number) const { return number < slots_ ? 0 : number + 1 - slots_; }

  bool two_phases(const Job& job) const {
    return job.kind == kAllReduce && size_ > 2 && job.count * job.width() > kTwoPhases;
  }

  // Returns which elements of a chunk `rank` adds in the first of two phases: [first, second).
  std::pair<size_t, size_t> share(const Job& job, size_t chunk, int rank) const {
    const size_t length = job.length(chunk), line = kLine / job.width();
    const size_t each = ((length + static_cast<size_t>(size_) - 1) / static_cast<size_t>(size_) + line - 1) / line * line;
    const size_t begin = std::min(length, each * static_cast<size_t>(rank));
    return {begin, std::min(length, begin + each)};
  }

  void check_labels(const Job& job, size_t chunk) {
    const uint64_t number = job.first + chunk;
    for (int rank = 0; rank < size_; ++rank) {
      const Label other = label(rank, number);
      if (rank == rank_ || other == make_label(job, chunk)) continue;
      const char* kind = other.kind < kKinds ? kKindNames[other.kind] : "unknown collective";
      const char* article = other.kind == kReduceScatter ? "a " : "an ";
      fail(job, rank, std::string("is in ") + article + kind + " of " + std::to_string(other.bytes) +
                          " bytes, or of another dtype; all ranks must call the same collectives in the same order");
    }
  }

  // Adds this rank's share of a chunk, and puts the sum where this rank posted the chunk.
  void reduce(Job& job) {
    const uint64_t number = job.first + job.reduced;
    wait(&Progress::posted, number + 1, job);
    check_labels(job, job.reduced);
    const auto [begin, end] = share(job, job.reduced, rank_);
    const char* sources[kMostRanks];
    for (int rank = 0; rank < size_; ++rank) sources[rank] = data(rank, number) + begin * job.width();
    kAdd[job.dtype](sources, size_, data(rank_, number) + begin * job.width(), end - begin);
    ++job.reduced;
    publish(&Progress::reduced, number + 1);
  }

  void consume(Job& job) {
    const size_t chunk = job.consumed, width = job.width(), length = job.length(chunk);
    const uint64_t number = job.first + chunk;
    char* out = job.out + job.begin(chunk) * width;
    if (two_phases(job)) {
      wait(&Progress::reduced, number + 1, job);
      for (int rank = 0; rank < size_; ++rank) {
        const auto [begin, end] = share(job, chunk, rank);
        std::memcpy(out + begin * width, data(rank, number) + begin * width, (end - begin) * width);
      }
    } else {
      wait(&Progress::posted, number + 1, job);
      check_labels(job, chunk);
      if (job.kind == kAllToAll) collect(job, chunk);
      const char* sources[kMostRanks];
      for (int rank = 0; rank < size_; ++rank) {
        sources[rank] = data(rank, number);
        if (job.kind == kReduceScatter) {
          const size_t own = static_cast<size_t>(rank_);
          sources[rank] = rank == rank_ ? job.in + (own * job.count + job.begin(chunk)) * width
                                        : sources[rank] + own * job.per_chunk * width;
        }
        if (job.kind == kAllGather) {
          char* place = out + static_cast<size_t>(rank) * job.count * width;
          // This rank's part may be in its place already.
          const bool is_there = rank == rank_ && place == job.in + job.begin(chunk) * width;
          if (!is_there) std::memcpy(place, sources[rank], length * width);
        }
      }
      if (job.kind == kAllReduce || job.kind == kReduceScatter) kAdd[job.dtype](sources, size_, out, length);
    }
    ++job.consumed;
    publish(&Progress::consumed, number + 1);
  }

  // Copies what the other ranks have sent to this one in a chunk of an all-to-all.
  void collect(const Job& job, size_t chunk) {
    const size_t width = job.width();
    size_t start = 0;  // of the elements from a rank
    for (int rank = 0; rank < size_; ++rank) {
      const size_t count = job.received[static_cast<size_t>(rank)], length = part(job, chunk, count);
      if (rank != rank_ && length) {
        const char* from = data(rank, job.first + chunk) + static_cast<size_t>(rank_) * job.per_chunk * width;
        std::memcpy(job.out + (start + job.begin(chunk)) * width, from, length * width);
      }
      start += count;
    }
  }

  void run(Job& job) {
    while (job.consumed < job.chunks) {
      post(job, kAhead);
      if (job.posted == job.consumed) {
        wait(&Progress::consumed, freed_for(job.first + job.posted), job);
        continue;
      }
      while (two_phases(job) && job.reduced < std::min(job.posted, job.consumed + 2)) reduce(job);
      consume(job);
    }
  }

  // Runs the collectives up to `id`, in the order in which they were started.
  void complete(int64_t id, std::vector<py::object>& ended) {
    while (!jobs_.empty() && jobs_.front().id <= id) {
      run(jobs_.front());
      ended.push_back(std::move(jobs_.front().tensors));
      jobs_.pop_front();
    }
  }

  const int rank_, size_;
  const size_t capacity_, slots_;
  size_t bytes_ = 0;
  std::atomic<double> timeout_;
  const double spin_;
  const std::vector<int> processes_;
  std::vector<int> handles_;
  char* memory_ = nullptr;
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_;
  std::deque<Job> jobs_;
  uint64_t next_ = 0;
  int64_t next_id_ = 0;
};

}  // namespace

PYBIND11_MODULE(_shared_memory, m) {
  m.doc() = "Collectives of the ranks of one host, through memory that they share; mpu/shared_memory.py opens it.";
  py::class_<Channel>(m, "Channel", R"(The memory that a group's ranks share, mapped into this process.

Args:
    descriptor: Of the file, which the channel does not need after this call.
    rank: This process's, in the group.
    processes: The process id of each rank.
    capacity: Bytes of a slot: a multiple of 64, and at least 64 for each rank.
    slots: Slots of a rank.
    timeout: Seconds for which a collective waits for a rank.
    spin: Seconds for which it looks for the rank's data before it sleeps.

Raises:
    RuntimeError: The file cannot be mapped.
    ValueError: The slots do not suit the ranks, or there are too many ranks.)")
      .def(py::init<int, int, std::vector<int>, size_t, size_t, double, double>(), py::arg("descriptor"),
           py::arg("rank"), py::arg("processes"), py::arg("capacity"), py::arg("slots"), py::arg("timeout"),
           py::arg("spin"))
      .def("start", &Channel::start, py::arg("kind"), py::arg("dtype"), py::arg("tensor"), py::arg("out"),
           py::arg("count"), R"(Starts a collective; returns its number. The tensors stay alive until it has ended.

Args:
    kind: 0: all-reduce, 1: all-gather, 2: reduce-scatter.
    dtype: 0: float32, 1: float64, 2: bfloat16, 3: float16, 4: int32, 5: int64.
    tensor: What this rank contributes.
    out: Where the result is written; for an all-reduce it may be the same tensor.
    count: Elements of the tensor; for a reduce-scatter, of the piece that each rank keeps.

Raises:
    ValueError: A tensor is not contiguous, or not of the size that the collective needs.)")
      .def("start_all_to_all", &Channel::start_all_to_all, py::arg("dtype"), py::arg("tensor"), py::arg("out"),
           py::arg("sent"), py::arg("received"), py::arg("longest"), R"(Starts an exchange; returns its number.

Args:
    dtype: As for `start`.
    tensor: What this rank sends, in the order of the ranks.
    out: Where it receives, in the order of the ranks.
    sent: Elements for each rank.
    received: Elements from each rank.
    longest: The most elements that any rank sends to another, the same number on all ranks.

Raises:
    ValueError: A tensor is not contiguous or not of this size, or the numbers do not agree.)")
      .def("finish", &Channel::finish, py::arg("number"), R"(Waits for the end of a collective.

Raises:
    RuntimeError: A rank has ended, is late, or calls another collective.)")
      .def("set_timeout", &Channel::set_timeout, py::arg("seconds"),
           "Sets for how many seconds a collective waits for a rank.")
      .def_static("count_bytes", &Channel::count_bytes, py::arg("ranks"), py::arg("capacity"), py::arg("slots"),
                  "Returns the bytes of the file of a channel.")
      .def_property_readonly_static(
          "most_ranks", [](const py::object&) { return kMostRanks; }, "The most ranks of a channel.");
}
