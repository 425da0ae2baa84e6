"""What the op tests share: the variants that run here, a case per op, and the comparison with fp64."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from every_case import EVERY_CASE

from shardzoo import ops
from shardzoo.ops import variants
from shardzoo.ops.rotary import rotate_op as rotation

VARIANTS = [
    v for v in ("reference", "cpp", "cuda", "triton") if variants.unavailable(v, "cpu") is None
]
# Where test_gpu.py computes: on a GPU, or where a dry run of benchmarks/gpu.sh has it compute.
DEVICE = os.environ.get("SHARDZOO_TEST_DEVICE") or ("cuda" if torch.cuda.is_available() else "")
GPU_VARIANTS = [
    v for v in ("cpp", "cuda", "triton") if DEVICE and variants.unavailable(v, DEVICE) is None
]
collect_ignore = [] if DEVICE else ["test_gpu.py"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# (relative, share of the largest value): a few roundings of the output's dtype, and the fp32 sums behind them
TOLERANCE = {
    torch.float32: (1e-5, 2e-6),
    torch.bfloat16: (2**-7, 2**-8),
    torch.float16: (2**-9, 2**-10),
    torch.float64: (1e-11, 1e-12),
}


@dataclass
class Case:
    """One call of an op: `function(**tensors)`; the floating tensors in `differentiable` get gradients."""

    function: object
    tensors: dict
    differentiable: tuple
    constants: dict = field(default_factory=dict)

    def run(self, variant, dtype, *, with_grad=True):
        """Outputs and gradients (dict) with floating tensors rounded to `dtype`."""

        def convert(tensor):
            return tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor

        inputs = {name: convert(tensor) for name, tensor in self.tensors.items()}
        leaves = {
            name: inputs[name].detach().requires_grad_(with_grad) for name in self.differentiable
        }
        with ops.kernels(variant):
            outputs = self.function(**{**inputs, **leaves}, **self.constants)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            results = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
            if with_grad:
                cotangents = [cotangent(output) for output in outputs]
                grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
                results |= {
                    f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)
                }
        return results

    def rounded(self, dtype):
        """The same case with its floating tensors rounded to `dtype` and held in fp64."""
        tensors = {
            name: t.to(dtype).double() if t is not None and t.is_floating_point() else t
            for name, t in self.tensors.items()
        }
        return Case(self.function, tensors, self.differentiable, self.constants)


def cotangent(output):
    """A fixed, smooth, non-constant gradient of an output, in its dtype on its device, exact in every dtype."""
    values = torch.arange(output.numel(), dtype=torch.float64)
    return ((values * 7 % 13 - 6) / 8).reshape(output.shape).to(output)


def assert_close(results, expected, dtype, slack=1.0, floor=0.0):
    """Every result within TOLERANCE of its fp64 value; NaN and infinities in the same places.

    `floor` is the least scale of the absolute tolerance, for results that cancel to almost nothing.
    """
    relative, absolute = (slack * value for value in TOLERANCE[dtype])
    for name, value in results.items():
        wanted = expected[name]
        finite = wanted[wanted.isfinite()]
        scale = max(finite.abs().max().item() if finite.numel() else 0.0, floor)
        torch.testing.assert_close(
            value.double(),
            wanted.to(value.dtype).double() if not wanted.isfinite().all() else wanted,
            rtol=relative,
            atol=absolute * scale,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def build_cases(rows=5, columns=37, seed=0):
    """A case per op and mode, at odd sizes; inputs are in fp64."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x, residual, third = (normal(2, rows, columns) for _ in range(3))
    weight, bias = 1 + 0.1 * normal(columns), normal(columns)
    keys = ops.dropout_keys(0x123456789ABCDEF, 5, 2)
    scores, score_bias = normal(2, 3, rows, columns), normal(1, 3, rows, columns)
    visible = torch.rand(2, 1, rows, columns, generator=g) > 0.3
    visible[1, 0, rows - 1] = False  # one row sees nothing
    added = normal(2, 1, 1, columns)
    target = torch.randint(columns, (2 * rows,), generator=g)
    target[rows] = -100
    logits = x.reshape(-1, columns)
    norm, pair = ("x", "weight", "bias"), ("x", "residual", "weight")

    def attention(tensors, **constants):
        grads = tuple(name for name in ("scores", "bias") if name in tensors)
        return Case(ops.masked_softmax, tensors, grads, constants)

    prefix = torch.tensor([columns // 2, 0])

    # Views of a fused projection, of whose heads the first ones are queries; part of them rotates.
    heads = normal(2, rows, 5, 14).transpose(1, 2)  # [B, N + K, S, D]
    angles = normal(2, 1, rows, 5)
    rotated = {"q": heads[:, :3], "k": heads[:, 3:], "cos": angles.cos(), "sin": angles.sin()}

    def rotate_op(q, k, cos, sin, interleaved, inverse):
        return rotation(q, k, cos, sin, interleaved, inverse)

    return {
        "softmax": attention({"scores": scores}, scale=0.3),
        "softmax_mask": attention({"scores": scores, "mask": visible}, scale=-2.0),
        "softmax_added": attention({"scores": scores, "mask": added}),
        "softmax_bias": attention({"scores": scores, "bias": score_bias, "mask": visible}),
        "softmax_batch_bias": attention({"scores": scores, "bias": normal(2, 1, rows, columns)}),
        "softmax_head_bias": attention({"scores": scores, "bias": normal(3, 1, columns)}),
        "softmax_causal": attention({"scores": scores}, causal=True),
        "softmax_prefix": attention(
            {"scores": scores, "prefix": prefix, "bias": score_bias}, causal=True
        ),
        "softmax_dropout": attention(
            {"scores": scores, "bias": score_bias, "keys": keys},
            dropout=0.3,
            first_head=7,
            causal=True,
        ),
        "layer_norm": Case(
            ops.layer_norm, {"x": x, "weight": weight, "bias": bias}, norm, {"eps": 1e-5}
        ),
        "layer_norm_no_bias": Case(
            ops.layer_norm, {"x": x, "weight": weight}, norm[:2], {"bias": None, "eps": 1e-5}
        ),
        "add_layer_norm": Case(
            ops.add_layer_norm,
            {"x": x, "residual": residual, "weight": weight, "bias": bias},
            (*pair, "bias"),
            {"eps": 1e-5},
        ),
        "rms_norm": Case(ops.rms_norm, {"x": x, "weight": weight}, norm[:2], {"eps": 1e-6}),
        "add_rms_norm": Case(
            ops.add_rms_norm, {"x": x, "residual": residual, "weight": weight}, pair, {"eps": 1e-6}
        ),
        "rms_norm_offset": Case(
            ops.rms_norm, {"x": x, "weight": weight}, norm[:2], {"eps": 1e-6, "offset": 1.0}
        ),
        "add_rms_norm_rounded_once": Case(
            ops.add_rms_norm,
            {"x": x, "residual": residual, "weight": weight},
            pair,
            {"eps": 1e-6, "offset": 0.0},
        ),
        "gelu": Case(ops.bias_gelu, {"x": x}, ("x",)),
        "bias_gelu": Case(ops.bias_gelu, {"x": x, "bias": bias}, ("x", "bias")),
        "bias_gelu_tanh": Case(
            ops.bias_gelu, {"x": x, "bias": bias}, ("x", "bias"), {"approximate": "tanh"}
        ),
        "geglu": Case(ops.geglu, {"gate": x, "up": third}, ("gate", "up")),
        "geglu_tanh": Case(
            ops.geglu, {"gate": x, "up": third}, ("gate", "up"), {"approximate": "tanh"}
        ),
        "swiglu": Case(ops.swiglu, {"gate": x, "up": third}, ("gate", "up")),
        "dropout": Case(ops.dropout, {"x": x, "keys": keys}, ("x",), {"p": 0.4, "first_column": 9}),
        "bias_residual": Case(
            ops.bias_dropout_residual,
            {"x": x, "bias": bias, "residual": residual},
            ("x", "bias", "residual"),
            {"p": 0.0},
        ),
        "bias_dropout_residual": Case(
            ops.bias_dropout_residual,
            {"x": x, "bias": bias, "residual": residual, "keys": keys},
            ("x", "bias", "residual"),
            {"p": 0.25, "first_row": 3, "first_column": 2},
        ),
        "rotate": Case(rotate_op, rotated, ("q", "k"), {"interleaved": False, "inverse": False}),
        "rotate_interleaved": Case(
            rotate_op,
            {**rotated, "cos": angles[:1].cos(), "sin": angles[:1].sin()},
            ("q", "k"),
            {"interleaved": True, "inverse": True},
        ),
        "cross_entropy": Case(ops.cross_entropy, {"logits": logits, "target": target}, ("logits",)),
        "cross_entropy_smooth": Case(
            ops.cross_entropy,
            {"logits": logits, "target": target},
            ("logits",),
            {"label_smoothing": 0.1, "z_loss": 0.01},
        ),
    }


CASE_NAMES = list(build_cases())


def pytest_generate_tests(metafunc):
    """`variant`, `dtype` and `case_name` run over everything there is.

    Triton's interpreter takes long. Every day it computes all cases in fp32 and bf16 where types are
    compared, and elsewhere each third case.
    """
    is_on_gpu = metafunc.module.__name__.endswith("test_gpu")
    every = {
        "variant": GPU_VARIANTS if is_on_gpu else VARIANTS,
        "dtype": DTYPES,
        "case_name": CASE_NAMES,
    }
    asked = [name for name in every if name in metafunc.fixturenames]
    rows = list(itertools.product(*(every[name] for name in asked)))
    if "case_name" in asked and "variant" in asked and not is_on_gpu and not EVERY_CASE:
        rows = [row for row in rows if visits_every_day(dict(zip(asked, row, strict=True)))]
    if asked:
        ids = ["-".join(str(value).removeprefix("torch.") for value in row) for row in rows]
        values = rows if len(asked) > 1 else [row[0] for row in rows]
        metafunc.parametrize(",".join(asked), values, ids=ids)


def visits_every_day(row: dict) -> bool:
    if row["variant"] != "triton":
        return True
    if "dtype" in row:
        return row["dtype"] in (torch.float32, torch.bfloat16)
    return CASE_NAMES.index(row["case_name"]) % 3 == 0


@pytest.fixture
def zoo():
    """The helpers of this file."""
    return SimpleNamespace(
        cases=build_cases, close=assert_close, Case=Case, variants=VARIANTS, device=DEVICE
    )


@pytest.fixture
def set_kernels(monkeypatch):
    """`set_kernels(choice)` sets SHARDZOO_KERNELS, which is read once."""

    def set_kernels(choice):
        monkeypatch.setenv("SHARDZOO_KERNELS", choice)
        variants.choice_of_environment.cache_clear()

    yield set_kernels
    monkeypatch.undo()
    variants.choice_of_environment.cache_clear()
