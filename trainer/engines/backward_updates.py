"""Updates each parameter while the backward pass goes on, as soon as its gradient is complete.

The gradient is freed at once, so gradients never exist all at a time (Lv et al. 2023,
arXiv:2306.09782). The norm of all of them is known only at the end, so nothing is clipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...mpu import ParallelMesh, grad_norm
from ..optimizers.registry import LONE_STEP_CLASSES, LONE_STEP_NAMES
from .optimizers import ELEMENTWISE_OPTIMIZERS


class BackwardUpdates:
    """Steps of an optimizer for one parameter at a time.

    Args:
        optimizer: One that keeps nothing in its groups that a step changes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        _check_optimizer(optimizer)
        self._optimizer = optimizer
        # Fused optimizers leave everything as it is where their `found_inf` is 1.
        self._is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._group_of: dict[Any, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            for updated in group["params"]:
                self._group_of[updated] = group
        # Stand for the parameters in the norm of the step: the norm of each gradient, [1].
        self._norms: dict[Any, nn.Parameter] = {}

    @torch.no_grad()
    def update(self, updated: Any) -> None:
        """Updates what the optimizer has of a parameter, and frees its gradient.

        Neither it nor its states change if the gradient is not finite.
        """
        norm = torch.linalg.vector_norm(updated.grad).float()
        self._note(updated, norm)
        if self._is_fused:
            vars(self._optimizer)["found_inf"] = (~norm.isfinite()).float()
        elif not norm.isfinite():
            updated.grad = None
            return
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**self._group_of[updated], "params": [updated]}]
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
        updated.grad = None

    def take_norm(
        self, every: Iterable[Any], mesh: ParallelMesh | None, shard_group: dist.ProcessGroup | None
    ) -> Tensor:
        """Returns the norm of all gradients since the last call, []; see `grad_norm`.

        Args:
            every: What the optimizer updates.
        """
        norms = [self._norms[updated] for updated in every if updated in self._norms]
        self._norms = {}
        return grad_norm(norms, mesh, shard_group)

    def _note(self, updated: Any, norm: Tensor) -> None:
        stand_in = nn.Parameter(torch.empty_like(norm).view(1))
        vars(stand_in).update(vars(updated))  # such as whether tensor parallelism splits it
        stand_in.grad = norm.view(1)
        self._norms[updated] = stand_in


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer that may not step for one parameter at a time."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, ELEMENTWISE_OPTIMIZERS) or kind in LONE_STEP_CLASSES:
        return
    raise ValueError(
        f"optimizer_in_backward=True updates one parameter at a time, and {kind} may need all of "
        f"them; use optimizer={' or '.join(map(repr, LONE_STEP_NAMES))}"
    )
