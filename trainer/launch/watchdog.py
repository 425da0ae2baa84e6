"""Decides from the samples of all ranks whether a job stands still, and which rank is the cause."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from .heartbeat import Sample, ask_for_stack, process_state, start_sampling

STALLED = 75  # exit code of a job that stood still: EX_TEMPFAIL of sysexits.h, "try again later"
# Seconds without a look after which the watchdog itself has stood still, with the whole job.
SUSPENDED = 5.0


@dataclass(frozen=True)
class Stall:
    """A rank that stands still, and why it is held to be the cause."""

    rank: int
    sample: Sample | None
    seconds: float
    is_stopped: bool

    def describe(self) -> str:
        sample = self.sample
        if sample is None:
            where = "before it reported anything"
        else:
            where = f"in phase {sample.phase!r}, at {sample.call}"
            if sample.collective:
                where += f", in the collective {sample.collective}"
        if self.is_stopped:
            what = "is stopped by a signal (SIGSTOP)"
        elif sample is not None and sample.stopped:
            processes = ", ".join(map(str, sample.stopped))
            what = f"waits for its process {processes}, which a signal has stopped (SIGSTOP),"
        else:
            what = "stands still"
        return f"rank {self.rank} {what} {where}, for {self.seconds:.0f} s"


class Watchdog:
    """Decides from the samples of all ranks whether the job stands still.

    A rank that a signal has stopped stands still in every phase. Otherwise ranks are compared only
    while they train: the job stands still if every rank does, or if one takes no more samples.

    Args:
        timeout: Seconds after which it stands still; 0 for never.
    """

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout = timeout
        self._clock = clock
        self._looked_at = clock()
        # The last sample of each rank, and when it came.
        self._last: dict[int, Sample | None] = {}
        self._since: dict[int, float] = {}

    def look(
        self, samples: Mapping[int, Sample | None], stopped: Callable[[int], bool]
    ) -> list[Stall]:
        """Returns the ranks that make the job stand still.

        Args:
            samples: The last sample of each rank that runs; None if it has taken none.
            stopped: Whether a signal has stopped a rank.
        """
        now = self._clock()
        if now - self._looked_at > SUSPENDED + self.timeout / 4:
            self._since.clear()
        self._looked_at = now
        for rank, sample in samples.items():
            if rank not in self._since or self._last.get(rank) != sample:
                self._since[rank] = now
                self._last[rank] = sample
        if not self.timeout:
            return []

        silent: list[Stall] = []  # ranks that take no more samples
        idle: list[Stall] = []  # ranks that do, and stay in the same call
        for rank, sample in samples.items():
            age = now - self._since[rank]
            late = age > self.timeout
            trains = sample is not None and not sample.is_long
            is_stopped = late and stopped(rank)
            if is_stopped or (late and trains):
                silent.append(Stall(rank, sample, age, is_stopped))
            elif sample is not None:
                seconds = age + sample.idle
                if seconds > self.timeout and (sample.stopped or trains):
                    idle.append(Stall(rank, sample, seconds, is_stopped=False))
        # A rank whose data worker is stopped is a cause as well, whatever the others do.
        causes = silent or [stall for stall in idle if stall.sample and stall.sample.stopped]
        if causes or len(idle) < len(samples):
            return causes
        # All ranks are idle. Those in a collective wait for the others, unless all are in one.
        return [stall for stall in idle if stall.sample and not stall.sample.collective] or idle


def watch_peers(
    rank: int, world_size: int, local_rank: int, timeout: float, connect: Callable[[], Any]
) -> None:
    """Watches the ranks of a job from within, because its launcher does not. Ends this process if
    the job stands still.

    The first two ranks of each machine watch, so that one of them still does if the other is
    stopped.

    Args:
        connect: Returns a new connection to the rendezvous of torch.distributed, a store.
    """
    interval = max(0.1, min(timeout / 10, 15.0))
    watchdog = Watchdog(timeout)
    keys = [f"heartbeat/{number}" for number in range(world_size)]
    here = socket.gethostname()
    store: Any = None
    answered_at = time.monotonic()

    def exchange(sample: Sample) -> dict[int, Sample]:
        """Writes this rank's sample, and returns those of the ranks that have written one."""
        nonlocal store
        if store is None:
            store = connect()
        store.set(keys[rank], json.dumps(asdict(sample)))
        if local_rank >= 2:
            return {}
        known = [number for number in range(world_size) if store.check([keys[number]])]
        if not known:
            return {}
        texts = store.multi_get([keys[number] for number in known])
        return {
            number: Sample(**json.loads(text)) for number, text in zip(known, texts, strict=True)
        }

    def write(sample: Sample) -> None:
        nonlocal store, answered_at
        try:
            samples = exchange(sample)
        except RuntimeError:  # torch's DistError: it does not answer
            store = None
            if time.monotonic() - answered_at > timeout and not sample.is_long:
                holder = "the rendezvous, held by rank 0 or its launcher,"
                _end_process([f"{holder} has not answered for {timeout:.0f} s"])
            return
        answered_at = time.monotonic()
        pids = {number: found.pid for number, found in samples.items() if found.host == here}
        stalls = watchdog.look(samples, lambda number: process_state(pids.get(number, 0)) == "T")
        if stalls:
            stalled = [stall.rank for stall in stalls if stall.rank != rank]
            others = [pids[number] for number in stalled if number in pids]
            _end_process([stall.describe() for stall in stalls], others)

    start_sampling(write, interval, sys.__stderr__)


def _end_process(lines: list[str], others: Sequence[int] = ()) -> NoReturn:
    """Ends this process after printing the lines, its stack and those of the processes `others`."""
    print("\n".join([*lines, "the stack of this rank:"]), file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
    for pid in others:
        with suppress(OSError):
            ask_for_stack(pid)
    # Their stacks take a moment. A stopped rank then runs on, and the job must end before it trains
    # to its end.
    time.sleep(0.05)
    os._exit(STALLED)
