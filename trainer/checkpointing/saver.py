"""Saves checkpoints in threads while training continues."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...files.working_copies import push
from ..launch.phase import SAVE, phase
from ..launch.ranks import Ranks, on_first_rank
from ..run_folder import RunFolder
from ..run_lock import check_not_lost
from .snapshot import Snapshot, amend_state, write_snapshot
from .staging_buffers import StagingBuffers


class BackgroundSaver:
    """Copies snapshots in one thread and writes them in another, one at a time. All ranks save the
    same steps.

    The copy is made while the next forward and backward passes run, which change neither parameters
    nor the optimizer's state. An update must wait for it. The threads of the ranks use a separate
    process group, so that their collectives never interleave with those of training. An error in a
    thread is raised by the next call. `keep` is the number of checkpoints to keep; None keeps all.
    `seconds` is how long a rank waits for the others, whose disks may be much slower. `notify` is
    called by the first rank's writing thread with step and folder of each checkpoint that is
    complete on disk, and in the store of a run that has its folder there.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        ranks: Ranks,
        keep: int | None,
        seconds: float = 3600.0,
        notify: Callable[[int, Path], None] = lambda step, folder: None,
    ) -> None:
        self.run_folder = run_folder
        self._ranks = ranks
        self._keep = keep
        self._notify = notify
        self._group: Any = None
        if ranks.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
            # A rank with nothing to do would close it while others still connect to it.
            dist.barrier(self._group)
        # A thread that starts takes the interpreter's lock and blocks training for milliseconds, so
        # they start now.
        self._copier = ThreadPoolExecutor(1, "copy")
        self._writer = ThreadPoolExecutor(1, "write", initializer=_yield_the_processor)
        for thread in (self._copier, self._writer):
            thread.submit(int).result()
        self._saving: Future[None] | None = None
        self._buffers = StagingBuffers()
        self.copied = threading.Event()
        self.copied.set()

    def save(self, snapshot: Snapshot) -> None:
        """Waits for the previous save, and starts this one."""
        self.wait()
        folder = self.run_folder.checkpoint(snapshot.state.step)
        self.copied.clear()
        copy = self._copier.submit(snapshot.copy, self._buffers)
        copy.add_done_callback(lambda _: self.copied.set())
        self._saving = self._writer.submit(self._write, snapshot, folder, copy)

    @phase(SAVE)
    def amend(self, step: int, *, validation: dict[str, float], best: dict[str, Any]) -> None:
        """Adds the results of an evaluation to the complete checkpoint of `step`. Collective."""
        self.wait()

        def amend() -> None:
            amend_state(self.run_folder.checkpoint(step), validation=validation, best=best)
            self._name_best(step, best)
            push(self.run_folder.path, at_once=False)

        on_first_rank(amend)

    @phase(SAVE)
    def wait_for_copy(self) -> None:
        """Waits until `copied` is set; then the parameters and the optimizer's state may change."""
        self.copied.wait()

    @phase(SAVE)
    def wait(self) -> None:
        """Waits until everything is on disk, and in the store of a run that has its folder there.
        Raises OSError if it could not be written.
        """
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.result()

    @phase(SAVE)
    def close(self) -> None:
        """Waits until everything is on disk, and destroys the process group."""
        try:
            self.wait()
        finally:
            self._copier.shutdown()
            self._writer.shutdown()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
                self._group = None

    def _write(self, snapshot: Snapshot, folder: Path, copy: Future[None]) -> None:
        copy.result()
        if self._ranks.rank == 0:
            check_not_lost(self.run_folder.path)
        write_snapshot(snapshot, folder, self._ranks, self._group)
        if self._ranks.rank == 0:
            self._name_best(snapshot.state.step, snapshot.state.best)
            push(self.run_folder.path, at_once=False)
            self._notify(snapshot.state.step, folder)

    def _name_best(self, step: int, best: dict[str, Any]) -> None:
        if best.get("step") == step:
            self.run_folder.name_best(self.run_folder.checkpoint(step))
        self.run_folder.prune(self._keep)


def _yield_the_processor() -> None:
    """Lowers the thread's priority, so that hashing and writing do not slow down training."""
    if sys.platform == "linux":  # Linux has a priority for each thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
