// Reports what the compiled parts were built with, for `shardzoo doctor`.
#include <pybind11/pybind11.h>

#include <string>

namespace {

std::string compiler() {
#ifdef __clang__
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

std::string torch_target() {
  const unsigned long long version = TORCH_TARGET_VERSION;
  return std::to_string(version >> 56) + "." + std::to_string((version >> 48) & 0xFF);
}

}  // namespace

PYBIND11_MODULE(_build_info, m) {
  m.attr("compiler") = compiler();
  m.attr("cuda_code") = SHARDZOO_CUDA_CODE;
  m.attr("torch_stable_abi") = torch_target();
#ifdef __x86_64__
  m.attr("cpu_instruction_sets") = "x86-64-v4+bf16 x86-64-v4 x86-64-v3 baseline";
#else
  m.attr("cpu_instruction_sets") = "baseline";
#endif
}
