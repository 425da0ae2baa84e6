"""The process mesh: pipeline × data × tensor, and the questions DeepSpeed asks of an `mpu` object."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .shard import describe_sizes, divisors


def validate_layout(world_size: int, tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> int:
    """Return the data-parallel size that fills `world_size` processes.

    Pure arithmetic, so it can run before any process is started. Raises `ValueError` naming the sizes that work.
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
        stages = f" in each of {pipeline_parallel_size} pipeline stages" if pipeline_parallel_size > 1 else ""
        raise ValueError(
            f"{per_stage} processes{stages} cannot be split into tensor-parallel groups of "
            f"{tensor_parallel_size}; use tensor_parallel_size {describe_sizes(divisors(per_stage))}"
        )
    return per_stage // tensor_parallel_size


class ParallelMesh:
    """Ranks, sizes and process groups of each axis of a pipeline × data × tensor mesh.

    Consecutive ranks are tensor-parallel neighbours, because that axis communicates most. The data-parallel size is
    inferred from the number of processes. `torch.distributed` must be initialised, and every process must build the
    mesh with the same sizes. The `get_*` methods are those that DeepSpeed 0.19 calls on an `mpu`; there are
    deliberately none named `*sequence_parallel*`, which DeepSpeed would take for its own Ulysses parallelism.

    Raises `ValueError` if the sizes do not fit the number of processes, `RuntimeError` without torch.distributed.
    """

    def __init__(self, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1):
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "ParallelMesh needs torch.distributed: call torch.distributed.init_process_group() first, "
                "or pass mesh=None for a single process"
            )
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.tp_size = tensor_parallel_size
        self.pp_size = pipeline_parallel_size
        self.dp_size = validate_layout(self.world_size, tensor_parallel_size, pipeline_parallel_size)
        device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
        self.device_mesh = init_device_mesh(
            device_type, (self.pp_size, self.dp_size, self.tp_size), mesh_dim_names=("pipeline", "data", "tensor")
        )
        self.pp_rank, self.dp_rank, self.tp_rank = (
            self.device_mesh.get_local_rank(axis) for axis in ("pipeline", "data", "tensor")
        )
        self.pp_group, self.dp_group, self.tp_group = (
            self.device_mesh.get_group(axis) for axis in ("pipeline", "data", "tensor")
        )
        self.model_group = self._build_model_group()

    def _build_model_group(self) -> dist.ProcessGroup:
        """All ranks that hold one replica of the model: tensor × pipeline, ordered by stage."""
        if self.pp_size == 1:
            return self.tp_group
        ranks = self.device_mesh.mesh.movedim(1, 0).flatten(1).tolist()  # [dp, pp * tp]
        group, _ = dist.new_subgroups_by_enumeration(ranks)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def __repr__(self) -> str:
        return (
            f"ParallelMesh(rank {self.rank} of {self.world_size}: pipeline {self.pp_rank}/{self.pp_size}, "
            f"data {self.dp_rank}/{self.dp_size}, tensor {self.tp_rank}/{self.tp_size})"
        )

    # What DeepSpeed asks. "model parallel" covers tensor and pipeline together, as in DeepSpeed's own grid: norms and
    # overflow flags are reduced over it and checkpoint files are numbered by it.

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
        """Global rank of the first member of this process's tensor-parallel group."""
        return dist.get_global_rank(self.tp_group, 0)

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self.dp_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.dp_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks of this process's data-parallel group."""
        return dist.get_process_group_ranks(self.dp_group)

    def get_pipe_parallel_rank(self) -> int:
        return self.pp_rank

    def get_pipe_parallel_world_size(self) -> int:
        return self.pp_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        return self.pp_group

    # Older and newer names of the same.
    get_slice_parallel_rank = get_tensor_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size
    get_slice_parallel_group = get_tensor_model_parallel_group
    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group


def tp_rank(mesh: ParallelMesh | None) -> int:
    """This process's tensor-parallel rank; 0 without a mesh."""
    return 0 if mesh is None else mesh.tp_rank


def tp_size(mesh: ParallelMesh | None) -> int:
    """The number of processes that share each split layer; 1 without a mesh."""
    return 1 if mesh is None else mesh.tp_size
