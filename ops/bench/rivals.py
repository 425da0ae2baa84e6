"""Calls the same operators in other libraries, if they are installed (both libraries need a GPU)."""

from __future__ import annotations

import importlib.util

import torch


def installed(name: str) -> bool:
    """Returns whether the library behind a function of this module can be used on this machine."""
    package = {"liger": "liger_kernel", "quack": "quack"}[name.partition("_")[0]]
    return torch.cuda.is_available() and importlib.util.find_spec(package) is not None


def liger_layer_norm(t):
    """Liger's LayerNorm."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(t["x"], t["weight"], t["bias"], 1e-5)


def liger_rms_norm(t):
    """Liger's RMSNorm in its default rounding order, casting mode 0: it normalizes in fp32 and rounds before it applies
    the weight."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(t["x"], t["weight"], 1e-6, 0.0, 0, False)


def liger_cross_entropy(t):
    """Liger's cross-entropy, on a copy of the input, because it overwrites its input with the gradient."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    result = LigerCrossEntropyFunction.apply(t["x"].clone(), t["target"], None, -100, 0.0, 0.0, "none", None, False)
    return result[0] if isinstance(result, tuple) else result


def quack_rms_norm(t):
    """Quack's RMSNorm."""
    from quack import rmsnorm

    return rmsnorm(t["x"], t["weight"], eps=1e-6)


def quack_cross_entropy(t):
    """Quack's cross-entropy."""
    from quack import cross_entropy

    return cross_entropy(t["x"], t["target"], reduction="none")
