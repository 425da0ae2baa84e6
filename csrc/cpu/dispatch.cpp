// Chooses an instruction set once, when a kernel first runs, and calls the kernels that were compiled for it.
//
// The kernels are compiled once for each instruction set (build.py), in a namespace of its name: `shardzoo::v4` and so
// on.
#include <cstdlib>
#include <cstring>

#include "../kernels.h"

#if defined(SHARDZOO_X86) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace shardzoo {
namespace {

using Entry = void (*)(int dtype, const void* arguments, int64_t begin, int64_t end);

// Calls a kernel whose arguments have lost their type, because a table has entries of one type.
template <class Arguments, void (*kernel)(int, const Arguments&, int64_t, int64_t)>
void call(int dtype, const void* arguments, int64_t begin, int64_t end) {
  kernel(dtype, *static_cast<const Arguments*>(arguments), begin, end);
}

}  // namespace
}  // namespace shardzoo

// Declares the kernels of an instruction set, and lists them in the order of their numbers.
#define SHARDZOO_DECLARE(name, Arguments) void name(int dtype, const Arguments&, int64_t begin, int64_t end);
#define SHARDZOO_ENTRY(name, Arguments) call<Arguments, name>,
#define SHARDZOO_INSTRUCTION_SET(isa)                              \
  namespace shardzoo::isa {                                        \
  SHARDZOO_KERNELS(SHARDZOO_DECLARE)                               \
  constexpr Entry kEntries[] = {SHARDZOO_KERNELS(SHARDZOO_ENTRY)}; \
  }

SHARDZOO_INSTRUCTION_SET(baseline)
#ifdef SHARDZOO_X86
SHARDZOO_INSTRUCTION_SET(v3)
SHARDZOO_INSTRUCTION_SET(v4)
SHARDZOO_INSTRUCTION_SET(v4bf16)
#endif

namespace shardzoo {
namespace {

struct InstructionSet {
  const char* name;
  const Entry* entries;
};

constexpr InstructionSet kBaseline = {"baseline", baseline::kEntries};
#ifdef SHARDZOO_X86
constexpr InstructionSet kV3 = {"x86-64-v3", v3::kEntries};
constexpr InstructionSet kV4 = {"x86-64-v4", v4::kEntries};
constexpr InstructionSet kV4Bf16 = {"x86-64-v4+bf16", v4bf16::kEntries};
// AMX has the kernels of AVX512-BF16: where it makes a difference, they ask shardzoo_cpu_has_amx.
constexpr InstructionSet kV4Amx = {"x86-64-v4+amx", v4bf16::kEntries};
#endif

#ifdef SHARDZOO_X86
// Returns whether the processor multiplies tiles of bf16, and the system lets this process use their registers.
bool may_use_amx() {
#ifdef __linux__
  constexpr unsigned kAmxBf16 = 1u << 22;  // bits of edx in leaf 7
  constexpr unsigned kAmxTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023;  // arguments of arch_prctl
  constexpr long kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

const InstructionSet& choose() {
#ifdef SHARDZOO_X86
  __builtin_cpu_init();
  const bool has_v3 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool has_v4 = has_v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  const bool has_bf16 = has_v4 && __builtin_cpu_supports("avx512bf16");
  // SHARDZOO_CPU_ISA requests a lower instruction set, as tests do. One that the processor lacks is never used.
  const char* wanted = std::getenv("SHARDZOO_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  if (has_bf16 && (any || std::strcmp(wanted, kV4Amx.name) == 0) && may_use_amx()) return kV4Amx;
  if (has_bf16 && (any || std::strcmp(wanted, kV4Bf16.name) == 0)) return kV4Bf16;
  if (has_v4 && (any || std::strncmp(wanted, kV4.name, std::strlen(kV4.name)) == 0)) return kV4;
  if (has_v3 && (any || std::strcmp(wanted, kBaseline.name) != 0)) return kV3;
#endif
  return kBaseline;
}

const InstructionSet& chosen() {
  static const InstructionSet& set = choose();
  return set;
}

}  // namespace
}  // namespace shardzoo

extern "C" int shardzoo_cpu_run(int kernel, int dtype, const void* arguments, int64_t begin, int64_t end) {
  if (kernel < 0 || kernel >= shardzoo::kKernels) return -1;
  if (dtype < 0 || dtype >= shardzoo::kDTypes) return -1;
  shardzoo::chosen().entries[kernel](dtype, arguments, begin, end);
  return 0;
}

extern "C" const char* shardzoo_cpu_isa() { return shardzoo::chosen().name; }

extern "C" int shardzoo_cpu_has_amx() {
#ifdef SHARDZOO_X86
  return &shardzoo::chosen() == &shardzoo::kV4Amx;
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
