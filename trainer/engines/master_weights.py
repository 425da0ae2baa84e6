"""fp32 copies of 16-bit parameters, which the optimizer updates in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MasterWeights:
    """Replaces the 16-bit parameters of an optimizer's groups by fp32 masters; without any it does nothing.

    An update smaller than a 16-bit parameter's resolution is not lost, and gradients of micro-batches add up in fp32
    (Micikevicius et al. 2018).
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.dtype in (torch.bfloat16, torch.float16):
                    master = nn.Parameter(parameter.detach().float())
                    group["params"][place] = master
                    if parameter in optimizer.state:  # some optimizers make their state before the first step
                        state = optimizer.state.pop(parameter)
                        optimizer.state[master] = {name: _widened(value) for name, value in state.items()}
                    self.pairs.append((parameter, master))

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Adds the parameters' gradients to those of the masters, and clears them."""
        for parameter, master in self.pairs:
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters into the parameters."""
        for parameter, master in self.pairs:
            parameter.copy_(master)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
