"""Communicates between pipeline stages outside of a training schedule."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import ParallelMesh

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
)
HEADER = 10  # the index of the type, the number of dimensions, and up to eight sizes


def send_to_stage(tensor: Tensor, stage: int, mesh: ParallelMesh) -> None:
    """Sends a tensor of any shape to the rank with the same data and tensor coordinates in another stage."""
    shape = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    header = torch.tensor(shape + [0] * (HEADER - len(shape)), device=mesh.device_type)
    peer = dist.get_global_rank(mesh.pp_group, stage)
    cast(Any, dist).send(header, peer)
    cast(Any, dist).send(tensor.detach().contiguous(), peer)


def receive_from_stage(stage: int, mesh: ParallelMesh) -> Tensor:
    """Returns the tensor that another stage sends by `send_to_stage`."""
    header = torch.empty(HEADER, dtype=torch.int64, device=mesh.device_type)
    peer = dist.get_global_rank(mesh.pp_group, stage)
    cast(Any, dist).recv(header, peer)
    tensor = _empty(header)
    cast(Any, dist).recv(tensor, peer)
    return tensor


def any_rank(condition: bool, mesh: ParallelMesh | None) -> bool:
    """Returns, on every rank of a replica of the model, whether the condition is true on any of them."""
    if mesh is None or mesh.get_model_parallel_world_size() == 1:
        return condition
    flag = torch.tensor(float(condition), device=mesh.device_type)
    cast(Any, dist).all_reduce(flag, group=mesh.model_group)
    return bool(flag.item())


def broadcast_from_stage(tensor: Tensor | None, stage: int, mesh: ParallelMesh) -> Tensor:
    """Returns a stage's tensor on every stage. The other stages may pass None."""
    header = torch.zeros(HEADER, dtype=torch.int64, device=mesh.device_type)
    if mesh.pp_rank == stage:
        assert tensor is not None
        tensor = tensor.contiguous()
        header[: 2 + tensor.dim()] = torch.tensor(
            [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        )
    cast(Any, dist).broadcast(header, group=mesh.pp_group, group_src=stage)
    if mesh.pp_rank != stage:
        tensor = _empty(header)
    assert tensor is not None
    cast(Any, dist).broadcast(tensor, group=mesh.pp_group, group_src=stage)
    return tensor


def _empty(header: Tensor) -> Tensor:
    """Returns an uninitialized tensor of the type and shape in a header."""
    kind, dims, *sizes = cast(list[int], cast(Any, header).tolist())
    return torch.empty(sizes[:dims], dtype=DTYPES[kind], device=header.device)
