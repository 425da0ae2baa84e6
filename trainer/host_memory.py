"""The C library's memory in a run on CPUs."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Lets glibc keep what is freed in blocks of up to 32 MiB, its most, for the next step, which needs as much again.

    With torch's huge pages it would give much of it back after each step, and fault it in again in the next. What the
    user has set in the environment stays.
    """
    if any(name in os.environ for name in SETTINGS):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(M_MMAP_THRESHOLD, 32 << 20)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
