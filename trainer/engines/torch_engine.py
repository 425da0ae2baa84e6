"""Trains with plain PyTorch in one process, with fp32 master weights of 16-bit parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.rank_files import MASTER_WEIGHT, TensorPart
from ...mpu import ColumnParallelLinear, RowParallelLinear
from ...mpu.main_gradients import adding_to_main_gradients
from ..arguments.training_arguments import TrainingArguments
from ..launch.phase import phase
from ..optimizers.adamw import AdamW, clip_gradients
from ..precisions import PRECISIONS
from .backward_updates import BackwardUpdates
from .engine import Forward, StepOutcome
from .master_weights import MasterWeights
from .state import load_state_tensors, model_tensors, state_tensors


class TorchEngine:
    """An `Engine` for one process, and the base class of `DDPEngine`.

    Attributes:
        fuses_last_gradients: Whether `gradient_accumulation_fusion` includes a step's last
            micro-batch.
    """

    fuses_last_gradients = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        arguments: TrainingArguments,
        names: Mapping[Any, str] | None = None,
    ) -> None:
        """Prepares the optimizer.

        Args:
            names: What the optimizer updates -> the names of the parameters; by default the model's
                own.
        """
        self.module = model
        self.model: Any = model
        self.optimizer = optimizer
        self.applied_steps = 0
        self._hooks: list[Any] = []
        self._clip_grad = arguments.clip_grad
        self._saves_state = arguments.save_optim

        self._masters = MasterWeights(optimizer)
        pairs = self._masters.pairs
        all_contiguous = all(parameter.is_contiguous() for parameter, _ in pairs)
        if isinstance(optimizer, AdamW) and all_contiguous:
            # Our AdamW rounds the master weights to the parameters in its pass over memory.
            optimizer.rounded = {master: parameter for parameter, master in pairs}

        # The names of what the optimizer updates: parameters, and master weights under those of
        # their parameters.
        if names is None:
            names = {parameter: name for name, parameter in model.named_parameters()}
        self._master_names = {master: names[parameter] for parameter, master in pairs}
        self._names: dict[Any, str] = {}
        for group in optimizer.param_groups:
            for updated in group["params"]:
                self._names[updated] = self._master_names.get(updated) or names[updated]

        device = next(model.parameters()).device.type
        scales_loss = PRECISIONS[arguments.precision].scales_loss
        self._scaler = torch.amp.GradScaler(device) if scales_loss else None
        # Fused optimizers leave everything as it is where their `found_inf` is 1, as GradScaler
        # asks them to.
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.takes_found_inf = self._scaler is None and is_fused

        # A scaler would unscale them in place.
        if isinstance(optimizer, AdamW) and self._scaler is None:
            self._masters.keeps_short_gradients = optimizer.takes_short_gradients()

        self._fused_weights: list[Any] = []
        if arguments.gradient_accumulation_fusion:
            trained = set(self.list_trained())
            for module in model.modules():
                if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                    self._fused_weights += [module.weight] if module.weight in trained else []

        self.updates_in_backward = arguments.optimizer_in_backward
        if self.updates_in_backward:
            self.takes_found_inf = False
            self._updates = BackwardUpdates(optimizer)
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(self._update_in_backward)
                for parameter in self.list_trained()
            ]

    @property
    def loss_scale(self) -> float | None:
        return self._scaler.get_scale() if self._scaler else None

    def forward_backward(self, forward: Forward, micro_batches: int) -> Tensor:
        losses: list[Tensor] = []
        for k in range(micro_batches):
            is_last = k == micro_batches - 1
            self.begin_micro_batch(is_last=is_last)
            # The gradient of a lone micro-batch is not added to anything.
            weights: list[Any] = []
            if micro_batches > 1 and (self.fuses_last_gradients or not is_last):
                weights = self._fused_weights
            with adding_to_main_gradients(
                [(weight, self._masters.find(weight)) for weight in weights]
            ):
                loss = forward(k)
                self.backward(loss)
            losses.append(loss.detach().view(()))
        return torch.stack(losses)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Is called before the forward pass of each micro-batch of a step."""

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass of a micro-batch, and adds its gradients to those of the master
        weights.
        """
        if self._scaler:
            loss = self._scaler.scale(loss)
        with phase("backward"):
            loss.backward()
        self._masters.accumulate_grads()

    def list_trained(self) -> list[Any]:
        """Returns the parameters whose gradients a backward pass completes one after another."""
        parameter_of = {master: parameter for parameter, master in self._masters.pairs}
        return [parameter_of.get(updated, updated) for updated in self._names]

    @torch.no_grad()
    def _update_in_backward(self, parameter: Any) -> None:
        """Updates a parameter whose gradient is complete, and frees the gradient."""
        updated = self.move_gradient(parameter)
        self._updates.update(updated)
        if updated is not parameter and not getattr(self.optimizer, "has_rounded", False):
            self.write_back(parameter, updated)

    def move_gradient(self, parameter: Any) -> Any:
        """Moves a parameter's gradient to what the optimizer updates in its place, and returns
        that.
        """
        self._masters.accumulate_grads()
        return self._masters.find(parameter)

    def write_back(self, parameter: Any, updated: Any) -> None:
        """Gives a parameter the new value of what the optimizer has updated in its place."""
        parameter.copy_(updated)

    def step(self, found_inf: Tensor | None = None) -> StepOutcome:
        if self.updates_in_backward:
            self._end_step(applied=True)
            return StepOutcome(self.take_norm(), applied=True)
        if self._scaler:
            self._scaler.unscale_(self.optimizer)
        norm = self.clip()
        if found_inf is not None:
            is_bad = (found_inf != 0) | ~norm.isfinite()
            vars(self.optimizer)["found_inf"] = is_bad.float()

        applied = True
        if self._scaler:
            scale = self._scaler.get_scale()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            # A lower scale means that the gradients overflowed.
            applied = self._scaler.get_scale() >= scale
        else:
            self.optimizer.step()
        self._end_step(applied=applied)
        if not getattr(self.optimizer, "has_rounded", False):
            self._masters.update_parameters()
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(norm, applied)

    def _end_step(self, *, applied: bool) -> None:
        self.applied_steps += applied
        if self.applied_steps == 1 and self._saves_state:
            self.optimizer_tensors()  # raises now if the states cannot be saved

    def note_applied_step(self) -> None:
        """Counts an update that was applied outside of `step`, by a graph of a recorded step."""
        self.applied_steps += 1

    def take_norm(self) -> Tensor:
        """Returns the norm of the gradients that the last backward pass has used up, []."""
        return self._updates.take_norm(self._names, None, None)

    def clip(self) -> Tensor:
        """Clips the gradients, and returns their norm before, []."""
        return clip_gradients(list(self._names), self._clip_grad, self.optimizer)

    def model_tensors(self) -> Mapping[str, Tensor | TensorPart]:
        return model_tensors(self.module)

    def optimizer_tensors(self) -> Mapping[str, Tensor | TensorPart]:
        masters = {
            f"{MASTER_WEIGHT}/{name}": master.detach()
            for master, name in self._master_names.items()
        }
        return {**state_tensors(self.optimizer, self._names), **masters}

    @torch.no_grad()
    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        load_state_tensors(self.optimizer, self._names, tensors, self.applied_steps)
        for master, name in self._master_names.items():
            # It is missing if the run was in fp32 so far.
            if f"{MASTER_WEIGHT}/{name}" in tensors:
                master.copy_(tensors[f"{MASTER_WEIGHT}/{name}"])

    def counters(self) -> dict[str, float]:
        scaling = self._scaler.state_dict() if self._scaler else {}
        return {"applied_steps": self.applied_steps, **scaling}

    def load_counters(self, counters: dict[str, float]) -> None:
        self.applied_steps = int(counters["applied_steps"])
        if self._scaler and "scale" in counters:
            scaling = {name: value for name, value in counters.items() if name != "applied_steps"}
            self._scaler.load_state_dict(scaling)

    def close(self, *, whole: bool) -> None:
        for hook in self._hooks:
            hook.remove()
