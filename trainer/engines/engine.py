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
    """grad_norm: of the whole model, before clipping; None if it is not known. applied: False where fp16 gradients
    overflowed, so that the parameters were left as they were and the loss scale was lowered."""

    grad_norm: float | None
    applied: bool


class Engine(Protocol):
    """A model and its optimizer, in one environment.

    For each micro-batch of a step: `begin_micro_batch`, a forward pass of `model`, `backward`, `end_micro_batch`.
    The losses of all micro-batches and data-parallel ranks are shares, whose sum is the loss of the step.
    """

    module: nn.Module
    """The model itself."""
    model: Any
    """What a forward pass is called on, in training and in evaluation."""
    optimizer: torch.optim.Optimizer
    """Whose parameter groups hold the learning rates."""

    @property
    def loss_scale(self) -> float | None:
        """By which the loss is multiplied before the backward pass; None unless fp16."""
        ...

    def begin_micro_batch(self, *, is_last: bool) -> None: ...

    def backward(self, loss: Tensor) -> None: ...

    def end_micro_batch(self) -> StepOutcome | None:
        """Clips and updates after a step's last micro-batch, and says how that went."""
        ...

    def model_tensors(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers, as they are until the next step. Collective."""
        ...

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """`<state>/<parameter>` -> tensor, as it is until the next step. Collective over data-parallel ranks, of which
        only the first may get them all."""
        ...

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Puts back what `optimizer_tensors` gave, whichever engine that was."""
        ...

    def counters(self) -> dict[str, float]:
        """What else to save: steps applied, loss scaling."""
        ...

    def load_counters(self, counters: dict[str, float]) -> None: ...

    def close(self, *, whole: bool) -> None:
        """Leaves the model as a plain module, without the engine's hooks. whole: with all its parameters, which is
        collective, and so not for after an error, which other ranks may not have had."""
        ...
