"""Loads the compiled kernel library, if it was built, and says why it is not there if it was not."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

LIBRARY = Path(__file__).with_name("_kernels.so")


@functools.cache
def load_error() -> str | None:
    """Load the library once. None if its operators are registered, else the reason why not."""
    if not LIBRARY.exists():
        return "the compiled kernels were not built (see `shardzoo doctor`)"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY.name} does not load: {error}"
    return None


@functools.cache
def _symbols() -> ctypes.CDLL:
    symbols = ctypes.CDLL(str(LIBRARY))
    symbols.shardzoo_cpu_isa.restype = ctypes.c_char_p
    return symbols


def has_cuda_kernels() -> bool:
    """Whether the library was compiled with the CUDA kernels."""
    return load_error() is None and bool(_symbols().shardzoo_has_cuda())


def cpu_isa() -> str:
    """The instruction set that the CPU kernels run on here; needs the library."""
    return _symbols().shardzoo_cpu_isa().decode()


def is_amd_with_avx512() -> bool:
    """Whether the processor is AMD's and the CPU kernels run on AVX-512; False without the library."""
    return load_error() is None and bool(_symbols().shardzoo_cpu_is_amd()) and cpu_isa() == "x86-64-v4"


@functools.cache
def missing(device_type: str) -> str | None:
    """None if compiled kernels exist for `device_type` ("cpu" or "cuda"), else the reason why not."""
    error = load_error()
    if error is None and device_type == "cuda" and not has_cuda_kernels():
        return "the library was built without CUDA kernels (no working nvcc at build time)"
    return error


@functools.cache
def _operator(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.shardzoo_kernels, name).default


def recycled(like: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """An uninitialized CPU tensor, large ones in memory that an earlier one left (csrc/binding/pool.h)."""
    return _operator("recycled")(like, size)


def call(name: str, *arguments) -> None:
    """Run one compiled kernel; the last arguments are the tensors it writes."""
    _operator(name)(*arguments)
