"""Runs the copies of a plan on several threads within a fixed amount of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from ..checkpoint.file_io import Files
from .copying import Copy, OutputFactory, run_copy

MEMORY = 40 << 20  # bytes of all threads' blocks together
BLOCKS_PER_THREAD = 5  # a block as read, assembled, turned or cast, and as cut up for the targets
SMALLEST_BLOCK = 64 << 10

Digests = dict[tuple[Path, str], str]
Progress = Callable[[int], None]  # is told the bytes that were just finished


def block_size(jobs: int) -> int:
    """Bytes of the largest block that one of `jobs` threads may hold."""
    return max(SMALLEST_BLOCK, MEMORY // (BLOCKS_PER_THREAD * jobs))


def run_copies(
    copies: Sequence[Copy],
    files: Files,
    hashes: Mapping[tuple[Path, str], str],
    make_output: OutputFactory,
    jobs: int,
) -> Iterator[tuple[int, Digests]]:
    """Yields each copy's index and its targets' hashes as it is finished. The first error ends all of them."""
    chunk = block_size(jobs)
    with ThreadPoolExecutor(jobs) as pool:
        todo = iter(enumerate(copies))
        running = {}
        try:
            while True:
                # Few are handed out ahead, so that an error leaves little to wait for.
                while len(running) < 2 * jobs and (entry := next(todo, None)) is not None:
                    index, copy = entry
                    running[pool.submit(run_copy, copy, files, hashes, make_output, chunk)] = index
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            for future in running:
                future.cancel()
