"""Runs copies side by side, in threads of this process or in processes of one thread each.

The processes do not import the models; torch only for copies that turn a matrix, convert a type or
add LoRA weights.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path

from ..checkpoint.file_io import HashingWriter, OpenFiles
from ..files.object_store import has_client
from ..files.working_copies import open_for_reading
from .copying import Digests, SinkFactory, TensorCopy, run_copy

MEMORY = 40 << 20  # bytes of all threads' blocks together
# The same when a process has the client of an object store, whose modules, and the answers that it
# is receiving, take as much.
MEMORY_BESIDE_CLIENT = 12 << 20
# A block as it is read, assembled, transposed or cast, and divided for the targets.
BLOCKS_PER_THREAD = 5
SMALLEST_BLOCK = 64 << 10  # bytes


def block_size(jobs: int) -> int:
    """Returns the bytes of the largest block that one of `jobs` threads or processes may hold."""
    memory = MEMORY_BESIDE_CLIENT if has_client() else MEMORY
    return max(SMALLEST_BLOCK, memory // (BLOCKS_PER_THREAD * jobs))


def run_copies(
    copies: Sequence[TensorCopy],
    files: OpenFiles,
    hashes: Mapping[tuple[Path, str], str],
    make_sink: SinkFactory,
    jobs: int,
) -> Iterator[tuple[int, Digests]]:
    """Copies in `jobs` threads; the first error stops all.

    Yields:
        The index of each finished copy, and the hashes of the tensors that it wrote.
    """
    work = partial(
        run_copy, files=files, hashes=hashes, make_sink=make_sink, block_bytes=block_size(jobs)
    )
    with ThreadPoolExecutor(jobs) as pool:
        yield from _run_in_pool(pool, work, copies, jobs)


@dataclass(frozen=True)
class Worker:
    """What a process needs for copies of any tensors.

    Attributes:
        sources: The files to read.
        targets: The files to write.
        open_target: Opens one of these for writing.
        hashes: (file, tensor name) -> recorded sha256 of the source tensors.
        block_bytes: Bytes of the largest block.
    """

    sources: Sequence[Path]
    targets: Sequence[Path]
    open_target: Callable[[Path], int]
    hashes: Mapping[tuple[Path, str], str]
    block_bytes: int

    def start(self) -> None:
        """Opens the files in a new process, which ends when its parent does."""
        global _run_copy
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles the interrupt.
        threading.Thread(target=_end_with_parent, daemon=True).start()
        inputs = OpenFiles(open_for_reading)
        inputs.open(self.sources)
        outputs = OpenFiles(self.open_target)
        outputs.open(self.targets)
        _run_copy = partial(
            run_copy,
            files=inputs,
            hashes=self.hashes,
            make_sink=lambda tensors: HashingWriter(tensors, outputs),
            block_bytes=self.block_bytes,
        )


def run_copies_in_processes(
    copies: Sequence[TensorCopy], worker: Worker, count: int
) -> Iterator[tuple[int, Digests]]:
    """Copies in `count` processes, one thread each, like `run_copies`.

    Raises:
        concurrent.futures.process.BrokenProcessPool: A process died.
    """
    with ProcessPoolExecutor(count, get_context("spawn"), worker.start) as pool:
        yield from _run_in_pool(pool, _run_in_worker, copies, count)


# In worker processes, `run_copy` with the process's open files.
_run_copy: Callable[[TensorCopy], Digests] | None = None


def _run_in_worker(copy: TensorCopy) -> Digests:
    assert _run_copy is not None
    return _run_copy(copy)


def _end_with_parent() -> None:
    """Exits with the parent.

    Without this, a pool's workers would wait forever for a parent that was killed.
    """
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_in_pool(
    pool: Executor, work: Callable[[TensorCopy], Digests], copies: Sequence[TensorCopy], jobs: int
) -> Iterator[tuple[int, Digests]]:
    waiting = iter(enumerate(copies))
    running: dict[Future[Digests], int] = {}
    try:
        while True:
            # Few copies are submitted ahead, so that little is left to wait for after an error.
            while len(running) < 2 * jobs:
                entry = next(waiting, None)
                if entry is None:
                    break
                index, copy = entry
                running[pool.submit(work, copy)] = index
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    finally:
        for future in running:
            future.cancel()
