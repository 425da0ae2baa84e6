"""Opens the shared memory through which the ranks of one host exchange CPU tensors.

gloo sends even a few bytes through sockets, which takes some 0.1 ms. Where all ranks of a group are
on one host, `find` returns a channel of csrc/mpu/shared_memory.cpp, which takes some microseconds.
Elsewhere it returns None, and torch.distributed does the work.

The memory has no name: the group's first rank makes an anonymous file, which the others open
through /proc. So nothing is left in /dev/shm when ranks are killed. A rank that waits for one that
has ended raises an error at once.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ..ops.device import host_can_read

try:
    from ._shared_memory import Channel
except ImportError:  # csrc/mpu/shared_memory.cpp was not built
    compiled = None
else:
    compiled = Channel

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = range(3)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
# Bytes of a slot, and slots of a rank. Some of them stay in a core's second-level cache.
SLOT = 1 << 18
SLOTS = 8
# Seconds for which a rank looks for others' data before it sleeps, if every rank has a core.
SPIN = 3e-5
FILE = "shardzoo-"  # how the names of the files begin, which /proc shows
# How Linux promises memory, and how it says that it promises no more than there is.
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
STRICT = "2"
TIMEOUT = 1800.0  # seconds: torch's default

# The channel of each group that was asked for one; None if the group has none.
_channels: WeakKeyDictionary[dist.ProcessGroup, Channel | None] = WeakKeyDictionary()
_timeouts: WeakKeyDictionary[dist.ProcessGroup, float] = WeakKeyDictionary()


def find(tensor: Tensor, group: dist.ProcessGroup) -> Channel | None:
    """Returns the channel through which the group's ranks exchange tensors such as this one, or
    None.

    The first call with a group is a collective.
    """
    if (
        not host_can_read(tensor)
        or tensor.dtype not in DTYPES
        or type(tensor) not in (Tensor, Parameter)
    ):
        return None
    if group not in _channels:
        _channels[group] = _open(group)
    return _channels[group]


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Sets for how long a collective of this group waits for the other ranks."""
    _timeouts[group] = seconds
    if channel := _channels.get(group):
        channel.set_timeout(seconds)


def start(
    channel: Channel, kind: int, tensor: Tensor, out: Tensor, count: int
) -> Callable[[], Tensor]:
    """Starts a collective of contiguous tensors. Returns a function that waits for its end and
    returns `out`.

    Args:
        count: Elements of the tensor; for a reduce-scatter, of the piece that each rank keeps.
    """
    number = channel.start(kind, DTYPES.index(tensor.dtype), tensor, out, count)

    def finish() -> Tensor:
        channel.finish(number)
        return out

    return finish


def exchange(
    channel: Channel, rows: Tensor, out: Tensor, sent: list[int], received: list[int], longest: int
) -> Tensor:
    """Sends each rank its rows, and returns `out` with those that have come from each.

    Args:
        rows: [sum(sent), ...], contiguous.
        out: [sum(received), ...], contiguous.
        sent, received: The number of rows for and from each rank.
        longest: The most rows that any rank sends to another.
    """
    width = rows.shape[1:].numel()
    number = channel.start_all_to_all(
        DTYPES.index(rows.dtype),
        rows,
        out,
        [count * width for count in sent],
        [count * width for count in received],
        longest * width,
    )
    channel.finish(number)
    return out


def _open(group: dist.ProcessGroup) -> Channel | None:
    """Opens the group's memory on all ranks, or on none if one of them cannot."""
    name = secrets.randbits(62)
    file = _make_file(name, group.size()) if group.rank() == 0 else -1
    ranks = _gather([*_host(), os.getpid(), file, name], group)
    channel = None
    if all(rank[:2] == ranks[0][:2] for rank in ranks):
        _, _, process, file_of_first, name = ranks[0]
        path = f"/proc/{process}/fd/{file_of_first}"
        channel = _map_file(path, name, [rank[2] for rank in ranks], group)
    opened = _gather([channel is not None], group)
    if file >= 0:
        os.close(file)
    return channel if all(rank[0] for rank in opened) else None


def _make_file(name: int, size: int) -> int:
    """Returns the descriptor of a new file that has no path, or -1 if there can be none."""
    if compiled is None or size > compiled.most_ranks or not hasattr(os, "memfd_create"):
        return -1
    file = -1
    try:
        file = os.memfd_create(f"{FILE}{name}")
        nbytes = compiled.count_bytes(size, SLOT, SLOTS)
        os.ftruncate(file, nbytes)
        if OVERCOMMIT.read_text().strip() == STRICT:
            # Without memory for it, a page that is first used later would end the rank by SIGBUS.
            os.posix_fallocate(file, 0, nbytes)
    except OSError:  # no memory, or a limit of open files (ulimit -n) or of their size (ulimit -f)
        if file >= 0:
            os.close(file)
        return -1
    return file


def _map_file(
    path: str, name: int, processes: list[int], group: dist.ProcessGroup
) -> Channel | None:
    """Returns the channel in a file that the group's first rank has made; None if this process
    cannot open it.
    """
    if compiled is None:
        return None
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    spin = SPIN if local_ranks <= len(os.sched_getaffinity(0)) else 0.0
    try:
        # Copies of one virtual machine may have equal numbers of the host and of processes.
        if not os.readlink(path).startswith(f"/memfd:{FILE}{name} "):
            return None
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        timeout = _timeouts.get(group, TIMEOUT)
        return compiled(file, group.rank(), processes, SLOT, SLOTS, timeout, spin)
    except RuntimeError:  # there is no address space for it
        return None
    finally:
        os.close(file)


def _host() -> list[int]:
    """Returns two numbers that are equal for processes that find each other in /proc, and for no
    others.
    """
    try:
        boot = uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).int >> 65
        return [boot, os.stat("/proc/self/ns/pid").st_ino]
    except (OSError, ValueError):
        return [secrets.randbits(62), 0]


def _gather(numbers: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Returns every rank's numbers, by torch.distributed."""
    every = [torch.empty(len(numbers), dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(every, torch.tensor(numbers, dtype=torch.int64), group=group)
    return [rank.tolist() for rank in every]
