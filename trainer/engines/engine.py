"""Defines the protocol between the training loop and its engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...checkpoint.rank_files import TensorPart

# (batch, the object that runs the forward pass, GLM's memory) -> a dict or ModelOutput with `loss`.
ForwardStep = Callable[[dict[str, Any], Any, Any], Any]
# The number of a micro-batch of the step -> its share of the step's loss, computed by
# `Engine.model`.
Forward = Callable[[int], Tensor]


@dataclass(frozen=True)
class StepOutcome:
    """The result of an optimizer step.

    Attributes:
        grad_norm: Gradient norm of the whole model before clipping, []; None if the engine does not
            know it. Reading it waits for the device.
        applied: False if fp16 gradients overflowed; the parameters were not updated, and the loss
            scale was lowered.
    """

    grad_norm: Tensor | None
    applied: bool


class Engine(Protocol):
    """A model and its optimizer in one environment.

    For each step, the loop calls `forward_backward` and then `step`. The losses of all
    micro-batches and data-parallel ranks add up to the loss of the step.
    """

    module: nn.Module
    """The model itself."""
    model: Any
    """The object that runs forward passes, in training and in evaluation: the model, or a wrapper
    of it."""
    optimizer: torch.optim.Optimizer
    """The optimizer, whose parameter groups hold the learning rates."""
    takes_found_inf: bool
    """Whether `step` takes `found_inf`, so that the host need not know the loss before it queues
    the update."""
    updates_in_backward: bool
    """Whether the parameters have their new values after `forward_backward` already."""

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss in the backward pass; None in other precisions than fp16."""
        ...

    def forward_backward(self, forward: Forward, micro_batches: int) -> Tensor:
        """Runs the forward and backward passes of a step; returns the loss of each micro-batch,
        [micro_batches].

        The losses stay on the device, so that the host need not wait for it between micro-batches.
        A stage of a pipeline returns the losses that it computes, which only the last stage does;
        the others are 0.
        """
        ...

    def step(self, found_inf: Tensor | None = None) -> StepOutcome:
        """Clips the gradients, updates the parameters, and clears the gradients.

        `found_inf`, [], is on the device. If it is not 0, or if the gradient norm is not finite,
        neither the parameters nor the optimizer's states change.
        """
        ...

    def model_tensors(self) -> Mapping[str, Tensor | TensorPart]:
        """Returns this rank's parameters and persistent buffers, valid until the next step; see
        `optimizer_tensors`.
        """
        ...

    def optimizer_tensors(self) -> Mapping[str, Tensor | TensorPart]:
        """Returns `<state>/<parameter>` -> tensor, valid until the next step.

        All data-parallel ranks name the same tensors. A `Tensor` is the same on all of them. A
        `TensorPart` is what this rank alone has; together the ranks have the whole.
        """
        ...

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the tensors that `optimizer_tensors` of any engine returned."""
        ...

    def counters(self) -> dict[str, float]:
        """Returns the other numbers to save: the number of applied steps, and the state of loss
        scaling.
        """
        ...

    def load_counters(self, counters: dict[str, float]) -> None: ...

    def close(self, *, whole: bool) -> None:
        """Removes the engine's hooks from the model, and gathers all parameters if `whole` is true.

        Gathering is collective, so `whole` must be False after an error, which other ranks may not
        have had.
        """
        ...
