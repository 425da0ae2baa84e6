"""Chooses which variant of the operators runs on a device.

`SHARDZOO_KERNELS`, which is read once (or `kernels(...)` for a block of code), makes the choice:

    auto       the fastest variant that exists for the tensor's device, else the reference (the default)
    reference  PyTorch's own operators
    cpp        the compiled kernels for CPU tensors
    cuda       the compiled kernels for CUDA tensors (for CPU tensors in the build of tests/ops/cuda_emulation)
    triton     the Triton kernels (CUDA tensors, or CPU tensors under TRITON_INTERPRET=1)

If a forced variant cannot run on this machine, that is an error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator

from . import library
from .device import is_for_amd

VARIANTS = ("reference", "cpp", "cuda", "triton")
CHOICES = ("auto", *VARIANTS)
log = logging.getLogger("shardzoo.ops")

# Set by `kernels`; None means that the environment variable applies.
_forced: str | None = None


@contextlib.contextmanager
def kernels(choice: str) -> Iterator[None]:
    """Runs the enclosed ops, and backward passes started inside, with one choice of `CHOICES`.

    The choice applies to the whole process, because autograd runs backward passes on other threads.

    Raises:
        ValueError: The choice is unknown.
    """
    global _forced
    validated = _validated(choice)
    previous = _forced
    _forced = validated
    try:
        yield
    finally:
        _forced = previous


def current_choice() -> str:
    """Returns the current choice: that of the innermost `kernels` block, else SHARDZOO_KERNELS,
    else "auto".
    """
    return _forced or choice_of_environment()


@functools.cache
def choice_of_environment() -> str:
    """Returns what SHARDZOO_KERNELS chooses.

    It is read once: a decoding step asks a hundred times.
    """
    return _validated(os.environ.get("SHARDZOO_KERNELS") or "auto")


def _validated(choice: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"kernels {choice!r} do not exist; use one of {', '.join(CHOICES)}")
    return choice


def choose_variant(device_type: str) -> str:
    """Returns the variant for tensors of `device_type` under the current choice.

    Raises:
        RuntimeError: A forced variant cannot run on this machine.
    """
    return _best_variant(_forced or choice_of_environment(), device_type)


@functools.cache
def _best_variant(choice: str, device_type: str) -> str:
    if choice != "auto":
        reason = unavailable(choice, device_type)
        if reason is not None:
            raise RuntimeError(f"SHARDZOO_KERNELS={choice} cannot run here: {reason}")
        log.info("kernels on %s: %s (forced)", device_type, choice)
        return choice
    preferred = ("cpp",) if device_type == "cpu" else ("cuda", "triton")
    reasons = []
    for variant in preferred:
        reason = unavailable(variant, device_type)
        if reason is None:
            log.info("kernels on %s: %s (fastest available)", device_type, variant)
            return variant
        reasons.append(reason)
    log.info("kernels on %s: reference (%s)", device_type, "; ".join(reasons))
    return "reference"


def unavailable(variant: str, device_type: str) -> str | None:
    """Returns None if `variant` can run on `device_type`, else the reason why not, as one clause."""
    if variant == "reference":
        return None
    if variant == "triton":
        return triton_unavailable(device_type)
    if device_type == "cpu" and library.emulates_cuda():
        if variant == "cuda":
            return None
        return "this build of the library runs its CUDA kernels on CPU tensors"
    if device_type != ("cpu" if variant == "cpp" else "cuda"):
        return f"{variant} kernels do not run on {device_type} tensors"
    if variant == "cuda" and is_for_amd():
        return "the compiled kernels are for NVIDIA's GPUs, and this PyTorch is for AMD's"
    return library.missing_kernels(device_type)


@functools.cache
def triton_unavailable(device_type: str) -> str | None:
    """Returns None if Triton kernels can run on this device type, else the reason why not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device_type == "cpu" and not interpreted:
        return "Triton has no CPU target (TRITON_INTERPRET=1 runs its interpreter, for tests)"
    if device_type not in ("cpu", "cuda"):
        return f"the Triton kernels are not written for {device_type}"
    return None
