"""A job of several ranks on this machine: started, watched, and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .rank_info import cpu_environment, free_port
from .rank_process import ERROR_FILE, SHOWN_BY_STARTER, STARTER, RankError, read

USAGE_ERROR = 2  # the exit code of a rank that has said what is wrong itself
POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0  # for the other ranks to fail of the same cause, so that the first can be told
TERMINATE_SECONDS = 3.0  # for them to end when asked to, before they are killed


@dataclass(frozen=True)
class Failure:
    """How a rank failed by itself. code: its exit code, minus a signal's number, or None while it still runs."""

    rank: int
    code: int | None
    error: RankError | None
    time: float

    @property
    def killed(self) -> bool:
        """By a signal from outside: never the consequence of another rank's end, as an abort may be."""
        return self.error is None and self.code is not None and self.code < 0 and self.code != -signal.SIGABRT

    @property
    def exit_code(self) -> int:
        """As a shell has it: 128 + a signal's number; 1, Python's own, of a rank that an exception did not end."""
        if self.code is None:
            return 1
        return self.code if self.code >= 0 else 128 - self.code

    def precedence(self) -> tuple[bool, bool, float]:
        """Sorts failures, the cause first."""
        return (not self.killed, self.error is not None and self.error.lost_a_peer, self.time)

    def describe(self) -> str:
        """For the first failure. Empty if the rank has said what was wrong itself."""
        if self.error is not None:
            return f"rank {self.rank} failed first:\n{self.error.traceback}"
        if self.killed:
            name = signal.Signals(self.exit_code - 128).name
            return f"rank {self.rank} was killed by {name}" + (
                "; the machine may have run out of memory\n" if name == "SIGKILL" else "\n"
            )
        return "" if self.code == USAGE_ERROR else f"rank {self.rank} failed first, with exit code {self.exit_code}\n"


class Rank:
    """One process of the job, with a session of its own."""

    def __init__(self, number: int, command: Sequence[str], environment: dict[str, str], error_file: Path) -> None:
        self.number, self.error_file = number, error_file
        self.process = subprocess.Popen(
            command,
            env=environment | {"RANK": str(number), "LOCAL_RANK": str(number), ERROR_FILE: str(error_file)},
            stdin=None if number == 0 else subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone, which passes it on once
        )
        self.failure: Failure | None = None

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def look(self) -> Failure | None:
        """How the rank has failed, if it has. An exception counts before its process is gone, which may hang."""
        code = self.process.poll()
        if self.failure is None and (code or self.error_file.exists()):
            error = read(self.error_file)
            self.failure = Failure(self.number, code, error, error.time if error else time.time())
        return self.failure

    def send(self, number: int) -> None:
        """A signal to the rank and the processes it has started."""
        if self.runs:
            os.killpg(self.process.pid, number)


def run_ranks(command: Sequence[str], world_size: int) -> int:
    """Runs `command` as `world_size` ranks of one job; returns its exit code.

    The first rank that fails takes the others down within seconds; its traceback is printed, and its exit code is
    the job's, that of a signal as the shell has it (128 + its number). SIGTERM and SIGINT are passed on to the ranks,
    which may take their time to save; a second SIGINT kills them. The ranks do not outlive this process.
    """
    ranks: list[Rank] = []
    stops: list[int] = []

    def stop(number: int, frame: object) -> None:
        stops.append(number)
        again = stops.count(signal.SIGINT) > 1
        if len(stops) == 1 or again:  # launchers repeat themselves while the ranks end
            for rank in ranks:
                rank.send(signal.SIGKILL if again else number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    with tempfile.TemporaryDirectory(prefix="shardzoo-ranks-") as folder:
        try:
            environment = _environment(world_size)
            for number in range(world_size):
                ranks.append(Rank(number, command, environment, Path(folder) / f"rank_{number}.json"))
            failures = _watch(ranks, stops)
        finally:
            for rank in ranks:
                rank.send(signal.SIGKILL)
                rank.process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
    if stops:
        return 128 + stops[0]
    _report(failures)
    return failures[0].exit_code if failures else 0


def _environment(world_size: int) -> dict[str, str]:
    """What the ranks share."""
    # What another launcher told this process about its own job would mislead the ranks of this one.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return {
        **inherited,
        **cpu_environment(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        SHOWN_BY_STARTER: "1",
        STARTER: str(os.getpid()),
    }


def _watch(ranks: Sequence[Rank], stops: Sequence[int]) -> list[Failure]:
    """Waits for all ranks to end, and ends those that are left when one fails. The failures, the cause first."""
    while any(rank.runs for rank in ranks):
        if [rank for rank in ranks if rank.look()] and not stops:  # all are looked at
            _wait(ranks, SETTLE_SECONDS)
            break
        time.sleep(POLL_SECONDS)
    failures = [failure for rank in ranks if (failure := rank.look())]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            rank.send(number)
        _wait(ranks, TERMINATE_SECONDS)
    return sorted(failures, key=Failure.precedence)


def _wait(ranks: Sequence[Rank], seconds: float) -> None:
    """Until all ranks have ended, at most so long; notes when each fails."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(rank.runs for rank in ranks):
        for rank in ranks:
            rank.look()
        time.sleep(POLL_SECONDS)


def _report(failures: Sequence[Failure]) -> None:
    """The first failure whole, the others with an exception in a line each."""
    for position, failure in enumerate(failures):
        if position == 0:
            print(failure.describe(), end="", file=sys.stderr)
        elif failure.error is not None:
            summary = (failure.error.summary.splitlines() or [""])[0]
            print(f"rank {failure.rank} failed after it: {summary}", file=sys.stderr)
    sys.stderr.flush()
