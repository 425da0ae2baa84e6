"""Defines the measured cases: an op's inputs, the PyTorch code it replaces, and the fewest bytes it
must move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from ... import ops
from ..softmax import lay_out_diagonals
from . import rivals

Tensors = dict[str, torch.Tensor]

# The soft cap of the case `attention_capped`, whose scores are mostly between -3 and 3.
SOFTCAP = 2.0


@dataclass
class Case:
    """One operator at one size.

    Attributes:
        name: The op's name on the command line.
        baseline: A description of `eager`.
        make: (device, dtype) -> tensors. The tensors named in `leaves` get gradients.
        ours, eager: tensors -> the output that is differentiated.
        forward, backward: The name of the operator behind `ours`, and a function that returns its
            arguments, for the `out` form.
        forward_passes, backward_passes: The fewest reads and writes of a tensor of x's size.
        rivals: Name -> a function like `ours`, from libraries that are installed.
        rival_leaves: What `eager` and the rivals differentiate instead, if their inputs differ.
    """

    name: str
    baseline: str
    make: Callable[[str, torch.dtype], Tensors]
    leaves: tuple[str, ...]
    ours: Callable[[Tensors], torch.Tensor]
    eager: Callable[[Tensors], torch.Tensor]
    forward: tuple[str, Callable[[Tensors], tuple]]
    backward: tuple[str, Callable[[Tensors, Any, torch.Tensor], tuple]]
    forward_passes: float
    backward_passes: float
    rivals: dict[str, Callable[[Tensors], torch.Tensor]] = field(default_factory=dict)
    rival_leaves: tuple[str, ...] = ()


def _normal(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(len(shape) * 1000 + shape[-1])
    return torch.randn(*shape, device=device, generator=generator).to(dtype)


def _softmax(size: tuple[int, int, int, int]) -> Case:
    batch, _, queries, columns = size

    def make(device, dtype):
        mask = torch.ones(batch, 1, queries, columns, dtype=torch.bool, device=device).tril()
        return {"x": _normal(device, dtype, *size), "mask": mask}

    def eager(t):
        scores = (t["x"] * 0.125).masked_fill(~t["mask"], torch.finfo(t["x"].dtype).min)
        return scores.softmax(-1, dtype=torch.float32).to(t["x"].dtype)

    return Case(
        "masked_softmax",
        "scale, masked_fill, softmax in fp32",
        make,
        ("x",),
        lambda t: ops.masked_softmax(t["x"], t["mask"], scale=0.125),
        eager,
        ("masked_softmax", lambda t: (t["x"], t["mask"], None, None, None, 0.125, False, 0.0, 0)),
        ("masked_softmax_backward", lambda t, out, grad: (grad, out[0], None, 0.125, 0.0, 0, 0)),
        2,
        3,
    )


def _softmax_bias(size: tuple[int, int, int, int]) -> Case:
    batch = size[0]

    def make(device, dtype):
        return {"x": _normal(device, dtype, *size), "bias": _normal(device, dtype, 1, *size[1:])}

    return Case(
        "softmax_bias",
        "scores + trained bias, softmax in fp32 (Hugging Face T5)",
        make,
        ("x", "bias"),
        lambda t: ops.masked_softmax(t["x"], None, t["bias"]),
        lambda t: (t["x"] + t["bias"]).softmax(-1, dtype=torch.float32).to(t["x"].dtype),
        ("masked_softmax", lambda t: (t["x"], None, t["bias"], None, None, 1.0, False, 0.0, 0)),
        ("masked_softmax_backward", lambda t, out, grad: (grad, out[0], None, 1.0, 0.0, 0, 1)),
        2 + 1 / batch,
        3 + 1 / batch,
    )


def _norm_inputs(rows: int, columns: int):
    def make(device, dtype):
        weight = 1 + 0.1 * _normal(device, torch.float32, columns)
        bias = _normal(device, dtype, columns)
        return {
            "x": _normal(device, dtype, rows, columns),
            "weight": weight.to(dtype),
            "bias": bias,
        }

    return make


def _layer_norm(rows: int, columns: int) -> Case:
    return Case(
        "layer_norm",
        "torch.nn.functional.layer_norm",
        _norm_inputs(rows, columns),
        ("x", "weight", "bias"),
        lambda t: ops.layer_norm(t["x"], t["weight"], t["bias"], 1e-5),
        lambda t: F.layer_norm(t["x"], (columns,), t["weight"], t["bias"], 1e-5),
        ("layer_norm", lambda t: (t["x"], None, t["weight"], t["bias"], 1e-5)),
        (
            "layer_norm_backward",
            lambda t, out, grad: (grad, None, t["x"], t["weight"], out[2], out[3], True, False),
        ),
        2,
        3,
        rivals=_norm_rivals("liger_layer_norm"),
    )


def _rms_norm(rows: int, columns: int) -> Case:
    def eager(t):
        wide = t["x"].float()
        normalized = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(
            t["x"].dtype
        )
        return t["weight"] * normalized

    return Case(
        "rms_norm",
        "Hugging Face's T5 and Llama RMSNorm",
        _norm_inputs(rows, columns),
        ("x", "weight"),
        lambda t: ops.rms_norm(t["x"], t["weight"], 1e-6),
        eager,
        ("rms_norm", lambda t: (t["x"], None, t["weight"], 1e-6)),
        (
            "rms_norm_backward",
            lambda t, out, grad: (grad, None, t["x"], t["weight"], out[2], False),
        ),
        2,
        3,
        rivals=_norm_rivals("liger_rms_norm", "quack_rms_norm"),
    )


def _norm_rivals(*names: str) -> dict[str, Callable[[Tensors], torch.Tensor]]:
    return {name: getattr(rivals, name) for name in names if rivals.installed(name)}


def _bias_gelu(rows: int, columns: int) -> Case:
    return Case(
        "bias_gelu",
        "gelu(x + bias)",
        _norm_inputs(rows, columns),
        ("x", "bias"),
        lambda t: ops.bias_gelu(t["x"], t["bias"]),
        lambda t: F.gelu(t["x"] + t["bias"]),
        ("bias_gelu", lambda t: (t["x"], t["bias"], False)),
        ("bias_gelu_backward", lambda t, out, grad: (grad, t["x"], t["bias"], False)),
        2,
        3,
    )


def _glu(name: str, rows: int, columns: int, activation: int) -> Case:
    def make(device, dtype):
        return {
            "x": _normal(device, dtype, rows, columns),
            "up": _normal(device, dtype, 1, rows, columns)[0],
        }

    def ours(t):
        is_silu = activation == ops.activation.SILU
        return ops.swiglu(t["x"], t["up"]) if is_silu else ops.geglu(t["x"], t["up"], "tanh")

    def eager(t):
        gate = (
            F.silu(t["x"])
            if activation == ops.activation.SILU
            else F.gelu(t["x"], approximate="tanh")
        )
        return gate * t["up"]

    return Case(
        name,
        "act(gate) * up",
        make,
        ("x", "up"),
        ours,
        eager,
        ("glu", lambda t: (t["x"], t["up"], activation)),
        ("glu_backward", lambda t, out, grad: (grad, t["x"], t["up"], activation)),
        3,
        5,
    )


def _bias_dropout_residual(rows: int, columns: int) -> Case:
    def make(device, dtype):
        return {
            "x": _normal(device, dtype, 8, rows // 8, columns),
            "bias": _normal(device, dtype, columns),
            "residual": _normal(device, dtype, 1, 8, rows // 8, columns)[0],
            "keys": ops.dropout_keys(1, 0, 8, device),
        }

    return Case(
        "bias_dropout_residual",
        "residual + dropout(x + bias)",
        make,
        ("x", "bias", "residual"),
        lambda t: ops.bias_dropout_residual(
            t["x"], t["bias"], t["residual"], p=0.1, keys=t["keys"]
        ),
        lambda t: t["residual"] + F.dropout(t["x"] + t["bias"], 0.1),
        (
            "bias_dropout_residual",
            lambda t: (t["x"], t["bias"], t["residual"], t["keys"], 0.1, 0, 0),
        ),
        ("bias_dropout_residual_backward", lambda t, out, grad: (grad, t["keys"], 0.1, 0, 0, True)),
        3,
        2,
    )


def _cross_entropy(rows: int, columns: int) -> Case:
    def make(device, dtype):
        target = torch.arange(rows, device=device) * 7919 % columns
        return {"x": _normal(device, dtype, rows, columns), "target": target}

    def backward_arguments(t, out, grad):
        log_z = out[0] + out[1].log()
        width = t["x"].shape[1]
        return (t["x"], t["target"], grad, log_z, 0, width, width, 0.0, 0.0, -100)

    return Case(
        "cross_entropy",
        "cross_entropy of fp32 logits",
        make,
        ("x",),
        lambda t: ops.cross_entropy(t["x"], t["target"]),
        lambda t: F.cross_entropy(t["x"].float(), t["target"], reduction="none"),
        ("cross_entropy_stats", lambda t: (t["x"], t["target"], 0, t["x"].shape[1], False)),
        ("cross_entropy_grad", backward_arguments),
        1,
        2,
        rivals=_norm_rivals("liger_cross_entropy", "quack_cross_entropy"),
    )


def _attention(name: str, size: tuple[int, int, int, int]) -> Case:
    """Returns attention of q, k and v [B, N, S, D]: of all positions, causal, causal with a soft cap of
    the scores, or with a trained bias by distance and dropout.

    The others get the bias written out [1, N, S, S] and differentiate that, as a stack of T5's
    layers does.
    """
    batch, heads, length, _ = size
    trained = name == "attention_bias"
    causal = name in ("attention_causal", "attention_capped")
    softcap = SOFTCAP if name == "attention_capped" else None
    dropout = 0.1 if trained else 0.0

    def make(device, dtype):
        x, k, v = _normal(device, dtype, 3, *size)
        tensors = {"x": x, "k": k, "v": v, "keys": ops.dropout_keys(1, 0, batch, device)}
        if trained:
            tensors["bias"] = _normal(device, dtype, heads, 2 * length - 1)
            tensors["written_bias"] = lay_out_diagonals(tensors["bias"], length, length)[None]
        return tensors

    def arguments(t):
        keys = t["keys"] if trained else None
        # There is no mask, no prefix, and no length of the keys.
        tensors = (t["x"], t["k"], t["v"], t.get("bias"), None, None, None, keys)
        scale = 0.125
        return (*tensors, scale, causal, dropout, 0, 0, softcap or 0.0)

    written, others = rivals.attention(causal, dropout, softcap)
    return Case(
        name,
        "scores, softmax in fp32, dropout and their product with v written out",
        make,
        ("x", "k", "v", "bias") if trained else ("x", "k", "v"),
        lambda t: torch.ops.shardzoo.attention(*arguments(t))[0],
        written,
        ("attention", arguments),
        ("attention_backward", lambda t, outputs, grad: (grad, *outputs, *arguments(t))),
        4,
        8,
        rivals=others,
        rival_leaves=("x", "k", "v", "written_bias") if trained else (),
    )


def cases(
    device: str, scale: float = 1.0, length: int = 0, shape: tuple[int, int] | None = None
) -> list[Case]:
    """Returns all cases, with the sizes of a training step on a CPU, or well beyond the L2 cache on
    a GPU.

    Args:
        scale: Multiplies the leading size, for quick runs.
        length: The positions of attention's sequences; 0 for 256 on a CPU, 2,048 on a GPU. Their
            tokens stay as many.
        shape: Rows, a multiple of 8, and columns of norms, activations and residuals; by default
            16,384 × 1,024 on a CPU and 65,536 × 4,096 on a GPU.
    """
    if device == "cuda":
        scores = (16, 32, 1024, 1024)
        matrix = (65536, 4096)
        logits = (8192, 131072)
        heads = 16
        length = length or 2048
        positions = 32768
    else:
        scores = (4, 8, 1024, 1024)
        matrix = (16384, 1024)
        logits = (128, 250112)
        heads = 8
        length = length or 256
        positions = 8192
    batch, score_heads, queries, keys = scores
    scores = (max(1, int(batch * scale)), score_heads, queries, keys)
    matrix = (max(int(matrix[0] * scale) // 8, 1) * 8, matrix[1])
    rows, width = shape or matrix
    tokens = max(1, int(logits[0] * scale))
    attended = (max(1, int(positions * scale / length)), heads, length, 64)
    return [
        _softmax(scores),
        _softmax_bias(scores),
        _layer_norm(rows, width),
        _rms_norm(rows, width),
        _bias_gelu(rows, width),
        _glu("geglu", rows, width, ops.activation.GELU_TANH),
        _glu("swiglu", rows, width, ops.activation.SILU),
        _bias_dropout_residual(rows, width),
        _cross_entropy(tokens, logits[1]),
        *(
            _attention(name, attended)
            for name in ("attention", "attention_causal", "attention_capped", "attention_bias")
        ),
    ]
