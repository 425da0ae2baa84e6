"""Trains with plain PyTorch in one process, with fp32 master weights of 16-bit parameters, which `AdamW` rounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.rank_files import MASTER_WEIGHT
from ..arguments.training_arguments import TrainingArguments
from ..launch.phase import phase
from ..optimizers.adamw import AdamW, clip_gradients
from ..precisions import PRECISIONS
from .engine import Forward, StepOutcome
from .state import load_state_tensors, model_tensors, state_tensors


class TorchEngine:
    """An `Engine` for one process, and the base class of `DDPEngine`."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, arguments: TrainingArguments
    ) -> None:
        self.module = model
        self.model: Any = model
        self.optimizer = optimizer
        self.applied_steps = 0
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._masters = MasterWeights(optimizer)
        if isinstance(optimizer, AdamW) and all(
            parameter.is_contiguous() for parameter, _ in self._masters.pairs
        ):
            optimizer.rounded = {master: parameter for parameter, master in self._masters.pairs}
        self._master_names = {master: names[parameter] for parameter, master in self._masters.pairs}
        updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._owners = {p: self._master_names.get(p) or names[p] for p in updated}
        self._clip_grad = arguments.clip_grad
        device = next(model.parameters()).device.type
        scales_loss = PRECISIONS[arguments.precision].scales_loss
        self._scaler = torch.amp.GradScaler(device) if scales_loss else None
        # Fused optimizers leave everything as it is where their `found_inf` is 1, as GradScaler asks them to.
        self.takes_found_inf = self._scaler is None and getattr(
            optimizer, "_step_supports_amp_scaling", False
        )
        self._saves = arguments.save_optim

    @property
    def loss_scale(self) -> float | None:
        return self._scaler.get_scale() if self._scaler else None

    def forward_backward(self, forward: Forward, micro_batches: int) -> Tensor:
        losses: list[Tensor] = []
        for k in range(micro_batches):
            self.begin_micro_batch(is_last=k == micro_batches - 1)
            loss = forward(k)
            self.backward(loss)
            losses.append(loss.detach().view(()))
        return torch.stack(losses)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Is called before the forward pass of each micro-batch of a step."""

    def backward(self, loss: Tensor) -> None:
        loss = self._scaler.scale(loss) if self._scaler else loss
        with phase("backward"):
            loss.backward()
        self._masters.take_gradients()

    def step(self, found_inf: Tensor | None = None) -> StepOutcome:
        if self._scaler:
            self._scaler.unscale_(self.optimizer)
        norm = clip_gradients(list(self._owners), self._clip_grad, self.optimizer)
        applied = True
        if found_inf is not None:
            vars(self.optimizer)["found_inf"] = ((found_inf != 0) | ~norm.isfinite()).float()
        if self._scaler:
            scale = self._scaler.get_scale()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            applied = (
                self._scaler.get_scale() >= scale
            )  # a lower scale means that the gradients overflowed
        else:
            self.optimizer.step()
        self.applied_steps += applied
        if self.applied_steps == 1 and self._saves:
            state_tensors(self.optimizer, self._owners)  # raises now if the states cannot be saved
        if not getattr(self.optimizer, "has_rounded", False):
            self._masters.update_parameters()
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(norm, applied)

    def model_tensors(self) -> dict[str, Tensor]:
        return model_tensors(self.module)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        masters = {
            f"{MASTER_WEIGHT}/{name}": master.detach()
            for master, name in self._master_names.items()
        }
        return {**state_tensors(self.optimizer, self._owners), **masters}

    @torch.no_grad()
    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        load_state_tensors(self.optimizer, self._owners, tensors, self.applied_steps)
        for master, name in self._master_names.items():
            if f"{MASTER_WEIGHT}/{name}" in tensors:  # missing if the run was in fp32 so far
                master.copy_(tensors[f"{MASTER_WEIGHT}/{name}"])

    def counters(self) -> dict[str, float]:
        scaling = self._scaler.state_dict() if self._scaler else {}
        return {"applied_steps": self.applied_steps, **scaling}

    def load_counters(self, counters: dict[str, float]) -> None:
        self.applied_steps = int(counters["applied_steps"])
        if self._scaler and "scale" in counters:
            self._scaler.load_state_dict(
                {name: value for name, value in counters.items() if name != "applied_steps"}
            )

    def close(self, *, whole: bool) -> None:
        pass


class MasterWeights:
    """fp32 copies that replace the 16-bit parameters in an optimizer's groups.

    Updates smaller than a 16-bit parameter's resolution are not lost, and the gradients of micro-batches add up in fp32
    (Micikevicius et al. 2018). Without 16-bit parameters the class does nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._taken: set[Tensor] = set()
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.dtype in (torch.bfloat16, torch.float16):
                    master = nn.Parameter(parameter.detach().float())
                    vars(master).update(vars(parameter))  # such as its shard
                    group["params"][place] = master
                    if (
                        parameter in optimizer.state
                    ):  # some optimizers create their state before the first step
                        state = optimizer.state.pop(parameter)
                        optimizer.state[master] = {
                            name: _widened(value) for name, value in state.items()
                        }
                    self.pairs.append((parameter, master))
        self._of: dict[Tensor, nn.Parameter] = dict(self.pairs)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Adds the gradients of the parameters to those of the master weights, and clears them."""
        first, later = [], []
        for parameter, master in self.pairs:
            if parameter.grad is None:
                continue
            if parameter in self._taken:
                pass
            elif master.grad is None:
                master.grad = torch.empty_like(master)
                first.append((master.grad, parameter.grad))
            else:
                later.append((master.grad, parameter.grad))
            parameter.grad = None
        if first:
            torch.ops.aten._foreach_copy_(*zip(*first, strict=True))
        if later:
            torch.ops.aten._foreach_add_(*zip(*later, strict=True))
        self._taken.clear()

    @torch.no_grad()
    def take(self, parameters: list[Tensor], gradients: list[Tensor]) -> Tensor:
        """Adds `gradients` of `parameters` to those of their master weights, and moves the sums into one tensor.

        Returns the tensor, fp32 [elements]. What is written into it changes the master weights' gradients, to which
        `take_gradients` then adds nothing.
        """
        sums = torch.cat([gradient.flatten().float() for gradient in gradients])
        for parameter, own in zip(
            parameters, sums.split([one.numel() for one in parameters]), strict=True
        ):
            if (master := self._of.get(parameter)) is not None:  # the optimizer updates it
                own = own.view_as(master)
                master.grad = own if master.grad is None else own.add_(master.grad)
        self._taken.update(parameters)
        return sums

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Copies the master weights, rounded, into the parameters."""
        if self.pairs:
            parameters, masters = zip(*self.pairs, strict=True)
            torch.ops.aten._foreach_copy_(parameters, masters)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
