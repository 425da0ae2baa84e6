"""Computes and clips the norm of all gradients of a split model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.optimizer import sum_squares
from .mesh import EXPERT_MODEL_AXES, ParallelMesh


@torch.no_grad()
def grad_norm(
    parameters: Iterable[Tensor],
    mesh: ParallelMesh | None = None,
    shard_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Returns the 2-norm of all gradients as an fp32 scalar, the same on every rank of the mesh.

    Gradients must already be equal over the ranks that hold the same parameters, or be the parts
    that the ranks of `shard_group` have of them; that group then includes the ranks along the
    expert axis. A split parameter counts on every tensor-parallel rank, a replicated one only on
    the first; experts that are dealt over ranks count on each of these, other parameters on one
    rank along the expert axis, which share them out. All pipeline stages count, except for
    parameters that DeepSpeed marks `ds_pipe_replicated`. Every rank of a tensor × expert ×
    pipeline group must call this function.
    """
    parameters = list(parameters)
    # Whole gradients of other parameters are equal along the expert axis.
    sums_over_experts = mesh is not None and mesh.size("expert") > 1 and shard_group is None
    # How many numbers of them each rank counts.
    shares = [0]
    own_share = 0
    if sums_over_experts and mesh is not None:
        shares = [0] * mesh.size("expert")
        own_share = mesh.rank_in("expert")
    split: list[Tensor] = []
    replicated: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None or getattr(parameter, "ds_pipe_replicated", False):
            continue
        is_expert = getattr(parameter, "expert_parallel", False)
        if not is_expert:
            counting = shares.index(min(shares))
            shares[counting] += parameter.numel()
            if counting != own_share:
                continue
        if getattr(parameter, "tensor_model_parallel", False):
            split.append(parameter.grad)
        else:
            replicated.append(parameter.grad)
    counted = split
    if mesh is None or mesh.tp_rank == 0:
        counted = split + replicated
    # A rank may have no part of a small parameter.
    counted = [gradient for gradient in counted if gradient.numel()]

    device = parameters[0].device if parameters else torch.device("cpu")
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if counted:
        squares = sum_squares(counted, device)
    if sums_over_experts and mesh is not None:
        cast(Any, dist).all_reduce(squares, group=mesh.group(*EXPERT_MODEL_AXES))
    elif mesh is not None and mesh.get_model_parallel_world_size() > 1:
        cast(Any, dist).all_reduce(squares, group=mesh.get_model_parallel_group())
    if shard_group is not None:
        cast(Any, dist).all_reduce(squares, group=shard_group)
    return squares.sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the fp32 factor that limits gradients of this norm to `max_norm`, as in PyTorch."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    mesh: ParallelMesh | None = None,
    shard_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scales all gradients so that their total norm is at most `max_norm`.

    It works like `torch.nn.utils.clip_grad_norm_`, and does not wait for the device.

    Returns:
        The norm before scaling.
    """
    parameters = list(parameters)
    norm = grad_norm(parameters, mesh, shard_group)
    factor = clip_factor(norm, max_norm)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        # The factor is fp32, so a 16-bit gradient is rounded once.
        torch.ops.aten._foreach_mul_.Tensor(gradients, factor)
    return norm
