"""Packed weights: the Triton kernels in the interpreter against the reference, to the bit for unpacked values; broken
kernels fail.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from every_case import every_day

from shardzoo import ops
from shardzoo.mpu import Shard
from shardzoo.mpu.packed import PackedWriter, packed_linear
from shardzoo.mpu.parameter import SplitParameter
from shardzoo.ops import packing

kernels = pytest.importorskip("shardzoo.ops.triton_kernels.packing")

FORMATS = ("nf4", "int8", "fp8")
SIZES = every_day([(5, 3, 37)], more=[(1, 1, 1), (16, 2, 32), (17, 5, 65)])  # rows, blocks, outputs


def make(format, blocks, outputs):
    """Bytes of every code, and scales of unequal sizes."""
    torch.manual_seed(0)
    bits = packing.BITS[format]
    codes = torch.randint(0, 256, (outputs, blocks * 64 * bits // 8), dtype=torch.uint8)
    if format == "fp8":
        codes[codes % 128 == 127] = 0  # not a number
    scales = 0.5 + torch.rand(outputs, blocks)
    return codes, scales


@pytest.mark.parametrize("format", FORMATS)
def test_unpacked_values_are_equal_to_the_bit(format):
    for _, blocks, outputs in SIZES:
        codes, scales = make(format, blocks, outputs)
        codes = codes.view(outputs * blocks, -1)
        for dtype in (torch.float32, torch.float16):
            both = []
            for variant in ("reference", "triton"):
                with ops.kernels(variant):
                    both.append(packing.unpack_blocks(codes, scales.flatten(), format, dtype))
            assert torch.equal(*both)
        values = packing.unpack_blocks_op(
            codes, scales.flatten(), packing._find_table(format, codes.device)
        )
        assert torch.equal(
            values, packing.unpack_blocks(codes, scales.flatten(), format, torch.float32)
        )


def multiply(x, codes, scales, format):
    """The product by the kernel, into an output that begins as NaN."""
    y = x.new_full((len(x), len(codes)), torch.nan)
    kernels.launch_product(x, codes, scales, packing._find_table(format, x.device), y)
    return y


def check_products():
    for format in FORMATS:
        for rows, blocks, outputs in SIZES:
            codes, scales = make(format, blocks, outputs)
            x = torch.randn(rows, 64 * blocks)
            found = multiply(x, codes, scales, format)
            values = packing.unpack_blocks(
                codes.view(outputs * blocks, -1), scales.flatten(), format, torch.float64
            )
            expected = x.double() @ values.view(outputs, -1).T
            error = (found.double() - expected).abs().max() / expected.abs().max()
            assert error < 1e-6


def test_products_are_those_of_unpacked_matrices():
    check_products()
    codes, scales = make("nf4", 2, 9)
    x = torch.randn(3, 128, dtype=torch.float16)
    with ops.kernels("triton"):
        assert packing.can_multiply_packed(x)
        assert not packing.can_multiply_packed(x.double())
        assert not packing.can_multiply_packed(x.repeat(6, 1))
        found = packing.multiply_packed(x, codes, scales, "nf4")
    with ops.kernels("reference"):
        assert not packing.can_multiply_packed(x)
        expected = packing.multiply_packed(x, codes, scales, "nf4")
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3 * expected.abs().max().item())


@pytest.mark.parametrize(
    "width", [128, 100]
)  # of whole blocks, and of blocks that go on in the next row
def test_a_layer_computes_the_same_by_kernels(width):
    torch.manual_seed(0)
    weight = torch.randn(48, width)
    parameter = SplitParameter(weight, requires_grad=False)
    parameter.shard = Shard((48, width), 0)
    writer = PackedWriter("nf4", None, weight.device)
    packed = writer.pack(weight, parameter)
    writer.finish()
    bias = torch.randn(48)
    results = []
    for variant in ("reference", "triton"):
        x = torch.ones(2, 3, width).cumsum(1).requires_grad_()
        with ops.kernels(variant):
            y = packed_linear(x, packed, bias)
            [grad] = torch.autograd.grad(y.sum(), x)
        results.append((y, grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


BROKEN = [
    ("interleave(codes >> 4, codes & 15)", "interleave(codes & 15, codes >> 4)"),
    ("block = output * blocks + number", "block = output * blocks"),
    (
        "mask=has_row[:, None], other=0.0)",
        "mask=has_row[:, None] & (column[None, :] > 0), other=0.0)",
    ),
    ("weights * scale[:, None]).to(x.dtype)", "weights).to(x.dtype)"),
]


@pytest.mark.parametrize(("line", "broken"), BROKEN)
def test_broken_kernels_fail(line, broken, monkeypatch, tmp_path):
    source = importlib.util.find_spec(kernels.__name__).origin
    text = Path(source).read_text()
    assert text.count(line) == 1
    file = tmp_path / "mutant.py"
    file.write_text(
        text.replace(line, broken).replace(
            "from .common", "from shardzoo.ops.triton_kernels.common"
        )
    )
    spec = importlib.util.spec_from_file_location("mutant_of_packing", file)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    monkeypatch.setattr(sys.modules[__name__], "kernels", mutant)
    with pytest.raises(AssertionError):
        check_products()
