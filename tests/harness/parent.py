"""Lets a process end with the one that has started it, whatever ends that one."""

from __future__ import annotations

import ctypes
import signal
import sys


def end_with_parent() -> None:
    """Lets the kernel end this process with its parent, also while this one is stopped."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
