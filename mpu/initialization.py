"""Allocates and initializes the parameters of a split model.

Initial values do not depend on how the model is split: a parameter's full value is a function of
(seed, name), of which each rank keeps its part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from .collectives import gather_bytes
from .dropout import assign_dropout_sites
from .mesh import ParallelMesh, axis_ranks, axis_sizes

Fill = Callable[[str, Tensor, torch.Generator], None]
# (a parameter's name, this rank's part of its value): sets it where it is kept.
Receive = Callable[[str, Tensor], None]


def materialize(
    model: nn.Module,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    skip: Collection[str] = (),
) -> nn.Module:
    """Allocates uninitialized storage, in place, for a model built under `torch.device("meta")`.

    Unlike `nn.Module.to_empty`, it keeps tied parameters tied and keeps a parameter's attributes
    such as `.shard`. Parameters that already have storage keep their values. Buffers are constants:
    modules create them with an explicit device, and this function moves them unchanged.

    Args:
        dtype: The new dtype of the floating-point parameters, but of those that stay in fp32.
        skip: The names of parameters that stay as they are.

    Raises:
        ValueError: A buffer is on the meta device, so its values are lost.
    """
    renewed: dict[int, nn.Parameter] = {}
    for path, module in cast(Any, model).named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if f"{path}.{name}" in skip:
                continue
            if id(parameter) not in renewed:
                renewed[id(parameter)] = _renew_parameter(parameter, torch.device(device), dtype)
            setattr(module, name, renewed[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                raise ValueError(
                    f"buffer {name!r} of {type(module).__name__} is on the meta device, so its "
                    f"values are lost; create it with an explicit device, e.g. "
                    f'torch.arange(n, device="cpu")'
                )
            setattr(module, name, buffer.to(device))
    assign_dropout_sites(model)
    return model


def _renew_parameter(
    parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None
) -> nn.Parameter:
    """Returns a parameter with storage on a device, with the attributes of the old one."""
    wanted = parameter.dtype
    keeps_fp32 = getattr(parameter, "keeps_fp32", False)
    if dtype is not None and parameter.is_floating_point() and not keeps_fp32:
        wanted = dtype
    values: Tensor
    if parameter.is_meta:
        values = torch.empty(parameter.shape, device=device, dtype=wanted)
    else:
        values = parameter.detach().to(device=device, dtype=wanted)
    renewed = type(parameter)(values, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(renewed, name, value)
    return renewed


def draw_model_seed(mesh: ParallelMesh | None = None) -> int:
    """Returns a seed for `initialize` from PyTorch's generator: that of the mesh's first rank.

    Collective over the mesh.
    """
    seed = int(torch.randint(1 << 62, (), device="cpu"))
    if mesh is None or mesh.world_size == 1:
        return seed
    return int(gather_bytes(str(seed).encode())[0])


def parameter_seed(seed: int, name: str) -> int:
    """Returns a 63-bit seed that depends only on (seed, name), in every process and Python."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def initialize(
    model: nn.Module,
    fill: Fill,
    seed: int,
    mesh: ParallelMesh | None = None,
    prefix: str = "",
    only: Collection[str] | None = None,
    receive: Receive | None = None,
) -> None:
    """Initializes every parameter with its part of a full value that depends only on (seed, name).

    Only one full parameter is in memory at a time.

    Args:
        fill: `fill(name, full, generator)` writes the whole, unpadded value of a parameter into
            `full`, an fp32 CPU tensor. It must use no other random source than `generator`. A tied
            parameter is filled under the name of the parameter it is tied to, so both get the same
            values.
        prefix: For a pipeline stage, the prefix that its modules have in the whole model.
        only: The names of the parameters to initialize; by default all.
        receive: Gets the values; by default they are copied into the parameters.

    Raises:
        ValueError: `fill` leaves a value unset.
    """
    ranks = axis_ranks(mesh)
    sizes = axis_sizes(mesh)
    for own_name, parameter in model.named_parameters(prefix=prefix):
        if only is not None and own_name not in only:
            continue
        shard = getattr(parameter, "shard", None)
        name = own_name
        if shard is not None and shard.tied_to is not None:
            name = shard.tied_to
        shape = parameter.shape if shard is None else shard.shape
        full = torch.full(shape, float("nan"), dtype=torch.float32, device="cpu")
        fill(name, full, torch.Generator().manual_seed(parameter_seed(seed, name)))
        if full.isnan().any():
            raise ValueError(f"fill left values of {name!r} unset")
        part = full if shard is None else shard.slice(full, ranks, sizes)
        if receive is None:
            parameter.copy_(part)
        else:
            receive(own_name, part)
    assign_dropout_sites(model, prefix)
