// Runs the threads of a block as fibers. In the chosen order, each warp runs as far as barriers allow before the next
// warp starts, so that a missing barrier gives wrong numbers. SHARDZOO_EMULATION_ORDER: forward, reversed or a seed;
// it orders the blocks, the warps of a block between two barriers, and the lanes of a warp between two shuffles.
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "cuda_runtime.h"

namespace emulation {

dim3 thread_index, block_index, block_size, grid_size;

namespace {

constexpr size_t kStack = 1 << 17;
constexpr int kMostThreads = 1024, kWarp = 32;

enum State { kReady, kAtBarrier, kAtShuffle, kDone };

// A place to continue. swapcontext makes two system calls, so only a fiber's first start uses it, and jumps do the rest;
// AddressSanitizer knows stacks by swapcontext alone.
struct Place {
  ucontext_t context;
#ifndef __SANITIZE_ADDRESS__
  jmp_buf registers;
#endif
};

struct Fiber {
  Place place;
  bool started;
  dim3 index;
  State state;
  uint64_t given;
};

Place scheduler;
Fiber fibers[kMostThreads];
uint64_t taken[kMostThreads];  // what the lanes gave to the last complete shuffle of their warp
Fiber* self = nullptr;
const std::function<void()>* body = nullptr;
std::vector<void*> shared;  // the block's shared variables

[[noreturn]] void refuse(const char* what) {
  std::fprintf(stderr, "CUDA emulation: %s\n", what);
  std::abort();
}

void leave(Place& from, Place& to, bool start) {
#ifdef __SANITIZE_ADDRESS__
  swapcontext(&from.context, &to.context);
#else
  if (_setjmp(from.registers) != 0) return;
  if (start) setcontext(&to.context);
  _longjmp(to.registers, 1);
#endif
}

void wait(State state) {
  Fiber* const me = self;
  me->state = state;
  leave(me->place, scheduler, false);
}

void enter() {
  (*body)();
  wait(kDone);
}

void resume(Fiber& fiber) {
  self = &fiber;
  thread_index = fiber.index;
  leave(scheduler, fiber.place, !std::exchange(fiber.started, true));
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
  ucontext_t blank;
  getcontext(&blank);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.index = dim3(i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y);
    fiber.state = kReady;
    fiber.started = false;
    ucontext_t& context = fiber.place.context;
    context = blank;
    context.uc_stack.ss_sp = stacks + i * kStack;
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
  }
  shared.clear();
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
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7FFFFFFF || grid.y > 65535 || grid.z > 65535) refuse("a grid's size is out of range");
  body = &kernel, block_size = block, grid_size = grid;
  for (const unsigned z : ordered(static_cast<int>(grid.z))) {
    for (const unsigned y : ordered(static_cast<int>(grid.y))) {
      for (const unsigned x : ordered(static_cast<int>(grid.x))) {
        block_index = dim3(x, y, z);
        run_block(static_cast<int>(threads));
      }
    }
  }
}

void block_barrier() { wait(kAtBarrier); }

void begin_shared(void* start, size_t bytes) {
  if (std::find(shared.begin(), shared.end(), start) != shared.end()) return;
  shared.push_back(start);
  std::memset(start, 0xFF, bytes);
}

void check_bounds(unsigned most_threads) {
  if (block_size.x * block_size.y * block_size.z > most_threads) refuse("a block exceeds the kernel's launch bounds");
}

uint64_t shuffle_xor(unsigned mask, uint64_t bits, int offset) {
  if (mask != 0xFFFFFFFFu) refuse("only shuffles of whole warps are emulated");
  const int64_t me = self - fibers;
  self->given = bits;
  wait(kAtShuffle);
  return taken[me ^ offset];
}

}  // namespace emulation

// The binding splits a CPU kernel's units among threads; the call with the first unit runs the whole CUDA kernel.
extern "C" int shardzoo_cpu_run(int kernel, int dtype, const void* parameters, int64_t begin, int64_t) {
  if (begin != 0) return 0;
  static std::mutex one;
  const std::lock_guard<std::mutex> lock(one);
  if (shardzoo_cuda_run(kernel, dtype, parameters, nullptr) != 0) emulation::refuse("there is no such kernel");
  return 0;
}
extern "C" const char* shardzoo_cpu_isa() { return "CUDA emulation"; }
extern "C" int shardzoo_cpu_is_amd() { return 0; }

// By this symbol shardzoo.ops knows the build.
extern "C" SHARDZOO_EXPORT int shardzoo_emulates_cuda() { return 1; }
