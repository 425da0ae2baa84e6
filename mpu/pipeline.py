"""Communicates between pipeline stages outside of a training schedule.

The receiver does not know a tensor's type and shape, so a header of fixed size travels before it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import EXPERT_MODEL_AXES, ParallelMesh

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
)
HEADER_SIZE = 10  # the index of the type, the number of dimensions, and up to eight sizes


def send_to_stage(tensor: Tensor, stage: int, mesh: ParallelMesh) -> None:
    """Sends a tensor to the rank of another stage with the same coordinates on the other axes."""
    peer = dist.get_global_rank(mesh.pp_group, stage)
    cast(Any, dist).send(_make_header(tensor, mesh), peer)
    cast(Any, dist).send(tensor.detach().contiguous(), peer)


def receive_from_stage(stage: int, mesh: ParallelMesh) -> Tensor:
    """Returns the tensor that another stage sends by `send_to_stage`."""
    peer = dist.get_global_rank(mesh.pp_group, stage)
    header = _make_header(None, mesh)
    cast(Any, dist).recv(header, peer)
    tensor = _allocate(header)
    cast(Any, dist).recv(tensor, peer)
    return tensor


def broadcast_from_stage(tensor: Tensor | None, stage: int, mesh: ParallelMesh) -> Tensor:
    """Returns a stage's tensor on every stage. The other stages may pass None."""
    is_source = mesh.pp_rank == stage
    header = _make_header(tensor if is_source else None, mesh)
    cast(Any, dist).broadcast(header, group=mesh.pp_group, group_src=stage)
    if is_source:
        assert tensor is not None
        tensor = tensor.contiguous()
    else:
        tensor = _allocate(header)
    cast(Any, dist).broadcast(tensor, group=mesh.pp_group, group_src=stage)
    return tensor


def any_rank(condition: bool, mesh: ParallelMesh | None) -> bool:
    """Returns, on every rank of a replica of the model, whether it is true on any of them."""
    if mesh is None or mesh.size(*EXPERT_MODEL_AXES) == 1:
        return condition
    flag = torch.tensor(float(condition), device=mesh.device_type)
    cast(Any, dist).all_reduce(flag, group=mesh.group(*EXPERT_MODEL_AXES))
    return bool(flag.item())


def _make_header(tensor: Tensor | None, mesh: ParallelMesh) -> Tensor:
    """Returns the header of a tensor, int64 [HEADER_SIZE]; of zeros to receive one."""
    header = torch.zeros(HEADER_SIZE, dtype=torch.int64, device=mesh.device_type)
    if tensor is not None:
        values = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        header[: len(values)] = torch.tensor(values)
    return header


def _allocate(header: Tensor) -> Tensor:
    """Returns an uninitialized tensor of the type and shape in a header."""
    kind, dims, *sizes = cast(list[int], cast(Any, header).tolist())
    return torch.empty(sizes[:dims], dtype=DTYPES[kind], device=header.device)
