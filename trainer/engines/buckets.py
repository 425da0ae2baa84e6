"""Decides in which pieces, and in which order, data-parallel ranks add up gradients during a
backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SMALLEST = (25 << 20) // 4  # elements: 25 MiB in fp32, DistributedDataParallel's bucket


def bucket_elements(trained: int, replicas: int) -> int:
    """Returns how many gradients the data-parallel ranks add up at a time.

    An eighth of them, so that little is left when the backward pass ends; but not less than torch's
    25 MiB, below which latency costs more than the exchange; and not more than Megatron Core's 40
    million elements, or a million for each rank, with which latency costs little.

    Args:
        trained: The number of elements that a rank trains.
        replicas: The number of data-parallel ranks.
    """
    return max(SMALLEST, min(trained // 8, max(40_000_000, 1_000_000 * replicas)))


class OrderedGradients:
    """Gives gradients to DeepSpeed's ZeRO optimizer in the same order on all ranks: from the
    model's end to its begin.

    DeepSpeed 0.19 puts a gradient into the bucket that is being filled when it arrives. If the
    ranks' orders differ, or one of them computes no gradient of some parameter (an expert without
    tokens), it adds gradients of different parameters, without an error. It also forgets what
    earlier micro-batches have accumulated of a parameter that the last one does not use. Here a
    gradient waits for those before it, and a missing one counts as zero.

    Experts that are dealt over ranks come last: the ranks may have unequal numbers of them, and
    buckets that hold both would end at other places among the other parameters.
    """

    def __init__(self, optimizer: Any, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._groups: dict[nn.Parameter, int] = {}
        for number, group in enumerate(optimizer.bit16_groups):
            self._groups |= dict.fromkeys(group, number)
        self._order = [
            parameter
            for parameter in reversed(list(model.parameters()))
            if parameter in self._groups
        ]
        # Sorting keeps the order of equals.
        self._order.sort(key=lambda parameter: getattr(parameter, "expert_parallel", False))
        self._arrived: set[nn.Parameter] = set()
        self._next = 0  # in `_order`: the first that has not been passed on
        # The two methods of DeepSpeed's optimizer through which gradients come are replaced, as it
        # offers no other way in.
        self._process = optimizer.process_gradients
        self._finish = optimizer.independent_gradient_partition_epilogue
        optimizer.process_gradients = self._receive
        optimizer.independent_gradient_partition_epilogue = self._end_backward

    def _receive(self, parameter: nn.Parameter, group: int) -> None:
        """Takes a gradient that has just been computed."""
        optimizer = self._optimizer
        if not optimizer.partition_gradients and not optimizer.is_gradient_accumulation_boundary():
            self._process(parameter, group)  # it is only accumulated
            return
        if parameter in self._arrived:
            raise RuntimeError(
                "a parameter got two gradients in one backward pass, and the first may have been "
                "exchanged already; recompute activations with use_reentrant=False, or set "
                "overlap_comm to false in deepspeed_config"
            )
        self._arrived.add(parameter)
        while self._next < len(self._order) and self._order[self._next] in self._arrived:
            self._pass_on(self._order[self._next])

    def _pass_on(self, parameter: nn.Parameter) -> None:
        self._next += 1
        self._process(parameter, self._groups[parameter])

    def _end_backward(self) -> None:
        """Ends a backward pass whose gradients are exchanged."""
        for parameter in self._order[self._next :]:
            is_missing = parameter not in self._arrived
            if is_missing and self._optimizer.get_gradient_for_reduction(parameter) is None:
                parameter.grad = torch.zeros_like(parameter)
            self._pass_on(parameter)
        self._arrived.clear()
        self._next = 0
        self._finish()
