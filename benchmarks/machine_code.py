"""Counts the CUDA kernels' machine instructions, and how busy they are while the memory delivers.

    python benchmarks/machine_code.py                # for sm_90
    python benchmarks/machine_code.py --arch sm_80

Needs nvcc and nvdisasm (Triton has one), and no GPU: nothing runs. For each kernel and dtype it prints the registers,
the 128-bit loads and stores of the main loop, and the instructions that a thread executes for 16 elements. Counted is
the longest way through the loop that calls no subroutine: every optional tensor is there, and divisions take their
usual path. "around" are the instructions outside the loop, once a thread, with the loops for what is left over; "of 16"
shares them among the times that a thread passes its loop.

"busy" is how long the busiest unit takes, as a share of the time in which the memory delivers the elements, at the
clock and the bandwidth of an H100 SXM: below 100 % the kernel can reach the full bandwidth if everything overlaps. A
multiprocessor's four schedulers issue one instruction of a warp per cycle; the unit for integers, comparisons and
conversions takes two cycles for one, that for exponentials and reciprocals eight.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MULTIPROCESSORS, CLOCK, BANDWIDTH = 132, 1.755e9, 3.35e12  # H100 SXM at its usual boost clock
DTYPES = {
    "fp32": ("f", 4, 4),
    "bf16": ("13__nv_bfloat16", 8, 2),
}  # mangled, elements of a vector, bytes of an element
EXPONENTIALS = ("MUFU",)
FULL_RATE = (
    "FADD",
    "FMUL",
    "FFMA",
    "HADD2",
    "HMUL2",
    "HFMA2",
    "IMAD",
    "MOV",
    "UMOV",
    "NOP",
    "LD",
    "ST",
    "BRA",
    "BSSY",
)
FULL_RATE += ("BSYNC", "EXIT", "BAR", "SHFL", "U", "S2", "CS2R", "R2UR", "WARPSYNC", "CALL")


@dataclass(frozen=True)
class Kernel:
    """A kernel of the table: a file of csrc/cuda and the beginning of its mangled name and template arguments.

    `moves` are the elements of tensors that must be read or written for one element; `vectors` are the 128-bit accesses
    of `kind` that belong to one vector of elements. `passes` is how often a thread passes its loop.
    """

    label: str
    file: str
    name: str
    moves: int
    kind: str
    vectors: int
    passes: int
    arguments: str = ""


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: str
    predicate: str

    @property
    def is_branch(self) -> bool:
        kind = self.opcode.split(".")[0]
        if kind == "CALL":  # to an address: sm_80's way to jump far
            return self.operands.startswith("0x")
        return kind == "BRA" and "DIV" not in self.opcode  # .DIV: a diverged warp's slow path

    @property
    def is_call(self) -> bool:
        return self.opcode.startswith("CALL") and not self.is_branch

    @property
    def target(self) -> int:
        return int(re.findall(r"0x[0-9a-f]+", self.operands)[-1], 16) // 16


@dataclass(frozen=True)
class Count:
    """What a thread executes: instructions, those of the half-rate unit, exponentials, and 128-bit accesses."""

    instructions: int
    halves: int
    exponentials: int
    loads: int
    stores: int
    narrow: int  # global loads and stores of fewer than 128 bits


@cache
def nvdisasm() -> str:
    """Returns the path of nvdisasm. Raises FileNotFoundError where there is none."""
    spec = importlib.util.find_spec("triton")
    beside = (
        Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        if spec and spec.origin
        else None
    )
    found = shutil.which("nvdisasm") or (str(beside) if beside and beside.exists() else None)
    if found is None:
        raise FileNotFoundError("there is no nvdisasm on PATH and none in an installed Triton")
    return found


def compile_kernels(source: Path, arch: str, folder: Path) -> tuple[Path, str]:
    """Returns a file's machine code below `folder`, and what ptxas says about registers and spills."""
    cubin = folder / f"{source.stem}.{arch}.cubin"
    command = [
        "nvcc",
        "-O3",
        "-std=c++17",
        f"-arch={arch}",
        "-cubin",
        "-Xptxas",
        "-v",
        str(source),
        "-o",
        str(cubin),
    ]
    return cubin, subprocess.run(command, capture_output=True, text=True, check=True).stderr


def disassembled(cubin: Path) -> str:
    """Returns what nvdisasm prints of a file, as JSON."""
    return subprocess.run(
        [nvdisasm(), "-json", str(cubin)], capture_output=True, text=True, check=True
    ).stdout


def parse(disassembly: str) -> dict[str, list[Instruction]]:
    """Returns the instructions of each kernel by mangled name, from what `nvdisasm -json` prints."""
    _, functions = json.loads(disassembly)
    return {
        function["function-name"]: [
            Instruction(i["opcode"], i.get("operands", ""), i.get("predicate", ""))
            for i in function["sass-instructions"]
        ]
        for function in functions
    }


def registers(report: str) -> dict[str, tuple[int, int]]:
    """Returns (registers, bytes of spills and stack) of each kernel by mangled name, from ptxas's report."""
    found = re.findall(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        report,
        re.DOTALL,
    )
    return {
        name: (int(used), int(stack) + int(stores) + int(loads))
        for name, stack, stores, loads, used in found
    }


def next_ones(code: Sequence[Instruction], i: int) -> list[int]:
    """Returns where execution may go on after instruction i."""
    one = code[i]
    always = one.predicate in ("", "@PT")
    if one.is_branch:
        uniform = not re.fullmatch(r"0x[0-9a-f]+", one.operands)  # a condition among the operands
        return [one.target] if always and not uniform else [one.target, i + 1]
    if one.opcode.split(".")[0] in ("EXIT", "RET"):
        return [] if always else [i + 1]
    return [i + 1]


def longest_way(code: Sequence[Instruction], first: int, last: int) -> list[int]:
    """Returns the longest way forward from `first` to `last`, with no call if one can be avoided."""
    best: dict[int, tuple[int, int | None]] = {last: (1, None)}
    for i in range(last - 1, first - 1, -1):
        onward = [(best[j][0], j) for j in next_ones(code, i) if i < j <= last and j in best]
        if onward:
            length, j = max(onward)
            best[i] = (length + (-100_000 if code[i].is_call else 1), j)
    way, at = [], first if first in best else None
    while at is not None:
        way.append(at)
        at = best[at][1]
    return way


def is_wide(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("LDG", "STG")) and ".128" in instruction.opcode


def main_loop(code: Sequence[Instruction]) -> list[int]:
    """Returns the longest way through the innermost loop with the most 128-bit loads; [] if no loop has any."""
    loops = [(i.target, n) for n, i in enumerate(code) if i.is_branch and i.target < n]
    ways = {}
    for head, tail in loops:
        way = longest_way(code, head, tail)
        if any(is_wide(code[i]) for i in way):
            ways[head, tail] = way
    inner = [
        way
        for (head, tail), way in ways.items()
        if not any(head <= h and t <= tail and (h, t) != (head, tail) for h, t in ways)
    ]
    return max(
        inner,
        key=lambda way: sum(is_wide(code[i]) for i in way if code[i].opcode.startswith("LDG")),
        default=[],
    )


def whole_way(code: Sequence[Instruction]) -> list[int]:
    """Returns the longest way through the kernel."""
    ends = [n for n, i in enumerate(code) if i.opcode.startswith("EXIT")]
    return max((longest_way(code, 0, end) for end in ends), key=len)


def count(code: Sequence[Instruction], way: Sequence[int]) -> Count:
    opcodes = [code[i].opcode for i in way]
    exponentials = sum(opcode.startswith(EXPONENTIALS) for opcode in opcodes)
    full = sum(opcode.startswith(FULL_RATE) for opcode in opcodes)
    accesses = [opcode for opcode in opcodes if opcode.startswith(("LDG", "STG"))]
    loads, stores = (
        sum(o.startswith(kind) and ".128" in o for o in accesses) for kind in ("LDG", "STG")
    )
    halves = len(opcodes) - exponentials - full
    return Count(len(opcodes), halves, exponentials, loads, stores, len(accesses) - loads - stores)


def busy(kernel: Kernel, size: int, per_16: float, halves: float, exponentials: float) -> float:
    """Returns the time of the busiest unit by that of the memory, for elements of `size` bytes.

    Args:
        per_16, halves, exponentials: Instructions for 16 elements: all, those of the half-rate unit, exponentials.
    """
    cycles = max(
        per_16, 2 * halves, 8 * exponentials
    )  # of a scheduler, for 16 elements of each of 32 lanes
    compute = cycles / (MULTIPROCESSORS * 4 * CLOCK)
    return compute / (32 * 16 * size * kernel.moves / BANDWIDTH)


KERNELS = (  # passes: of 8,192 rows of 768 columns, or 3,072 behind an activation, or 50,304 words, on an H100
    Kernel("add_layer_norm", "norm", "norm_forward_kernel", 4, "STG", 2, 1, "Lb1E"),
    Kernel("its gradient", "norm", "norm_backward_kernel", 4, "STG", 1, 13, "Lb1ELb1E"),
    Kernel("add_rms_norm", "norm", "norm_forward_kernel", 4, "STG", 2, 1, "Lb0E"),
    Kernel("its gradient", "norm", "norm_backward_kernel", 4, "STG", 1, 13, "Lb0ELb1E"),
    Kernel("masked_softmax", "softmax", "softmax_forward_kernel", 3, "STG", 2, 1, "Lb1E"),
    Kernel("its gradient", "softmax", "softmax_backward_kernel", 4, "LDG", 2, 1, "Lb1ELb0E"),
    Kernel("with a shared bias", "softmax", "softmax_backward_kernel", 3, "LDG", 2, 1, "Lb1ELb1E"),
    Kernel("bias_gelu", "activation", "gelu_forward_kernel", 2, "STG", 1, 15, "Li0E"),
    Kernel("its gradient", "activation", "gelu_backward_kernel", 3, "STG", 1, 16, "Li0E"),
    Kernel("bias_gelu, tanh", "activation", "gelu_forward_kernel", 2, "STG", 1, 15, "Li1E"),
    Kernel("its gradient", "activation", "gelu_backward_kernel", 3, "STG", 1, 16, "Li1E"),
    Kernel("geglu", "activation", "glu_forward_kernel", 3, "STG", 1, 15, "Li0E"),
    Kernel("its gradient", "activation", "glu_backward_kernel", 5, "STG", 2, 15, "Li0E"),
    Kernel("swiglu", "activation", "glu_forward_kernel", 3, "STG", 1, 15, "Li2E"),
    Kernel("its gradient", "activation", "glu_backward_kernel", 5, "STG", 2, 15, "Li2E"),
    Kernel("bias_dropout_residual", "dropout", "dropout_forward_kernel", 3, "STG", 1, 4),
    Kernel("its gradient", "dropout", "dropout_backward_kernel", 2, "STG", 1, 6),
    Kernel(
        "cross_entropy_stats", "cross_entropy", "cross_entropy_stats_kernel", 1, "LDG", 1, 6, "Lb0E"
    ),
    Kernel("cross_entropy_grad", "cross_entropy", "cross_entropy_grad_kernel", 2, "STG", 1, 6),
)


def row(
    kernel: Kernel, dtype: str, code: Sequence[Instruction], used: tuple[int, int]
) -> list[str]:
    """Returns the kernel's row of the table."""
    _, width, size = DTYPES[dtype]
    loop, whole = main_loop(code), whole_way(code)
    inside, around = count(code, loop), len(whole) - len(loop)
    vectors = (inside.stores if kernel.kind == "STG" else inside.loads) / kernel.vectors
    scale = 16 / (vectors * width)
    total = scale * (inside.instructions + around / kernel.passes)
    share = busy(kernel, size, total, scale * inside.halves, scale * inside.exponentials)
    numbers = [
        inside.loads,
        inside.stores,
        inside.narrow,
        round(scale * inside.instructions),
        around,
        round(total),
    ]
    return [kernel.label, dtype, *map(str, used), *map(str, numbers), f"{share:.0%}"]


def compiled(kernel: Kernel, dtype: str, names: Iterable[str]) -> str:
    """Returns the mangled name of a kernel for vectors of a dtype."""
    mangled, width, _ = DTYPES[dtype]
    start = rf"\d{kernel.name}I{mangled}Li{width}E{kernel.arguments}"
    return next(name for name in names if re.search(start, name))


def table(arch: str) -> list[list[str]]:
    """Returns the rows of the table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for file in dict.fromkeys(kernel.file for kernel in KERNELS):
            cubin, report = compile_kernels(
                ROOT / "csrc" / "cuda" / f"{file}.cu", arch, Path(folder)
            )
            codes, used = parse(disassembled(cubin)), registers(report)
            for kernel in (kernel for kernel in KERNELS if kernel.file == file):
                for dtype in DTYPES:
                    name = compiled(kernel, dtype, codes)
                    rows.append(row(kernel, dtype, codes[name], used[name]))
    return rows


HEADINGS = [
    "kernel",
    "dtype",
    "registers",
    "spills",
    "loads",
    "stores",
    "narrow",
    "loop",
    "around",
    "of 16",
    "busy",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", default="sm_90")
    options = parser.parse_args()
    for cells in (HEADINGS, ["---"] * len(HEADINGS), *table(options.arch)):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
