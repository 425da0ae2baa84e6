"""Parameters of a split model: how they are made, materialized and initialized, and the norm of their gradients."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .dropout import assign_dropout_sites
from .mesh import ParallelMesh, tp_rank, tp_size
from .shard import Shard

Fill = Callable[[str, Tensor, torch.Generator], None]


class SplitLayer(nn.Module):
    """A layer whose weight is split; it prints how."""

    shard: Shard
    sequence_parallel: bool
    mesh: ParallelMesh | None

    def extra_repr(self) -> str:
        return f"{self.shard.describe()}, sequence_parallel={self.sequence_parallel}"


class SplitParameter(nn.Parameter):
    """A parameter whose attributes, `.shard` and DeepSpeed's marks among them, survive `copy.deepcopy`."""

    shard: Shard
    model_parallel: bool
    tensor_model_parallel: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitParameter:
        copy = cast(SplitParameter, cast(Any, super()).__deepcopy__(memo))
        vars(copy).update(vars(self))
        return copy


def split_parameter(shard: Shard, mesh: ParallelMesh | None) -> SplitParameter:
    """A parameter that holds this rank's part of `shard`, filled with NaN until it is initialized or loaded.

    It carries `.shard`, and the two marks by which DeepSpeed counts it on every tensor-parallel rank.
    """
    parameter = SplitParameter(torch.full(shard.local_shape(tp_size(mesh)), float("nan")))
    parameter.shard = shard
    parameter.model_parallel = parameter.tensor_model_parallel = True
    return parameter


def materialize(model: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> nn.Module:
    """Give every parameter of a model built under `torch.device("meta")` real, uninitialized storage, in place.

    Unlike `nn.Module.to_empty`, ties stay ties and the attributes of a parameter (`.shard` and its like) survive.
    Parameters that already have storage keep their values. `dtype` applies to floating-point parameters. Buffers are
    constants: a module creates them with an explicit device, and they are moved as they are; one that is still on the
    meta device raises `ValueError`, because its values would be lost.
    """
    renewed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in renewed:
                renewed[id(parameter)] = _with_storage(parameter, torch.device(device), dtype)
            setattr(module, name, renewed[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                raise ValueError(
                    f"buffer {name!r} of {type(module).__name__} is on the meta device: its values are lost; "
                    'create it with an explicit device, e.g. torch.arange(n, device="cpu")'
                )
            setattr(module, name, buffer.to(device))
    assign_dropout_sites(model)
    return model


def _with_storage(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter:
    wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    values: Tensor = (
        torch.empty(parameter.shape, device=device, dtype=wanted)
        if parameter.is_meta
        else parameter.detach().to(device=device, dtype=wanted)
    )
    renewed = type(parameter)(values, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(renewed, name, value)
    return renewed


def parameter_seed(seed: int, name: str) -> int:
    """A 63-bit seed that depends on (seed, name) alone, the same in every process and Python version."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def initialize(model: nn.Module, fill: Fill, seed: int, mesh: ParallelMesh | None = None, prefix: str = "") -> None:
    """Set every parameter to its part of a full value that is a function of (seed, name).

    `fill(name, full, generator)` writes the whole, unpadded value of the parameter into `full`, an fp32 CPU tensor,
    drawing from `generator` only. A tied parameter is filled once, under the name it is tied to. One full parameter
    is in memory at a time. A pipeline stage passes the `prefix` that its modules have in the whole model. Raises
    `ValueError` if `fill` leaves a value unset.
    """
    rank, size = tp_rank(mesh), tp_size(mesh)
    for own_name, parameter in model.named_parameters(prefix=prefix):
        shard = getattr(parameter, "shard", None)
        name = own_name if shard is None or shard.tied_to is None else shard.tied_to
        full = torch.full(parameter.shape if shard is None else shard.shape, float("nan"), dtype=torch.float32)
        fill(name, full, torch.Generator().manual_seed(parameter_seed(seed, name)))
        if full.isnan().any():
            raise ValueError(f"fill left values of {name!r} unset")
        parameter.copy_(full if shard is None else shard.slice(full, rank, size))
    assign_dropout_sites(model, prefix)


@torch.no_grad()
def grad_norm(parameters: Iterable[Tensor], mesh: ParallelMesh | None = None) -> Tensor:
    """The 2-norm of all gradients as an fp32 scalar, the same on every rank of the mesh.

    Gradients must already be equal over the data-parallel ranks. Split parameters add up over the tensor-parallel
    ranks; replicated ones count once; pipeline stages add up, less what DeepSpeed marks `ds_pipe_replicated`. Every
    rank of a tensor × pipeline group must call it.
    """
    parameters = list(parameters)
    split: list[Tensor] = []
    replicated: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None or getattr(parameter, "ds_pipe_replicated", False):
            continue
        (split if getattr(parameter, "tensor_model_parallel", False) else replicated).append(parameter.grad)
    if mesh is None or mesh.tp_rank == 0:
        split += replicated
    device = parameters[0].device if parameters else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if split:
        wide = reduce(torch.promote_types, (grad.dtype for grad in split), torch.float32)
        norms = torch.ops.aten._foreach_norm(split, 2, dtype=wide)
        squares = torch.stack([norm.to(device) for norm in norms]).square().sum().float()
    if mesh is not None and mesh.get_model_parallel_world_size() > 1:
        cast(Any, dist).all_reduce(squares, group=mesh.get_model_parallel_group())
    return squares.sqrt()


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, mesh: ParallelMesh | None = None) -> Tensor:
    """Scale all gradients so that their whole norm is at most `max_norm`; returns the norm before. As
    `torch.nn.utils.clip_grad_norm_`, without waiting for the device."""
    parameters = list(parameters)
    norm = grad_norm(parameters, mesh)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)  # an fp32 scalar: a 16-bit gradient is rounded once
    return norm


def check_ids(ids: Tensor, count: int, what: str) -> None:
    """Raise `ValueError` if an id is outside [0, count). On an accelerator, where looking would stall the host, the
    check runs on the device and fails the way an out-of-range index there does."""
    inside = (ids >= 0) & (ids < count)
    if not ids.is_cpu:
        torch.ops.aten._assert_async(inside.all())
    elif not inside.all():
        raise ValueError(f"{what} {ids[~inside][0]} is outside 0..{count - 1}")
