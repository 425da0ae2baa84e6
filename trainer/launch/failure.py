"""Describes how a rank of a job has failed, and which of several failures is the cause of the
others.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .rank_process import RankError

USAGE_ERROR = 2  # the exit code of a rank that has printed a message about the user's error itself


@dataclass(frozen=True)
class Faults:
    """What to do about ranks that die or stand still. See `TrainingArguments` for the fields.

    Attributes:
        smaller: Fewer processes that the job can be restarted with, the largest number first.
    """

    stall_timeout: float = 300.0
    grace_period: float = 300.0
    max_restarts: int = 0
    smaller: tuple[int, ...] = ()


@dataclass(frozen=True)
class Failure:
    """The failure of a rank.

    Attributes:
        code: Its exit code, the negative number of a signal, or None while it still runs.
        error: The exception that it recorded, if any.
        time: When it failed, in seconds since the epoch.
    """

    rank: int
    code: int | None
    error: RankError | None
    time: float

    @property
    def killed(self) -> bool:
        """Whether an external signal ended it.

        Unlike an abort, this is never the consequence of another failure.
        """
        if self.error is not None or self.code is None:
            return False
        return self.code < 0 and self.code != -signal.SIGABRT

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: 128 + the number of a signal; 1 if the failed rank
        still runs.
        """
        if self.code is None:
            return 1
        return shell_code(self.code)

    def precedence(self) -> tuple[bool, bool, float]:
        """Returns a key for sorting failures so that the cause comes first."""
        lost_a_peer = self.error is not None and self.error.lost_a_peer
        return (not self.killed, lost_a_peer, self.time)

    def describe(self) -> str:
        """Describes the first failure. Empty if the rank has printed its own message."""
        if self.error is not None:
            return f"rank {self.rank} failed first:\n{self.error.traceback}"
        if self.killed:
            name = signal.Signals(self.exit_code - 128).name
            memory = "; the machine may have run out of memory" if name == "SIGKILL" else ""
            return f"rank {self.rank} was killed by {name}{memory}\n"
        if self.code == USAGE_ERROR:
            return ""
        return f"rank {self.rank} failed first, with exit code {self.exit_code}\n"


def shell_code(code: int) -> int:
    """Returns a process's exit code as a shell reports it: 128 + the number of a signal that ended
    it.
    """
    return code if code >= 0 else 128 - code


def report_failures(failures: Sequence[Failure]) -> None:
    """Prints the first failure in full, and one line for each other exception."""
    print(failures[0].describe(), end="", file=sys.stderr)
    for failure in failures[1:]:
        if failure.error is not None:
            lines = failure.error.summary.splitlines() or [""]
            print(f"rank {failure.rank} failed after it: {lines[0]}", file=sys.stderr)
    sys.stderr.flush()
