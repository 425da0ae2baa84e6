"""Collects what a result depends on besides its arguments: versions, git commit, hardware, command
line.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch

from ... import __version__

LIBRARIES = ("transformers", "deepspeed")
GIT_TIMEOUT = 10  # seconds; a repository on a network disk may be slow


def versions() -> dict[str, str]:
    """Returns the versions of Python, torch, the other libraries and shardzoo."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "shardzoo": __version__}


def git_commit() -> str | None:
    """Returns the commit of the script's repository, else of the working directory's, else None.

    The suffix "-dirty" says that tracked files differ from the commit.
    """
    for folder in (Path(sys.argv[0]).absolute().parent, Path.cwd()):
        describe = ["git", "-C", str(folder), "describe"]
        describe += ["--always", "--dirty", "--abbrev=40", "--exclude=*"]
        try:
            found = subprocess.run(describe, capture_output=True, text=True, timeout=GIT_TIMEOUT)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if found.returncode == 0:
            return found.stdout.strip()
    return None


def hardware() -> dict[str, str]:
    """Returns the operating system, the CPU and its cores, the memory, and the GPUs of this
    machine.
    """
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    gpus = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    facts = {
        "system": platform.platform(),
        "CPU": f"{_cpu_name()}, {cores} cores, {torch.get_num_threads()} threads",
    }
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        facts["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB"
    return {
        **facts,
        "GPUs": ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "none",
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def command_line() -> str:
    """Returns the script and its arguments as a shell reads them, without the rank that a launcher
    adds.
    """
    return shlex.join(word for word in sys.argv if not word.startswith("--local_rank"))
