"""Builds the compiled parts by setuptools, torch.utils.cpp_extension and ninja.

`ops/_kernels.so` holds the kernels. It uses libtorch's stable ABI and nothing of Python, so that
one build serves every torch from 2.11 on and every Python. Its sources are compiled in groups:

    binding         the operators of torch.ops.shardzoo_kernels: csrc/binding, csrc/matmul
    dispatch        the choice of an instruction set
    v4bf16, v4, ... the kernels of the CPU, once for each instruction set: csrc/cpu,
                    csrc/matmul/kernels
    cuda            the kernels of CUDA, by nvcc: csrc/cuda

`data/_index` and `mpu/_shared_memory` are pybind11 modules, one for each version of Python.

ninja compiles in parallel, and again only what depends on a changed file. `setup.py` loads this
file by its path. Run as a script, it builds into the checkout. A failed build does not make an
installation fail, unless that is required:

    SHARDZOO_BUILD        auto (default): build what can be built; required: a failure is an
                          error; skip: nothing
    SHARDZOO_CUDA         auto (default): with CUDA kernels if nvcc is found; 1: required;
                          0: without
    SHARDZOO_CUDA_ARCHS   compute capabilities, default "80;90"; later GPUs use the PTX of the
                          last one
    CXX, NVCC             the compilers
    MAX_JOBS              how many files are compiled at a time
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError

try:
    from torch.utils.cpp_extension import BuildExtension
except ImportError:  # only the helpers can be built, by setuptools alone
    BuildExtension = build_ext

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
KERNELS = "shardzoo.ops._kernels"
HELPERS = {
    "shardzoo.data._index": "csrc/data/index.cpp",
    "shardzoo.mpu._shared_memory": "csrc/mpu/shared_memory.cpp",
}
BUILD_MODES = ("auto", "required", "skip")
TORCH_TARGET = "0x020b000000000000"  # the oldest torch whose stable ABI the library uses: 2.11
X86_FLAGS = {
    "v4bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"],
    "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "v3": ["-march=x86-64-v3"],
    "baseline": ["-march=x86-64"],
}
COMMON_FLAGS = ["-fPIC", "-Wall", "-Wextra", "-fvisibility=hidden"]
# Without -ffast-math, rounding happens as written. Contraction to FMA, errno and trapping do not
# change finite results.
CPU_FLAGS = [
    "-O3",
    "-std=c++17",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-semantic-interposition",
]


class CannotBuild(Exception):
    """An extension cannot be built on this machine; the message is the reason, as one clause."""


# What a failed build of an extension raises.
FAILURES = (CannotBuild, subprocess.CalledProcessError, BaseError, RuntimeError, OSError)


class Group(NamedTuple):
    """Sources that are compiled by one command.

    Args:
        name: The folder of their object files, below that of the extension.
        sources: Paths from the root of the checkout.
        flags: The compiler's, or nvcc's for sources that end in .cu.
    """

    name: str
    sources: list[str]
    flags: list[str]


# What is built, and by which compilers.


def extensions() -> list[Extension]:
    """Returns the extensions to build: none under SHARDZOO_BUILD=skip."""
    if read_mode("SHARDZOO_BUILD", BUILD_MODES) == "skip":
        return []
    depends = [
        str(path.relative_to(ROOT)) for path in sorted(CSRC.rglob("*.[ch]*")) if path.is_file()
    ]
    kernels = Extension(KERNELS, list_sources("binding/*.cpp"), depends=depends, optional=True)
    helpers = [Extension(name, [source], optional=True) for name, source in HELPERS.items()]
    return [kernels, *helpers]


def read_mode(variable: str, values: tuple[str, ...]) -> str:
    """Returns an environment variable, by default the first of `values`.

    Raises:
        ValueError: It has another value.
    """
    value = os.environ.get(variable) or values[0]
    if value not in values:
        raise ValueError(f"{variable} must be one of {', '.join(values)}; got {value!r}")
    return value


def find_compiler() -> list[str]:
    """Returns the command of the C++ compiler. Raises CannotBuild if there is none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CannotBuild("there is no C++ compiler (g++, c++ or clang++) on PATH")


def find_nvcc() -> str | None:
    """Returns the CUDA compiler, or None if CUDA kernels are not to be built."""
    choice = read_mode("SHARDZOO_CUDA", ("auto", "0", "1"))
    if choice == "0":
        return None
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if choice == "1" and nvcc is None:
        raise CannotBuild("SHARDZOO_CUDA=1, but there is no nvcc (set NVCC or CUDA_HOME)")
    return nvcc


def find_torch() -> Path:
    """Returns the folder of torch. Raises CannotBuild if it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotBuild("torch is not installed where the build runs")
    return Path(spec.origin).parent


# The groups of the kernel library.


def list_sources(*patterns: str) -> list[str]:
    """Returns the files of csrc/ that match, as paths from the root of the checkout."""
    found = [path for pattern in patterns for path in sorted(CSRC.glob(pattern))]
    return [str(path.relative_to(ROOT)) for path in found]


def group_binding(nvcc: str | None) -> Group:
    """Returns the binding to torch and the build's information, with CUDA kernels or without."""
    flags = [*COMMON_FLAGS, "-O2", "-std=c++20", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    flags += ["-isystem", str(find_torch() / "include")]
    machine_code = "none"
    if nvcc is not None:
        flags += ["-DSHARDZOO_WITH_CUDA", "-DUSE_CUDA"]
        machine_code = " ".join(flag.split("=")[-1] for flag in list_cuda_targets())
    flags.append(f'-DSHARDZOO_CUDA_CODE="{machine_code}"')
    return Group("binding", list_sources("build_info.cpp", "binding/*.cpp", "matmul/*.cpp"), flags)


def group_cpu_kernels() -> list[Group]:
    """Returns the CPU's kernels once for each instruction set, and the choice between them."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    defines = ["-DSHARDZOO_X86"] if is_x86 else []
    flags = [*COMMON_FLAGS, "-O2", "-std=c++17", *defines]
    groups = [Group("dispatch", list_sources("cpu/dispatch.cpp"), flags)]
    kernels = list_sources("cpu/*.cpp", "matmul/kernels/*.cpp")
    kernels.remove("csrc/cpu/dispatch.cpp")
    is_clang = "clang" in Path(find_compiler()[0]).name
    # GCC warns that other flags would pass vectors in another way; ours never leave their file.
    quiet = [] if is_clang else ["-Wno-psabi"]
    for isa, march in X86_FLAGS.items() if is_x86 else [("baseline", [])]:
        flags = [*COMMON_FLAGS, *quiet, *CPU_FLAGS, *march, f"-DSHARDZOO_ISA={isa}"]
        groups.append(Group(isa, kernels, flags))
    return groups


def list_cuda_targets() -> list[str]:
    """Returns nvcc's -gencode flags.

    They ask for machine code for each capability, and for PTX of the last one for later GPUs.
    """
    capabilities = (os.environ.get("SHARDZOO_CUDA_ARCHS") or "80;90").split(";")
    flags = [f"-gencode=arch=compute_{c},code=sm_{c}" for c in capabilities]
    return [*flags, f"-gencode=arch=compute_{capabilities[-1]},code=compute_{capabilities[-1]}"]


def group_cuda_kernels() -> Group:
    """Returns the kernels of CUDA."""
    flags = [
        "-O3",
        "-std=c++17",
        "-ccbin",
        find_compiler()[0],
        "-Xcompiler=-fPIC,-fvisibility=hidden",
    ]
    # torch lets ninja follow the headers of CUDA sources only where torch itself is a build for
    # CUDA. A digest of the headers in the command makes ninja notice their changes everywhere.
    headers = [CSRC / "kernels.h", CSRC / "hash.h", *sorted((CSRC / "cuda").glob("*.cuh"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in headers)).hexdigest()[:16]
    flags += [*list_cuda_targets(), f"-DSHARDZOO_HEADERS={digest}"]
    return Group("cuda", list_sources("cuda/*.cu"), flags)


def list_pybind11_includes() -> list[str]:
    """Returns flags for the headers of pybind11, which torch ships too, and of Python."""
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11

        folder = pybind11.get_include()
    else:
        folder = str(find_torch() / "include")
    return ["-isystem", folder, "-isystem", sysconfig.get_paths()["include"]]


# The build.


class BuildCompiled(BuildExtension):
    """Builds each extension by itself. It leaves out one that fails, and prints why in one line."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # The program of the ninja package is on PATH only where its environment is active.
        os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], sysconfig.get_path("scripts")])
        # torch would check the compiler's C++ ABI, on which neither its stable ABI nor the helpers
        # depend.
        os.environ["TORCH_DONT_CHECK_COMPILER_ABI"] = "1"
        self.missing: list[str] = []  # extensions
        self.failures: list[str] = []  # the reasons, one line each
        super().__init__(*arguments, **options)

    def run(self) -> None:
        super().run()
        if not self.failures:
            return
        if self.inplace:  # what an earlier build made must not be used in place of what failed
            for name in self.missing:
                Path(self.get_ext_fullpath(name)).unlink(missing_ok=True)
        reasons = "\n  ".join(self.failures)
        if read_mode("SHARDZOO_BUILD", BUILD_MODES) == "required":
            raise SystemExit(f"SHARDZOO_BUILD=required, but:\n  {reasons}")
        print(
            "shardzoo: installed without some compiled parts; "
            f"PyTorch and Python code do their work.\n  {reasons}",
            file=sys.stderr,
        )

    def build_extension(self, extension: Extension) -> None:
        """Builds an extension in the build's folder; setuptools copies it into a checkout."""
        Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
        try:
            self.prepare_compiler()
            if extension.name == KERNELS:
                self.build_kernels(extension)
            else:
                self.build_helper(extension)
        except FAILURES as error:
            self.missing.append(extension.name)
            self.failures.append(f"{extension.name}: {describe(error)}")

    def prepare_compiler(self) -> None:
        """Chooses the C++ compiler, without the flags that Python was built with."""
        compiler = find_compiler()
        os.environ["CXX"] = shlex.join(compiler)  # which torch asks
        for executable in ("compiler_so", "compiler_so_cxx", "compiler_cxx"):
            if executable in self.compiler.executables:
                self.compiler.set_executables(**{executable: compiler})
        self.compiler.set_include_dirs([])

    def build_kernels(self, extension: Extension) -> None:
        """Builds the kernel library, without CUDA kernels if nvcc fails.

        One reason for nvcc to fail is a C++ compiler that is too new for it.
        """
        find_torch()
        nvcc = find_nvcc()
        try:
            self.compile_and_link_kernels(extension, nvcc)
        except FAILURES as error:
            if nvcc is None or os.environ.get("SHARDZOO_CUDA") == "1":
                raise
            self.compile_and_link_kernels(extension, None)
            self.failures.append(f"{extension.name}: without CUDA kernels: {describe(error)}")

    def compile_and_link_kernels(self, extension: Extension, nvcc: str | None) -> None:
        """Builds the kernel library, with CUDA kernels if `nvcc` is not None."""
        groups = [group_binding(nvcc), *group_cpu_kernels()]
        linker = find_compiler()
        if nvcc is not None:
            os.environ["PYTORCH_NVCC"] = nvcc  # which torch asks
            groups.insert(0, group_cuda_kernels())
            # nvcc finds its runtime, which is linked statically so that the library also loads
            # where there is no CUDA.
            linker = [nvcc, "-ccbin", linker[0], "-cudart", "static"]
        objects = [file for group in groups for file in self.compile_group(extension, group)]
        libraries = [f"-L{find_torch() / 'lib'}", "-ltorch_cpu", "-ldl"]
        self.link(extension, linker, objects, libraries)

    def build_helper(self, extension: Extension) -> None:
        """Builds a pybind11 module."""
        flags = [*COMMON_FLAGS, "-O2", "-std=c++17", *list_pybind11_includes()]
        objects = self.compile_group(extension, Group("module", extension.sources, flags))
        self.link(extension, find_compiler(), objects, [])

    def compile_group(self, extension: Extension, group: Group) -> list[str]:
        """Compiles what has changed. Returns the paths of all object files.

        Raises:
            CannotBuild: A compiler failed; the message is its first error.
        """
        folder = Path(self.build_temp).resolve() / extension.name / group.name
        try:
            return self.compiler.compile(
                group.sources, output_dir=str(folder), extra_postargs=list(group.flags)
            )
        except (RuntimeError, BaseError) as error:
            # ninja has shown the compiler's message; the file that failed gives it once more.
            again = subprocess.run(["ninja"], cwd=folder, capture_output=True, text=True)
            lines = [line for line in again.stdout.splitlines() if re.search(r"\berror\b:", line)]
            tool = Path(os.environ["PYTORCH_NVCC"] if group.name == "cuda" else find_compiler()[0])
            raise CannotBuild(f"{tool.name} failed: {lines[0] if lines else error}") from error

    def link(
        self, extension: Extension, linker: list[str], objects: Iterable[str], libraries: list[str]
    ) -> None:
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [*linker, "-shared", "-o", str(target), *objects, *libraries]
        print(shlex.join(command), flush=True)
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        sys.stderr.write(done.stderr)
        done.check_returncode()

    def get_ext_filename(self, fullname: str) -> str:
        """Returns the file of an extension, which for the kernels names no version of Python."""
        if fullname.split(".")[-1] == KERNELS.split(".")[-1]:
            return str(Path(*fullname.split("."))) + ".so"
        return super().get_ext_filename(fullname)

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


def describe(error: Exception) -> str:
    """Returns the reason why a build failed, as one line."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    lines = (error.stderr or "").strip().splitlines() or [f"exit {error.returncode}"]
    first = next((line for line in lines if "error" in line), lines[0])
    return f"{Path(error.cmd[0]).name} failed: {first}"


def build_in_place() -> None:
    """Builds into the checkout.

    Unlike `setup.py build_ext --inplace` it does not read pyproject.toml, which setuptools before
    77 refuses.
    """
    packages = sorted({extension.name.rpartition(".")[0] for extension in extensions()})
    distribution = Distribution(
        {"package_dir": {"shardzoo": "."}, "packages": packages, "ext_modules": extensions()}
    )
    distribution.cmdclass["build_ext"] = BuildCompiled
    command = distribution.get_command_obj("build_ext")
    command.inplace = True
    command.ensure_finalized()
    command.run()


if __name__ == "__main__":
    os.chdir(ROOT)
    build_in_place()
