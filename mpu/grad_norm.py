"""The norm of the whole model's gradient, counted once however it is split."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import ParallelMesh


@torch.no_grad()
def grad_norm(parameters: Iterable[Tensor], mesh: ParallelMesh | None = None) -> Tensor:
    """The 2-norm of all gradients as an fp32 scalar, the same on every rank of the mesh.

    Gradients must already be equal over the data-parallel ranks. Split parameters add up over the tensor-parallel
    ranks; replicated ones count once; pipeline stages add up, less what DeepSpeed marks `ds_pipe_replicated`. Every
    rank of a tensor × pipeline group must call it.
    """
    parameters = list(parameters)
    split, replicated = [], []
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
        dist.all_reduce(squares, group=mesh.get_model_parallel_group())
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
