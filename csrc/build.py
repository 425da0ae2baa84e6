"""Builds the compiled parts: the kernel library, and the libraries of data/ and mpu/.

None is a module of Python, so one build serves all its versions: the kernels use libtorch's stable ABI, and Python
calls the others by ctypes.

`setup.py` loads this file by its path. Run as a script, it builds into the checkout. A failed build does not make an
installation fail, unless the environment requires it:

    SHARDZOO_BUILD        auto (default): build what can be built; required: a failure is an error; skip: nothing
    SHARDZOO_CUDA         auto (default): with CUDA kernels if nvcc is found; 1: required; 0: without
    SHARDZOO_CUDA_ARCHS   compute capabilities, default "80;90"; later GPUs use the PTX of the last one
    CXX, NVCC             the compilers
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

CSRC = Path(__file__).resolve().parent
KERNELS = "shardzoo.ops._kernels"
TORCH_TARGET = "0x020b000000000000"  # the oldest torch whose stable ABI the library uses: 2.11
CPU_SOURCES = sorted(path.stem for path in (CSRC / "cpu").glob("*.cpp") if path.stem != "dispatch")
X86_FLAGS = {
    "v4bf16": ["-march=x86-64-v4", "-mavx512bf16"],
    "v4": ["-march=x86-64-v4"],
    "v3": ["-march=x86-64-v3"],
    "baseline": ["-march=x86-64"],
}
COMMON = ["-fPIC", "-Wall", "-Wextra", "-fvisibility=hidden"]
# Without -ffast-math, rounding happens as written. Contraction to FMA, errno and trapping do not change finite results.
CPU_FLAGS = [
    *(
        "-O3",
        "-std=c++17",
        "-Wno-psabi",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-ffp-contract=fast",
    ),
    "-fno-semantic-interposition",
]


class CannotBuild(Exception):
    """An extension cannot be built on this machine; the message is the reason, as one clause."""


def extensions() -> list[Extension]:
    """Returns the extensions to build: none under SHARDZOO_BUILD=skip."""
    if mode("SHARDZOO_BUILD", ("auto", "required", "skip")) == "skip":
        return []
    relative = [
        str(path.relative_to(CSRC.parent))
        for path in sorted(CSRC.rglob("*.[ch]*"))
        if path.is_file()
    ]
    libraries = [
        (room, path.stem)
        for room in ("data", "mpu")
        for path in sorted((CSRC / room).glob("*.cpp"))
    ]
    return [
        Extension(KERNELS, ["csrc/binding/ops.cpp"], depends=relative),
        *(
            Extension(f"shardzoo.{room}._{name}", [f"csrc/{room}/{name}.cpp"])
            for room, name in libraries
        ),
    ]


def mode(variable: str, values: tuple[str, ...]) -> str:
    """Returns the environment variable's value, by default the first of `values`. Raises ValueError for any other."""
    value = os.environ.get(variable) or values[0]
    if value not in values:
        raise ValueError(f"{variable} must be one of {', '.join(values)}; got {value!r}")
    return value


class BuildCompiled(build_ext):
    """Builds each extension separately. It omits an extension that fails, and prints one line with the reason."""

    def run(self) -> None:
        failures = []
        for extension in self.extensions:
            try:
                if without := self.build_one(extension):
                    failures.append(f"{extension.name}: {without}")
            except (CannotBuild, subprocess.CalledProcessError, OSError) as error:
                self.remove(extension)
                failures.append(f"{extension.name}: {describe(error)}")
        if failures and mode("SHARDZOO_BUILD", ("auto", "required", "skip")) == "required":
            raise SystemExit("SHARDZOO_BUILD=required, but:\n  " + "\n  ".join(failures))
        if failures:
            print(
                "shardzoo: installed without some compiled parts; PyTorch and Python code do their work.\n  "
                + "\n  ".join(failures),
                file=sys.stderr,
            )

    def build_one(self, extension: Extension) -> str | None:
        """Builds an extension. Returns None, or what it had to be built without, and why."""
        target = Path(self.target(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        objects = Path(self.build_temp).resolve() / extension.name
        objects.mkdir(parents=True, exist_ok=True)
        if extension.name == KERNELS:
            return build_kernels(objects, target)
        build_library(CSRC.parent / extension.sources[0], objects, target)
        return None

    def target(self, name: str) -> str:
        """Returns the path of a built extension: in the source folder for editable installations."""
        if not self.editable_mode and not self.inplace:
            return str(Path(self.build_lib) / self.get_ext_filename(name))
        self.inplace = True
        return self.get_ext_fullpath(name)

    def get_ext_filename(self, fullname: str) -> str:
        """Returns an extension's file name, without Python's version."""
        return str(Path(*fullname.split("."))) + ".so"

    def remove(self, extension: Extension) -> None:
        """Removes the library of an earlier build, so that it is not used in place of the failed build."""
        Path(self.target(extension.name)).unlink(missing_ok=True)

    def get_outputs(self) -> list[str]:
        targets = [self.target(extension.name) for extension in self.extensions]
        return [target for target in targets if Path(target).exists()]


def describe(error: Exception) -> str:
    """Returns the reason why a build failed, as one line."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines()
        first = next(
            (line for line in lines if "error" in line),
            lines[0] if lines else f"exit {error.returncode}",
        )
        return f"{Path(error.cmd[0]).name} failed: {first}"
    return str(error)


def compiler() -> list[str]:
    """Returns the command of the C++ compiler."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CannotBuild("there is no C++ compiler (g++, c++ or clang++) on PATH")


def torch_folder() -> Path:
    """Returns the folder of torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotBuild("torch is not installed where the build runs")
    return Path(spec.origin).parent


def find_nvcc() -> str | None:
    """Returns the CUDA compiler, or None if CUDA kernels are not to be built."""
    choice = mode("SHARDZOO_CUDA", ("auto", "0", "1"))
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if choice == "1" and nvcc is None:
        raise CannotBuild("SHARDZOO_CUDA=1, but there is no nvcc (set NVCC or CUDA_HOME)")
    return None if choice == "0" else nvcc


def run_all(jobs: list[tuple[Path, Path, list[str]]]) -> None:
    """Runs compile commands (source, object, command) in parallel. Skips objects that are newer than every source."""
    newest = max(path.stat().st_mtime for path in CSRC.rglob("*") if path.is_file())
    stale = [job for job in jobs if not job[1].exists() or job[1].stat().st_mtime < newest]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(run, command) for _, _, command in stale]:
            done.result()


def run(command: list[str]) -> None:
    """Runs a compiler and prints its warnings. Raises CalledProcessError with its output."""
    result = subprocess.run(command, capture_output=True, text=True)
    sys.stderr.write(result.stderr)
    result.check_returncode()


def cpu_jobs(cxx: list[str], objects: Path) -> list[tuple[Path, Path, list[str]]]:
    """Returns the compile commands of the CPU kernels, once per instruction set."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    clang = "clang" in Path(cxx[0]).name
    jobs = []
    for isa, march in X86_FLAGS.items() if x86 else (("baseline", []),):
        width = ["-mprefer-vector-width=512"] if isa.startswith("v4") else []
        flags = [*COMMON, *CPU_FLAGS, *width, *march, f"-DSHARDZOO_ISA={isa}"]
        for name in CPU_SOURCES:
            source, target = CSRC / "cpu" / f"{name}.cpp", objects / f"{name}.{isa}.o"
            jobs.append((source, target, [*cxx, *flags, "-c", str(source), "-o", str(target)]))
    source, target = CSRC / "cpu" / "dispatch.cpp", objects / "dispatch.o"
    defines = ["-DSHARDZOO_X86"] if x86 else []
    jobs.append(
        (
            source,
            target,
            [*cxx, *COMMON, "-O2", "-std=c++17", *defines, "-c", str(source), "-o", str(target)],
        )
    )
    return [
        (s, t, [flag for flag in c if not (clang and flag == "-Wno-psabi")]) for s, t, c in jobs
    ]


def cuda_architectures() -> list[str]:
    """Returns nvcc's -gencode flags: machine code for each capability, and PTX of the last one for later GPUs."""
    capabilities = (os.environ.get("SHARDZOO_CUDA_ARCHS") or "80;90").split(";")
    flags = [f"-gencode=arch=compute_{c},code=sm_{c}" for c in capabilities]
    return [*flags, f"-gencode=arch=compute_{capabilities[-1]},code=compute_{capabilities[-1]}"]


def cuda_jobs(nvcc: str, cxx: list[str], objects: Path) -> list[tuple[Path, Path, list[str]]]:
    """Returns the compile commands of the CUDA kernels."""
    flags = ["-O3", "-std=c++17", "-ccbin", cxx[0], "-Xcompiler=-fPIC,-fvisibility=hidden"]
    flags += cuda_architectures()
    sources = sorted((CSRC / "cuda").glob("*.cu"))
    pairs = [(source, objects / f"{source.stem}.cuda.o") for source in sources]
    return [(s, t, [nvcc, *flags, "-c", str(s), "-o", str(t)]) for s, t in pairs]


def binding_jobs(
    cxx: list[str], objects: Path, torch: Path, cuda: bool
) -> list[tuple[Path, Path, list[str]]]:
    """Returns the compile commands of the binding to torch, which uses its stable ABI, and of the build information."""
    include = ["-isystem", str(torch / "include")]
    machine_code = (
        " ".join(flag.split("=")[-1] for flag in cuda_architectures()) if cuda else "none"
    )
    defines = [
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
        *(["-DSHARDZOO_WITH_CUDA", "-DUSE_CUDA"] if cuda else []),
    ]
    defines += [f'-DSHARDZOO_CUDA_CODE="{machine_code}"']
    jobs = []
    for source in (CSRC / "build_info.cpp", *sorted((CSRC / "binding").glob("*.cpp"))):
        target = objects / f"{source.stem}.{'cuda' if cuda else 'cpu'}.binding.o"
        command = [
            *cxx,
            *COMMON,
            "-O2",
            "-std=c++20",
            *defines,
            *include,
            "-c",
            str(source),
            "-o",
            str(target),
        ]
        jobs.append((source, target, command))
    return jobs


def build_kernels(objects: Path, target: Path) -> str | None:
    """Builds the kernel library, without CUDA kernels if nvcc fails, e.g. because the host compiler is too new for it.

    Returns None, or nvcc's error.
    """
    nvcc = find_nvcc()
    try:
        link_kernels(objects, target, nvcc)
    except (subprocess.CalledProcessError, OSError) as error:
        if nvcc is None or os.environ.get("SHARDZOO_CUDA") == "1":
            raise
        link_kernels(objects, target, None)
        return f"without CUDA kernels: {describe(error)}"
    return None


def link_kernels(objects: Path, target: Path, nvcc: str | None) -> None:
    """Compiles and links the kernel library, with CUDA kernels if `nvcc` is not None."""
    cxx, torch = compiler(), torch_folder()
    jobs = [*binding_jobs(cxx, objects, torch, nvcc is not None), *cpu_jobs(cxx, objects)]
    link = ["-L" + str(torch / "lib"), "-ltorch_cpu", "-ldl"]
    linker = cxx
    if nvcc is not None:
        jobs = [*cuda_jobs(nvcc, cxx, objects), *jobs]
        # nvcc finds its runtime, which is linked statically, so that the library also loads without CUDA.
        linker = [nvcc, "-ccbin", cxx[0], "-cudart", "static"]
    run_all(jobs)
    run([*linker, "-shared", "-o", str(target), *(str(job[1]) for job in jobs), *link])


def build_library(source: Path, objects: Path, target: Path) -> None:
    """Compiles a library of one source."""
    cxx = compiler()
    output = objects / f"{source.stem}.o"
    run([*cxx, *COMMON, "-O2", "-std=c++17", "-c", str(source), "-o", str(output)])
    run([*cxx, "-shared", "-o", str(target), str(output)])


def build_in_place() -> None:
    """Builds into the checkout.

    Unlike `setup.py build_ext --inplace` it does not read pyproject.toml, which setuptools before 77 refuses.
    """
    distribution = Distribution({"package_dir": {"shardzoo": "."}, "ext_modules": extensions()})
    distribution.cmdclass["build_ext"] = BuildCompiled
    command = distribution.get_command_obj("build_ext")
    command.inplace = True
    command.ensure_finalized()
    command.run()


if __name__ == "__main__":
    os.chdir(CSRC.parent)
    build_in_place()
