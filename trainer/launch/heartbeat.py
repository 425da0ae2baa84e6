"""Samples what the main thread of a rank does, so that others notice when it stands still.

A thread of each rank looks at the main thread's Python frames about once a second, so training
itself does nothing for it. The rank is idle while its innermost call stays the same and does not
compute. Our launcher reads the samples from files. Under another launcher, the ranks send them
through the rendezvous of torch.distributed (`watchdog.py`).
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from .phase import OUTSIDE, current_phase, is_long, publish_phases

# The file that a rank of our launcher writes its samples to, and the seconds between them.
PULSE = "SHARDZOO_PULSE"
# Makes a rank print its stack, without Python's help.
STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGTERM)
# The share of the time that a computing call spends on a processor. A call that waits takes none,
# and a busy machine leaves a rank little.
COMPUTES = 0.1
# Of torch and Python: what the main thread does while a function of this module is on its stack. It
# takes as long as the user or the compiler needs.
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
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

StackFrame = tuple[str, int, str]  # file, line, function


@dataclass(frozen=True)
class Sample:
    """What a rank was doing.

    Attributes:
        number: Counts the samples.
        idle: Seconds since the innermost call of the main thread began or last computed, or less.
        call: The function and line of the innermost call.
        collective: The collective that the main thread is in, or "".
        stopped: The processes that the rank has started, such as data workers, that a signal has
            stopped.
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
        self._clock = clock
        self._number = 0
        self._main = threading.main_thread().ident
        # The innermost call of the main thread, and since when it has been idle there.
        self._position: tuple[int, int] | None = None
        self._since = clock()
        # The main thread's processor time at the last look, in seconds.
        self._read_processor = _make_processor_clock(self._main)
        self._used = 0.0
        self._looked_at = self._since

    def sample(self) -> Sample:
        now = self._clock()
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return Sample(number=self._number)
        call, collective = _place(_list_frames(frame))
        position = (id(frame), frame.f_lasti)
        computes = self._computes(now) and not collective
        if position != self._position or not self._was_seen(frame) or computes:
            self._since = now
        self._position = position
        self._number += 1
        idle = now - self._since
        stopped = []
        if idle > 1:
            stopped = _find_stopped_children()
        return Sample(
            number=self._number,
            idle=idle,
            phase=_find_long_call(frame) or current_phase(),
            call=call,
            collective=collective,
            stopped=stopped,
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    def _computes(self, now: float) -> bool:
        """Returns whether the main thread has computed since the last sample.

        With an accelerator, a processor's time says nothing, because waiting for a kernel, and thus
        for a collective on the device, may spin. Other threads do not count either: those of OpenMP
        and gloo may spin while they wait.
        """
        used = self._read_processor()
        share = COMPUTES * (now - self._looked_at)
        computed = used - self._used > share and not _uses_accelerator()
        self._used = used
        self._looked_at = now
        return computed

    @staticmethod
    def _was_seen(frame: FrameType) -> bool:
        """Returns whether an earlier sample saw this very frame.

        A new frame may have an old one's address.
        """
        if frame.f_trace is not None:  # a debugger uses the attribute that marks a frame here
            return False
        seen = not frame.f_trace_lines
        frame.f_trace_lines = False
        return seen


def _make_processor_clock(thread: int | None) -> Callable[[], float]:
    """Returns a function that returns the processor time of a thread in seconds; always 0 without
    such a clock.
    """
    if thread is None or not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)


def _uses_accelerator() -> bool:
    available = getattr(sys.modules.get("torch.accelerator"), "is_available", None)
    return available is not None and available()


def _list_frames(frame: FrameType | None) -> list[StackFrame]:
    """Returns the frames of a stack, the innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _find_long_call(frame: FrameType | None) -> str:
    """Returns what one of `LONG_MODULES` does on a stack, or "" if none is on it."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name in LONG_MODULES:
            return LONG_MODULES[name]
        frame = frame.f_back
    return ""


def _place(frames: list[StackFrame]) -> tuple[str, str]:
    """Returns the innermost call outside torch, and the collective or "" of a stack."""
    # The stack that faulthandler prints may be cut off.
    innermost = ("an unknown file", 0, "an unknown call")
    if frames:
        innermost = frames[0]
    outside_torch = (frame for frame in frames if "/torch/" not in frame[0])
    file, line, function = next(outside_torch, innermost)
    collectives = (frame[2] for frame in reversed(frames) if COLLECTIVES in frame[0])
    return f"{function} ({file}:{line})", next(collectives, "")


def process_state(pid: int) -> str:
    """Returns the state of a process as in proc(5): "T" if a signal has stopped it; "" if there is
    none.
    """
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _find_stopped_children() -> list[int]:
    children: list[str] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            children += path.read_text().split()
    return [int(child) for child in children if process_state(int(child)) == "T"]


def start_sampling(write: Callable[[Sample], None], seconds: float, stack_file: Any) -> None:
    """Starts the thread that samples this process, and lets `STACK_SIGNAL` write the stack of all
    threads to a file.
    """
    # Not in a main thread, or in a system without such a signal, there are no stacks.
    with suppress(ValueError, RuntimeError, OSError):
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
    # This must not be the name that the rank's error has while it is written.
    unfinished = path.with_name(f"{path.name}.part")

    def write(sample: Sample) -> None:
        unfinished.write_text(json.dumps(asdict(sample)))
        unfinished.replace(path)

    with suppress(OSError):
        publish_phases(path.with_suffix(".phase"))
        start_sampling(write, float(seconds), path.with_suffix(".stack").open("w"))


def read_sample(path: Path) -> Sample | None:
    """Returns the last sample that a rank has written, or None."""
    try:
        return Sample(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def read_stack(pid: int, path: Path, seconds: float = 3.0) -> str:
    """Returns the Python stack of a rank that samples for our launcher; a stopped one runs on for
    it.
    """
    with suppress(OSError):
        ask_for_stack(pid)
        deadline = time.monotonic() + seconds
        size = -1
        while time.monotonic() < deadline and (not size or path.stat().st_size != size):
            size = path.stat().st_size
            time.sleep(0.2)
        threads = path.read_text().split("\n\n")
        others = [thread.strip() for thread in threads if "launch/heartbeat.py" not in thread]
        return "\n\n".join(others)
    return ""


def ask_for_stack(pid: int) -> None:
    """Makes a process that takes samples print its stack; a stopped one runs on, and gets this
    signal first of all.
    """
    os.kill(pid, STACK_SIGNAL)
    os.kill(pid, signal.SIGCONT)


def refresh_sample(sample: Sample, phase: str, stack: str) -> Sample:
    """Returns the sample of a rank with what is newer: its published phase, and faulthandler's
    stack of its threads.

    The main thread comes last in the stack.
    """
    if phase and sample.phase not in LONG_MODULES.values():
        sample = replace(sample, phase=phase)
    frames = FRAME.findall(stack.split("\n\n")[-1])
    if not frames:
        return sample
    call, collective = _place([(file, int(line), function) for file, line, function in frames])
    return replace(sample, call=call, collective=collective)
