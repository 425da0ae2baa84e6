"""benchmarks/machine_code.py on a kernel written by hand; what it finds in the real ones is in test_cuda.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import machine_code

# (predicate, opcode, operands); an instruction has 16 bytes
PROGRAM = [
    ("", "MOV", "R1,RZ"),
    ("@P0", "BRA", "0x30"),  # over a call
    ("", "CALL.REL.NOINC", "$divide"),
    ("", "LDG.E.128", "R4,[R2]"),  # 3: the loop
    ("@!P1", "BRA", "0x70"),  # over an optional tensor
    ("", "LDG.E.128.CONSTANT", "R8,[R2]"),
    ("", "FADD", "R4,R4,R8"),
    ("", "MUFU.EX2", "R4,R4"),  # 7
    ("@P2", "BRA", "0xb0"),  # over a subroutine
    ("", "CALL.REL.NOINC", "$divide"),
    ("", "MOV", "R5,RZ"),
    ("", "ISETP.GE.AND", "P3,R2,R3"),  # 11
    ("", "STG.E.128", "[R2],R4"),
    ("@P3", "CALL.REL.NOINC", "0xf0"),  # 13: sm_80 leaves a loop so
    ("", "BRA", "0x30"),
    ("", "STG.E", "[R6],R4"),
    ("", "EXIT", ""),
    ("", "RET.REL.NODEC", "R2"),
]


@pytest.fixture
def code():
    listed = [{"predicate": p, "opcode": o, "operands": operands} for p, o, operands in PROGRAM]
    printed = json.dumps([{"SM": 90}, [{"function-name": "kernel", "sass-instructions": listed}]])
    return machine_code.parse(printed)["kernel"]


def test_the_longest_way_takes_options_and_avoids_calls(code):
    loop = machine_code.main_loop(code)
    assert loop == [3, 4, 5, 6, 7, 8, 11, 12, 13, 14]
    assert machine_code.whole_way(code) == [0, 1, *loop[:-1], 15, 16]
    assert machine_code.count(code, loop) == machine_code.Count(
        instructions=10, halves=1, exponentials=1, loads=2, stores=1, narrow=0
    )
    assert machine_code.count(code, [15]).narrow == 1


def test_the_slowest_unit_counts():
    kernel = machine_code.Kernel("", "", "", moves=2, kind="STG", vectors=1, passes=1)
    # 16 elements of 2 bytes, read and written, are 64 bytes a lane; a byte takes as long as 8.85 instructions
    for cycles in ((283.15, 0, 0), (0, 141.6, 0), (0, 0, 35.4)):
        assert machine_code.busy(kernel, 2, *cycles) == pytest.approx(0.5, abs=1e-3)


def test_reads_what_ptxas_reports():
    report = """ptxas info    : Compiling entry function '_Z1f' for 'sm_90'
ptxas info    : Function properties for _Z1f
    8 bytes stack frame, 16 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Compiling entry function '_Z1g' for 'sm_90'
ptxas info    : Function properties for _Z1g
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers
"""
    assert machine_code.registers(report) == {"_Z1f": (64, 28), "_Z1g": (20, 0)}
