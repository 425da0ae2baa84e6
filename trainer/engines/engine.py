"""The protocol between the training loop and its engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# A batch, what a forward pass is called on, and GLM's memory -> a dict or ModelOutput with `loss`.
ForwardStep = Callable[[dict[str, Any], Any, Any], Any]


@dataclass(frozen=True)
class StepOutcome:
    """The result of an optimizer step.

    grad_norm: of the whole model before clipping; None if the engine does not know it. applied: False where fp16
    gradients overflowed, so that the parameters were not updated and the loss scale was lowered.
    """

    grad_norm: float | None
    applied: bool


class Engine(Protocol):
    """A model and its optimizer in one environment.

    For each micro-batch of a step, the loop calls `begin_micro_batch`, the forward pass of `model`, and `backward`;
    after the last one `step`. The losses of all micro-batches and data-parallel ranks add up to the loss of the step.
    """

    module: nn.Module
    """The model itself."""
    model: Any
    """What a forward pass is called on, in training and in evaluation."""
    optimizer: torch.optim.Optimizer
    """Its parameter groups hold the learning rates."""

    @property
    def loss_scale(self) -> float | None:
        """The factor of the loss in the backward pass; None unless the precision is fp16."""
        ...

    def begin_micro_batch(self, *, is_last: bool) -> None: ...

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> StepOutcome:
        """Clips the gradients, updates the parameters, and clears the gradients."""
        ...

    def model_tensors(self) -> dict[str, Tensor]:
        """Returns this rank's parameters and persistent buffers, valid until the next step. Collective."""
        ...

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Returns `<state>/<parameter>` -> tensor, valid until the next step.

        Collective over data-parallel ranks, of which only the first may get all tensors.
        """
        ...

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Loads what `optimizer_tensors` of any engine returned."""
        ...

    def counters(self) -> dict[str, float]:
        """Returns what else to save: the number of applied steps, and the state of loss scaling."""
        ...

    def load_counters(self, counters: dict[str, float]) -> None: ...

    def close(self, *, whole: bool) -> None:
        """Removes the engine's hooks from the model.

        whole: also gathers all its parameters. That is collective, and so not for after an error, which other ranks may
            not have had.
        """
        ...
