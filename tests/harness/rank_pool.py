"""Pools of gloo workers that live for the whole test session.

The workers are forked from a server that has torch loaded, and keep their process group between tests, so running a
function on N ranks costs milliseconds. Between two functions they are stopped: gloo's threads wake up a hundred times a
second. A pool in which anything went wrong is thrown away: its ranks may disagree about which collective comes next.
"""

from __future__ import annotations

import contextlib
import copyreg
import itertools
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from rank_worker import serve, with_mesh

TESTS = Path(__file__).resolve().parent.parent
SECONDS_AFTER_FAILURE = 2.0  # what the other ranks get once one has failed
SECONDS_AFTER_SUCCESS = (
    10.0  # ... and once one has returned: more, because ranks may have unequal work
)
SECONDS_IN_ALL = 120.0
# Loaded once, in the fork server: what every worker would load at its first mesh, checkpoint, engine or export.
PRELOADED = [
    "imports_begin",
    "torch",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.utils.tensorboard",
    "cloudpickle",
    "datasets",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "peft",
    "pytest",
    "rouge_score.rouge_scorer",
    "seqeval.metrics",
    "setuptools",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.optimization",
    "shardzoo.cli.finetune",
    "shardzoo.cli.pretrain",
    "shardzoo.convert.logits",
    "shardzoo.generation",
    "shardzoo.trainer.engines.deepspeed_engine",
    "shardzoo.trainer.trainer",
    *(
        f"shardzoo.models.{model.parent.name}"
        for model in (TESTS.parent / "models").glob("*/__init__.py")
    ),
    "imports_end",
]


# cloudpickle sends `torch.ops` along with a function that mentions any `.ops`, and does not know how.
copyreg.pickle(type(torch.ops), lambda _: (getattr, (torch, "ops")))


class RanksFailedError(AssertionError):
    """Some ranks raised, died or hung. The text names each and shows its traceback or where it was."""


class RankPool:
    """`size` processes in one process group."""

    def __init__(self, context, store: dist.TCPStore, size: int, prefix: str):
        self.size = size
        self._stacks = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            stack_path = str(self._stack_path(rank))
            arguments = (theirs, rank, size, store.port, prefix, stack_path)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def _stack_path(self, rank: int) -> Path:
        return Path(self._stacks.name) / f"rank_{rank}"

    def run(self, job: bytes, timeout: float) -> list[Any]:
        """Send `job` to every rank and return the results in rank order. Raises `RanksFailedError`."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.send_bytes(job)
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.size:
            waiting = {self._connections[r]: r for r in range(self.size) if r not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answers[rank] = self._receive(rank)
                patience = SECONDS_AFTER_SUCCESS if answers[rank][0] else SECONDS_AFTER_FAILURE
                deadline = min(deadline, time.monotonic() + patience)
        if len(answers) == self.size and all(succeeded for succeeded, _ in answers.values()):
            self._signal(signal.SIGSTOP)
            return [answers[rank][1] for rank in range(self.size)]
        raise RanksFailedError(self._report(answers))

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return cloudpickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(2)
            return False, f"the process died with exit code {self._processes[rank].exitcode}"

    def _report(self, answers: dict[int, tuple[bool, Any]]) -> str:
        stuck = [rank for rank in range(self.size) if rank not in answers]
        for rank in stuck:
            if self._processes[rank].is_alive():
                os.kill(
                    self._processes[rank].pid, signal.SIGUSR1
                )  # the worker's faulthandler writes its stack
        time.sleep(0.2 if stuck else 0)
        lines = []
        for rank in range(self.size):
            if rank in stuck:
                lines.append(
                    f"rank {rank} of {self.size} is stuck:\n{self._stack_path(rank).read_text()}"
                )
            elif not answers[rank][0]:
                lines.append(f"rank {rank} of {self.size} failed:\n{answers[rank][1]}")
            else:
                lines.append(f"rank {rank} of {self.size} returned")
        return "\n".join(lines)

    def close(self, kill: bool = False) -> None:
        """End the workers: by closing their connections, or at once."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if kill:
                process.kill()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._stacks.cleanup()


class RankPools:
    """One pool per world size, started when first needed and replaced after a failure."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._store: dist.TCPStore | None = None
        self._pools: dict[int, RankPool] = {}
        self._numbers = itertools.count()
        self._known_modules: set[str] = set()

    def _start(self, size: int) -> RankPool:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return RankPool(self._context, self._store, size, f"pool{next(self._numbers)}")

    def _ship_tests_by_value(self) -> None:
        """Test modules cannot be imported by a worker, so cloudpickle must send what they define."""
        if len(self._known_modules) == len(sys.modules):
            return
        new = [
            (name, module)
            for name, module in list(sys.modules.items())
            if name not in self._known_modules
        ]
        for name, module in new:
            path = getattr(module, "__file__", None) or ""
            if path.startswith(f"{TESTS}{os.sep}") and name not in ("rank_pool", "rank_worker"):
                cloudpickle.register_pickle_by_value(module)
        self._known_modules.update(name for name, _ in new)

    def run_ranks(
        self,
        size: int,
        function,
        *args,
        timeout: float = SECONDS_IN_ALL,
        isolated: bool = False,
        **kwargs,
    ):
        """Call `function(*args, **kwargs)` in `size` processes of one gloo group; the results in rank order.

        isolated: use new processes and end them afterwards, for code that leaves global state behind.
        Raises `RanksFailedError` with every rank's traceback if one fails, dies, or does not return: `timeout` seconds
        after the start, or a few seconds after another rank has.
        """
        self._ship_tests_by_value()
        job = cloudpickle.dumps((function, args, kwargs))
        if isolated:
            pool = self._start(size)
        elif size in self._pools:
            pool = self._pools[size]
        else:
            pool = self._pools[size] = self._start(size)
        try:
            results = pool.run(job, timeout)
        except BaseException:
            self._pools = {n: other for n, other in self._pools.items() if other is not pool}
            pool.close(kill=True)
            raise
        if isolated:
            pool.close()
        return results

    def run_mesh(
        self,
        tensor_parallel_size: int,
        function,
        *args,
        data: int = 1,
        pipeline: int = 1,
        context: int = 1,
        expert: int = 1,
        **options,
    ) -> list[Any]:
        """Call `function(mesh, *args, **options)` on every rank of a mesh; some options are those of `run_ranks`."""
        sizes = (tensor_parallel_size, pipeline, context, expert)
        world_size = math.prod(sizes) * data
        return self.run_ranks(world_size, with_mesh, sizes, function, *args, **options)

    def close(self) -> None:
        """End all workers."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
