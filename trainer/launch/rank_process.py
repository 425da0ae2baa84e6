"""Connects a rank to its launcher: records its traceback, and ends it with the launcher.

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
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

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
