"""Which implementation of an op runs: the reference, the compiled C++ or CUDA kernels, or Triton.

`SHARDZOO_KERNELS` (or `kernels(...)` for a block of code) is one of

    auto       the fastest variant that exists for the tensor's device, else the reference (the default)
    reference  PyTorch's own operators
    cpp        the compiled kernels for CPU tensors
    cuda       the compiled kernels for CUDA tensors
    triton     the Triton kernels (CUDA tensors, or CPU tensors under TRITON_INTERPRET=1)

A forced variant that does not exist here is an error, never a silent fallback. A single call that a variant
does not cover (mixed dtypes, an empty tensor) runs on the reference, which computes the same function; it is
logged once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator

import torch

from . import native

VARIANTS = ("reference", "cpp", "cuda", "triton")
CHOICES = ("auto", *VARIANTS)
log = logging.getLogger("shardzoo.ops")

_forced: str | None = None  # set by `kernels`; None means the environment decides


def _validated(choice: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"kernels {choice!r} do not exist; use one of {', '.join(CHOICES)}")
    return choice


def current_choice() -> str:
    """The choice in force: the innermost `kernels` block, else SHARDZOO_KERNELS, else "auto"."""
    return _forced or _validated(os.environ.get("SHARDZOO_KERNELS") or "auto")


@contextlib.contextmanager
def kernels(choice: str) -> Iterator[None]:
    """Run the enclosed ops with one choice of `CHOICES`; backward passes started inside follow it too.

    Raises ValueError for an unknown choice. The choice is process-wide, because autograd runs backward
    passes on threads of its own.
    """
    global _forced
    previous, _forced = _forced, _validated(choice)
    try:
        yield
    finally:
        _forced = previous


@functools.cache
def triton_runs_on(device_type: str) -> str | None:
    """None if Triton kernels can run on this device type, else the reason why not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device_type == "cpu" and not interpreted:
        return "Triton has no CPU target (TRITON_INTERPRET=1 runs its interpreter, for tests)"
    if device_type not in ("cpu", "cuda"):
        return f"the Triton kernels are not written for {device_type}"
    return None


def unavailable(variant: str, device_type: str) -> str | None:
    """None if `variant` can run on `device_type`, else the reason why not, as one clause."""
    if variant == "reference":
        return None
    if variant == "triton":
        return triton_runs_on(device_type)
    if device_type != ("cpu" if variant == "cpp" else "cuda"):
        return f"{variant} kernels do not run on {device_type} tensors"
    return native.missing(device_type)


def choose(device_type: str) -> str:
    """The variant for tensors of `device_type` under the choice in force. Raises RuntimeError if forced and
    missing.
    """
    choice = current_choice()
    if choice != "auto":
        reason = unavailable(choice, device_type)
        if reason is not None:
            raise RuntimeError(f"SHARDZOO_KERNELS={choice} cannot run here: {reason}")
        announce(choice, device_type, "forced")
        return choice
    preferred = ("cpp",) if device_type == "cpu" else ("cuda", "triton")
    reasons = []
    for variant in preferred:
        reason = unavailable(variant, device_type)
        if reason is None:
            announce(variant, device_type, "fastest available")
            return variant
        reasons.append(reason)
    announce("reference", device_type, "; ".join(reasons))
    return "reference"


@functools.cache
def announce(variant: str, device_type: str, why: str) -> None:
    """Log a choice the first time it is made."""
    log.info("kernels on %s: %s (%s)", device_type, variant, why)


@functools.cache
def announce_fallback(op: str, variant: str, why: str) -> None:
    """Log, once per cause, that one call ran on the reference."""
    log.info("%s ran on the reference instead of %s: %s", op, variant, why)


def same_dtype(*tensors: torch.Tensor | None) -> str | None:
    """The reason why compiled kernels cannot take these tensors together, or None if they can."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) > 1:
        return "mixed dtypes " + ", ".join(sorted(str(dtype) for dtype in dtypes))
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16, torch.float64}:
        return f"no kernel for {dtypes.pop()}"
    return None
