"""What runs in each worker process of a pool: receive a function, run it, send back its result or its traceback."""

from __future__ import annotations

import datetime
import faulthandler
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import quick_disk  # noqa: F401 - for what it does
import torch
import torch.distributed as dist
from fixed_draws import seed_all
from parent import end_with_parent
from quick_collections import ignore_what_exists

# A collective that waits longer than this raises in its rank, so even a deadlock of all ranks ends.
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=20)

WORKER_SEED = 1  # that of every rank: tests count on equal draws as after a fork

_meshes: dict[tuple[int, ...], Any] = {}


def with_mesh(sizes: tuple[int, ...], function, *args, **kwargs):
    """Call `function(mesh, ...)`; process groups live as long as the worker, so a mesh costs time once.

    sizes: those of the tensor, pipeline, context and expert axes.
    """
    from shardzoo.mpu import ParallelMesh

    if sizes not in _meshes:
        _meshes[sizes] = ParallelMesh(*sizes)
    return function(_meshes[sizes], *args, **kwargs)


def serve_groups_by_one_thread() -> None:
    """Has one thread of this process serve all of gloo's groups.

    Otherwise each has its own, which wakes up a hundred times a second, and a worker has dozens of groups.
    """
    gloo = dist.ProcessGroupGloo
    device, start = gloo.create_device(interface="lo"), gloo.__init__

    def start_with_device(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        **later: bool,  # torch 2.15 says here whether a group may change its ranks; ours never do
    ) -> None:
        options = gloo._Options()
        options._devices, options._timeout = [device], timeout
        start(self, store, rank, size, options)

    gloo.__init__ = start_with_device


def serve(
    connection: Connection, rank: int, world_size: int, port: int, prefix: str, stack_path: str
) -> None:
    """The life of one worker: join the process group, then run functions until the connection closes."""
    ignore_what_exists()
    end_with_parent()
    os.setpgid(
        0, 0
    )  # when a shell leaves a group in which processes are stopped, the kernel hangs up on all of it
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for pytest, which then closes the connections
    stack_file = open(stack_path, "w")  # noqa: SIM115 - it stays open for the signal handler
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
    serve_groups_by_one_thread()
    dist.distributed_c10d.default_pg_timeout = (
        COLLECTIVE_TIMEOUT  # also for the groups a test creates
    )
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    while True:
        try:
            job = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # no teardown: a peer may already be gone
        connection.send_bytes(_run(job))


def _run(job: bytes) -> bytes:
    from shardzoo.mpu import dropout_state

    try:
        # Whatever the last function set, or drew.
        seed_all(WORKER_SEED)
        torch.set_num_threads(1)
        dropout_state.clear()
        function, args, kwargs = cloudpickle.loads(job)
        return cloudpickle.dumps((True, function(*args, **kwargs)))
    except BaseException:  # whatever it is, even SystemExit, belongs to the test
        return cloudpickle.dumps((False, traceback.format_exc()))
