"""How the CUDA kernels compile, wherever nvcc is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc" / "cuda"
NVCC, PTXAS = shutil.which("nvcc"), shutil.which("ptxas")
FILES = sorted(path.stem for path in SOURCES.glob("*.cu") if path.stem != "dispatch") if NVCC else []
MOST_REGISTERS = 128  # 512 threads of this many fill a multiprocessor's registers


@pytest.fixture(scope="module", autouse=True)
def nvcc_works(tmp_path_factory):
    """One that compiles nothing at all says nothing about our kernels."""
    empty = tmp_path_factory.mktemp("nvcc") / "empty.cu"
    empty.write_text("__global__ void nothing() {}\n")
    if subprocess.run([str(NVCC), "-cubin", str(empty)], capture_output=True, cwd=empty.parent).returncode:
        pytest.skip("nvcc does not work here")


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("name", FILES)
def test_compiles_lean(name, tmp_path):
    """No spills and no local memory, registers within budget, 16-byte accesses in every vector kernel.

    No source looks at the architecture, so that both have the same PTX; `make setup` compiles for each by itself.
    """
    source, ptx = SOURCES / f"{name}.cu", tmp_path / "kernels.ptx"
    assert not any("__CUDA_ARCH__" in path.read_text() for path in SOURCES.iterdir())
    run(NVCC, "-O3", "-std=c++17", "-arch=compute_80", "-ptx", source, "-o", ptx)
    kernels = re.findall(r"\.entry (\S+?)\((.*?)\n}", ptx.read_text(), re.DOTALL)
    assert kernels
    for architecture in ("sm_80", "sm_90"):
        report = run(PTXAS, "-O3", f"-arch={architecture}", "-v", ptx, "-o", tmp_path / "kernels.cubin")
        assert not re.search(r"[1-9]\d* bytes (spill|stack frame)", report), report
        registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
        assert len(kernels) == len(registers)
        assert max(registers) <= MOST_REGISTERS
    for kernel, body in kernels:
        if re.search(r"I(fLi4|13__nv_bfloat16Li8|6__halfLi8)E", kernel):
            assert re.search(r"ld\.global(\.\w+)*\.v4\.(f32|u32|b32)", body), kernel
            writes = "stats" not in kernel  # it writes four numbers per row
            assert not writes or re.search(r"st\.global(\.\w+)*\.v4\.(f32|u32|b32)", body), kernel
