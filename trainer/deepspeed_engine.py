"""The DeepSpeed engine behind the training loop: forward, backward, step, and its state as plain tensors."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from ..mpu import ParallelMesh
from .arguments import TrainingArguments
from .deepspeed_config import deepspeed_config

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER_WEIGHT = "master_weight"


class DeepSpeedEngine:
    """A model, its optimizer and DeepSpeed's engine around them, for one `ParallelMesh`."""

    def __init__(self, model: nn.Module, arguments: TrainingArguments, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        self.accumulation_steps = arguments.accumulation_steps(mesh.dp_size)
        self.optimizer = torch.optim.AdamW(
            weight_decay_groups(model, arguments.weight_decay),
            lr=arguments.lr,
            betas=(arguments.beta1, arguments.beta2),
            fused=True,
        )
        # DeepSpeed would compile this CPU collective at run time, with a lock file that a killed run leaves behind.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._engine: Any = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=deepspeed_config(arguments, mesh.dp_size), mpu=mesh
        )[0]
        self._zero = arguments.zero_stage > 0
        self._keeps_master_weights = arguments.precision != "fp32"
        self._create_optimizer_state()

    @property
    def module(self) -> Any:
        """The model."""
        return self._engine.module

    def forward(self, **inputs: Any) -> Any:
        """The model's output for one micro-batch."""
        return self._engine(**inputs)

    def backward(self, loss: Tensor) -> None:
        """Backward of one micro-batch's share of the step's loss. The shares of all ranks are summed."""
        # DeepSpeed averages gradients over the data-parallel ranks; the shares already add up to the mean.
        self._engine.backward(loss * self.mesh.dp_size, scale_wrt_gas=False)

    def end_micro_batch(self, lr: float) -> float | None:
        """Ends a micro-batch; at the last one of a step, updates the parameters with `lr`.

        Returns the gradient norm before clipping at the end of a step, else None.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        if not self._engine.was_step_applied():
            return None
        norm = self._engine.get_global_grad_norm()
        return float(norm) if norm is not None else None

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """`<moment>/<parameter>` -> fp32 CPU tensor of its local shape. Collective over data-parallel ranks."""
        tensors = {}
        for name, parameter in self.module.named_parameters():
            for moment in ADAM_MOMENTS:
                tensors[f"{moment}/{name}"] = self._get_state(parameter, moment).cpu()
            if self._keeps_master_weights:
                tensors[f"{MASTER_WEIGHT}/{name}"] = self._get_state(parameter, MASTER_WEIGHT).cpu()
        return tensors

    def load_optimizer_tensors(self, tensors: dict[str, Tensor], step: int) -> None:
        """Puts back what `optimizer_tensors` gave after `step` steps."""
        for state in self.optimizer.state.values():
            state["step"].fill_(step)
        for name, parameter in self.module.named_parameters():
            for moment in ADAM_MOMENTS:
                self._set_state(parameter, moment, tensors[f"{moment}/{name}"])
            if self._keeps_master_weights:
                safe_set_full_fp32_param(parameter, tensors[f"{MASTER_WEIGHT}/{name}"])

    def _get_state(self, parameter: nn.Parameter, name: str) -> Tensor:
        if not self._zero:
            return self.optimizer.state[parameter][name]
        if name == MASTER_WEIGHT:
            value = safe_get_full_fp32_param(parameter)
        else:
            value = safe_get_full_optimizer_state(parameter, name)
        assert value is not None
        return value

    def _set_state(self, parameter: nn.Parameter, moment: str, value: Tensor) -> None:
        if self._zero:
            safe_set_full_optimizer_state(parameter, value, moment)
        else:
            self.optimizer.state[parameter][moment].copy_(value)

    def _create_optimizer_state(self) -> None:
        # Adam would make its state in the first step; DeepSpeed 0.19 then links only the first parameter group's
        # to the parameters. ZeRO has put its flat partitions into the parameter groups by now.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state: dict[str, Any] = {moment: torch.zeros_like(parameter) for moment in ADAM_MOMENTS}
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **state}
        if self._zero:
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norms (fewer than two dimensions) do not."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
