"""Notices ranks that stand still: each samples what its main thread does, and a watchdog compares the samples.

A thread of each rank looks at the main thread's Python frames about once a second, so training itself does nothing for
it. The rank is idle while its innermost call stays the same and does not compute. Our launcher reads the samples from
files. Under another launcher, the first two ranks of each machine read them from the rendezvous of torch.distributed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from .phase import OUTSIDE, current_phase, is_long, publish_phases

STALLED = (
    75  # the exit code of a job that stood still: EX_TEMPFAIL of sysexits.h, "try again later"
)
PULSE = "SHARDZOO_PULSE"  # the file that a rank of our launcher writes its samples to, and the seconds between them
STACK_SIGNAL = getattr(
    signal, "SIGRTMAX", signal.SIGTERM
)  # makes a rank print its stack, without Python's help
SUSPENDED = 5.0  # seconds without a look after which the watchdog itself has stood still, with the whole job
COMPUTES = 0.1  # of the time, on a processor: a call that waits takes none, and a busy machine leaves a rank little
# Of torch and Python: what the main thread does while a function of this module is on its stack. It takes as long as
# the user or the compiler needs.
LONG_MODULES = {
    "bdb": "debugger",
    "pdb": "debugger",
    "torch._dynamo.convert_frame": "building kernels",
    "torch._inductor.codecache": "building kernels",
    "torch._inductor.compile_fx": "building kernels",
    "torch.utils.cpp_extension": "building kernels",
    "triton.compiler.compiler": "building kernels",
}
COLLECTIVES = "/torch/distributed/distributed_c10d.py"


@dataclass(frozen=True)
class Sample:
    """What a rank was doing.

    Attributes:
        number: Counts the samples.
        idle: Seconds since the innermost call of the main thread began or last computed, or less.
        call: The function and line of the innermost call.
        collective: The collective that the main thread is in, or "".
        stopped: The processes that the rank has started, such as data workers, that a signal has stopped.
    """

    number: int = 0
    idle: float = 0.0
    phase: str = OUTSIDE
    call: str = ""
    collective: str = ""
    stopped: list[int] = field(default_factory=list)
    pid: int = 0
    host: str = ""

    @property
    def is_long(self) -> bool:
        """Whether the phase may take any time, so that its length says nothing."""
        return is_long(self.phase) or self.phase in LONG_MODULES.values()


class Sampler:
    """Samples the main thread of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._since, self._number = clock, clock(), 0
        self._position: tuple[int, int] | None = None
        self._main = threading.main_thread().ident
        self._processor, self._used, self._looked = _processor_clock(self._main), 0.0, self._since

    def sample(self) -> Sample:
        now = self._clock()
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return Sample(number=self._number)
        call, collective = _place(_frames(frame))
        position, computes = (id(frame), frame.f_lasti), self._computes(now) and not collective
        if position != self._position or not self._was_seen(frame) or computes:
            self._since = now
        self._position, self._number = position, self._number + 1
        idle = now - self._since
        return Sample(
            number=self._number,
            idle=idle,
            phase=_long_call(frame) or current_phase(),
            call=call,
            collective=collective,
            stopped=_stopped_children() if idle > 1 else [],
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    def _computes(self, now: float) -> bool:
        """Returns whether the main thread has computed since the last sample.

        With an accelerator, a processor's time says nothing, because waiting for a kernel, and thus for a collective on
        the device, may spin. Other threads do not count either: those of OpenMP and gloo may spin while they wait.
        """
        used, seconds = self._processor(), now - self._looked
        computed = used - self._used > COMPUTES * seconds and not _uses_accelerator()
        self._used, self._looked = used, now
        return computed

    @staticmethod
    def _was_seen(frame: FrameType) -> bool:
        """Returns whether an earlier sample saw this very frame. A new frame may have an old one's address."""
        if frame.f_trace is not None:  # a debugger uses the attribute that marks a frame here
            return False
        seen, frame.f_trace_lines = not frame.f_trace_lines, False
        return seen


def _processor_clock(thread: int | None) -> Callable[[], float]:
    """Returns a function that returns the processor time of a thread in seconds; always 0 without such a clock."""
    if thread is None or not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)


def _uses_accelerator() -> bool:
    available = getattr(sys.modules.get("torch.accelerator"), "is_available", None)
    return available is not None and available()


def _frames(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """Returns (file, line, function) of a stack, the innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _long_call(frame: FrameType | None) -> str:
    """Returns what one of `LONG_MODULES` does on a stack, or "" if none is on it."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name in LONG_MODULES:
            return LONG_MODULES[name]
        frame = frame.f_back
    return ""


def _place(frames: list[tuple[str, int, str]]) -> tuple[str, str]:
    """Returns the innermost call outside torch, and the collective or "" of a stack."""
    innermost = (
        frames[0] if frames else ("an unknown file", 0, "an unknown call")
    )  # the stack was cut off
    name, line, called = next((frame for frame in frames if "/torch/" not in frame[0]), innermost)
    collective = next((inner[2] for inner in reversed(frames) if COLLECTIVES in inner[0]), "")
    return f"{called} ({name}:{line})", collective


def process_state(pid: int) -> str:
    """Returns the state of a process as in proc(5): "T" if a signal has stopped it; "" if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _stopped_children() -> list[int]:
    children: list[str] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            children += path.read_text().split()
    return [int(child) for child in children if process_state(int(child)) == "T"]


FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def refresh_sample(sample: Sample, phase: str, stack: str) -> Sample:
    """Returns the sample of a rank with what is newer: its published phase, and faulthandler's stack of its threads.

    The main thread comes last in the stack.
    """
    if phase and sample.phase not in LONG_MODULES.values():
        sample = replace(sample, phase=phase)
    frames = FRAME.findall(stack.split("\n\n")[-1])
    if not frames:
        return sample
    call, collective = _place([(name, int(line), called) for name, line, called in frames])
    return replace(sample, call=call, collective=collective)


@dataclass(frozen=True)
class Stall:
    """A rank that stands still, and why it is held to be the cause."""

    rank: int
    sample: Sample | None
    seconds: float
    is_stopped: bool

    def describe(self) -> str:
        sample = self.sample
        where = (
            "before it reported anything"
            if sample is None
            else f"in phase {sample.phase!r}, at {sample.call}"
        )
        where += f", in the collective {sample.collective}" if sample and sample.collective else ""
        what = "is stopped by a signal (SIGSTOP)" if self.is_stopped else "stands still"
        if sample and sample.stopped and not self.is_stopped:
            what = f"waits for its process {', '.join(map(str, sample.stopped))}, which a signal has stopped (SIGSTOP),"
        return f"rank {self.rank} {what} {where}, for {self.seconds:.0f} s"


class Watchdog:
    """Decides from the samples of all ranks whether the job stands still.

    A rank that a signal has stopped stands still in every phase. Otherwise ranks are compared only while they train:
    the job stands still if every rank does, or if one takes no more samples.

    Args:
        timeout: Seconds after which it stands still; 0 for never.
    """

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout, self._clock = timeout, clock
        self._looked = clock()
        self._since: dict[int, float] = {}
        self._last: dict[int, Sample | None] = {}

    def look(
        self, samples: Mapping[int, Sample | None], stopped: Callable[[int], bool]
    ) -> list[Stall]:
        """Returns the ranks that make the job stand still.

        Args:
            samples: The last sample of each rank that runs; None if it has taken none.
            stopped: Whether a signal has stopped a rank.
        """
        now, before = self._clock(), self._looked
        self._looked = now
        if now - before > SUSPENDED + self.timeout / 4:
            self._since.clear()
        for rank, sample in samples.items():
            if rank not in self._since or self._last.get(rank) != sample:
                self._since[rank], self._last[rank] = now, sample
        if not self.timeout:
            return []
        return self._stalls({rank: now - self._since[rank] for rank in samples}, samples, stopped)

    def _stalls(
        self,
        ages: Mapping[int, float],
        samples: Mapping[int, Sample | None],
        stopped: Callable[[int], bool],
    ) -> list[Stall]:
        """Returns the stalls, from the seconds since the last new sample of each rank."""
        silent, idle = [], []
        for rank, age in ages.items():
            sample, late = samples[rank], age > self.timeout
            trains = sample is not None and not sample.is_long
            seconds = age + (sample.idle if sample else 0.0)
            is_stopped = late and stopped(rank)
            if is_stopped or (late and trains):
                silent.append(Stall(rank, sample, age, is_stopped))
            elif sample and seconds > self.timeout and (sample.stopped or trains):
                idle.append(Stall(rank, sample, seconds, is_stopped=False))
        causes = silent or [stall for stall in idle if stall.sample and stall.sample.stopped]
        if causes or len(idle) < len(ages):
            return causes
        return [stall for stall in idle if stall.sample and not stall.sample.collective] or idle


def start_sampling(write: Callable[[Sample], None], seconds: float, stack_file: Any) -> None:
    """Starts the thread that samples this process, and lets `STACK_SIGNAL` write the stack of all threads to a file."""
    with suppress(
        ValueError, RuntimeError, OSError
    ):  # not a main thread; a system without such a signal
        faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)

    def run() -> None:
        sampler = Sampler()
        while True:
            with suppress(OSError):  # a full disk must not end a run
                write(sampler.sample())
            time.sleep(seconds)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()


def sample_for_launcher() -> None:
    """Starts sampling for our launcher, if it has started this process."""
    if PULSE not in os.environ or threading.current_thread() is not threading.main_thread():
        return
    name, _, seconds = os.environ.pop(PULSE).rpartition(":")
    path = Path(name)

    def write(sample: Sample) -> None:
        unfinished = path.with_name(
            f"{path.name}.part"
        )  # not the name that the rank's error has while it is written
        unfinished.write_text(json.dumps(asdict(sample)))
        unfinished.replace(path)

    with suppress(OSError):
        publish_phases(path.with_suffix(".phase"))
        start_sampling(write, float(seconds), path.with_suffix(".stack").open("w"))


def read_sample(path: Path) -> Sample | None:
    try:
        return Sample(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def read_stack(pid: int, path: Path, seconds: float = 3.0) -> str:
    """Returns the Python stack of a rank that samples for our launcher; a stopped one runs on for it."""
    with suppress(OSError):
        _ask_for_stack(pid)
        deadline, size = time.monotonic() + seconds, -1
        while time.monotonic() < deadline and (not size or path.stat().st_size != size):
            size = path.stat().st_size
            time.sleep(0.2)
        threads = path.read_text().split("\n\n")
        return "\n\n".join(
            thread.strip() for thread in threads if "launch/heartbeat.py" not in thread
        )
    return ""


def _ask_for_stack(pid: int) -> None:
    """Makes a process that takes samples print its stack; a stopped one runs on, and gets this signal first of all."""
    os.kill(pid, STACK_SIGNAL)
    os.kill(pid, signal.SIGCONT)


def watch_peers(
    rank: int, world_size: int, local_rank: int, timeout: float, connect: Callable[[], Any]
) -> None:
    """Watches the ranks of a job from within, because its launcher does not. Ends this process if the job stands still.

    Args:
        connect: Returns a new connection to the rendezvous of torch.distributed, a store.
    """
    seconds = max(0.1, min(timeout / 10, 15.0))
    watchdog, watches = Watchdog(timeout), local_rank < 2
    keys = [f"heartbeat/{number}" for number in range(world_size)]
    stores: list[Any] = []
    answered = [time.monotonic()]

    def write(sample: Sample) -> None:
        try:
            stores[:] = stores or [connect()]
            stores[0].set(keys[rank], json.dumps(asdict(sample)))
            known = [
                number
                for number in range(world_size)
                if watches and stores[0].check([keys[number]])
            ]
            texts = stores[0].multi_get([keys[number] for number in known]) if known else []
        except RuntimeError:  # torch's DistError: it does not answer
            stores.clear()
            if time.monotonic() - answered[0] > timeout and not sample.is_long:
                _end(
                    [
                        f"the rendezvous, held by rank 0 or its launcher, has not answered for {timeout:.0f} s"
                    ]
                )
            return
        answered[0] = time.monotonic()
        samples = {
            number: Sample(**json.loads(text)) for number, text in zip(known, texts, strict=True)
        }
        here = socket.gethostname()
        pids = {number: found.pid for number, found in samples.items() if found.host == here}
        stalls = watchdog.look(samples, lambda number: process_state(pids.get(number, 0)) == "T")
        if stalls:
            others = [
                pids[stall.rank] for stall in stalls if stall.rank in pids and stall.rank != rank
            ]
            _end([stall.describe() for stall in stalls], others)

    start_sampling(write, seconds, sys.__stderr__)


def _end(lines: list[str], others: Sequence[int] = ()) -> NoReturn:
    """Ends this process after printing the lines, its stack and those of the processes `others`."""
    print("\n".join([*lines, "the stack of this rank:"]), file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
    for pid in others:
        with suppress(OSError):
            _ask_for_stack(pid)
    time.sleep(
        0.05
    )  # for their stacks; a stopped rank runs on, and the job must end before it trains to its end
    os._exit(STALLED)
