"""LAMB for parameters that tensor parallelism or ZeRO splits."""

from __future__ import annotations

from typing import Any

import torch

from ...mpu import ParallelMesh
from .whole_matrix import ParameterGroup, ParameterPart, WholeMatrixOptimizer


class Lamb(WholeMatrixOptimizer):
    """LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2), with the norms of whole parameters in
    its trust ratios.

    It computes what pytorch_optimizer's class of the same name does on an unsplit parameter: the
    weight decay is decoupled, only the first moment's bias is corrected, and weight norms are cut
    at 10. It overwrites the gradients.
    """

    element_states = ("exp_avg", "exp_avg_sq")
    LARGEST_WEIGHT_NORM = 10.0

    def __init__(
        self,
        groups: Any,
        lr: float,
        betas: tuple[float, float],
        *,
        mesh: ParallelMesh | None,
        eps: float = 1e-6,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": 0.0, "eps": eps, "step": 0}
        super().__init__(groups, defaults, mesh)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
        work = self.collect_parts()
        if not work:
            return
        for group, part in work:
            self._update_moments(group, part)

        # The norms of each parameter's weights and of its update, [parameters, 2].
        own_squares = []
        for _, part in work:
            own_squares.append(part.squared_norm(part.tensor))
            own_squares.append(part.squared_norm(part.tensor.grad))
        norms = self.sum_over_parts(torch.stack(own_squares)).sqrt().view(-1, 2)

        for (group, part), (weight, update) in zip(work, norms, strict=True):
            ratio = weight.clamp(max=self.LARGEST_WEIGHT_NORM) / (update + group["eps"])
            ratio = torch.where((weight != 0) & (update != 0), ratio, 1.0)
            scale = ratio * (group["lr"] / (1.0 - group["betas"][0] ** group["step"]))
            for tile in part.tiles:
                tile.view_in(part.tensor).sub_(tile.view_in(part.tensor.grad).mul_(scale))

    def _update_moments(self, group: ParameterGroup, part: ParameterPart) -> None:
        """Decays a parameter's weights, updates its moments, and replaces its gradient by Adam's
        update.
        """
        beta1, beta2 = group["betas"]
        state = self.state[part.tensor]
        for name in self.element_states:
            state.setdefault(name, torch.zeros_like(part.tensor))
        for tile in part.tiles:
            grad = tile.view_in(part.tensor.grad)
            mean = tile.view_in(state["exp_avg"])
            square = tile.view_in(state["exp_avg_sq"])
            mean.mul_(beta1).add_(grad, alpha=1.0 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
            torch.div(mean, square.sqrt().add_(group["eps"]), out=grad)
            tile.view_in(part.tensor).mul_(1.0 - group["weight_decay"] * group["lr"])
