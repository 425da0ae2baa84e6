#include "pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <vector>

namespace shardzoo {
namespace {

constexpr size_t kLeast = size_t{1} << 20;  // bytes; the C library keeps smaller blocks itself
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kGranule = size_t{256} << 10;  // the unit of blocks smaller than two huge pages

// Returns the most bytes that the pool keeps unused: SHARDZOO_POOL_MIB, as set at the first large output, or 1 GiB.
size_t most_idle() {
  static const size_t bytes = [] {
    const char* mebibytes = std::getenv("SHARDZOO_POOL_MIB");
    if (mebibytes == nullptr) return size_t{1} << 30;
    return static_cast<size_t>(std::strtoull(mebibytes, nullptr, 10)) << 20;
  }();
  return bytes;
}

class Pool {
 public:
  struct Block {
    void* data;
    size_t bytes;
  };

  // Returns a block of at least `bytes`, or {nullptr, 0} if there is no memory.
  Block take(size_t bytes) {
    const size_t alignment = bytes < 2 * kHugePage ? kGranule : kHugePage;
    bytes = (bytes + alignment - 1) / alignment * alignment;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      size_t best = idle_.size();
      for (size_t i = 0; i < idle_.size(); ++i) {
        const bool fits = idle_[i].bytes >= bytes && idle_[i].bytes <= bytes + bytes / 4;
        // Of equal blocks, take the one freed last: it may still be in a cache.
        if (fits && (best == idle_.size() || idle_[i].bytes <= idle_[best].bytes)) best = i;
      }
      if (best < idle_.size()) return remove(best);
    }
    void* data = std::aligned_alloc(alignment, bytes);
    if (data == nullptr) {
      shrink(0);
      data = std::aligned_alloc(alignment, bytes);
    }
    if (data == nullptr) return {nullptr, 0};
    // This is optional: if it fails, the pages are small.
    madvise(data, bytes, MADV_HUGEPAGE);
    return {data, bytes};
  }

  // Takes back a block that no tensor uses any more.
  void give(Block block) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      idle_.push_back(block);
      idle_bytes_ += block.bytes;
    }
    shrink(most_idle());
  }

  size_t idle_bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return idle_bytes_;
  }

  // The mutex is locked around a fork: the child must not inherit one that another thread holds.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  Block remove(size_t index) {
    const Block block = idle_[index];
    idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(index));
    idle_bytes_ -= block.bytes;
    return block;
  }

  // Returns the blocks freed longest ago to the system until at most `most` bytes are idle.
  void shrink(size_t most) {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (idle_bytes_ > most) std::free(remove(0).data);
  }

  std::mutex mutex_;
  std::vector<Block> idle_;  // in the order in which they were freed
  size_t idle_bytes_ = 0;
};

Pool& pool() {
  static Pool* const shared = [] {
    // It is never destroyed: tensors may outlive every static object.
    auto* made = new Pool;
    pthread_atfork([] { pool().lock(); }, [] { pool().unlock(); }, [] { pool().unlock(); });
    return made;
  }();
  return *shared;
}

}  // namespace

Tensor recycled(const Tensor& like, const std::vector<int64_t>& size) {
  size_t bytes = like.element_size();
  for (const int64_t length : size) bytes *= static_cast<size_t>(length);
  Pool::Block block = {nullptr, 0};
  if (bytes >= kLeast && most_idle() != 0) block = pool().take(bytes);
  if (block.data == nullptr) return torch::stable::new_empty(like, {size.data(), size.size()});
  std::vector<int64_t> stride(size.size(), 1);
  for (size_t i = size.size() - 1; i > 0; --i) stride[i - 1] = stride[i] * size[i];
  return torch::stable::from_blob(block.data, {size.data(), size.size()}, {stride.data(), stride.size()},
                                  like.device(), like.scalar_type(), [block](void*) { pool().give(block); });
}

int64_t recycled_idle() { return static_cast<int64_t>(pool().idle_bytes()); }

}  // namespace shardzoo
