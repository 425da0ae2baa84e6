"""Keeps fp32 copies of 16-bit parameters, which an optimizer updates in their place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class MasterWeights:
    """fp32 copies that replace the 16-bit parameters in an optimizer's groups.

    Updates smaller than a 16-bit parameter's resolution are not lost, and the gradients of
    micro-batches add up in fp32 (Micikevicius et al. 2018, arXiv:1710.03740). Without 16-bit
    parameters the class does nothing.

    Attributes:
        pairs: Each 16-bit parameter with its master weight.
        keeps_short_gradients: Whether the gradient of a lone micro-batch stays in 16 bits, for an
            optimizer that takes it so. It is exact, and a copy in fp32 would be read and written once
            more.
    """

    keeps_short_gradients = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._already_added: set[Tensor] = set()
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.dtype not in (torch.bfloat16, torch.float16):
                    continue
                master = nn.Parameter(parameter.detach().float())
                vars(master).update(vars(parameter))  # such as its shard
                group["params"][place] = master
                # Some optimizers create their state before the first step.
                if parameter in optimizer.state:
                    state = optimizer.state.pop(parameter)
                    optimizer.state[master] = {name: _widen(value) for name, value in state.items()}
                self.pairs.append((parameter, master))
        self._master_by_parameter: dict[Tensor, nn.Parameter] = dict(self.pairs)

    @torch.no_grad()
    def accumulate_grads(self) -> None:
        """Adds the gradients of the parameters to those of the master weights, and clears them."""
        copied: list[tuple[Tensor, Tensor]] = []
        added: list[tuple[Tensor, Tensor]] = []
        for parameter, master in self.pairs:
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad = None
            if parameter in self._already_added:
                continue
            if master.grad is None and self.keeps_short_gradients:
                master.grad_dtype = None  # any
                master.grad = gradient
                continue
            if master.grad is None:
                master.grad = torch.empty_like(master)
                copied.append((master.grad, gradient))
                continue
            if master.grad.dtype != master.dtype:
                master.grad = master.grad.to(master.dtype)
            added.append((master.grad, gradient))
        if copied:
            torch.ops.aten._foreach_copy_.default(*zip(*copied, strict=True))
        if added:
            torch.ops.aten._foreach_add_.List(*zip(*added, strict=True))
        self._already_added.clear()

    def find(self, parameter: Any) -> Any:
        """Returns the master weight of a parameter, or the parameter itself if it has none."""
        return self._master_by_parameter.get(parameter, parameter)

    @torch.no_grad()
    def accumulate_in_one_tensor(self, parameters: list[Tensor], gradients: list[Tensor]) -> Tensor:
        """Adds gradients of parameters to those of their master weights, and moves the sums into
        one tensor.

        What is written into the tensor changes the master weights' gradients, to which the next
        `accumulate_grads` adds nothing.

        Returns:
            The tensor, fp32 [elements of all parameters].
        """
        sums = torch.cat([gradient.flatten().float() for gradient in gradients])
        own_sums = sums.split([parameter.numel() for parameter in parameters])
        for parameter, own_sum in zip(parameters, own_sums, strict=True):
            master = self._master_by_parameter.get(parameter)
            if master is None:  # the optimizer does not update it
                continue
            gradient = own_sum.view_as(master)
            if master.grad is not None:
                gradient.add_(master.grad)
            master.grad = gradient
        self._already_added.update(parameters)
        return sums

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Copies the master weights, rounded, into the parameters."""
        if self.pairs:
            parameters, masters = zip(*self.pairs, strict=True)
            torch.ops.aten._foreach_copy_.default(parameters, masters)


def _widen(value: Any) -> Any:
    """Returns a floating-point tensor in fp32, and anything else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    return value
