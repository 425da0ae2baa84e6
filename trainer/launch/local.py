"""Runs a job of several ranks on this machine. The ranks start and end together."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from .heartbeat import (
    PULSE,
    STALLED,
    Watchdog,
    process_state,
    read_sample,
    refresh_sample,
    stack_of,
)
from .phase import read_phase
from .rank_info import cpu_environment, free_port
from .rank_process import (
    BEGUN,
    ERROR_FILE,
    LAUNCHER_PID,
    LAUNCHER_SHOWS_ERRORS,
    RESTARTED,
    RankError,
    read,
)

SCRATCH, LOCK = "shardzoo-ranks-", "launcher.lock"
DEVICES = "CUDA_VISIBLE_DEVICES"
USAGE_ERROR = 2  # the exit code of a rank that has printed a message about the user's error itself
POLL_SECONDS = 0.05
SETTLE_SECONDS = (
    1.0  # time for other ranks to fail from the same cause, so that the first failure can be found
)
SOON = (
    600.0  # seconds: a rank that fails again sooner after a restart would probably fail each time
)
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
        return (
            self.error is None
            and self.code is not None
            and self.code < 0
            and self.code != -signal.SIGABRT
        )

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
        return (
            ""
            if self.code == USAGE_ERROR
            else f"rank {self.rank} failed first, with exit code {self.exit_code}\n"
        )


class RankProcess:
    """One process of the job, in a new session."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: dict[str, str],
        folder: Path,
        interval: float,
    ) -> None:
        self.number = number
        self.error_file, self.pulse_file = (
            folder / f"rank_{number}.json",
            folder / f"rank_{number}.pulse",
        )
        for file in (self.error_file, self.pulse_file):  # of the job's start before
            file.unlink(missing_ok=True)
        own = {"RANK": str(number), "LOCAL_RANK": str(number), ERROR_FILE: str(self.error_file)}
        self.process = subprocess.Popen(
            command,
            env=environment | own | {PULSE: f"{self.pulse_file}:{interval}"},
            stdin=None if number == 0 else subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C then reaches only the launcher, which passes it on once
        )
        self.failure: Failure | None = None

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return process_state(self.process.pid) == "T"

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

    def end(self) -> None:
        """Kills the rank and the processes it has started, also those that have outlived it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


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


class Job:
    """A job of several ranks on this machine, which may be started again."""

    def __init__(
        self, command: Sequence[str], world_size: int, faults: Faults, folder: Path
    ) -> None:
        self.command, self.world_size, self.faults, self.folder = (
            command,
            world_size,
            faults,
            folder,
        )
        self._most = world_size
        self.ranks: list[RankProcess] = []
        self.stops: list[int] = []
        self._stopped_at = 0.0
        self._watchdog = Watchdog(faults.stall_timeout)
        self._next_look = 0.0
        self._causes: list[int] = []  # the ranks that ended the runs with this number of ranks
        self._started = 0.0
        visible = os.environ.get(DEVICES)
        self._devices = (
            visible.split(",") if visible else [str(number) for number in range(world_size)]
        )

    def stop(self, number: int, frame: object) -> None:
        """Passes a signal on to the ranks. A second SIGINT kills them; launchers repeat signals while the ranks end."""
        self.stops.append(number)
        self._stopped_at = self._stopped_at or time.monotonic()
        again = self.stops.count(signal.SIGINT) > 1
        if len(self.stops) == 1 or again:
            for rank in self.ranks:
                rank.send(signal.SIGKILL if again else number)

    def run(self) -> int:
        """Runs the ranks once; returns the job's exit code. No rank is left."""
        environment = _environment(self.world_size) | {BEGUN: str(self.folder / BEGUN)}
        environment |= {RESTARTED: "1"} if (self.folder / BEGUN).exists() else {}
        if self.world_size < self._most:
            environment[DEVICES] = ",".join(self._devices)
        self._watchdog, self._started = Watchdog(self.faults.stall_timeout), time.monotonic()
        failures: list[Failure] = []
        try:
            for number in range(self.world_size):
                self.ranks.append(
                    RankProcess(number, self.command, environment, self.folder, self._interval)
                )
            stalled, failures = self._watch()
        finally:
            for rank in self.ranks:
                rank.end()
            self.ranks.clear()
        if self.stops:
            return 128 + self.stops[0]
        if stalled:
            return STALLED
        _report(failures)
        self._causes += [failure.rank for failure in failures[:1]]
        return failures[0].exit_code if failures else 0

    def shrink(self) -> str:
        """Goes on with fewer ranks, without the device of one that has failed again soon; returns words that say so."""
        rank, smaller = (
            self._causes[-1],
            [size for size in self.faults.smaller if size < self.world_size],
        )
        if (
            self._causes[-2:] != [rank, rank]
            or not smaller
            or time.monotonic() - self._started > SOON
        ):
            return ""
        words = f" with {smaller[0]} instead of {self.world_size} processes, because rank {rank} has failed twice"
        self.world_size, self._causes = smaller[0], []
        del self._devices[rank : rank + 1]
        return words

    @property
    def _interval(self) -> float:
        """Seconds between two samples of a rank."""
        return max(0.05, min(1.0, self.faults.stall_timeout / 10))

    def _watch(self) -> tuple[bool, list[Failure]]:
        """Waits for all ranks, and ends the others when one fails or stands still.

        Returns whether one stands still, and the failures, the cause first.
        """
        ranks = self.ranks
        while any(rank.is_running for rank in ranks):
            if [
                rank for rank in ranks if rank.find_failure()
            ] and not self.stops:  # a list: `any` would skip ranks
                _wait(ranks, SETTLE_SECONDS)
                break
            if self._stands_still():
                return True, []
            if self.stops and self._cannot_stop():
                return False, []
            time.sleep(POLL_SECONDS)
        failures = [failure for rank in ranks if (failure := rank.find_failure())]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in ranks:
                rank.send(number)
            _wait(ranks, TERMINATE_SECONDS)
        return False, sorted(failures, key=Failure.precedence)

    def _stands_still(self) -> bool:
        """Returns whether the job stands still, after printing which rank is the cause, and its stack."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + self._interval
        running = {rank.number: rank for rank in self.ranks if rank.is_running}
        samples = {number: read_sample(rank.pulse_file) for number, rank in running.items()}
        stalls = self._watchdog.look(samples, lambda number: running[number].is_stopped)
        for stall in stalls:
            pulse = running[stall.rank].pulse_file
            phase = read_phase(
                pulse.with_suffix(".phase")
            )  # before it may run on to print its stack
            stack = (
                stack_of(running[stall.rank].process.pid, pulse.with_suffix(".stack"))
                if stall.sample
                else ""
            )
            found = (
                replace(stall, sample=refresh_sample(stall.sample, phase, stack))
                if stall.sample
                else stall
            )
            print(f"{found.describe()}\n{stack}", file=sys.stderr, flush=True)
        if stalls:
            self._causes.append(stalls[0].rank)
            limit = f"--stall-timeout {self.faults.stall_timeout:g} s"
            print(
                f"the job is ended with exit code {STALLED}, because of {limit}",
                file=sys.stderr,
                flush=True,
            )
        return bool(stalls)

    def _cannot_stop(self) -> bool:
        """Returns whether the ranks will not end by themselves after a signal, after printing why."""
        name, waited = signal.Signals(self.stops[0]).name, time.monotonic() - self._stopped_at
        frozen = (
            [rank.number for rank in self.ranks if rank.is_stopped]
            if waited > TERMINATE_SECONDS
            else []
        )
        if frozen:
            print(
                f"rank {frozen[0]} is stopped by a signal, so the job cannot save: it is ended",
                file=sys.stderr,
            )
        elif waited > self.faults.grace_period:
            limit = f"--grace-period {self.faults.grace_period:g} s"
            print(
                f"the ranks did not end within {limit} of {name}: they are killed", file=sys.stderr
            )
        return bool(frozen) or waited > self.faults.grace_period


def run_ranks(command: Sequence[str], world_size: int, faults: Faults) -> int:
    """Runs `command` as `world_size` ranks of one job; returns its exit code.

    When a rank fails, the others are ended within seconds. The traceback of the first failure is printed, and its exit
    code is the job's: for a signal 128 + its number, as in a shell. If the job stands still, it is ended with exit code
    75. SIGTERM and SIGINT are passed on to the ranks, which have the grace period to save. A second SIGINT kills them.
    The ranks do not outlive this process. A job that fails is started again as often as `faults` allows, unless a rank
    has reported a user's error; with fewer ranks if the same rank has failed twice.
    """
    with _scratch_folder() as folder:
        job, code = Job(command, world_size, faults, folder), 0
        before = {
            number: signal.signal(number, job.stop) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            for attempt in range(faults.max_restarts + 1):
                code = job.run()
                if code in (0, USAGE_ERROR) or job.stops or attempt == faults.max_restarts:
                    break
                words = f"restart {attempt + 1} of {faults.max_restarts} (exit code {code}){job.shrink()}"
                print(words, file=sys.stderr, flush=True)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return code


@contextmanager
def _scratch_folder() -> Generator[Path]:
    """Yields a temporary folder, after deleting those of launchers of this user that were killed.

    Each launcher holds a lock in its folder, which the system releases when the launcher ends.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*/{LOCK}"):
        with suppress(OSError):  # locked by a launcher that runs, or deleted by another one
            if lock.parent.is_symlink() or lock.parent.stat().st_uid != os.getuid():
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
    with tempfile.TemporaryDirectory(prefix=SCRATCH) as name, open(Path(name, LOCK), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield Path(name)


def _environment(world_size: int) -> dict[str, str]:
    """Returns the environment variables that all ranks share."""
    # Variables that another launcher has set for this process would mislead the ranks of this job.
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")
    }
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
