"""Runs copies side by side: in threads of this process, or in processes that import neither torch nor the models."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path

from ..checkpoint.file_io import HashingWriter, OpenFiles, open_for_reading
from .copying import Copy, Digests, OutputFactory, run_copy

MEMORY = 40 << 20  # bytes of all threads' blocks together
BLOCKS_PER_THREAD = 5  # a block as read, assembled, transposed or cast, and divided for the targets
SMALLEST_BLOCK = 64 << 10


def block_size(jobs: int) -> int:
    """Returns the bytes of the largest block that one of `jobs` threads or processes may hold."""
    return max(SMALLEST_BLOCK, MEMORY // (BLOCKS_PER_THREAD * jobs))


def run_copies(
    copies: Sequence[Copy],
    files: OpenFiles,
    hashes: Mapping[tuple[Path, str], str],
    make_output: OutputFactory,
    jobs: int,
) -> Iterator[tuple[int, Digests]]:
    """Copies in `jobs` threads; the first error stops all. Yields each finished copy's index and target hashes."""
    work = partial(
        run_copy, files=files, hashes=hashes, make_output=make_output, chunk=block_size(jobs)
    )
    with ThreadPoolExecutor(jobs) as pool:
        yield from _in_pool(pool, work, copies, jobs)


@dataclass(frozen=True)
class Worker:
    """What a process needs for copies of any tensors: see `run_copy`. `open_target` opens a target file for writing."""

    sources: Sequence[Path]
    targets: Sequence[Path]
    open_target: Callable[[Path], int]
    hashes: Mapping[tuple[Path, str], str]
    chunk: int

    def start(self) -> None:
        """Opens the files in a new process, which ends when its parent does."""
        global _run
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles the interrupt
        threading.Thread(target=_end_with_parent, daemon=True).start()
        inputs, outputs = OpenFiles(open_for_reading), OpenFiles(self.open_target)
        inputs.open(self.sources)
        outputs.open(self.targets)
        _run = partial(
            run_copy,
            files=inputs,
            hashes=self.hashes,
            make_output=lambda tensors: HashingWriter(tensors, outputs),
            chunk=self.chunk,
        )


def run_copies_in_processes(
    copies: Sequence[Copy], worker: Worker, count: int
) -> Iterator[tuple[int, Digests]]:
    """Copies in `count` processes, one thread each, like `run_copies`.

    Raises `concurrent.futures.process.BrokenProcessPool` if a process dies.
    """
    with ProcessPoolExecutor(count, get_context("spawn"), worker.start) as pool:
        yield from _in_pool(pool, _run_in_worker, copies, count)


_run: Callable[[Copy], Digests] | None = None  # set in worker processes


def _run_in_worker(copy: Copy) -> Digests:
    assert _run is not None
    return _run(copy)


def _end_with_parent() -> None:
    """Exits with the parent; without this, a pool's workers would wait forever for a parent that was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_pool(
    pool: Executor, work: Callable[[Copy], Digests], copies: Sequence[Copy], jobs: int
) -> Iterator[tuple[int, Digests]]:
    todo = iter(enumerate(copies))
    running = {}
    try:
        while True:
            # Few copies are submitted ahead, so that little is left to wait for after an error.
            while len(running) < 2 * jobs and (entry := next(todo, None)) is not None:
                index, copy = entry
                running[pool.submit(work, copy)] = index
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    finally:
        for future in running:
            future.cancel()
