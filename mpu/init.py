"""Initial weights that do not depend on how the model is split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .dropout import assign_dropout_sites
from .mesh import ParallelMesh, tp_rank, tp_size

Fill = Callable[[str, Tensor, torch.Generator], None]


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
