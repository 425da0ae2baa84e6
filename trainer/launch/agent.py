"""Runs a job of several ranks on this machine, by torch's elastic agent. The ranks start and end
together.

`LocalElasticAgent` starts each rank in a session of its own, with its variables and its error file,
watches whether it runs, restarts a failed job, and ends all ranks together. `RankAgent` adds what
it does not do:

- It decides which rank failed first: an exception counts before its process has ended, ranks have a
  second to fail from the same cause, and a rank that lost a peer is not the cause.
- It ends a job that stands still, and prints the stack of the rank.
- SIGTERM, the SIGHUP of a closed terminal, and Ctrl-C reach the ranks once, and give them time to
  end: after the first two they save.
- A restarted job resumes its run, and goes on with fewer ranks if one fails again and again.

torch starts ranks by itself only here: under `torchrun` its agent does so, and with a hostfile
DeepSpeed's launcher.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from .failure import USAGE_ERROR, Failure, Faults, report_failures
from .heartbeat import PULSE, process_state, read_sample, read_stack, refresh_sample
from .phase import read_phase
from .rank_info import cpu_environment, free_port
from .rank_process import BEGUN, LAUNCHER_PID, LAUNCHER_SHOWS_ERRORS, RESTARTED, read_error
from .stop_signal import leave_closed_terminal, signals_that_save
from .watchdog import STALLED, Stall, Watchdog

SCRATCH = "shardzoo-ranks-"
LOCK = "launcher.lock"
DEVICES = "CUDA_VISIBLE_DEVICES"
POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0  # for other ranks to fail from the same cause, so that the first one is found
SOON = (
    600.0  # seconds: a rank that fails again sooner after a restart would probably fail each time
)
TERMINATE_SECONDS = 3  # for the ranks to end after a signal, before they are killed
# torch's own handler raises wherever the launcher is, and at a second signal does not wait for
# ranks that save. It would also catch the SIGHUP that nohup ignores. It gets the one signal that
# nobody sends to save a run.
SIGNALS_OF_TORCH = "TORCHELASTIC_SIGNALS_TO_HANDLE"
TORCHS_SIGNAL = "SIGQUIT"
TORCHS_LOGGER = "torch.distributed.elastic.multiprocessing.api"


def run_ranks(command: Sequence[str], world_size: int, faults: Faults) -> int:
    """Runs `command` as `world_size` ranks of one job; returns its exit code.

    When a rank fails, the others are ended within seconds. The traceback of the first failure is
    printed, and its exit code is the job's: for a signal 128 + its number, as in a shell. If the
    job stands still, it is ended with exit code 75. SIGTERM, SIGHUP and SIGINT are passed on to the
    ranks, which have the grace period to end; after the first two they save. A second SIGINT kills
    them. The ranks do not outlive this process. A job that fails is started again as often as
    `faults` allows, unless a rank has reported a user's error; with fewer ranks if the same rank
    has failed twice.
    """
    logger = logging.getLogger(TORCHS_LOGGER)
    level = logger.level
    passed_on = [*signals_that_save(), signal.SIGINT]
    changed = [*passed_on, getattr(signal, TORCHS_SIGNAL)]
    handlers = {number: signal.getsignal(number) for number in changed}
    os.environ[SIGNALS_OF_TORCH] = TORCHS_SIGNAL
    with _scratch_folder() as folder:
        agent = RankAgent(command, world_size, faults, folder)
        try:
            logger.setLevel(logging.ERROR)  # it warns of each rank that it ends
            for number in passed_on:
                signal.signal(number, agent.stop)
            agent.run()
        except SignalException as stopped:
            return 128 + stopped.sigval
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            logger.setLevel(level)
    return agent.exit_code


class RankAgent(LocalElasticAgent):
    """The agent of a job on this machine. After `run`, `exit_code` is the job's."""

    def __init__(
        self, command: Sequence[str], world_size: int, faults: Faults, folder: Path
    ) -> None:
        program, *arguments = command
        spec = WorkerSpec(
            role="default",
            local_world_size=world_size,
            rdzv_handler=OneMachine(),
            entrypoint=program,
            # The agent would replace ${local_rank} in them.
            args=tuple(argument.replace("$", "$$") for argument in arguments),
            max_restarts=faults.max_restarts,
            monitor_interval=POLL_SECONDS,
        )
        self._interval = max(0.05, min(1.0, faults.stall_timeout / 10))
        self._files = RankFiles(folder, self._interval)
        super().__init__(spec, self._files, shutdown_timeout=TERMINATE_SECONDS)
        self.exit_code = 0
        self._faults = faults
        self._ranks: list[RankProcess] = []
        self._signals: list[int] = []  # that the launcher has received
        self._signalled_at = 0.0
        self._signalled_in_start = False  # whether a signal came while the ranks were started
        self._started_at = 0.0
        self._causes: list[int] = []  # the ranks that ended the runs with this number of ranks
        self._watchdog = Watchdog(faults.stall_timeout)
        self._next_look = 0.0
        self._devices = [str(number) for number in range(world_size)]
        if os.environ.get(DEVICES):
            self._devices = os.environ[DEVICES].split(",")

    def stop(self, number: int, frame: object) -> None:
        """Passes a signal on to the ranks.

        A second SIGINT kills them; launchers repeat signals while the ranks end.
        """
        leave_closed_terminal()
        if not self._signals:
            self._signalled_at = time.monotonic()
        self._signals.append(number)
        if self._signals.count(signal.SIGINT) > 1:
            number = signal.SIGKILL
        elif len(self._signals) > 1:
            return
        for rank in self._ranks:
            rank.send(number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._signals:  # one that came before, or while a failed job was ended
            name = signal.Signals(self._signals[0])
            raise SignalException(f"the job has been ended by {name.name}", name)
        self._started_at = time.monotonic()
        self._watchdog = Watchdog(self._faults.stall_timeout)
        parent: Any = super()  # torch's decorator of its methods has no types
        pids = parent._start_workers(worker_group)
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        self._ranks = [
            RankProcess(number, handler.proc, Path(context.error_files[number]))
            for number, handler in context.subprocess_handlers.items()
        ]
        if self._signals:
            self._signalled_in_start = True
            for rank in self._ranks:
                rank.send(self._signals[0])
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Returns the state of the ranks.

        If one has failed or stands still, or after a signal, none runs any more.
        """
        if self._signals:
            self._wait_for_saves()
            return self._end_job(128 + self._signals[0])
        found = [rank.find_failure() for rank in self._ranks]
        if any(found):
            self._wait(SETTLE_SECONDS)
            found = [rank.find_failure() for rank in self._ranks]
            failures = sorted(filter(None, found), key=Failure.precedence)
            self._stop_workers(worker_group)
            if self._signals:
                return self._end_job(128 + self._signals[0])
            report_failures(failures)
            self._causes.append(failures[0].rank)
            return self._end_job(failures[0].exit_code)
        stalls = self._find_stalls()
        if stalls:
            self._report_stalls(stalls)
            self._causes.append(stalls[0].rank)
            return self._end_job(STALLED)
        if any(rank.is_running for rank in self._ranks):
            return RunResult(state=WorkerState.HEALTHY)
        self.exit_code = 0
        parent: Any = super()
        return parent._monitor_workers(worker_group)

    def _end_job(self, exit_code: int) -> RunResult:
        """Kills the ranks that still run.

        Returns the state of a failed job, which the agent may restart.
        """
        self._shutdown(signal.SIGKILL)
        self.exit_code = exit_code
        if self._signals or exit_code == USAGE_ERROR:
            self._remaining_restarts = 0
        return RunResult(state=WorkerState.FAILED)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        number = spec.max_restarts - self._remaining_restarts
        words = f"restart {number} of {spec.max_restarts} (exit code {self.exit_code})"
        print(f"{words}{self._shrink(spec)}", file=sys.stderr, flush=True)
        parent: Any = super()
        parent._restart_workers(worker_group)

    def _shrink(self, spec: WorkerSpec) -> str:
        """Goes on with fewer ranks, without the device of one that has failed again soon; returns
        words that say so.
        """
        rank = self._causes[-1]
        size = spec.local_world_size
        smaller = [fewer for fewer in self._faults.smaller if fewer < size]
        failed_again = self._causes[-2:] == [rank, rank]
        if not failed_again or not smaller or time.monotonic() - self._started_at > SOON:
            return ""
        spec.local_world_size = smaller[0]
        self._causes.clear()
        del self._devices[rank : rank + 1]
        self._files.devices = ",".join(self._devices)
        return (
            f" with {smaller[0]} instead of {size} processes, because rank {rank} has failed twice"
        )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = TERMINATE_SECONDS
    ) -> None:
        super()._shutdown(death_sig, timeout)
        for rank in self._ranks:
            rank.kill_children()

    def _find_stalls(self) -> list[Stall]:
        """Returns the ranks that make the job stand still."""
        if time.monotonic() < self._next_look:
            return []
        self._next_look = time.monotonic() + self._interval
        running = {rank.number: rank for rank in self._ranks if rank.is_running}
        samples = {number: read_sample(rank.pulse_file) for number, rank in running.items()}
        return self._watchdog.look(samples, lambda number: running[number].is_stopped)

    def _report_stalls(self, stalls: Sequence[Stall]) -> None:
        """Prints which ranks stand still, and their stacks."""
        for stall in stalls:
            stack = ""
            if stall.sample is not None:
                rank = self._ranks[stall.rank]
                # A stopped rank must run on to print its stack, and then may enter another phase.
                phase = read_phase(rank.pulse_file.with_suffix(".phase"))
                stack = read_stack(rank.process.pid, rank.pulse_file.with_suffix(".stack"))
                stall = replace(stall, sample=refresh_sample(stall.sample, phase, stack))
            print(f"{stall.describe()}\n{stack}", file=sys.stderr, flush=True)
        limit = f"--stall-timeout {self._faults.stall_timeout:g} s"
        print(
            f"the job is ended with exit code {STALLED}, because of {limit}",
            file=sys.stderr,
            flush=True,
        )

    def _wait_for_saves(self) -> None:
        """Waits until the ranks have ended after a signal. Prints why if they will not."""
        while any(rank.is_running for rank in self._ranks):
            waited = time.monotonic() - self._signalled_at
            if self._signalled_in_start and waited > TERMINATE_SECONDS:
                # Python may lose a SIGINT in the first milliseconds of a process: it ignores a
                # KeyboardInterrupt that is raised in a callback of its import system.
                self._signalled_in_start = False
                for rank in self._ranks:
                    if not rank.has_joined:
                        rank.send(self._signals[0])
            frozen = [rank.number for rank in self._ranks if rank.is_stopped]
            if frozen and waited > TERMINATE_SECONDS:
                print(
                    f"rank {frozen[0]} is stopped by a signal, so the job cannot save: it is ended",
                    file=sys.stderr,
                )
                return
            if waited > self._faults.grace_period:
                limit = f"--grace-period {self._faults.grace_period:g} s"
                name = signal.Signals(self._signals[0]).name
                print(
                    f"the ranks did not end within {limit} of {name}: they are killed",
                    file=sys.stderr,
                )
                return
            time.sleep(POLL_SECONDS)

    def _wait(self, seconds: float) -> None:
        """Waits until all ranks have ended, but at most `seconds`. Records when each rank fails."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(rank.is_running for rank in self._ranks):
            for rank in self._ranks:
                rank.find_failure()
            time.sleep(POLL_SECONDS)


class RankProcess:
    """One process of the job, which leads a session, and its files."""

    def __init__(self, number: int, process: subprocess.Popen[Any], error_file: Path) -> None:
        self.number = number
        self.process = process
        self.error_file = error_file
        self.pulse_file = find_pulse_file(error_file)
        self._failure: Failure | None = None

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it."""
        return process_state(self.process.pid) == "T"

    @property
    def has_joined(self) -> bool:
        """Whether it has called `join_job`, after which it handles signals as the trainer says."""
        return self.pulse_file.exists()

    def find_failure(self) -> Failure | None:
        """Returns the rank's failure, or None.

        A recorded exception counts at once, because its process may hang.
        """
        code = self.process.poll()
        if self._failure is None and (code or self.error_file.exists()):
            error = read_error(self.error_file)
            when = time.time()
            if error is not None:
                when = error.time
            self._failure = Failure(self.number, code, error, when)
        return self._failure

    def send(self, number: int) -> None:
        """Sends a signal to the rank and the processes it has started."""
        if self.is_running:
            os.killpg(self.process.pid, number)

    def kill_children(self) -> None:
        """Kills the processes that an ended rank has started and that have outlived it, such as
        data workers.
        """
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class RankFiles(DefaultLogsSpecs):
    """The files and the variables that each rank gets, besides those of torch's agent.

    Attributes:
        devices: The devices that the ranks see; None for those of the launcher.
    """

    def __init__(self, folder: Path, sample_interval: float) -> None:
        super().__init__(log_dir=str(folder))
        self.devices: str | None = None
        self._begun = folder / BEGUN
        self._interval = sample_interval

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        files = super().reify(envs)
        shared = {
            **cpu_environment(len(envs)),
            LAUNCHER_PID: str(os.getpid()),
            LAUNCHER_SHOWS_ERRORS: "1",
            BEGUN: str(self._begun),
        }
        if self._begun.exists():
            shared[RESTARTED] = "1"
        if self.devices is not None:
            shared[DEVICES] = self.devices
        for local_rank, environment in envs.items():
            pulse_file = find_pulse_file(Path(files.error_files[local_rank]))
            environment.update(shared)
            environment[PULSE] = f"{pulse_file}:{self._interval}"
        return files


def find_pulse_file(error_file: Path) -> Path:
    """Returns the file of a rank's samples. Each start of each rank has a folder of its own."""
    return error_file.with_name("samples.pulse")


class OneMachine(RendezvousHandler):
    """The rendezvous of an agent that has no other.

    Its store is in memory and opens no port. The ranks open one that only this machine reaches
    (`mpu.process_group.init_process_group`), and another one after each restart.
    """

    def get_backend(self) -> str:
        return "one-machine"

    def next_rendezvous(self) -> RendezvousInfo:
        ranks_meet_at = RendezvousStoreInfo("127.0.0.1", free_port())
        return RendezvousInfo(cast(Any, dist).HashStore(), 0, 1, ranks_meet_at)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "shardzoo"

    def shutdown(self) -> bool:
        return True


@contextmanager
def _scratch_folder() -> Generator[Path]:
    """Yields a temporary folder, after deleting those of launchers of this user that were killed.

    Each launcher holds a lock in its folder, which the system releases when the launcher ends.
    """
    _delete_folders_of_killed_launchers()
    while True:
        with tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as name:
            lock = Path(name, LOCK)
            with lock.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                # Another launcher may have found the folder before this one had locked it, and
                # taken it for that of a killed launcher.
                if _is_file_at(lock, file):
                    yield Path(name)
                    return


def _delete_folders_of_killed_launchers() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*/{LOCK}"):
        with suppress(OSError):  # locked by a launcher that runs, or deleted by another one
            if lock.parent.is_symlink() or lock.parent.stat().st_uid != os.getuid():
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_file_at(lock, file):
                    shutil.rmtree(lock.parent)


def _is_file_at(path: Path, file: IO[str]) -> bool:
    """Returns whether an open file is still the one at a path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
