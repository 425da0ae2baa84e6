"""Says what glibc does with memory that is freed. Settings in the user's environment take precedence.

Other C libraries are left as they are.
"""

from __future__ import annotations

import ctypes
import os

# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
USERS_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
RETURNED_BYTES = 256 << 10


def keep_freed_memory() -> None:
    """Lets glibc keep freed blocks of up to 32 MiB, its maximum, because the next step needs as
    much memory again.

    With torch's huge pages, glibc would otherwise return much of that memory after each step, and
    page faults would slow down the next step.
    """
    _set_heap({M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 2**31 - 1})


def return_freed_memory() -> None:
    """Lets glibc return freed blocks of 256 KiB and more at once.

    By itself it keeps a heap for each thread, with blocks as large as the largest that was freed. The
    threads that speak with an object store would so keep tens of megabytes that none of them uses.
    """
    _set_heap({M_MMAP_THRESHOLD: RETURNED_BYTES})


def _set_heap(settings: dict[int, int]) -> None:
    if any(name in os.environ for name in USERS_SETTINGS):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return
    for name, value in settings.items():
        mallopt(name, value)
