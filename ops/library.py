"""Loads the library of compiled kernels, `_kernels.so`, and calls its kernels.

The library is built from csrc/ and may be missing: without it every operator runs on its reference
or in Triton. Loading it registers the operators of `torch.ops.shardzoo_kernels`. They are the bare
kernels, which write into given tensors and know nothing of gradients.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

COMPILED = Path(__file__).with_name("_kernels.so")
STALE = "was built from another version of the source: run `python csrc/build.py` or `make setup`"


def call_compiled(name: str, *arguments: Any) -> Any:
    """Runs one compiled kernel.

    The last arguments are the tensors that it writes, unless it returns its results.
    """
    try:
        return find_kernel(name)(*arguments)
    except RuntimeError as error:
        refuse_stale_library(error)
        raise


@functools.cache
def find_kernel(name: str) -> Callable[..., Any]:
    """Returns the function that runs a compiled kernel: what PyTorch's object for an operator
    calls, without the call in Python around it.

    Raises:
        RuntimeError: The library has no such kernel, because it was built from another source.
    """
    try:
        return getattr(torch.ops.shardzoo_kernels, name).default._op
    except AttributeError:
        raise RuntimeError(f"{COMPILED.name} has no kernel {name!r}: it {STALE}") from None


def refuse_stale_library(error: RuntimeError) -> None:
    """Raises RuntimeError if `error` says that arguments do not fit the declaration of a kernel, which
    is then that of a library built from another source.
    """
    if "Declaration: shardzoo_kernels::" in str(error):
        message = str(error).splitlines()[0].split(" Declaration:")[0]
        raise RuntimeError(f"{message} ({COMPILED.name} {STALE})") from error


@functools.cache
def load_error() -> str | None:
    """Loads the compiled kernels once.

    Returns:
        None if their operators are registered, else the reason why not, as one clause.
    """
    if not COMPILED.exists():
        return "the compiled kernels were not built (see `shardzoo doctor`)"
    try:
        torch.ops.load_library(str(COMPILED))
    except OSError as error:
        return f"{COMPILED.name} does not load: {error}"
    return None


@functools.cache
def missing_kernels(device_type: str) -> str | None:
    """Returns None if compiled kernels exist for `device_type` ("cpu" or "cuda"), else the reason
    why not.
    """
    error = load_error()
    if error is None and device_type == "cuda" and not has_cuda_kernels():
        return "the library was built without CUDA kernels (no working nvcc at build time)"
    return error


def has_cuda_kernels() -> bool:
    """Returns whether the library was compiled with the CUDA kernels."""
    return load_error() is None and bool(_symbols().shardzoo_has_cuda())


@functools.cache
def emulates_cuda() -> bool:
    """Returns whether the library is that of tests/ops/cuda_emulation, which runs CUDA kernels on
    CPU tensors.
    """
    return load_error() is None and hasattr(_symbols(), "shardzoo_emulates_cuda")


def is_amd_with_avx512_bf16() -> bool:
    """Returns whether the processor is AMD's and the CPU kernels use AVX512-BF16; False without the
    library.
    """
    return (
        load_error() is None
        and bool(_symbols().shardzoo_cpu_is_amd())
        and cpu_isa() == "x86-64-v4+bf16"
    )


def cpu_isa() -> str:
    """Returns the instruction set that the CPU kernels use on this machine.

    Requires the library.
    """
    return _symbols().shardzoo_cpu_isa().decode()


def build_info() -> str:
    """Returns the compiler, torch's ABI and the machine code of the library, which is required."""
    return _symbols().shardzoo_build_info().decode()


@functools.cache
def _symbols() -> ctypes.CDLL:
    symbols = ctypes.CDLL(str(COMPILED))
    symbols.shardzoo_cpu_isa.restype = ctypes.c_char_p
    symbols.shardzoo_build_info.restype = ctypes.c_char_p
    return symbols
