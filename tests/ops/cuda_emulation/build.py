"""Builds a kernel library whose CPU entries are the CUDA kernels, run by fibers: `python build.py OBJECTS TARGET`."""

from __future__ import annotations

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

LAUNCH = re.compile(r"([\w<>]+?)<<<(.+), (dim3\(.*?\)|[\w.]+), 0, stream>>>\((.*?)\);")


def rewrite(text: str) -> str:
    """Returns a CUDA source whose launches are calls of the emulator. Raises ValueError for a launch left over."""
    text = LAUNCH.sub(r"emulation::launch(\2, \3, [&] { \1(\4); });", text)
    if "<<<" in text:
        raise ValueError("a launch is written in a way that the emulation does not know")
    return text.replace('#include "../', f'#include "{CSRC}/')


def build(objects: Path, target: Path, cuda: Path = CSRC / "cuda", flags: tuple[str, ...] = ("-O2",)) -> None:
    """Builds `target` from the CUDA sources in `cuda` with extra compiler flags."""
    objects.mkdir(parents=True, exist_ok=True)
    for source in cuda.glob("*.cu*"):
        (objects / source.name).write_text(rewrite(source.read_text()))
    cxx, torch = library.compiler(), library.package_folder("torch")
    common = [*cxx, "-fPIC", "-std=c++17", "-w", *flags, "-I", str(HERE), "-c"]
    sources = sorted(objects.glob("*.cu"))
    jobs = [[*common, "-x", "c++", str(s), "-o", str(s.with_suffix(".cuda.o"))] for s in sources]
    jobs.append([*common, str(HERE / "emulator.cpp"), "-o", str(objects / "emulator.o")])
    jobs += [command for *_, command in library.binding_jobs(cxx, objects, torch, False)]
    native = [command for _, _, command in library.cpu_jobs(cxx, objects)]
    jobs += [[*command, "-Dshardzoo_cpu_run=native_cpu_run"] for command in native]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), jobs))
    built = [job[job.index("-o") + 1] for job in jobs]
    link = ["-L" + str(torch / "lib"), "-ltorch_cpu", "-ldl"]
    subprocess.run([*cxx, *flags, "-shared", "-o", str(target), *built, *link], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
