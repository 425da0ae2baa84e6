// Runs the threads of a block as fibers. In the chosen order, each warp runs as far as barriers allow before the next
// warp starts, so that a missing barrier gives wrong numbers. SHARDZOO_EMULATION_ORDER: forward, reversed or a seed.
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../../../csrc/kernels.h"
#include "cuda_runtime.h"

extern "C" int native_cpu_run(int kernel, int dtype, const void* parameters, int64_t begin, int64_t end);

namespace emulation {

dim3 thread_index, block_index, block_size, grid_size;

namespace {

constexpr size_t kStack = 1 << 17;
constexpr int kMostThreads = 1024, kWarp = 32;

enum State { kReady, kAtBarrier, kAtShuffle, kDone };

struct Fiber {
  ucontext_t context;
  dim3 index;
  State state;
  uint64_t given;
};

ucontext_t scheduler;
Fiber fibers[kMostThreads];
uint64_t taken[kMostThreads];  // what the lanes gave to the last complete shuffle of their warp
Fiber* self = nullptr;
const std::function<void()>* body = nullptr;

[[noreturn]] void refuse(const char* what) {
  std::fprintf(stderr, "CUDA emulation: %s\n", what);
  std::abort();
}

void enter() {
  (*body)();
  self->state = kDone;
  swapcontext(&self->context, &scheduler);
}

void wait(State state) {
  Fiber* const me = self;
  me->state = state;
  swapcontext(&me->context, &scheduler);
}

void resume(Fiber& fiber) {
  self = &fiber;
  thread_index = fiber.index;
  swapcontext(&scheduler, &fiber.context);
}

std::vector<int> ordered(int count) {
  static const char* const order = std::getenv("SHARDZOO_EMULATION_ORDER");
  static const std::string name = order == nullptr ? "forward" : order;
  static std::mt19937 random(name == "forward" || name == "reversed" ? 0 : std::stoul(name));
  std::vector<int> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  if (name == "reversed") std::reverse(numbers.begin(), numbers.end());
  if (name != "forward" && name != "reversed") std::shuffle(numbers.begin(), numbers.end(), random);
  return numbers;
}

// Runs a warp until all its lanes wait for the block or are done.
void run_warp(int first, int lanes) {
  const auto count = [&](State state) {
    return std::count_if(fibers + first, fibers + first + lanes, [&](const Fiber& f) { return f.state == state; });
  };
  while (true) {
    for (const int lane : ordered(lanes)) {
      if (fibers[first + lane].state == kReady) resume(fibers[first + lane]);
    }
    if (count(kAtShuffle) == 0) return;
    if (count(kAtShuffle) != kWarp) refuse("a shuffle names lanes that do not reach it");
    for (int i = first; i < first + lanes; ++i) taken[i] = fibers[i].given, fibers[i].state = kReady;
  }
}

void run_block(int threads) {
  static char* const stacks = static_cast<char*>(mmap(nullptr, kStack * kMostThreads, PROT_READ | PROT_WRITE,
                                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.index = dim3(i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y);
    fiber.state = kReady;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + i * kStack;
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  while (true) {
    for (const int warp : ordered((threads + kWarp - 1) / kWarp)) {
      run_warp(warp * kWarp, std::min(kWarp, threads - warp * kWarp));
    }
    const auto done = std::count_if(fibers, fibers + threads, [](const Fiber& f) { return f.state == kDone; });
    if (done == threads) return;
    if (done != 0) refuse("some threads of a block ended while others wait at a barrier");
    for (int i = 0; i < threads; ++i) fibers[i].state = kReady;
  }
}

}  // namespace

void launch(dim3 grid, dim3 block, const std::function<void()>& kernel) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMostThreads) refuse("a block must have 1 to 1,024 threads");
  if (grid.x == 0 || grid.y == 0 || grid.x > 0x7FFFFFFF || grid.y > 65535) refuse("a grid's size is out of range");
  body = &kernel, block_size = block, grid_size = grid;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      block_index = dim3(x, y, 0);
      run_block(static_cast<int>(threads));
    }
  }
}

void block_barrier() { wait(kAtBarrier); }

uint64_t shuffle_xor(unsigned mask, uint64_t bits, int offset) {
  if (mask != 0xFFFFFFFFu) refuse("only shuffles of whole warps are emulated");
  const int64_t me = self - fibers;
  self->given = bits;
  wait(kAtShuffle);
  return taken[me ^ offset];
}

}  // namespace emulation

// The binding splits a CPU kernel's units among threads; the call with the first unit runs the whole CUDA kernel.
extern "C" int shardzoo_cpu_run(int kernel, int dtype, const void* parameters, int64_t begin, int64_t end) {
  if (kernel == shardzoo::kLinearForward) return native_cpu_run(kernel, dtype, parameters, begin, end);
  if (begin != 0) return 0;
  static std::mutex one;
  const std::lock_guard<std::mutex> lock(one);
  return shardzoo_cuda_run(kernel, dtype, parameters, nullptr);
}
