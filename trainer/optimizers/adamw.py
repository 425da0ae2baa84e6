"""AdamW that clips, updates and rounds in one pass over memory, where our kernels run."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...mpu import ParallelMesh, clip_factor, clip_grad_norm_, grad_norm
from ...ops.optimizer import (
    AdamWTensors,
    adamw,
    adamw_together,
    has_adamw_together,
    may_have_adamw_kernel,
    suits_adamw_together,
    suits_optimizer_kernels,
)

# A parameter's group; the parameter, its gradient and its two averages; its number of steps.
Update = tuple[dict[str, Any], tuple[Tensor, ...], Tensor]


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` with the same states, which can scale gradients and round
    parameters.

    The gradients themselves stay as they are. Where our kernels do not run, PyTorch's own step
    does. On an accelerator the host waits for nothing, and gradients may be bf16 or fp16.

    Attributes:
        grad_factor: fp32 [], multiplies the gradients of the next step, to clip them; None for 1.
        rounded: Master weight -> the bf16 or fp16 parameter that gets its new value.
        has_rounded: Whether the last step wrote them.
    """

    grad_factor: Tensor | None = None
    rounded: Mapping[Tensor, Tensor] = {}
    has_rounded = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        factor = self.grad_factor
        self.grad_factor = None
        # A GradScaler that has not unscaled the gradients leaves `grad_scale` to the optimizer.
        gradients_are_unscaled = getattr(self, "grad_scale", None) is None
        updates = None
        if closure is None and gradients_are_unscaled:
            updates = self._collect_updates()
        self.has_rounded = updates is not None and bool(self.rounded)
        if updates is None:
            return self._step_of_torch(closure, factor)

        # GradScaler, or an engine, asks to skip the update.
        found_inf = getattr(self, "found_inf", None)
        if self._runs_together():
            self._update_together(updates, factor, found_inf)
            return None
        if found_inf is not None and found_inf.item():
            return None
        scale = 1.0 if factor is None else factor.item()
        if updates:
            torch.ops.aten._foreach_add_.Scalar([step for *_, step in updates], 1)
        for group, tensors, step in filter(has_rows, updates):
            parameter, gradient, *states = tensors
            beta1, beta2 = group["betas"]
            adamw(
                parameter,
                gradient,
                states,
                self.rounded.get(parameter),
                gradient_scale=scale,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=float(step),
            )
        self._note_written(updates)
        return None

    @contextmanager
    def recording(self) -> Generator[list[Any]]:
        """Within the context, a graph records a step, whose launches read tables of their own.

        They say where the gradients are in the graph's memory. Whoever records sends the yielded
        tables afterwards and keeps them as long as the graph.
        """
        tables = self._launch_tables()
        own = {
            number: {dtypes: table.copy_for_recording() for dtypes, table in by_dtypes.items()}
            for number, by_dtypes in tables.items()
        }
        vars(self)["_tables"] = own
        try:
            yield [table for by_dtypes in own.values() for table in by_dtypes.values()]
        finally:
            vars(self)["_tables"] = tables

    def _launch_tables(self) -> dict[int, dict[Any, Any]]:
        """Returns what the launches of each group keep on the device. A copied optimizer has none."""
        return vars(self).setdefault("_tables", {})

    def takes_short_gradients(self) -> bool:
        """Returns whether steps read 16-bit gradients of fp32 parameters, where all else suits our
        kernel for accelerators.
        """
        return self._runs_together() and not any(
            group["amsgrad"] or group["maximize"] for group in self.param_groups
        )

    def _runs_together(self) -> bool:
        """Returns whether the first parameter's device has the kernel that updates many at a time."""
        # Under ZeRO 3, groups take steps in turn, and the others are empty.
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        first = next(parameters, None)
        return first is not None and has_adamw_together(first.device)

    def _update_together(
        self, updates: list[Update], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Updates all parameters in one launch for each group."""
        tables = self._launch_tables()
        steps = [step for *_, step in updates]
        if steps and found_inf is None:
            torch.ops.aten._foreach_add_.Scalar(steps, 1)
        elif steps:
            torch.ops.aten._foreach_add_.Tensor(steps, (found_inf == 0).float())
        for number, group in enumerate(self.param_groups):
            tensors = [
                self._describe(own_tensors, step)
                for own_group, own_tensors, step in filter(has_rows, updates)
                if own_group is group
            ]
            adamw_together(
                tensors,
                tables.setdefault(number, {}),
                factor=factor,
                found_inf=found_inf,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
        self._note_written(updates)

    def _describe(self, tensors: tuple[Tensor, ...], step: Tensor) -> AdamWTensors:
        """Returns what an update of a parameter reads and writes."""
        parameter, gradient, average, square_average = tensors
        rounded = self.rounded.get(parameter)
        return AdamWTensors(parameter, gradient, average, square_average, step, rounded)

    def _note_written(self, updates: list[Update]) -> None:
        """Lets autograd notice that tensors which it may have saved for a gradient have changed."""
        written = [
            self.rounded[tensors[0]] for _, tensors, _ in updates if tensors[0] in self.rounded
        ]
        torch.autograd.graph.increment_version(written)

    def _step_of_torch(self, closure: Any, factor: Tensor | None) -> Any:
        """Runs PyTorch's own step on clipped gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                    parameter.grad = parameter.grad.to(parameter.dtype)
        if factor is not None:
            gradients = [
                parameter.grad
                for group in self.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            torch.ops.aten._foreach_mul_.Tensor(gradients, factor)
        # The user's hooks are called around `step` of this class already, so not around torch's.
        step: Any = torch.optim.AdamW.step
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        return step(self, closure)

    def _collect_updates(self) -> list[Update] | None:
        """Returns of each parameter with a gradient: its group, tensors, and number of steps.

        The tensors are the parameter, its gradient and its states. None if our kernel does not take
        one of them.
        """
        together = self._runs_together()
        for group in self.param_groups:
            if group["amsgrad"] or group["maximize"]:
                return None
            parameters = group["params"]
            if together:
                devices = {parameter.device for parameter in parameters}
                if not all(has_adamw_together(device) for device in devices):
                    return None
            elif not all(may_have_adamw_kernel(parameter) for parameter in parameters):
                return None
        updates: list[Update] = []
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)  # pyright: ignore[reportCallIssue]
            *tensors, _, steps = lists
            for own_tensors, step in zip(zip(*tensors, strict=True), steps, strict=True):
                updates.append((group, own_tensors, step))
        filled = [update for update in updates if has_rows(update)]
        if together:
            suits = all(suits_adamw_together(self._describe(own, step)) for _, own, step in filled)
        else:
            suits = all(suits_optimizer_kernels(*tensors) for _, tensors, _ in filled)
        return updates if suits else None


def has_rows(update: Update) -> bool:
    """Returns whether there is anything to update: a rank may have no row of a small parameter.

    Its steps are counted there too, because a checkpoint has one count for all ranks.
    """
    return update[1][0].numel() > 0


def clip_gradients(
    parameters: list[Tensor],
    max_norm: float,
    optimizer: torch.optim.Optimizer,
    mesh: ParallelMesh | None = None,
    shard_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Clips the gradients before a step, or lets `AdamW` do so in its pass over memory.

    Args:
        max_norm: The largest norm; 0 clips nothing.
        mesh: Of a model whose parameters are split.
        shard_group: The ranks that have the other parts of each gradient; None if it is whole.

    Returns:
        The norm before, [].
    """
    if max_norm and not isinstance(optimizer, AdamW):
        return clip_grad_norm_(parameters, max_norm, mesh, shard_group)
    norm = grad_norm(parameters, mesh, shard_group)
    if max_norm:
        vars(optimizer)["grad_factor"] = clip_factor(norm, max_norm)
    return norm
