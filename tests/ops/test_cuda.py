"""How the CUDA kernels compile, wherever nvcc is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from every_case import every_day

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "cuda"
sys.path.insert(0, str(ROOT / "benchmarks"))
import machine_code  # noqa: E402

NVCC, PTXAS = shutil.which("nvcc"), shutil.which("ptxas")
FILES = (
    sorted(path.stem for path in SOURCES.glob("*.cu") if path.stem != "dispatch") if NVCC else []
)
MOST_REGISTERS = 128  # 512 threads of this many fill a multiprocessor's registers


@pytest.fixture(scope="module", autouse=True)
def nvcc_works(tmp_path_factory):
    """One that compiles nothing at all says nothing about our kernels."""
    empty = tmp_path_factory.mktemp("nvcc") / "empty.cu"
    empty.write_text("__global__ void nothing() {}\n")
    if subprocess.run(
        [str(NVCC), "-cubin", str(empty)], capture_output=True, cwd=empty.parent
    ).returncode:
        pytest.skip("nvcc does not work here")


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.before_release
@pytest.mark.parametrize("name", every_day(FILES[:1], more=FILES[1:]))
def test_compiles_lean(name, tmp_path):
    """No spills and no local memory, registers within budget, 128-bit accesses alone in the loops of vector kernels.

    No source looks at the architecture, so that both have the same PTX; `make setup` compiles for each by itself.
    """
    source, ptx = SOURCES / f"{name}.cu", tmp_path / "kernels.ptx"
    assert not any("__CUDA_ARCH__" in path.read_text() for path in SOURCES.iterdir())
    run(NVCC, "-O3", "-std=c++17", "-arch=compute_80", "-ptx", source, "-o", ptx)
    kernels = re.findall(r"\.entry (\S+?)\((.*?)\n}", ptx.read_text(), re.DOTALL)
    assert kernels
    for architecture in every_day(["sm_90"], more=["sm_80"]):
        report = run(
            PTXAS, "-O3", f"-arch={architecture}", "-v", ptx, "-o", tmp_path / "kernels.cubin"
        )
        assert not re.search(r"[1-9]\d* bytes (spill|stack frame)", report), report
        registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
        assert len(kernels) == len(registers)
        assert max(registers) <= MOST_REGISTERS
        check_loops(name, tmp_path / "kernels.cubin")


def check_loops(file, cubin):
    """The main loop of every vector kernel loads and stores 16 bytes at a time, but for numbers of a whole row."""
    try:
        codes = machine_code.parse(machine_code.disassembled(cubin))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    for kernel in (kernel for kernel in machine_code.KERNELS if kernel.file == file):
        for dtype in machine_code.DTYPES:
            code = codes[machine_code.compiled(kernel, dtype, codes)]
            opcodes = [code[i].opcode for i in machine_code.main_loop(code)]
            stores = [opcode for opcode in opcodes if opcode.startswith("STG")]
            of_rows = {"add_layer_norm": 2, "add_rms_norm": 1}.get(kernel.label, 0)  # mean and rstd
            assert sum(".128" not in opcode for opcode in stores) == of_rows, (kernel, dtype)
            assert len(stores) > of_rows or "stats" in kernel.name, (kernel, dtype)
            assert sum(opcode.startswith("LDG") and ".128" in opcode for opcode in opcodes) > 0, (
                kernel,
                dtype,
            )
            assert not any(opcode.startswith(("LDL", "STL")) for opcode in opcodes), (kernel, dtype)
