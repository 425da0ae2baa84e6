"""The Triton kernels compile ahead of time, on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

# In a process of its own, because under the interpreter there is nothing to compile.
COMPILE = """
import importlib
import json
import re
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FLAGS = {"BLOCK": 1024, "MASK": 1, "BIAS": 1, "ACTIVATION": 0, "BITS": 4, "BLOCKS": 16, "ROWS": 16, "COLUMNS": 32}
FLOATS = {"scale", "keep_scale", "eps", "uniform", "target_share", "twice_z_loss"}
ELEMENTS = {"mask": "*u8", "prefix": "*i64", "row_keys": "*i64", "sample_keys": "*i64",
            "target": "*i64", "mean": "*fp32", "rstd": "*fp32",
            "partial": "*fp32", "partial_weight": "*fp32", "partial_bias": "*fp32", "maximum": "*fp32",
            "sum_exp": "*fp32", "codes": "*u8", "scales": "*fp32", "table": "*fp32",
            "target_logit": "*fp32", "sum_logits": "*fp32", "log_z": "*fp32"}

def type_of(name, element):
    if name.endswith("_ptr"):
        return ELEMENTS.get(name.removesuffix("_ptr"), element)
    return "fp32" if name in FLOATS else "i64"

target = GPUTarget(*json.loads(sys.argv[1]))

def compile(module):
    # how many kernels it has, times two element types
    count = 0
    for name, kernel in vars(importlib.import_module("shardzoo.ops.triton_kernels." + module)).items():
        if not isinstance(kernel, triton.JITFunction) or name in ("keep_factor", "activate", "decode_blocks"):
            continue
        for element in ("*bf16", "*fp32"):
            constants = {n: FLAGS.get(n, True) for n in kernel.arg_names if n.isupper()}
            signature = {n: "constexpr" if n.isupper() else type_of(n, element) for n in kernel.arg_names}
            built = triton.compile(ASTSource(kernel, signature, constants), target=target)
            assert len(built.asm["cubin" if target.backend == "cuda" else "hsaco"]) > 1000
            spilled = re.findall(r"[sv]gpr_spill_count: +([0-9]+)", built.asm.get("amdgcn", ""))
            assert set(spilled) <= {"0"}, (name, spilled)
            count += 1
    return count

print(json.dumps({module: compile(module) for module in sys.argv[2:]}))
"""
# Attention's kernels, as they are launched: a driver stands in for a device, and a launch only compiles.
COMPILE_LAUNCHES = """
import json
import os
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from shardzoo.ops.triton_kernels import attention, rotary

CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
results = []
attention._precision = lambda device: "tf32x3"

def compile(self, grid):
    def launch(*arguments, **options):
        global ptx
        kernel = self.run(*arguments, grid=grid, warmup=True, **options)
        if "hsaco" in kernel.asm:
            names = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
            usage = [int(re.search(f"[.]{name}: +([0-9]+)", kernel.asm["amdgcn"])[1]) for name in names]
            ptx = kernel.asm["amdgcn"]
            products = ptx.count("v_mfma")
            results.append([self.fn.__name__, *usage, kernel.metadata.shared, [products, 0, 0], label])
            return
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            printed = [
                subprocess.run([CUOBJDUMP, option, file.name], capture_output=True, text=True).stdout
                for option in ("--dump-resource-usage", "--dump-sass")
            ]
        usage = dict(re.findall(r"(REG|STACK|LOCAL):([0-9]+)", printed[0]))
        ptx = kernel.asm["ptx"]
        waits = printed[1].count("WARPGROUP.DEPBAR")
        counts = [ptx.count("wgmma.mma_async"), ptx.count("cp.async.c"), kernel.metadata.num_stages, waits]
        results.append([self.fn.__name__, *map(int, usage.values()), kernel.metadata.shared, counts, label])
    return launch

triton.runtime.jit.KernelInterface.__getitem__ = compile

def compile_for(arch):
    target = GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)
    attention._precision = lambda device: "tf32x3" if target.backend == "cuda" else "ieee"
    driver.set_active(SimpleNamespace(
        get_current_device=lambda: arch, get_current_stream=lambda device: 0,
        get_current_target=lambda: target))
    attention._choose_tile.cache_clear()  # of another device
"""
COMPILE_ATTENTION = """
for arch, width, dtype, everything in json.loads(sys.argv[1]):
    compile_for(arch)
    q = torch.zeros(2, 4, 512, width, dtype=getattr(torch, dtype))
    label = [arch, width, dtype]
    cap = 30.0 if everything == "capped" else 0.0
    lse, number, bias = torch.zeros(2, 4, 512), torch.zeros(2, dtype=torch.int64), q.new_zeros(4, 1023)
    rules = (None,) * 5 + (0.125, False, 0.0, 0, 0, 0.0)
    if everything:
        rules = (bias, q.new_zeros(2, 4, 512, 512), number, number, number, 0.125, True, 0.1, 0, 0, cap)
    if everything != "varlen":
        attention.launch_forward(q, q, q, *rules, q, lse)
        attention.launch_backward(q, q, lse, q, q, q, *rules, q, q, q, bias)
        continue
    rows, starts = q.view(1024, 4, width), torch.zeros(3, dtype=torch.int64)
    call = (rows, rows, rows, starts, starts, bias, number, 512, 512, 0.125, True, 0.1, 0)
    attention.launch_varlen_forward(*call, rows, lse)
    attention.launch_varlen_backward(rows, rows, lse, *call, rows, rows, rows, bias)
print(json.dumps(results))
"""
COMPILE_ROTARY = """
for arch, width, dtype, interleaved in json.loads(sys.argv[1]):
    compile_for(arch)
    heads = torch.zeros(2, 512, 12, width, dtype=getattr(torch, dtype)).transpose(1, 2)
    label = [arch, width, dtype]
    angles = heads.new_zeros(1, 1, 512, width // 4)
    q, k = heads[:, :8], heads[:, 8:10]
    rotary.launch_rotation(q, k, angles, angles, interleaved, False, q, k)
print(json.dumps(results))
"""
COMPILE_ADAMW = """
from shardzoo.ops.triton_kernels import optimizer
for arch, gradient, rounded in json.loads(sys.argv[1]):
    compile_for(arch)
    label = [arch, gradient, rounded]
    wide, number = torch.zeros(5000), torch.zeros(())
    copied = None if rounded is None else wide.to(getattr(torch, rounded))
    parts = (wide, wide.to(getattr(torch, gradient)), wide, wide, number, copied)
    optimizer.launch_adamw([parts], optimizer.LaunchTable(), number, number, 0.1, (0.9, 0.999), 1e-8, 0.1)
    results[-1].append([ptx.count("ld.global.v4.b32"), ptx.count("st.global.v4.b32")])
print(json.dumps(results))
"""
# Launches on a stand-in of a device, which notes what it is given. Each call is made by Triton and then
# from the table of compiled kernels.
COMPARE_LAUNCHES = """
import json
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from shardzoo.ops.triton_kernels import attention, launching, rotary

launches = []

class Launcher:
    def __init__(self, source, metadata):
        pass

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, exit, *arguments):
        launches.append([x, y, z, function, flatten(arguments)])

def flatten(arguments):
    flat = []
    for value in arguments:
        if isinstance(value, tuple):
            flat += flatten(value)
        else:
            flat.append(value.data_ptr() if isinstance(value, torch.Tensor) else value)
    return flat

def load(name, binary, *others):
    return ("module", hash(binary), 0, 0, 1024)

driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0, launcher_cls=Launcher,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    utils=SimpleNamespace(load_binary=load, get_device_properties=lambda device: {"max_shared_mem": 232448})))
attention._precision = lambda device: "tf32x3"

def attend(batch, length, **changes):
    q = torch.zeros(batch, 4, length, 64, dtype=torch.bfloat16)
    lse = torch.zeros(batch, 4, length)
    rules = {"bias": None, "mask": None, "prefix": None, "lengths": None, "keys": None, "scale": 0.125,
             "causal": False, "dropout": 0.0, "first_head": 0, "first_row": 0, "softcap": 0.0, **changes}
    attention.launch_forward(q, q, q, *rules.values(), q, lse)

def rotate(first):
    heads = torch.zeros(2 * 16 * 6 * 64 + 8, dtype=torch.bfloat16)[first:].narrow(0, 0, 2 * 16 * 6 * 64)
    heads = heads.view(2, 16, 6, 64).transpose(1, 2)
    angles = heads.new_zeros(1, 1, 16, 32)
    q, k = heads[:, :4], heads[:, 4:]
    rotary.launch_rotation(q, k, angles, angles, False, False, q, k)

CALLS = [
    lambda: attend(2, 512), lambda: attend(2, 500), lambda: attend(1, 512, causal=True),
    lambda: attend(2, 512, first_row=7, dropout=0.1, keys=torch.zeros(2, dtype=torch.int64)),
    lambda: attend(2, 512, bias=torch.zeros(4, 1023)), lambda: rotate(0), lambda: rotate(1),
]
same = 0
for call in CALLS:
    kept = len(launching._compiled)
    call()
    assert len(launching._compiled) == kept + 1  # another kernel than those before
for call in CALLS:
    launches.clear()
    found = dict(launching._compiled)
    call()
    assert launching._compiled == found
    launching._compiled.clear()
    call()
    launching._compiled.update(found)
    (*first, arguments), (*second, others) = launches
    pointers = [i for i, (a, b) in enumerate(zip(arguments, others, strict=True)) if a != b]
    assert first == second and all(arguments[i] > 1 << 32 for i in pointers)  # addresses alone differ
    same += 1
print(json.dumps(same))
"""
ATTENTION = [(arch, 64, "bfloat16", True) for arch in (80, 90)] + [
    (arch, width, dtype, everything) for arch in (80, 90) for width, dtype in [
        (64, "float16"), (80, "bfloat16"), (128, "bfloat16"), (256, "bfloat16")] for everything in (False, True)
] + [(arch, width, "bfloat16", "varlen") for arch in (80, 90) for width in (64, 128)
] + [(arch, width, "bfloat16", "capped") for arch in (80, 90) for width in (64, 128)
] + [(90, 64, "float32", everything) for everything in (False, True)]  # fmt: skip
MODULES = {"softmax": 4, "norm": 4, "activation": 8, "dropout": 4, "cross_entropy": 4,
           "packing": 4}  # fmt: skip


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
SHARED = 163 << 10  # bytes of shared memory that a block may have on sm_80
AMD = ("gfx942", "gfx950")  # MI300 and MI350
SHARED_OF_AMD = 64 << 10  # of gfx942; gfx950 has 160 KiB


def printed(folder, program, *arguments):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.before_release
def test_all_compile_for_sm_90(tmp_path):
    assert printed(tmp_path, COMPILE, '["cuda", 90, 32]', *MODULES) == MODULES


@pytest.mark.timeout(1200)
@pytest.mark.before_release
def test_attention_keeps_its_tiles_in_registers(tmp_path):
    """Compiled as it is launched, with every rule at once and with none, no kernel spills."""
    built = printed(tmp_path, COMPILE_LAUNCHES + COMPILE_ATTENTION, json.dumps(ATTENTION))
    assert {kernel for kernel, *_ in built} == {
        "forward",
        "query_gradient",
        "key_gradient",
        "add_bias_sums",
    }
    assert len(built) == sum(4 if everything else 3 for *_, everything in ATTENTION)
    for kernel, registers, stack, local, shared, counts, (arch, width, dtype) in built:
        assert (stack, local) == (0, 0), (kernel, registers)
        assert shared <= SHARED, kernel
        products, *_, waits = counts
        if arch == 90 and width == 64 and dtype != "float32" and kernel != "add_bias_sums":
            assert products >= 16, kernel
            # Else each instruction waits for the one before.
            assert waits <= products // 2, (kernel, products, waits)
        if kernel == "key_gradient" and arch == 90 and width <= 128 and dtype != "float32":
            products, copies, stages, _ = counts
            assert products >= 4, (width, dtype)  # of whole groups of warps
            assert copies > 0, (width, dtype)  # while others are multiplied
            assert stages >= 2, (width, dtype)


@pytest.mark.before_release
@pytest.mark.parametrize("arch", AMD)
def test_all_compile_for_amd(arch, tmp_path):
    """Without spills, which the program itself looks for."""
    assert printed(tmp_path, COMPILE, json.dumps(["hip", arch, 64]), *MODULES) == MODULES


@pytest.mark.timeout(1200)
@pytest.mark.before_release
@pytest.mark.parametrize("arch", AMD)
def test_attention_compiles_for_amd(arch, tmp_path):
    """With AMD's matrix instructions, in the registers and the memory that a block has."""
    cases = [
        (arch, 64, "bfloat16", False),
        (arch, 64, "bfloat16", "capped"),  # with every rule
        (arch, 128, "bfloat16", "capped"),
        (arch, 128, "bfloat16", "varlen"),
        (arch, 64, "float32", "capped"),
    ]
    built = printed(tmp_path, COMPILE_LAUNCHES + COMPILE_ATTENTION, json.dumps(cases))
    assert len(built) == 3 + 4 * 4
    for kernel, registers, stack, spilled, shared, (products, *_), label in built:
        assert registers <= 512, (kernel, label)
        assert (stack, spilled) == (0, 0), (kernel, label)
        assert shared <= SHARED_OF_AMD, (kernel, label)
        assert products > 0 or kernel == "add_bias_sums", (kernel, label)


@pytest.mark.before_release
@pytest.mark.parametrize("arch", AMD)
def test_rotary_positions_and_adamw_compile_for_amd(arch, tmp_path):
    shapes = [(arch, 64, "bfloat16", False), (arch, 80, "float32", True)]
    built = printed(tmp_path, COMPILE_LAUNCHES + COMPILE_ROTARY, json.dumps(shapes))
    updates = [(arch, "float32", None), (arch, "bfloat16", "bfloat16")]
    built += printed(tmp_path, COMPILE_LAUNCHES + COMPILE_ADAMW, json.dumps(updates))
    assert [kernel for kernel, *_ in built] == ["rotate", "rotate", "update", "update"]
    for _, registers, stack, spilled, *_ in built:
        assert registers <= 256
        assert (stack, spilled) == (0, 0)


@pytest.mark.before_release
def test_rotary_positions_are_one_kernel_without_spills(tmp_path):
    shapes = [
        (arch, width, dtype, width == 80)
        for arch in (80, 90)
        for width in (64, 80, 128)
        for dtype in ("bfloat16", "float32")
    ]
    built = printed(tmp_path, COMPILE_LAUNCHES + COMPILE_ROTARY, json.dumps(shapes))
    assert len(built) == len(shapes)
    for kernel, registers, stack, local, *_ in built:
        assert (kernel, stack, local) == ("rotate", 0, 0)
        assert registers <= 64


@pytest.mark.before_release
def test_adamw_reads_and_writes_16_bytes_at_a_time(tmp_path):
    cases = [
        (arch, gradient, rounded)
        for arch in (80, 90)
        for gradient, rounded in (("float32", None), ("float32", "bfloat16"), ("bfloat16",) * 2)
    ]
    built = printed(tmp_path, COMPILE_LAUNCHES + COMPILE_ADAMW, json.dumps(cases))
    for kernel, _, stack, local, _, _, (_, gradient, rounded), vectors in built:
        assert (kernel, stack, local) == ("update", 0, 0)
        # Of 8 elements of a thread: three tensors of fp32, the gradient and the rounded copy.
        loads = 6 + (2 if gradient == "float32" else 1)
        stores = 6 + (0 if rounded is None else 1)
        assert vectors == [loads, stores]


@pytest.mark.before_release
def test_kept_kernels_are_those_that_triton_would_launch(tmp_path):
    assert printed(tmp_path, COMPARE_LAUNCHES) == 7
