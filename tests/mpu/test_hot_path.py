"""How much of our own code stands between a layer and torch where the tensors are not on a CPU.

The meta device stands for an accelerator: it takes the same branches, because only CPU tensors have a pool and kernels
for products.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import shardzoo
from shardzoo import mpu, ops

PACKAGE = f"{Path(shardzoo.__file__).parent}/"


def is_own(frame) -> bool:
    """Whether a frame runs the package's code; the tests lie below it."""
    name = frame.f_code.co_filename
    # The virtual environment lies in the checkout too.
    return name.startswith(PACKAGE) and not name.startswith(
        (f"{PACKAGE}tests/", f"{PACKAGE}.venv/")
    )


class FirstTorchCall(TorchFunctionMode):
    """Stops `OwnCalls` at the first torch function that calculates; reading an attribute is none."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") not in ("__get__", "dim", "is_floating_point"):
            self.calls.stop(sys._getframe(1))
        return func(*args, **(kwargs or {}))


class OwnCalls:
    """The package's functions that are called before torch is, and how many of them wait for torch's answer."""

    def __init__(self):
        self.names, self.depth, self.stopped = [], 0, False

    def profile(self, frame, event, _):
        if event == "call" and is_own(frame):
            self.names.append(frame.f_code.co_name)

    def stop(self, frame):
        if self.stopped:
            return
        self.stopped = True
        sys.setprofile(None)
        while frame is not None:
            self.depth += is_own(frame)
            frame = frame.f_back


def calls_before_torch(function, *arguments) -> OwnCalls:
    calls = OwnCalls()
    with FirstTorchCall(calls):
        sys.setprofile(calls.profile)
        try:
            function(*arguments)
        finally:
            sys.setprofile(None)
    assert calls.stopped
    return calls


def layers():
    """name -> (layer, its inputs, calls that may come before torch)"""
    with torch.device("meta"):
        x, ids, heads = (
            torch.randn(2, 5, 8),
            torch.zeros(2, 5, dtype=torch.int64),
            torch.randn(2, 4, 5, 8),
        )
        return {
            "column": (mpu.ColumnParallelLinear(8, 12), (x,), 3),
            "row": (mpu.RowParallelLinear(8, 12), (x,), 3),
            "head": (mpu.VocabParallelHead(8, 16), (x,), 4),
            "embedding": (mpu.VocabParallelEmbedding(16, 8), (ids,), 3),
            "layer norm": (mpu.LayerNorm(8), (x,), 4),
            "rms norm": (mpu.RMSNorm(8), (x,), 4),
            "linear": (ops.linear, (x, torch.randn(3, 8)), 1),
            "matmul": (ops.matmul, (heads, heads.mT), 1),
            "relu": (ops.relu, (x,), 1),
            "bias_gelu": (ops.bias_gelu, (x, torch.randn(8)), 3),
            "swiglu": (ops.swiglu, (x, x), 4),
        }


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", layers())
def test_few_calls_stand_before_torch(name, gradient):
    layer, inputs, most = layers()[name]
    inputs = [x.requires_grad_(gradient) if x.is_floating_point() else x for x in inputs]
    with torch.set_grad_enabled(gradient):
        calls = calls_before_torch(layer, *inputs)
    assert len(calls.names) <= most, calls.names
    assert calls.depth <= 3, calls.names
