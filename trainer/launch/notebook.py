"""Calls a function of a notebook in several processes, as a launcher starts a script."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from .agent import run_ranks
from .failure import Faults
from .launch import check_gpus
from .rank_process import join_job
from .watchdog import STALLED

CALL = "call"  # the file with the pickled function
RESULT = "result_{}"  # that of a rank's result
INTERRUPTED = 128 + signal.SIGINT


def notebook_launcher(
    function: Callable[..., Any], *args: Any, processes: int = 2, stall_timeout: float = 300.0
) -> list[Any]:
    """Calls `function(*args)` in new processes of this machine that can form a process group, and
    waits for them.

    In each process a `ParallelMesh` or a `Trainer` with `env_type="deepspeed+mpu"` finds the
    others, as under torchrun. The function may be defined in the notebook, and use names of the
    notebook; what it changes there is changed in its process alone. A notebook's own process cannot
    be a rank, because its code cannot be started again.

    Args:
        processes: The number of ranks. On GPUs each takes the device of its number.
        stall_timeout: Seconds after which ranks that stand still are ended; 0 for never.

    Returns:
        What the function has returned on each rank, in their order.

    Raises:
        ValueError: `processes` is less than 1, or more than the machine's GPUs.
        RuntimeError: A rank has failed. Its traceback is printed, and the other ranks are ended.
        KeyboardInterrupt: The call was interrupted; no rank is left.
    """
    if processes < 1:
        raise ValueError(f"processes {processes} must be at least 1")
    check_gpus(processes)
    with tempfile.TemporaryDirectory(prefix="shardzoo-notebook-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(cloudpickle.dumps((function, args)))
        code = run_ranks([sys.executable, "-m", __name__, name], processes, Faults(stall_timeout))
        results = [folder / RESULT.format(rank) for rank in range(processes)]
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code == STALLED:
            raise RuntimeError("a rank stood still; what it has printed is above")
        if code or not all(result.exists() for result in results):
            raise RuntimeError(
                f"a rank ended with exit code {code} and without a result; what it has printed is above"
            )
        return [cloudpickle.loads(result.read_bytes()) for result in results]


def main(folder: Path) -> None:
    """Calls the function on one rank."""
    # Kernels set these variables, but a cell shows no moving progress bars.
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE"):
        os.environ.pop(name, None)
    join_job()
    function, args = cloudpickle.loads((folder / CALL).read_bytes())
    result = function(*args)
    (folder / RESULT.format(os.environ["RANK"])).write_bytes(cloudpickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
