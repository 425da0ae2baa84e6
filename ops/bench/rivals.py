"""Calls the same operators in other libraries, if they are installed (Liger and quack need a GPU)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import ops
from ..attention import cap_scores
from ..matmul import matmul

Run = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def installed(name: str) -> bool:
    """Returns whether the library behind a function of this module can be used on this machine."""
    package = {"liger": "liger_kernel", "quack": "quack"}[name.partition("_")[0]]
    return torch.cuda.is_available() and importlib.util.find_spec(package) is not None


def liger_layer_norm(t):
    """Liger's LayerNorm."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(t["x"], t["weight"], t["bias"], 1e-5)


def liger_rms_norm(t):
    """Liger's RMSNorm in its default rounding order, casting mode 0: it normalizes in fp32 and
    rounds before it applies the weight."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(t["x"], t["weight"], 1e-6, 0.0, 0, False)


def liger_cross_entropy(t):
    """Liger's cross-entropy, on a copy of the input, because it overwrites its input with the
    gradient.
    """
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    result = LigerCrossEntropyFunction.apply(
        t["x"].clone(), t["target"], None, -100, 0.0, 0.0, "none", None, False
    )
    return result[0] if isinstance(result, tuple) else result


def quack_rms_norm(t):
    """Quack's RMSNorm."""
    from quack import rmsnorm

    return rmsnorm(t["x"], t["weight"], eps=1e-6)


def quack_cross_entropy(t):
    """Quack's cross-entropy."""
    from quack import cross_entropy

    return cross_entropy(t["x"], t["target"], reduction="none")


@cache
def flex_attention(length: int, device: torch.device) -> tuple[Callable, object]:
    """Returns compiled FlexAttention and its causal mask of a length, which are made once."""
    from torch.nn.attention import flex_attention as flex

    seen = flex.create_block_mask(lambda b, n, q, k: q >= k, None, None, length, length, device)  # type: ignore
    return torch.compile(flex.flex_attention), seen


def attention(
    causal: bool, dropout: float, softcap: float | None = None
) -> tuple[Run, dict[str, Run]]:
    """Returns attention in plain PyTorch, and what else computes it.

    All take x, k and v [B, N, S, D] and, if it is there, the bias `written_bias` [1, N, S, S], with
    a scale of 1/8.

    - `written_out`: this package's operators with the scores of a whole sequence in memory.
    - `sdpa`: PyTorch's fused attention as it chooses; without a bias on a GPU each of its kernels
      by itself too.
    - `flex`: FlexAttention, compiled. It has no dropout, and no backward pass on CPUs.
    - `t5_eager` and `t5_sdpa`: what transformers' T5 calls. `measure.warm_up` removes those that
      cannot run here.
    - `gemma2_eager`: what transformers' Gemma 2 calls. PyTorch's fused attention has no soft cap.
    """

    def eager(t):
        scores = t["x"] @ t["k"].mT * 0.125
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        scores = scores + t["written_bias"] if "written_bias" in t else scores
        if causal:
            scores = scores.masked_fill(
                torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf
            )
        weights = scores.softmax(-1, dtype=torch.float32).to(t["x"].dtype)
        return F.dropout(weights, dropout) @ t["v"]

    def written_out(t):
        keys = t["keys"] if dropout else None
        bias = t.get("written_bias")
        scores = matmul(t["x"], t["k"].mT)
        scale = 0.125
        if softcap is not None:
            scores = cap_scores(scores, scale, softcap)
            scale = 1.0
        weights = ops.masked_softmax(
            scores, None, bias, scale=scale, causal=causal, dropout=dropout, keys=keys
        )
        return matmul(weights, t["v"])

    def sdpa(t, *backends):
        rules = {
            "attn_mask": t.get("written_bias"),
            "dropout_p": dropout,
            "is_causal": causal,
            "scale": 0.125,
        }
        with sdpa_kernel(list(backends)) if backends else nullcontext():
            return F.scaled_dot_product_attention(t["x"], t["k"], t["v"], **rules)

    def flex(t):
        compiled, seen = flex_attention(t["x"].shape[2], t["x"].device)
        return compiled(t["x"], t["k"], t["v"], block_mask=seen if causal else None, scale=0.125)

    def t5(t, implementation):
        from transformers import AttentionInterface, T5Model

        eager = sys.modules[T5Model.__module__].eager_attention_forward
        run = AttentionInterface().get_interface(implementation, eager)
        layer = torch.nn.Module()  # in training mode; not causal
        rules = {
            "scaling": 0.125,
            "dropout": dropout,
            "is_causal": False,
            "position_bias": t["written_bias"],
        }
        return run(layer, t["x"], t["k"], t["v"], None, **rules)[0].transpose(1, 2)

    def gemma2_eager(t):
        from transformers import Gemma2Model

        layer = torch.nn.Module()
        layer.num_key_value_groups = 1
        mask = None
        if causal:
            hidden = torch.ones(2 * t["x"].shape[2:3], dtype=torch.bool, device=t["x"].device)
            mask = torch.zeros_like(hidden, dtype=t["x"].dtype).masked_fill(
                hidden.triu(1), -torch.inf
            )[None, None]
        run = sys.modules[Gemma2Model.__module__].eager_attention_forward
        rules = {"scaling": 0.125, "softcap": softcap}
        return run(layer, t["x"], t["k"], t["v"], mask, **rules)[0].transpose(1, 2)

    if softcap is not None:
        return eager, {"written_out": written_out, "gemma2_eager": gemma2_eager}
    others = {"written_out": written_out, "sdpa": sdpa}
    if dropout:
        return eager, others | {
            f"t5_{name}": partial(t5, implementation=name) for name in ("eager", "sdpa")
        }
    if torch.cuda.is_available():
        kernels = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
        named = {name.partition("_")[0].lower(): getattr(SDPBackend, name) for name in kernels}
        others |= {
            f"sdpa_{name}": lambda t, kernel=kernel: sdpa(t, kernel)
            for name, kernel in named.items()
        }
        others["flex"] = flex
    return eager, others
