"""Creates, materializes and initializes the parameters of a split model, and computes and clips their gradient norm."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ops.library import call_compiled, suits_optimizer_kernels
from .dropout import assign_dropout_sites
from .mesh import ParallelMesh, axis_ranks, axis_sizes
from .shard import Shard

Fill = Callable[[str, Tensor, torch.Generator], None]


class SplitLayer(nn.Module):
    """Base of the layers whose weight is split; `repr` shows the split."""

    shard: Shard
    sequence_parallel: bool
    mesh: ParallelMesh | None

    def extra_repr(self) -> str:
        return f"{self.shard.describe()}, sequence_parallel={self.sequence_parallel}"


class SplitParameter(nn.Parameter):
    """A parameter whose attributes survive `copy.deepcopy`.

    Attributes:
        shard: How the full parameter is split.
        model_parallel, tensor_model_parallel: The marks by which DeepSpeed counts a split parameter on every
            tensor-parallel rank.
    """

    shard: Shard
    model_parallel: bool
    tensor_model_parallel: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitParameter:
        copy = cast(SplitParameter, cast(Any, super()).__deepcopy__(memo))
        vars(copy).update(vars(self))
        return copy


def split_parameter(shard: Shard, mesh: ParallelMesh | None) -> SplitParameter:
    """Returns a parameter for this rank's part of `shard`, filled with NaN until it is initialized or loaded."""
    shape = shard.local_shape(axis_ranks(mesh), axis_sizes(mesh))
    parameter = SplitParameter(torch.full(shape, float("nan")))
    is_tensor_parallel = any(split.axis == "tensor" for split in shard.splits)
    parameter.shard = shard
    parameter.model_parallel = is_tensor_parallel
    parameter.tensor_model_parallel = is_tensor_parallel
    return parameter


def materialize(
    model: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None
) -> nn.Module:
    """Allocates uninitialized storage, in place, for the parameters of a model built under `torch.device("meta")`.

    Unlike `nn.Module.to_empty`, it keeps tied parameters tied and keeps a parameter's attributes such as `.shard`.
    Parameters that already have storage keep their values. Buffers are constants: modules create them with an explicit
    device, and this function moves them unchanged.

    Args:
        dtype: The new dtype of the floating-point parameters.

    Raises:
        ValueError: A buffer is on the meta device, so its values are lost.
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
                    f"buffer {name!r} of {type(module).__name__} is on the meta device, so its values are lost; "
                    'create it with an explicit device, e.g. torch.arange(n, device="cpu")'
                )
            setattr(module, name, buffer.to(device))
    assign_dropout_sites(model)
    return model


def _with_storage(
    parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None
) -> nn.Parameter:
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
    """Returns a 63-bit seed that depends only on (seed, name). It is the same in every process and Python version."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def initialize(
    model: nn.Module, fill: Fill, seed: int, mesh: ParallelMesh | None = None, prefix: str = ""
) -> None:
    """Initializes every parameter with its part of a full value that depends only on (seed, name).

    Only one full parameter is in memory at a time.

    Args:
        fill: `fill(name, full, generator)` writes the whole, unpadded value of a parameter into `full`, an fp32 CPU
            tensor. It must use no other random source than `generator`. A tied parameter is filled under the name of
            the parameter it is tied to, so both get the same values.
        prefix: For a pipeline stage, the prefix that its modules have in the whole model.

    Raises:
        ValueError: `fill` leaves a value unset.
    """
    ranks = axis_ranks(mesh)
    sizes = axis_sizes(mesh)
    for own_name, parameter in model.named_parameters(prefix=prefix):
        shard = getattr(parameter, "shard", None)
        name = own_name if shard is None or shard.tied_to is None else shard.tied_to
        full = torch.full(
            parameter.shape if shard is None else shard.shape, float("nan"), dtype=torch.float32
        )
        fill(name, full, torch.Generator().manual_seed(parameter_seed(seed, name)))
        if full.isnan().any():
            raise ValueError(f"fill left values of {name!r} unset")
        parameter.copy_(full if shard is None else shard.slice(full, ranks, sizes))
    assign_dropout_sites(model, prefix)


@torch.no_grad()
def grad_norm(parameters: Iterable[Tensor], mesh: ParallelMesh | None = None) -> Tensor:
    """Returns the 2-norm of all gradients as an fp32 scalar, the same on every rank of the mesh.

    Gradients must already be equal over the data-parallel ranks. A split parameter counts on every tensor-parallel
    rank, a replicated one only on the first. All pipeline stages count, except for parameters that DeepSpeed marks
    `ds_pipe_replicated`. Every rank of a tensor × pipeline group must call this function.
    """
    if mesh is not None and mesh.size("expert") > 1:
        raise NotImplementedError(
            "the norm of gradients is not defined yet for experts that are split over ranks"
        )
    parameters = list(parameters)
    split: list[Tensor] = []
    replicated: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None or getattr(parameter, "ds_pipe_replicated", False):
            continue
        (split if getattr(parameter, "tensor_model_parallel", False) else replicated).append(
            parameter.grad
        )
    if mesh is None or mesh.tp_rank == 0:
        split += replicated
    device = parameters[0].device if parameters else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if split and all(
        map(suits_optimizer_kernels, split)
    ):  # in one pass, in an order that depends only on the sizes
        squares = torch.tensor(
            sum(call_compiled("square_sum", grad) for grad in split), dtype=torch.float32
        )
    elif split:
        wide = reduce(torch.promote_types, (grad.dtype for grad in split), torch.float32)
        norms = torch.ops.aten._foreach_norm(split, 2, dtype=wide)
        squares = torch.stack([norm.to(device) for norm in norms]).square().sum().float()
    if mesh is not None and mesh.get_model_parallel_world_size() > 1:
        cast(Any, dist).all_reduce(squares, group=mesh.get_model_parallel_group())
    return squares.sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the fp32 factor of all gradients that limits their total norm to `max_norm`, as PyTorch computes it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, mesh: ParallelMesh | None = None
) -> Tensor:
    """Scales all gradients so that their total norm is at most `max_norm`, and returns the norm before scaling.

    It works like `torch.nn.utils.clip_grad_norm_`, and does not wait for the device.
    """
    parameters = list(parameters)
    norm = grad_norm(parameters, mesh)
    factor = clip_factor(norm, max_norm)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch.ops.aten._foreach_mul_(
            gradients, factor
        )  # the factor is fp32, so a 16-bit gradient is rounded once
    return norm


def check_ids(ids: Tensor, count: int, what: str) -> None:
    """Checks that all ids are in [0, count); `what` names them in the error.

    On an accelerator, reading the ids would stall the host. There the check runs on the device and fails like an
    out-of-range index.

    Raises:
        ValueError: An id on a CPU is outside the range.
    """
    inside = ids.clamp(0, count - 1) == ids
    if not ids.is_cpu:
        torch.ops.aten._assert_async(inside.all())
    elif not inside.all():
        raise ValueError(f"{what} {ids[~inside][0]} is outside 0..{count - 1}")
