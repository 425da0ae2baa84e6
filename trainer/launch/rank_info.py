"""Reads the rank of this process from its launcher's environment variables.

Does not import torch, to start quickly.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process, from the variables that torchrun, deepspeed, srun or `RankAgent`
    set.

    Attributes:
        variables: The variables of torchrun for this rank, if the launcher has set different ones.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> RankInfo:
        """Returns the rank that the launcher's variables describe; one process without them.

        Raises:
            ValueError: A variable is not a number, or there is no such rank.
        """
        own: dict[str, str] = {}
        if "RANK" not in environ and started_by_srun(environ):
            own = make_torch_variables(environ)
        found = {**environ, **own}
        world_size = read_number(found, "WORLD_SIZE", 1, least=1)
        rank = read_number(found, "RANK", 0)
        if rank >= world_size:
            raise ValueError(
                f"RANK={rank} is not a rank of WORLD_SIZE={world_size} processes, which are counted "
                "from 0; start the processes with torchrun, deepspeed or srun, or unset RANK"
            )
        local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in found else "LOCAL_SIZE"
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=read_number(found, "LOCAL_RANK", 0),
            local_world_size=read_number(found, local_size, world_size, least=1),
            variables=own,
        )

    def export(self) -> None:
        """Sets the environment variables that `torch.distributed` and DeepSpeed read."""
        os.environ.update(self.variables)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read_number(environ: Mapping[str, str], name: str, default: int, *, least: int = 0) -> int:
    """Returns the number in an environment variable, or `default` without the variable.

    Raises:
        ValueError: The variable is not a number of at least `least`.
    """
    text = environ.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"\s*[0-9]{1,15}\s*", text) or int(text) < least:
        raise ValueError(
            f"the environment variable {name}={text[:50]!r} is not a number of at least {least}; "
            "launchers set it, so unset it if none has started this process"
        )
    return int(text)


def count_threads(local_world_size: int) -> int:
    """Returns the number of threads of a rank: that of OMP_NUM_THREADS, or its share of the cores.

    OpenMP also takes a list such as `4,2`, with a number for each level of nested parallel regions.
    The first one is that of torch's kernels, which do not nest.

    Raises:
        ValueError: The variable is not a number of threads.
    """
    text = cpu_environment(local_world_size)["OMP_NUM_THREADS"]
    first = text.partition(",")[0].strip()
    if not re.fullmatch("[0-9]{1,5}", first) or int(first) < 1:
        raise ValueError(
            f"OMP_NUM_THREADS={text[:50]!r} is not a number of threads from 1 to 99999; set it to "
            "the number of cores for each process, or unset it"
        )
    return int(first)


def cpu_environment(local_world_size: int) -> dict[str, str]:
    """Returns environment variables that make several CPU processes on one machine fast. Existing
    values are kept.

    - OMP_NUM_THREADS divides the cores among the processes.
    - THP_MEM_ALLOC_ENABLE uses huge pages for tensors, because page faults of small pages cost
      eager PyTorch most of its memory bandwidth.
    - LOCAL_SIZE is the number of devices for DeepSpeed's CPU accelerator, one for each process.
    """
    threads = max(1, (os.cpu_count() or 1) // local_world_size)
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "THP_MEM_ALLOC_ENABLE": "1",
        "LOCAL_SIZE": str(local_world_size),
    }
    return {name: os.environ.get(name) or value for name, value in wanted.items()}


# Each job of SLURM meets at one of these ports.
FIRST_PORT = 15000
PORTS = 10000
# The step number that SLURM gives to a batch script itself: SLURM_BATCH_SCRIPT in slurm.h.
BATCH_STEP = "4294967291"


def started_by_srun(environ: Mapping[str, str]) -> bool:
    """Returns whether this process is a task of an `srun` step.

    The batch script of a job also has a SLURM_PROCID of 0 and the job's number of tasks, although
    `srun` has not started the other tasks. If it were treated as a task, it would wait for them
    forever. A batch script has no step.
    """
    if "SLURM_PROCID" not in environ or count_tasks(environ) is None:
        return False
    inside_a_job = "SLURM_JOB_ID" in environ
    in_a_step = environ.get("SLURM_STEP_ID", BATCH_STEP) != BATCH_STEP
    return in_a_step or not inside_a_job or read_number(environ, "SLURM_PROCID", 0) > 0


def count_tasks(environ: Mapping[str, str]) -> int | None:
    """Returns the number of tasks of this step, which may be fewer than the job's;

    None if SLURM does not say it.
    """
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        if environ.get(name):
            return read_number(environ, name, 1, least=1)
    return None


def make_torch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that torchrun would set for this task.

    An existing MASTER_ADDR or MASTER_PORT is kept.
    """
    world_size = count_tasks(environ)
    assert world_size is not None
    first = "127.0.0.1"
    for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
        if environ.get(name):
            first = first_host(environ[name])
            break
    # Jobs that share a node need different ports.
    port = FIRST_PORT + read_number(environ, "SLURM_JOB_ID", 0) % PORTS
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(count_tasks_on_this_node(environ, world_size)),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first,
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }


def count_tasks_on_this_node(environ: Mapping[str, str], world_size: int) -> int:
    """Returns the number of tasks on this node.

    It comes from `SLURM_STEP_TASKS_PER_NODE`, such as `2(x3),1`: two on each of three nodes, one on
    the last.
    """
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if counts is None:
        return world_size // read_number(environ, "SLURM_NNODES", 1, least=1) or 1
    by_node: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        by_node += [int(count)] * int(times or 1)
    if not by_node:
        raise ValueError(
            f"SLURM says {counts[:50]!r} of the tasks of each node, which has no number"
        )
    return by_node[min(read_number(environ, "SLURM_NODEID", 0), len(by_node) - 1)]


def first_host(nodes: str) -> str:
    """Returns the first name of a SLURM node list: `rack[1-2]n[04-07,9],other` -> `rack1n04`."""
    depth = 0
    for end, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            nodes = nodes[:end]
            break
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes)
