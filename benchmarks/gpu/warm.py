"""Starts the parts of a call as copies of a process that has imported PyTorch, transformers and this package already.

Importing them takes eight seconds of a processor in each part, of which a call of eight minutes has eighteen. A copy of
a process that has used the GPU could not use it, so the imports do not touch it. Each copy leads a group of processes,
so that all that it starts ends with it.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# transformers imports most of itself, and what it finds of DeepSpeed, SciPy and torchao, with `modeling_utils`.
PRELOADED = [
    "torch",
    "torch.nn.attention",
    "transformers",
    "transformers.modeling_utils",
    "shardzoo.trainer.trainer",
    "shardzoo.trainer.estimate",
    "shardzoo.plan.layouts",
]
# Some of these ask at once whether there is a GPU. PyTorch then asks the driver's library of facts instead of the
# driver itself, of which a copy of the process could make no use any more.
ASKS_WITHOUT_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
GRACE = 5  # seconds from SIGTERM to SIGKILL


def run_words(words: Sequence[str], folder: str, environment: Mapping[str, str], log: str) -> None:
    """Does in this process what Python would do with these words on its command line."""
    # What was imported before stays: collecting garbage need not walk over a million objects again, whose memory
    # would be copied for it.
    gc.freeze()
    os.setsid()
    os.chdir(folder)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(":") if path]
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


class WarmStart:
    """Runs programs one after another in a folder, each in a copy of a warm process.

    The warm process has the variables of `environment`; the programs have those that they are given.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = str(folder)
        self._environment = {**environment, **ASKS_WITHOUT_DRIVER}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._running: BaseProcess | None = None

    def run(
        self, words: Sequence[str], environment: Mapping[str, str], limit: float, log: Any
    ) -> int | None:
        """Runs a program to its end; returns its exit code, or None if it had to be ended."""
        self._start_server()
        process = self._context.Process(
            target=run_words, args=(words, self._folder, environment, log.name)
        )
        self._running = process
        process.start()
        try:
            process.join(limit)
            return process.exitcode
        finally:
            self.end_running()

    def _start_server(self) -> None:
        """Starts the warm process, if it does not run. It finds modules by PYTHONPATH: Python gives it this process's
        `sys.path` from 3.12.4 on alone, and passes silently over what it cannot import.
        """
        before = dict(os.environ)
        os.environ.update(self._environment)
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def end_running(self) -> None:
        """Ends the running program and all that it has started."""
        process = self._running
        self._running = None
        if process is None or process.pid is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.is_alive() or number == signal.SIGKILL:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:  # nothing is left of its group
                    break
            process.join(GRACE)
