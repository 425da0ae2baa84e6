"""How the CUDA kernels compile, wherever nvcc is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc" / "cuda"
NVCC = shutil.which("nvcc")
FILES = sorted(path.stem for path in SOURCES.glob("*.cu") if path.stem != "dispatch") if NVCC else []
MOST_REGISTERS = 128  # 512 threads of this many fill a multiprocessor's registers


@pytest.fixture(scope="module", autouse=True)
def nvcc_works(tmp_path_factory):
    """One that compiles nothing at all says nothing about our kernels."""
    empty = tmp_path_factory.mktemp("nvcc") / "empty.cu"
    empty.write_text("__global__ void nothing() {}\n")
    if subprocess.run([str(NVCC), "-cubin", str(empty)], capture_output=True, cwd=empty.parent).returncode:
        pytest.skip("nvcc does not work here")


def compiled(name, folder, architecture):
    """(PTX, ptxas's report) of a source."""
    common = [str(NVCC), "-O3", "-std=c++17", f"-arch={architecture}", str(SOURCES / f"{name}.cu")]
    cubin = [*common, "-cubin", "-Xptxas", "-v", "--keep", "--keep-dir", str(folder), "-o", str(folder / "out.cubin")]
    done = subprocess.run(cubin, capture_output=True, text=True, check=True, cwd=folder)
    return next(folder.glob("*.ptx")).read_text(), done.stderr


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", FILES)
def test_compiles_lean(name, architecture, tmp_path):
    """No spills and no local memory, registers within budget, 16-byte accesses in every vector kernel."""
    ptx, report = compiled(name, tmp_path, architecture)
    assert not re.search(r"[1-9]\d* bytes (spill|stack frame)", report), report
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
    assert registers
    assert max(registers) <= MOST_REGISTERS
    kernels = re.findall(r"\.entry (\S+?)\((.*?)\n}", ptx, re.DOTALL)
    assert len(kernels) == len(registers)
    for kernel, body in kernels:
        if re.search(r"I(fLi4|13__nv_bfloat16Li8|6__halfLi8)E", kernel):
            assert re.search(r"ld\.global(\.\w+)*\.v4\.(f32|u32|b32)", body), kernel
            writes = "stats" not in kernel  # it writes four numbers per row
            assert not writes or re.search(r"st\.global(\.\w+)*\.v4\.(f32|u32|b32)", body), kernel
