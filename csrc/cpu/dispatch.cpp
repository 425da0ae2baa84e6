// Picks the instruction set once, when the library is loaded, and runs kernels by number.
#include <cstdlib>
#include <cstring>

#include "../kernels.h"

#if defined(SHARDZOO_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

using Entry = void (*)(int dtype, const void* parameters, int64_t begin, int64_t end);

#define SHARDZOO_EACH_KERNEL(isa)                                                              \
  X(softmax_forward, isa)                                                                      \
  X(softmax_backward, isa)                                                                     \
  X(norm_forward, isa) X(norm_backward, isa) X(column_sum, isa) X(gelu_forward, isa)           \
  X(gelu_backward, isa) X(glu_forward, isa) X(glu_backward, isa) X(dropout_forward, isa)       \
  X(dropout_backward, isa) X(cross_entropy_stats, isa) X(cross_entropy_grad, isa)              \
  X(linear_forward, isa) X(matrix_product, isa)                                                \
  X(attention_forward, isa) X(attention_backward, isa) X(square_sums, isa) X(adamw, isa)

#define X(name, isa) extern "C" void shardzoo_##name##_##isa(int, const void*, int64_t, int64_t);
SHARDZOO_EACH_KERNEL(baseline)
#ifdef SHARDZOO_X86
SHARDZOO_EACH_KERNEL(v3)
SHARDZOO_EACH_KERNEL(v4)
SHARDZOO_EACH_KERNEL(v4bf16)
#endif
#undef X

namespace {

struct Isa {
  const char* name;
  Entry entries[shardzoo::kKernels];  // in the order of the enumeration Kernel
};

#define X(name, isa) shardzoo_##name##_##isa,
constexpr Isa kBaseline = {"baseline", {SHARDZOO_EACH_KERNEL(baseline)}};
#ifdef SHARDZOO_X86
constexpr Isa kV3 = {"x86-64-v3", {SHARDZOO_EACH_KERNEL(v3)}};
constexpr Isa kV4 = {"x86-64-v4", {SHARDZOO_EACH_KERNEL(v4)}};
constexpr Isa kV4Bf16 = {"x86-64-v4+bf16", {SHARDZOO_EACH_KERNEL(v4bf16)}};
constexpr Isa kV4Amx = {"x86-64-v4+amx", {SHARDZOO_EACH_KERNEL(v4bf16)}};  // asks shardzoo_cpu_has_amx where it differs
#endif
#undef X

// Whether the processor multiplies tiles of bf16, and the system lets this process use their registers.
bool may_use_amx() {
#if defined(SHARDZOO_X86) && defined(__linux__)
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // of edx, leaf 7
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl's
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

const Isa& choose() {
#ifdef SHARDZOO_X86
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512cd");
  // A lower instruction set can be requested, as tests do; one that the processor lacks is never used.
  const char* wanted = std::getenv("SHARDZOO_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  const bool bf16 = v4 && __builtin_cpu_supports("avx512bf16");
  if (bf16 && (any || std::strcmp(wanted, kV4Amx.name) == 0) && may_use_amx()) return kV4Amx;
  if (bf16 && (any || std::strcmp(wanted, kV4Bf16.name) == 0)) return kV4Bf16;
  if (v4 && (any || std::strncmp(wanted, kV4.name, std::strlen(kV4.name)) == 0)) return kV4;
  if (v3 && (any || std::strcmp(wanted, kBaseline.name) != 0)) return kV3;
#endif
  return kBaseline;
}

const Isa& chosen() {
  static const Isa& isa = choose();
  return isa;
}

}  // namespace

extern "C" int shardzoo_cpu_run(int kernel, int dtype, const void* parameters, int64_t begin, int64_t end) {
  if (kernel < 0 || kernel >= shardzoo::kKernels || dtype < 0 || dtype >= shardzoo::kDTypes) return -1;
  chosen().entries[kernel](dtype, parameters, begin, end);
  return 0;
}

extern "C" const char* shardzoo_cpu_isa() { return chosen().name; }

extern "C" int shardzoo_cpu_has_amx() {
#ifdef SHARDZOO_X86
  return &chosen() == &kV4Amx;
#else
  return 0;
#endif
}

extern "C" int shardzoo_cpu_is_amd() {
#ifdef SHARDZOO_X86
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") != 0;
#else
  return 0;
#endif
}
