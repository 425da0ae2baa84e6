"""Builds the process mesh with five named axes, which is also the `mpu` that DeepSpeed expects.

| axis       | the ranks along it                                                              |
|------------|---------------------------------------------------------------------------------|
| `pipeline` | hold consecutive stages of the model                                            |
| `data`     | hold the same parameters, and read different samples                            |
| `context`  | hold the same parameters, and read different positions of the same samples      |
| `expert`   | hold different experts and the same other parameters, and read different samples |
| `tensor`   | hold parts of every split parameter, and read the same tokens                   |

What the ranks of the context axis send one another is in context.py, and those of the expert axis
in experts.py.

The expert axis is a part of data parallelism as far as everything but the experts is concerned,
as in Megatron-core and DeepSpeed: tokens travel to their experts and back along it. What follows
for gradients and samples is stated by the joined axes below, whose ranks `ParallelMesh.group`,
`size` and `rank_in` answer for.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .division import describe_sizes, divisors
from .process_group import ended_by_interrupt, join_process_group

Axis = Literal["pipeline", "data", "context", "expert", "tensor"]

# From the outermost to the innermost: consecutive ranks are neighbors along the tensor axis,
# because that axis communicates most.
AXES: tuple[Axis, ...] = get_args(Axis)

# The ranks that read different samples.
SAMPLE_AXES: tuple[Axis, ...] = ("data", "expert")
# The ranks that hold the same parameters, experts excepted: gradients are summed over them.
REPLICA_AXES: tuple[Axis, ...] = ("data", "context", "expert")
# The ranks that hold the same experts: the gradients of experts are summed over them.
EXPERT_REPLICA_AXES: tuple[Axis, ...] = ("data", "context")
# The ranks that together hold one replica of the model, experts excepted.
MODEL_AXES: tuple[Axis, ...] = ("pipeline", "tensor")
# The ranks that together hold all parameters, experts included.
EXPERT_MODEL_AXES: tuple[Axis, ...] = ("pipeline", "expert", "tensor")
# The ranks that together hold one mixture.
MIXTURE_AXES: tuple[Axis, ...] = ("expert", "tensor")


def validate_layout(
    world_size: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
) -> int:
    """Returns the size of the data axis, which fills `world_size` processes.

    This is arithmetic only, so it can run before any process is started.

    Raises:
        ValueError: The sizes do not fit; the message names the sizes that work.
    """
    sizes = {
        "world_size": world_size,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "context_parallel_size": context_parallel_size,
        "expert_parallel_size": expert_parallel_size,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if world_size % pipeline_parallel_size:
        raise ValueError(
            f"{world_size} processes cannot form {pipeline_parallel_size} pipeline stages; "
            f"use pipeline_parallel_size {describe_sizes(divisors(world_size))}"
        )
    per_stage = world_size // pipeline_parallel_size
    if per_stage % tensor_parallel_size:
        stages = ""
        if pipeline_parallel_size > 1:
            stages = f" in each of {pipeline_parallel_size} pipeline stages"
        raise ValueError(
            f"{per_stage} processes{stages} cannot be split into tensor-parallel groups of "
            f"{tensor_parallel_size}; "
            f"use tensor_parallel_size {describe_sizes(divisors(per_stage))}"
        )
    replicas = per_stage // tensor_parallel_size
    for axis, size in (("context", context_parallel_size), ("expert", expert_parallel_size)):
        if replicas % size:
            raise ValueError(
                f"{replicas} replicas of the model cannot be split into {axis}-parallel groups of "
                f"{size}; use {axis}_parallel_size {describe_sizes(divisors(replicas))}"
            )
        replicas //= size
    return replicas


class ParallelMesh:
    """The sizes, ranks and process groups of the mesh's axes (see the top of this file).

        mesh = ParallelMesh(tensor_parallel_size=2)  # under torchrun or deepspeed

    The size of the data axis follows from the number of processes. Every process must build the
    mesh with the same sizes. An axis of size 1 has no process group and costs nothing.

    The mesh uses the existing process group of torch.distributed. If none exists and a launcher
    started the process, the mesh creates one: NCCL if GPUs are available, with the GPU that
    LOCAL_RANK names for each process, else gloo. A single process without a launcher needs no
    process group.

    The `get_*` methods are those that DeepSpeed 0.19 calls on an `mpu`. No method is named
    `*sequence_parallel*`, because DeepSpeed would use it for its own Ulysses parallelism.

    Attributes:
        world_size, rank: Of all processes.
        sizes: The size of each axis.
        ranks: This process's coordinate along each axis.
        pp_size, pp_rank, dp_size, dp_rank, cp_size, cp_rank, tp_size, tp_rank: Those of the
            pipeline, data, context and tensor axes.
        device_mesh: torch's mesh of the axes that are larger than 1; None if there are none.
        device_type: "cuda" or "cpu", where the backend's tensors are.

    Raises:
        ValueError: The sizes do not fit the number of processes, or the launcher's variables are
            incomplete.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelMesh:
        """Returns itself: a copy of a model is on the same mesh."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the mesh of one process.

        Raises:
            ValueError: It has several processes, which no file can hold.
        """
        if self.world_size > 1:
            raise ValueError(
                "a model on a mesh of several processes cannot be pickled; write it with "
                "save_pretrained, or save its state_dict"
            )
        return ParallelMesh, ()

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
    ):
        self._has_process_group = join_process_group()
        self.world_size = dist.get_world_size() if self._has_process_group else 1
        self.rank = dist.get_rank() if self._has_process_group else 0
        self.sizes: dict[Axis, int] = {
            "pipeline": pipeline_parallel_size,
            "data": 1,
            "context": context_parallel_size,
            "expert": expert_parallel_size,
            "tensor": tensor_parallel_size,
        }
        if not self._has_process_group:
            self._refuse_more_than_one_process()
        try:
            self.sizes["data"] = validate_layout(
                self.world_size,
                tensor_parallel_size,
                pipeline_parallel_size,
                context_parallel_size,
                expert_parallel_size,
            )
        except ValueError as error:
            if self.world_size > 1:
                print_once(error, self.rank)
            raise
        grid = torch.arange(self.world_size).view(*self.sizes.values())
        coordinates = (grid == self.rank).nonzero()[0]
        self.ranks: dict[Axis, int] = dict(zip(AXES, map(int, coordinates), strict=True))
        self.pp_size = self.sizes["pipeline"]
        self.pp_rank = self.ranks["pipeline"]
        self.dp_size = self.sizes["data"]
        self.dp_rank = self.ranks["data"]
        self.cp_size = self.sizes["context"]
        self.cp_rank = self.ranks["context"]
        self.tp_size = self.sizes["tensor"]
        self.tp_rank = self.ranks["tensor"]

        self.device_type = "cuda" if torch.cuda.is_available() else "cpu"
        if self._has_process_group:
            self.device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
        self.device_mesh: DeviceMesh | None = None
        self._groups: dict[tuple[Axis, ...], dist.ProcessGroup] = {}
        parallel_axes = self._drop_axes_of_one(AXES)
        if parallel_axes:
            with ended_by_interrupt(self.world_size):
                self.device_mesh = init_device_mesh(
                    self.device_type,
                    tuple(self.sizes[axis] for axis in parallel_axes),
                    mesh_dim_names=parallel_axes,
                )
            for axis in parallel_axes:
                self._groups[(axis,)] = self.device_mesh.get_group(axis)
        # These are made now, because every process is here now.
        joined: list[tuple[Axis, ...]] = [MODEL_AXES, REPLICA_AXES]
        if expert_parallel_size > 1:
            joined += [SAMPLE_AXES, EXPERT_REPLICA_AXES, EXPERT_MODEL_AXES, MIXTURE_AXES]
        for axes in joined:
            if self._drop_axes_of_one(axes):
                self.group(*axes)

    def size(self, *axes: Axis) -> int:
        """Returns the number of ranks along an axis, or along several joined axes."""
        # A compiler can trace a loop, but no generator in `prod`.
        size = 1
        for axis in axes:
            size *= self.sizes[axis]
        return size

    def rank_in(self, *axes: Axis) -> int:
        """Returns this process's rank in `group(*axes)`, along which the last axis varies fastest."""
        rank = 0
        for axis in sorted(axes, key=AXES.index):
            rank = rank * self.sizes[axis] + self.ranks[axis]
        return rank

    def group(self, *axes: Axis) -> dist.ProcessGroup:
        """Returns the process group of the ranks that differ from this one along these axes only.

            mesh.group("tensor")
            mesh.group("data", "context")  # the ranks that sum the gradients of the same experts

        Several axes that are larger than 1 share a group, which is kept. The first call with them
        makes it, and every process must make this call; the mesh itself makes those that are named
        at the top of this file. Axes of size 1 have a group of this process alone, which is made
        when it is asked for, without the other processes.

        Raises:
            RuntimeError: The mesh is a single process without torch.distributed.
        """
        if axes in self._groups:
            return self._groups[axes]
        if not self._has_process_group:
            raise RuntimeError(
                "this mesh is a single process without torch.distributed, so it has no process "
                "groups"
            )
        key = self._drop_axes_of_one(axes)
        if key not in self._groups:
            self._groups[key] = self._make_group(key)
        return self._groups[key]

    def split_data_axis(
        self, replicas: int, holders: tuple[Axis, ...] = REPLICA_AXES
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup]:
        """Returns the groups of this process along the two parts of the ranks that hold the same
        parameters: [replicas, ranks that share one replica's parameters], of which the second varies
        fastest.

        Collective over all processes. The data axis is cut, so context- and expert-parallel ranks
        share a replica. The first group is None for one replica.

        Args:
            holders: The axes of the ranks that hold the same parameters: `REPLICA_AXES`, or of
                experts `EXPERT_REPLICA_AXES`.
        """
        if replicas == 1:
            return None, self.group(*holders)
        grid = torch.arange(self.world_size).view(*self.sizes.values())
        axes = [AXES.index(axis) for axis in holders]
        others = [number for number in range(len(AXES)) if number not in axes]
        sharing = self.size(*holders) // replicas
        last = grid.permute(*others, *axes).reshape(-1, replicas, sharing)
        across: Any = last.transpose(1, 2).flatten(0, 1)
        within: Any = last.flatten(0, 1)
        groups: list[dist.ProcessGroup] = []
        for ranks in (across, within):
            group, _ = cast(Any, dist).new_subgroups_by_enumeration(ranks.tolist())
            assert isinstance(group, dist.ProcessGroup)
            groups.append(group)
        return groups[0], groups[1]

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All process groups that the mesh has made so far."""
        return list(self._groups.values())

    def _drop_axes_of_one(self, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Returns those of the axes that are larger than 1, in the order of the mesh."""
        return tuple(axis for axis in AXES if axis in axes and self.sizes[axis] > 1)

    def _make_group(self, axes: tuple[Axis, ...]) -> dist.ProcessGroup:
        """Makes the group of this process along several axes, which are all larger than 1."""
        if not axes:
            return _group_of_this_process(self.rank)
        grid = torch.arange(self.world_size).view(*self.sizes.values())
        others = [number for number, axis in enumerate(AXES) if axis not in axes]
        joined = [number for number, axis in enumerate(AXES) if axis in axes]
        ranks = grid.permute(*others, *joined).reshape(-1, self.size(*axes))
        group, _ = cast(Any, dist).new_subgroups_by_enumeration(cast(Any, ranks).tolist())
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _refuse_more_than_one_process(self) -> None:
        """Raises ValueError if this one process cannot be the whole mesh."""
        needed = self.size(*AXES)
        if needed == 1 or min(self.sizes.values()) < 1:
            return  # `validate_layout` refuses sizes below 1
        asked = [
            f"{axis}_parallel_size {self.sizes[axis]}"
            for axis in ("tensor", "pipeline", "context", "expert")
            if self.sizes[axis] != 1
        ]
        raise ValueError(
            f"{' and '.join(asked)} need a multiple of {needed} processes, but this is one process "
            f"without a launcher: start the script with `torchrun --nproc-per-node {needed}` or "
            f"`deepspeed --num_gpus {needed}`, or use sizes of 1"
        )

    def __repr__(self) -> str:
        shown = [
            f"{axis} {self.ranks[axis]}/{self.sizes[axis]}"
            for axis in AXES
            if axis in ("pipeline", "data", "tensor") or self.sizes[axis] > 1
        ]
        return f"ParallelMesh(rank {self.rank} of {self.world_size}: {', '.join(shown)})"

    @property
    def pp_group(self) -> dist.ProcessGroup:
        return self.group("pipeline")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.group("data")

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return self.group("context")

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return self.group("tensor")

    @property
    def model_group(self) -> dist.ProcessGroup:
        """The ranks that together hold one replica of the model, ordered by stage."""
        return self.group(*MODEL_AXES)

    # The methods that DeepSpeed calls. "Model parallel" means tensor and pipeline parallelism
    # together, as in DeepSpeed's own grid: DeepSpeed reduces norms and overflow flags over that
    # group, and numbers checkpoint files by its ranks. "Data parallel" means all ranks that hold
    # the same parameters: DeepSpeed sums gradients over them, ZeRO divides the optimizer's state
    # among them, and DeepSpeed finds the ranks of experts among them by itself.

    def get_model_parallel_rank(self) -> int:
        return self.rank_in(*MODEL_AXES)

    def get_model_parallel_world_size(self) -> int:
        return self.size(*MODEL_AXES)

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
        return self.rank - self.tp_rank

    def get_data_parallel_rank(self) -> int:
        return self.rank_in(*REPLICA_AXES)

    def get_data_parallel_world_size(self) -> int:
        return self.size(*REPLICA_AXES)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group(*REPLICA_AXES)

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Returns the global ranks of this process's data-parallel group."""
        return dist.get_process_group_ranks(self.get_data_parallel_group())

    def get_pipe_parallel_rank(self) -> int:
        return self.pp_rank

    def get_pipe_parallel_world_size(self) -> int:
        return self.pp_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        return self.pp_group

    # Other names of the same methods, from older and newer versions of DeepSpeed.
    get_slice_parallel_rank = get_tensor_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size
    get_slice_parallel_group = get_tensor_model_parallel_group
    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group


def axis_ranks(mesh: ParallelMesh | None) -> dict[Axis, int]:
    """Returns this process's coordinate along each axis; zeros without a mesh."""
    return dict.fromkeys(AXES, 0) if mesh is None else mesh.ranks


def axis_sizes(mesh: ParallelMesh | None) -> dict[Axis, int]:
    """Returns the size of each axis; ones without a mesh."""
    return dict.fromkeys(AXES, 1) if mesh is None else mesh.sizes


def tp_rank(mesh: ParallelMesh | None) -> int:
    """Returns this process's tensor-parallel rank; 0 without a mesh."""
    return 0 if mesh is None else mesh.tp_rank


def tp_size(mesh: ParallelMesh | None) -> int:
    """Returns the number of processes that share each split layer; 1 without a mesh."""
    return 1 if mesh is None else mesh.tp_size


# The group of this process alone, beside the default group that it was made under.
_alone: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None


def print_once(error: ValueError, rank: int) -> None:
    """Makes an error that all ranks raise end their script with one line of the first rank, instead
    of a traceback of each.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            before(kind, raised, trace)
        elif rank == 0:
            sys.stderr.write(f"error: {error}\n")

    sys.excepthook = hook


def _group_of_this_process(rank: int) -> dist.ProcessGroup:
    """Returns the group of this process alone, which all meshes of the process share.

    PyTorch names a group that is made without the other processes after its ranks and the number
    of groups that exist, so a second one could meet the first one's name and be refused.
    """
    global _alone
    world = dist.group.WORLD
    assert world is not None
    if _alone is None or _alone[0] is not world:
        alone = cast(Any, dist).new_group([rank], use_local_synchronization=True)
        _alone = (world, alone)
    return _alone[1]
