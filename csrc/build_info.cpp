// Reports what the kernel library was built with, for `shardzoo doctor`.
#include <string>

namespace {

#ifdef __clang__
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "gcc " __VERSION__;
#endif
#ifdef __x86_64__
constexpr const char* kCpu = "x86-64-v4+bf16 x86-64-v4 x86-64-v3 baseline";
#else
constexpr const char* kCpu = "baseline";
#endif

std::string torch_target() {
  const unsigned long long version = TORCH_TARGET_VERSION;
  return std::to_string(version >> 56) + "." + std::to_string((version >> 48) & 0xFF);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* shardzoo_build_info() {
  static const std::string info = std::string(kCompiler) + ", torch stable ABI " + torch_target() +
                                  "; machine code: CPU " + kCpu + ", CUDA " + SHARDZOO_CUDA_CODE;
  return info.c_str();
}
