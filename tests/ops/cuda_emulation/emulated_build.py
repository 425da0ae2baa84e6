"""Builds a kernel library whose CPU entries are the CUDA kernels, run by fibers.

    python tests/ops/cuda_emulation/emulated_build.py FOLDER            # prints the path of the library
    python tests/ops/cuda_emulation/emulated_build.py FOLDER --sanitize # with AddressSanitizer as well as UBSan

A library and each object file are named by a hash of what they are made of, so that only what changed is compiled.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
sys.path.insert(0, str(CSRC))
import build as library  # noqa: E402

UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
SANITIZERS = ("-g1", "-fsanitize=address")
LAUNCH = re.compile(r"([\w<>]+?)<<<(.+), (dim3\(.*?\)|[\w.]+), 0, stream>>>\((.*?)\);")
SHARED = re.compile(r"__shared__ ([^;\[]+? (\w+)(?:\[\w+\])+);")
BOUNDS = re.compile(r"__global__ void __launch_bounds__\(([^,()]+)(?:, \w+)?\) (\w+\([^)]*\) \{)")
PTX = {
    re.compile(r'asm\("ex2\.approx\.ftz\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\((\w+)\)\);'): (
        r"\1 = emulation::flush(std::exp2(\2));"
    ),
    re.compile(r'asm\("rcp\.approx\.ftz\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\((\w+)\)\);'): (
        r"\1 = emulation::flush(1.0f / \2);"
    ),
    re.compile(
        r'asm volatile\("st\.global\.v4\.u32 [^;]*;" ::"l"\((\w+)\), "r"\((\w+)\.x\)[^;]*;'
    ): (r"*static_cast<uint4*>(\1) = \2;"),
}


def rewrite(text: str) -> str:
    """Returns a CUDA source as C++: with launches, shared memory, launch bounds and PTX by the emulator.

    Raises:
        ValueError: One of them is written in a way that the emulation does not know.
    """
    text = LAUNCH.sub(r"emulation::launch(\2, \3, [&] { \1(\4); });", text)
    text = SHARED.sub(r"static \1; emulation::begin_shared(\2, sizeof(\2));", text)
    text = BOUNDS.sub(r"void \2 emulation::check_bounds(\1);", text)
    for instruction, code in PTX.items():
        text = instruction.sub(code, text)
    if left := re.search(r"<<<|__shared__|__global__|__launch_bounds__|\basm\b", text):
        raise ValueError(
            f"the emulation of CUDA does not know how to rewrite {text[left.start() :][:80]!r}"
        )
    return text.replace('#include "../', f'#include "{CSRC}/')


def sources(changed: dict[str, str]) -> dict[str, str]:
    """Returns the CUDA sources by name, rewritten; `changed` has those that replace a file of csrc/cuda."""
    found = {path.name: path.read_text() for path in sorted((CSRC / "cuda").glob("*.cu*"))}
    return {name: rewrite(text) for name, text in {**found, **changed}.items()}


def jobs(
    folder: Path, changed: dict[str, str], flags: tuple[str, ...]
) -> list[tuple[Path, list[str]]]:
    """Returns (object, its command) of every part. Sources lie in folders named by their hash, below `folder`."""
    cxx = library.find_compiler()
    texts = sources(changed)
    headers = "".join(
        path.read_text()
        for path in [*sorted(HERE.glob("*.h")), CSRC / "kernels.h", CSRC / "hash.h"]
    )
    headers += "".join(text for name, text in texts.items() if name.endswith(".cuh"))
    common = [*cxx, "-fPIC", "-std=c++17", "-O1", "-w", *UNDEFINED, *flags, "-I", str(HERE)]
    made = []
    for name, text in [*texts.items(), ("emulator.cpp", (HERE / "emulator.cpp").read_text())]:
        if name.endswith(".cuh"):
            continue
        place = folder / hashlib.sha256(repr((text, headers, common)).encode()).hexdigest()[:16]
        place.mkdir(parents=True, exist_ok=True)
        for other in [name, *(header for header in texts if header.endswith(".cuh"))]:
            (place / other).write_text(text if other == name else texts[other])
        command = [*common, "-I", str(CSRC), "-x", "c++", "-c", str(place / name), "-o"]
        made.append((place / f"{name}.o", command))
    torch = library.find_torch()
    version = (torch / "version.py").read_text()
    binding = library.group_binding(None)
    folders = [CSRC / "binding", CSRC / "matmul"]
    binding_headers = "".join(path.read_text() for place in folders for path in place.glob("*.h"))
    flags_of_binding = ["-O0" if flag == "-O2" else flag for flag in binding.flags]
    for source in (library.ROOT / name for name in binding.sources):
        command = [*cxx, *flags_of_binding, "-c", str(source), "-o"]
        text = source.read_text() + binding_headers + (CSRC / "kernels.h").read_text()
        digest = hashlib.sha256(repr((text, version, command)).encode()).hexdigest()[:16]
        made.append((folder / f"{digest}.o", command))
    return made


def make(job: tuple[Path, list[str]]) -> None:
    """Runs a command whose last argument is to be its output, unless the output exists. Safe among processes."""
    target, command = job
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}.part")
        subprocess.run([*command, str(part)], check=True)
        part.replace(target)


def build(
    folder: Path,
    *,
    sanitize: bool = False,
    changed: dict[str, str] | None = None,
    only: str | None = None,
) -> Path:
    """Returns the library below `folder`, built if what it is made of has changed.

    Args:
        changed: Texts that replace files of csrc/cuda, by name.
        only: The source that sees them; the others stay as they are. It is linked first, so that of the templates that
            several sources instantiate, the changed ones are taken.

    Raises:
        build.CannotBuild: There is no C++ compiler.
        subprocess.CalledProcessError: The compiler failed.
    """
    flags = SANITIZERS if sanitize else ()
    parts = jobs(folder.resolve(), changed or {}, flags)
    if only is not None:
        seen = [job for job in parts if job[0].name == f"{only}.o"]
        parts = seen + [
            job for job in jobs(folder.resolve(), {}, flags) if job[0].name != f"{only}.o"
        ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(make, parts))
    objects = [str(target) for target, _ in parts]
    link = [
        *UNDEFINED,
        "-L" + str(library.find_torch() / "lib"),
        "-ltorch_cpu",
        "-ldl",
        "-shared",
        "-o",
    ]
    target = (
        folder.resolve() / f"{hashlib.sha256(repr((objects, flags)).encode()).hexdigest()[:16]}.so"
    )
    make((target, [*library.find_compiler(), *flags, *objects, *link]))
    return target


def environment(built: Path, order: str = "forward", *, sanitize: bool = False) -> dict[str, str]:
    """Returns the environment of a Python process that uses a library (see emulated.py) in a thread order."""
    changes = {"SHARDZOO_EMULATED": str(built), "SHARDZOO_EMULATION_ORDER": order}
    if sanitize:
        compiler = library.find_compiler()
        options = [f"-print-file-name=lib{name}.so" for name in ("asan", "ubsan")]
        named = [
            subprocess.check_output([*compiler, option], text=True).strip() for option in options
        ]
        # Python and torch free nothing at their end; fibers have stacks that ASan does not know
        changes["LD_PRELOAD"] = " ".join(named)
        changes["ASAN_OPTIONS"] = "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=1"
    return {
        **os.environ,
        **changes,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), sanitize="--sanitize" in sys.argv))
