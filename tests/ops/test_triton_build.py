"""The Triton kernels compile ahead of time for sm_90, on a machine without a GPU."""

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
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FLAGS = {"BLOCK": 1024, "MASK": 1, "BIAS": 1, "ACTIVATION": 0}
FLOATS = {"scale", "keep_scale", "eps", "uniform", "target_share", "twice_z_loss"}
ELEMENTS = {"mask": "*u8", "prefix": "*i64", "row_keys": "*i64", "target": "*i64", "mean": "*fp32", "rstd": "*fp32",
            "partial": "*fp32", "partial_weight": "*fp32", "partial_bias": "*fp32", "maximum": "*fp32",
            "sum_exp": "*fp32", "target_logit": "*fp32", "sum_logits": "*fp32", "log_z": "*fp32"}

def type_of(name, element):
    if name.endswith("_ptr"):
        return ELEMENTS.get(name.removesuffix("_ptr"), element)
    return "fp32" if name in FLOATS else "i64"

def compile(module):
    # how many kernels it has, times two element types
    count = 0
    for name, kernel in vars(importlib.import_module("shardzoo.ops.triton_kernels." + module)).items():
        if not isinstance(kernel, triton.JITFunction) or name in ("keep_factor", "activate"):
            continue
        for element in ("*bf16", "*fp32"):
            constants = {n: FLAGS.get(n, True) for n in kernel.arg_names if n.isupper()}
            signature = {n: "constexpr" if n.isupper() else type_of(n, element) for n in kernel.arg_names}
            built = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
            assert len(built.asm["cubin"]) > 1000
            count += 1
    return count

print(json.dumps({module: compile(module) for module in sys.argv[1:]}))
"""
MODULES = {"softmax": 4, "norm": 4, "activation": 8, "dropout": 4, "cross_entropy": 4}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_all_compile_for_sm_90(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, *MODULES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == MODULES
