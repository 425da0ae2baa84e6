"""Builds the pipeline × data × tensor process mesh, which is also the `mpu` object that DeepSpeed expects."""

from __future__ import annotations

import atexit
import os
import socket
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .shard import describe_sizes, divisors

AXES = ("pipeline", "data", "tensor")

Backend = Literal["auto", "nccl", "gloo"]


def validate_layout(
    world_size: int, tensor_parallel_size: int, pipeline_parallel_size: int = 1
) -> int:
    """Returns the data-parallel size that fills `world_size` processes.

    This is arithmetic only, so it can run before any process is started.

    Raises:
        ValueError: The sizes do not fit; the message names the sizes that work.
    """
    for name, size in (
        ("world_size", world_size),
        ("tensor_parallel_size", tensor_parallel_size),
        ("pipeline_parallel_size", pipeline_parallel_size),
    ):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if world_size % pipeline_parallel_size:
        raise ValueError(
            f"{world_size} processes cannot form {pipeline_parallel_size} pipeline stages; "
            f"use pipeline_parallel_size {describe_sizes(divisors(world_size))}"
        )
    per_stage = world_size // pipeline_parallel_size
    if per_stage % tensor_parallel_size:
        stages = (
            f" in each of {pipeline_parallel_size} pipeline stages"
            if pipeline_parallel_size > 1
            else ""
        )
        raise ValueError(
            f"{per_stage} processes{stages} cannot be split into tensor-parallel groups of "
            f"{tensor_parallel_size}; use tensor_parallel_size {describe_sizes(divisors(per_stage))}"
        )
    return per_stage // tensor_parallel_size


class ParallelMesh:
    """The ranks, sizes and process groups of each axis of a pipeline × data × tensor mesh.

        mesh = ParallelMesh(tensor_parallel_size=2)  # under torchrun or deepspeed

    Consecutive ranks are tensor-parallel neighbors, because that axis communicates most. The data-parallel size follows
    from the number of processes. Every process must build the mesh with the same sizes.

    The mesh uses the existing process group of torch.distributed. If none exists and a launcher started the process,
    the mesh creates one: NCCL if GPUs are available, with the GPU that LOCAL_RANK names for each process, else gloo.
    A single process without a launcher needs no process group.

    The `get_*` methods are those that DeepSpeed 0.19 calls on an `mpu`. No method is named `*sequence_parallel*`,
    because DeepSpeed would use it for its own Ulysses parallelism.

    Raises:
        ValueError: The sizes do not fit the number of processes, or the launcher's variables are incomplete.
    """

    def __init__(self, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1):
        grouped = join_process_group()
        self.world_size, self.rank = (dist.get_world_size(), dist.get_rank()) if grouped else (1, 0)
        self.tp_size, self.pp_size = tensor_parallel_size, pipeline_parallel_size
        needed = tensor_parallel_size * pipeline_parallel_size
        if not grouped and needed > 1:
            raise ValueError(
                f"tensor_parallel_size {tensor_parallel_size} and pipeline_parallel_size {pipeline_parallel_size} need "
                f"a multiple of {needed} processes, but this is one process without a launcher: start the script with "
                f"`torchrun --nproc-per-node {needed}` or `deepspeed --num_gpus {needed}`, or use sizes of 1"
            )
        self.dp_size = validate_layout(
            self.world_size, tensor_parallel_size, pipeline_parallel_size
        )
        self.device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self.device_mesh: DeviceMesh | None = None
        self.pp_rank = self.dp_rank = self.tp_rank = 0
        self._groups: dict[str, dist.ProcessGroup] = {}
        if grouped:
            self.device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
            self.device_mesh = init_device_mesh(
                self.device_type, (self.pp_size, self.dp_size, self.tp_size), mesh_dim_names=AXES
            )
            self.pp_rank, self.dp_rank, self.tp_rank = (
                self.device_mesh.get_local_rank(axis) for axis in AXES
            )
            self._groups = {axis: self.device_mesh.get_group(axis) for axis in AXES}
            self._groups["model"] = self._build_model_group(self.device_mesh)

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self._group("pipeline")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self._group("data")

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self._group("tensor")

    @property
    def model_group(self) -> dist.ProcessGroup:
        """The ranks that together hold one replica of the model: tensor × pipeline, ordered by stage."""
        return self._group("model")

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return list(self._groups.values())

    def _group(self, axis: str) -> dist.ProcessGroup:
        if axis not in self._groups:
            raise RuntimeError(
                "this mesh is a single process without torch.distributed, so it has no process groups"
            )
        return self._groups[axis]

    def _build_model_group(self, device_mesh: DeviceMesh) -> dist.ProcessGroup:
        if self.pp_size == 1:
            return self._groups["tensor"]
        ranks = device_mesh.mesh.movedim(1, 0).flatten(1)  # [dp, pp * tp]
        group, _ = cast(Any, dist).new_subgroups_by_enumeration(cast(Any, ranks).tolist())
        assert isinstance(group, dist.ProcessGroup)
        return group

    def __repr__(self) -> str:
        return (
            f"ParallelMesh(rank {self.rank} of {self.world_size}: pipeline {self.pp_rank}/{self.pp_size}, "
            f"data {self.dp_rank}/{self.dp_size}, tensor {self.tp_rank}/{self.tp_size})"
        )

    # The methods that DeepSpeed calls. "Model parallel" means tensor and pipeline parallelism together, as in
    # DeepSpeed's own grid. DeepSpeed reduces norms and overflow flags over that group, and numbers checkpoint files
    # by its ranks.

    def get_model_parallel_rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self.pp_size * self.tp_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.model_group

    def get_tensor_model_parallel_rank(self) -> int:
        return self.tp_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tp_size

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self.tp_group

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Returns the global rank of the first member of this process's tensor-parallel group."""
        return dist.get_global_rank(self.tp_group, 0)

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self.dp_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.dp_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Returns the global ranks of this process's data-parallel group."""
        return dist.get_process_group_ranks(self.dp_group)

    def get_pipe_parallel_rank(self) -> int:
        return self.pp_rank

    def get_pipe_parallel_world_size(self) -> int:
        return self.pp_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        return self.pp_group

    # Other names of the same methods, from older and newer versions.
    get_slice_parallel_rank = get_tensor_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size
    get_slice_parallel_group = get_tensor_model_parallel_group
    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group


def join_process_group() -> bool:
    """Joins torch.distributed's process group if a launcher started this process.

    Returns:
        Whether this process now belongs to a process group.

    Raises:
        ValueError: RANK and WORLD_SIZE are set but MASTER_ADDR or MASTER_PORT is not, or a variable is not a number.
    """
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return True
    if not ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        return False
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"RANK and WORLD_SIZE say that a launcher started this process, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; use torchrun or deepspeed, or set both variables"
        )
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        torch.cuda.set_device(
            local_rank % torch.cuda.device_count()
        )  # a launcher may show each process one GPU
    init_process_group()
    atexit.register(_leave_process_group)
    return True


def init_process_group(timeout: timedelta | None = None, backend: Backend = "auto") -> None:
    """Creates the default process group from the launcher's variables.

    "auto" is NCCL with GPUs, else gloo. gloo sends tensors of a GPU through the host's memory, but several ranks may
    then share one GPU, which NCCL refuses.

    If MASTER_ADDR is this machine's loopback address, the rendezvous is open to this machine alone; torch's own
    listens on all addresses.

    Raises ValueError for "nccl" without a GPU.
    """
    has_gpu = torch.cuda.is_available()
    if backend == "nccl" and not has_gpu:
        raise ValueError(
            "distributed_backend='nccl' needs a GPU, and this process sees none; use 'gloo' or 'auto'"
        )
    chosen = ("nccl" if has_gpu else "gloo") if backend == "auto" else backend
    has_agent = (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )  # torchrun's agent has opened a rendezvous
    if os.environ["MASTER_ADDR"] in ("localhost", "127.0.0.1") and not has_agent:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        descriptor = (
            socket.create_server(address, backlog=world_size + 16).detach() if rank == 0 else None
        )
        wait = timeout or timedelta(minutes=30)  # torch's default
        store = cast(Any, dist).TCPStore(
            *address, world_size, rank == 0, wait, master_listen_fd=descriptor
        )
        dist.init_process_group(
            chosen, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        return
    dist.init_process_group(chosen, timeout=timeout)


def _leave_process_group() -> None:
    """Destroys the process group if it still exists, because its threads would abort the interpreter's shutdown."""
    if dist.is_initialized():
        dist.destroy_process_group()


def tp_rank(mesh: ParallelMesh | None) -> int:
    """Returns this process's tensor-parallel rank; 0 without a mesh."""
    return 0 if mesh is None else mesh.tp_rank


def tp_size(mesh: ParallelMesh | None) -> int:
    """Returns the number of processes that share each split layer; 1 without a mesh."""
    return 1 if mesh is None else mesh.tp_size
