"""Trains with torch's FSDP2: every data-parallel rank keeps a part of each parameter, of its gradient
and of its optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...checkpoint.rank_files import MASTER_WEIGHT, TensorPart
from ...mpu import ParallelMesh
from ..arguments.training_arguments import TrainingArguments
from ..launch.ranks import Ranks
from ..optimizers.adamw import clip_gradients
from ..optimizers.registry import ELEMENTWISE_CLASSES
from ..optimizers.whole_matrix import WholeMatrixOptimizer
from .engine import StepOutcome
from .fully_sharded import ShardedModel, ShardedParameter, replace_parameters
from .optimizers import ELEMENTWISE_OPTIMIZERS, show_whole_matrix_names
from .state import load_state_tensors, persistent_buffers, state_tensors
from .torch_engine import TorchEngine


class FSDPEngine(TorchEngine):
    """An `Engine` over a `ShardedModel`. The optimizer updates the rank's rows, which are fp32 in
    every precision.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer,
        arguments: TrainingArguments,
        ranks: Ranks,
    ) -> None:
        _check_optimizer(optimizer, ranks)
        self._sharded = sharded
        self._mesh: ParallelMesh | None = ranks.mesh
        self._shard_group: dist.ProcessGroup | None = None
        if dist.get_world_size(sharded.group) > 1:
            self._shard_group = sharded.group
        # A run in 16 bits keeps the fp32 rows as other engines keep their master weights.
        self._keeps_master_weights = arguments.precision != "fp32"
        self._exchanges_each_pass = arguments.fsdp_exchange_each_pass

        replaced = {part.parameter: part.local for part in sharded.parameters}
        by_parameter = {part.parameter: part for part in sharded.parameters}
        replace_parameters(
            optimizer, replaced, lambda old, state: by_parameter[old].cut(state).clone()
        )
        in_optimizer = {id(each) for group in optimizer.param_groups for each in group["params"]}
        self._parts = {
            part.name: part for part in sharded.parameters if id(part.local) in in_optimizer
        }
        self._local_of = {part.parameter: part.local for part in self._parts.values()}
        names: dict[Any, str] = {part.local: part.name for part in self._parts.values()}
        super().__init__(sharded.module, optimizer, arguments, names)

        # Whose states are whole: what a whole-matrix optimizer keeps of a matrix besides its
        # elements.
        self._owners: dict[Any, str] = {}
        if isinstance(optimizer, WholeMatrixOptimizer):
            partitions: dict[Any, list[tuple[Any, int]]] = {}
            for part in self._parts.values():
                partitions[part.local] = [(part.whole, -part.start)]
                self._owners[part.whole] = part.name
            optimizer.set_partitions(partitions, ranks.mesh, self._shard_group)
        # A forward pass updates buffers from its own samples. As in DDP, those of the first replica
        # count.
        self._buffers: list[Tensor] = []
        if ranks.replica_size > 1:
            self._buffers = list(persistent_buffers(sharded.module).values())

    def begin_micro_batch(self, *, is_last: bool) -> None:
        self._sharded.sync_gradients(is_last or self._exchanges_each_pass)

    def list_trained(self) -> list[Any]:
        return list(self._local_of)

    def move_gradient(self, parameter: Any) -> Any:
        gradient = parameter.grad
        parameter.grad = None
        local = self._local_of[parameter]
        local.grad = None if gradient is None else gradient.to_local()
        return local

    def write_back(self, parameter: Any, updated: Any) -> None:
        pass  # they have the same memory

    def take_norm(self) -> Tensor:
        return self._updates.take_norm(self._names, self._mesh, self._shard_group)

    def step(self, found_inf: Tensor | None = None) -> StepOutcome:
        for parameter in () if self.updates_in_backward else self._local_of:
            self.move_gradient(parameter)
        outcome = super().step(found_inf)
        for buffer in self._buffers:
            assert self._mesh is not None
            dist.broadcast(buffer, group=self._mesh.get_data_parallel_group(), group_src=0)
        return outcome

    def clip(self) -> Tensor:
        parameters = list(self._names)
        return clip_gradients(
            parameters, self._clip_grad, self.optimizer, self._mesh, self._shard_group
        )

    def model_tensors(self) -> Mapping[str, Tensor | TensorPart]:
        self._sharded.reshard()
        return self._sharded.model_tensors()

    def optimizer_tensors(self) -> Mapping[str, Tensor | TensorPart]:
        tensors: dict[str, Tensor | TensorPart] = {}
        for name, value in state_tensors(self.optimizer, {**self._names, **self._owners}).items():
            part = self._find_part(name)
            has_rows = part is not None and value.dim() and value.shape == part.local.shape
            is_whole = self._owners and not self._has_element_states
            tensors[name] = value
            if part is not None and has_rows and not is_whole:
                tensors[name] = part.describe(value)
        if self._keeps_master_weights:
            for part in self._parts.values():
                tensors[f"{MASTER_WEIGHT}/{part.name}"] = part.describe(part.local.detach())
        return tensors

    @property
    def _has_element_states(self) -> bool:
        """Whether the states that a `WholeMatrixOptimizer` has are split like the parameters."""
        optimizer = self.optimizer
        return isinstance(optimizer, WholeMatrixOptimizer) and bool(optimizer.element_states)

    def _find_part(self, name: str) -> ShardedParameter | None:
        """Returns the parameter of `<state>/<parameter>`."""
        return self._parts.get(name.split("/", 1)[1])

    @torch.no_grad()
    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        owners = self._names
        if self._owners and not self._has_element_states:
            owners = self._owners
        cut = _CutTensors(self, tensors, cuts=owners is self._names)
        # What owns a whole state has no storage, and its device is none.
        device = next((part.local.device for part in self._parts.values()), None)
        load_state_tensors(self.optimizer, owners, cut, self.applied_steps, device)
        for part in self._parts.values():
            # It is missing if the run was in fp32 so far.
            name = f"{MASTER_WEIGHT}/{part.name}"
            if self._keeps_master_weights and name in tensors:
                part.fill(tensors[name])

    def close(self, *, whole: bool) -> None:
        super().close(whole=whole)
        if whole:
            # The model stays split: no rank may have the memory for all of it.
            self._sharded.reshard()
        else:
            self._sharded.release()


class _CutTensors(Mapping[str, Tensor]):
    """Tensors of a checkpoint, of which this rank takes its rows, one after another."""

    def __init__(self, engine: FSDPEngine, tensors: Mapping[str, Tensor], *, cuts: bool) -> None:
        self._engine = engine
        self._tensors = tensors
        self._cuts = cuts

    def __getitem__(self, name: str) -> Tensor:
        value = self._tensors[name]
        part = self._engine._find_part(name)
        if self._cuts and part is not None and value.shape == part.whole.shape:
            return part.cut(value).clone()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _check_optimizer(optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Raises ValueError for an optimizer that may need whole parameters."""
    kind = type(optimizer).__name__
    takes_parts = (
        isinstance(optimizer, (*ELEMENTWISE_OPTIMIZERS, WholeMatrixOptimizer))
        or kind in ELEMENTWISE_CLASSES
    )
    if ranks.replica_size > 1 and not takes_parts:
        raise ValueError(
            f"{kind} may need whole parameters, which env_type='fsdp' splits over "
            f"{ranks.replica_size} ranks; use {', '.join(ELEMENTWISE_CLASSES)}, or the "
            f"arguments optimizer={show_whole_matrix_names()}"
        )
