"""Connects a rank to its launcher: records its traceback, ends it with the launcher, and stops it
on SIGTERM.

The traceback is written to a file with the name and format of torchrun
(`torch.distributed.elastic.multiprocessing.errors`), so that torchrun shows it in its summary.
`RankAgent` reads the same file.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .heartbeat import sample_for_launcher

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
LAUNCHER_PID = "SHARDZOO_LAUNCHER_PID"  # process id of our launcher
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that this process gets when its parent ends
# A file that exists once the job has begun a run, which the job resumes if it is restarted.
BEGUN = "SHARDZOO_BEGUN"
RESTARTED = "SHARDZOO_RESTARTED"  # set if the job has begun a run and was then started again
LAUNCHER_SHOWS_ERRORS = "SHARDZOO_LAUNCHER_SHOWS_ERRORS"
# Parts of gloo's and NCCL's messages about a lost peer, which is the consequence of another rank's
# failure.
LOST_PEER = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL",
    "recvValue failed",
)


@dataclass(frozen=True)
class RankError:
    """The error with which a rank failed.

    Attributes:
        summary: The exception's type and message, as in `ValueError: the message`.
        time: When it failed, in seconds since the epoch.
    """

    summary: str
    traceback: str
    time: float

    @property
    def lost_a_peer(self) -> bool:
        return lost_a_peer(self.summary)


def join_job() -> None:
    """Sets up this process as a rank of a job, if it is one."""
    record_uncaught_exceptions()
    end_with_launcher()
    sample_for_launcher()


def mark_run_as_begun() -> None:
    """Lets our launcher, if there is one, resume this job's run when it restarts the job."""
    if BEGUN in os.environ:
        Path(os.environ[BEGUN]).touch()


def is_restarted() -> bool:
    """Returns whether our launcher has started this job again after it had begun a run, which it
    then resumes.
    """
    return RESTARTED in os.environ


def record_uncaught_exceptions() -> None:
    """Makes an exception that ends this process be recorded in the launcher's error file, if there
    is one.

    Under torchrun the rank also prints its traceback; our launcher prints the first one itself.
    """
    if (
        ERROR_FILE not in os.environ
        or getattr(sys.excepthook, "records_to", None) == os.environ[ERROR_FILE]
    ):
        return
    path = Path(os.environ[ERROR_FILE])
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        written = False
        if issubclass(kind, Exception):
            written = write_error(path, error)
        if not written or LAUNCHER_SHOWS_ERRORS not in os.environ:
            before(kind, error, trace)

    hook.records_to = str(path)  # type: ignore[attr-defined]
    sys.excepthook = hook


def end_with_launcher() -> None:
    """Makes this process end when its launcher does, in whatever way the launcher ends (Linux
    only).
    """
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(int(launcher), 0)
    except ProcessLookupError:  # the launcher has already ended
        os.kill(os.getpid(), signal.SIGKILL)
    except PermissionError:
        pass


def lost_a_peer(summary: str) -> bool:
    """Returns whether an exception is the consequence of another rank's failure."""
    return any(words in summary for words in LOST_PEER)


def write_error(path: Path, error: BaseException) -> bool:
    """Writes an exception atomically; returns whether that succeeded."""
    summary = f"{type(error).__name__}: {error}"
    # torchrun reports the earliest error, in whole seconds, as the cause. A rank that lost a peer
    # failed after it.
    when = int(time.time()) + lost_a_peer(summary)
    details = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(when)}
    record = {"message": {"message": summary, "extraInfo": details}}
    unfinished = path.with_name(f"{path.name}.part")
    try:
        unfinished.write_text(json.dumps(record))
        unfinished.replace(path)
    except OSError:  # such as a full disk, which may be why the rank fails
        return False
    return True


def read_error(path: Path) -> RankError | None:
    """Returns the error that a rank has written, or None."""
    try:
        message = json.loads(path.read_text())["message"]
        return RankError(
            message["message"], message["extraInfo"]["py_callstack"], path.stat().st_mtime
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


class StopSignal:
    """A context in which SIGTERM only sets `is_set`. The training loop then ends after its step.

    A step reads `is_set` once, before its update, so that all ranks end after the same one. If the
    context does not end within `grace_period` seconds, such as because a step never ends, the
    process does, with exit code 143.
    """

    def __init__(self, grace_period: float) -> None:
        self.is_set = False
        self._grace_period = grace_period
        self._previous: Any = None
        self._deadline: threading.Timer | None = None

    def __enter__(self) -> StopSignal:
        # Python allows signal handlers only in the main thread.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._set)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
        if self._deadline is not None:
            self._deadline.cancel()

    def _set(self, number: int, frame: object) -> None:
        if not self.is_set:
            self._deadline = threading.Timer(self._grace_period, self._end)
            self._deadline.daemon = True
            self._deadline.start()
        self.is_set = True

    def _end(self) -> None:
        print(
            f"the run did not end within --grace-period {self._grace_period:g} s of SIGTERM",
            file=sys.stderr,
        )
        sys.stderr.flush()
        os._exit(128 + signal.SIGTERM)
