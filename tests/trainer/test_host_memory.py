"""A run on CPUs takes the memory of a step from the step before."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from shardzoo.files.heap import keep_freed_memory

def step():
    held = [torch.ones((1 + 7 * i % 29) << 18) for i in range(24)]  # of 1 to 28 MiB
    while held:
        held.pop()

keep_freed_memory()
for _ in range(8):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**own: str) -> int:
    """Of four steps in a process that has taken eight, with torch's huge pages."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    environment |= {"THP_MEM_ALLOC_ENABLE": "1", **own}
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    return int(shown.stdout)


@pytest.mark.before_release
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_kept_unless_the_user_says_otherwise():
    assert page_faults() < page_faults(MALLOC_TRIM_THRESHOLD_="131072") / 8
