"""Runs a job of several ranks on this machine. The ranks start and end together."""

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
from .rank_process import ERROR_FILE, LAUNCHER_PID, LAUNCHER_SHOWS_ERRORS, RankError, read

USAGE_ERROR = 2  # the exit code of a rank that has printed a message about the user's error itself
POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0  # time for other ranks to fail from the same cause, so that the first failure can be found
TERMINATE_SECONDS = 3.0  # time for the ranks to end after a signal, before they are killed


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
        """Whether an external signal ended it. Unlike an abort, this is never the consequence of another failure."""
        return self.error is None and self.code is not None and self.code < 0 and self.code != -signal.SIGABRT

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: 128 + the number of a signal; 1 if the failed rank still runs."""
        if self.code is None:
            return 1
        return self.code if self.code >= 0 else 128 - self.code

    def precedence(self) -> tuple[bool, bool, float]:
        """Returns a key for sorting failures so that the cause comes first."""
        return (not self.killed, self.error is not None and self.error.lost_a_peer, self.time)

    def describe(self) -> str:
        """Describes the first failure. Empty if the rank has printed its own message."""
        if self.error is not None:
            return f"rank {self.rank} failed first:\n{self.error.traceback}"
        if self.killed:
            name = signal.Signals(self.exit_code - 128).name
            return f"rank {self.rank} was killed by {name}" + (
                "; the machine may have run out of memory\n" if name == "SIGKILL" else "\n"
            )
        return "" if self.code == USAGE_ERROR else f"rank {self.rank} failed first, with exit code {self.exit_code}\n"


class RankProcess:
    """One process of the job, in a new session."""

    def __init__(self, number: int, command: Sequence[str], environment: dict[str, str], error_file: Path) -> None:
        self.number, self.error_file = number, error_file
        self.process = subprocess.Popen(
            command,
            env=environment | {"RANK": str(number), "LOCAL_RANK": str(number), ERROR_FILE: str(error_file)},
            stdin=None if number == 0 else subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C then reaches only the launcher, which passes it on once
        )
        self.failure: Failure | None = None

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def find_failure(self) -> Failure | None:
        """Returns the rank's failure, or None. A recorded exception counts at once, because its process may hang."""
        code = self.process.poll()
        if self.failure is None and (code or self.error_file.exists()):
            error = read(self.error_file)
            self.failure = Failure(self.number, code, error, error.time if error else time.time())
        return self.failure

    def send(self, number: int) -> None:
        """Sends a signal to the rank and the processes it has started."""
        if self.is_running:
            os.killpg(self.process.pid, number)


def run_ranks(command: Sequence[str], world_size: int) -> int:
    """Runs `command` as `world_size` ranks of one job; returns its exit code.

    When a rank fails, the others are ended within seconds. The traceback of the first failure is printed, and its exit
    code is the job's: for a signal 128 + its number, as in a shell. SIGTERM and SIGINT are passed on to the ranks,
    which have as much time as they need to save. A second SIGINT kills them. The ranks do not outlive this process.
    """
    ranks: list[RankProcess] = []
    stops: list[int] = []

    def stop(number: int, frame: object) -> None:
        stops.append(number)
        again = stops.count(signal.SIGINT) > 1
        if len(stops) == 1 or again:  # launchers repeat signals while the ranks end
            for rank in ranks:
                rank.send(signal.SIGKILL if again else number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    with tempfile.TemporaryDirectory(prefix="shardzoo-ranks-") as folder:
        try:
            environment = _environment(world_size)
            for number in range(world_size):
                ranks.append(RankProcess(number, command, environment, Path(folder) / f"rank_{number}.json"))
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
    """Returns the environment variables that all ranks share."""
    # Variables that another launcher has set for this process would mislead the ranks of this job.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return {
        **inherited,
        **cpu_environment(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        LAUNCHER_SHOWS_ERRORS: "1",
        LAUNCHER_PID: str(os.getpid()),
    }


def _watch(ranks: Sequence[RankProcess], stops: Sequence[int]) -> list[Failure]:
    """Waits for all ranks, and ends the others when one fails. Returns the failures, the cause first."""
    while any(rank.is_running for rank in ranks):
        if [rank for rank in ranks if rank.find_failure()] and not stops:  # a list, because `any` would skip ranks
            _wait(ranks, SETTLE_SECONDS)
            break
        time.sleep(POLL_SECONDS)
    failures = [failure for rank in ranks if (failure := rank.find_failure())]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            rank.send(number)
        _wait(ranks, TERMINATE_SECONDS)
    return sorted(failures, key=Failure.precedence)


def _wait(ranks: Sequence[RankProcess], seconds: float) -> None:
    """Waits until all ranks have ended, but at most `seconds`. Records when each rank fails."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(rank.is_running for rank in ranks):
        for rank in ranks:
            rank.find_failure()
        time.sleep(POLL_SECONDS)


def _report(failures: Sequence[Failure]) -> None:
    """Prints the first failure in full, and one line for each other exception."""
    for position, failure in enumerate(failures):
        if position == 0:
            print(failure.describe(), end="", file=sys.stderr)
        elif failure.error is not None:
            summary = (failure.error.summary.splitlines() or [""])[0]
            print(f"rank {failure.rank} failed after it: {summary}", file=sys.stderr)
    sys.stderr.flush()
