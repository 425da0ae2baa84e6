"""Trains one stage of a pipeline with DeepSpeed's 1F1B schedule (Narayanan et al., 2019,
arXiv:1806.03377).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Generator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.utils import combine_grad_norm_groups
from torch import Tensor, nn

from ...models.pipeline import StagePlace, find_copied_parameters
from ...mpu import receive_from_stage, send_to_stage
from ..arguments.training_arguments import TrainingArguments
from ..launch.phase import phase
from ..launch.ranks import Ranks
from ..optimizers.adamw import clip_gradients
from .deepspeed_engine import (
    DeepSpeedEngine,
    has_dealt_experts,
    mark_experts,
    own_choices,
    quiet_setup,
)
from .engine import Forward, StepOutcome


class PipelineEngine(DeepSpeedEngine):
    """An `Engine` for a model that is one stage of a pipeline.

    DeepSpeed's engine moves the hidden states and their gradients. It sees one layer for each
    stage, because a stage computes masks, positions and labels from its own micro-batch. This
    differs from DeepSpeed's own use in three ways:

    - The update is not part of the schedule: the loop first checks the loss.
    - A parameter that several stages hold is updated by the first of them, which gets the sum of
      the gradients and sends the result to the others. DeepSpeed's tied layers are updated on each
      stage, and may drift apart by rounding.
    - Shapes may differ between micro-batches.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        arguments: TrainingArguments,
        ranks: Ranks,
    ) -> None:
        whole: Any = model
        self._pipeline: StagePlace = whole.stage
        self._shared = SharedParameters(model, self._pipeline)
        _remove_from_groups(optimizer, self._shared.copies)
        super().__init__(model, optimizer, arguments, ranks)
        for parameter in self._shared.copies:
            self._owners.pop(parameter, None)
            self._names.pop(parameter, None)
        _even_out_norms(self._engine.optimizer, ranks)

    def _initialize(
        self, model: nn.Module, arguments: TrainingArguments, ranks: Ranks, config: dict[str, Any]
    ) -> Any:
        assert ranks.mesh is not None
        mesh = ranks.mesh
        self.model = model
        # Tensor-parallel ranks would split hidden states between them, as whole tensors of one
        # shape.
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
        self._layer = _StageLayer(
            self._pipeline, ranks.replica_size * config["gradient_accumulation_steps"]
        )
        self._layer.add_module("model", model)
        # DeepSpeed knows context- and expert-parallel ranks as data-parallel ones: it sums gradients
        # over all of them.
        topology = PipeModelDataParallelTopology(mesh.pp_size, mesh.tp_size, ranks.replica_size)
        deepspeed.init_distributed(dist_init_required=False)
        with quiet_setup(), _local_rank():
            stages = deepspeed.PipelineModule(
                [self._layer] * mesh.pp_size,
                topology=topology,
                partition_method="uniform",
                dynamic_shape=True,
            )
            self._shared.mark_copies()
            if ranks.ep_size > 1:
                mark_experts(model, mesh)
            with own_choices(buckets=False, experts=has_dealt_experts(model)):
                engine: Any = deepspeed.initialize(
                    model=stages, optimizer=self.optimizer, config=config
                )[0]
            # Without an optimizer of its own, DeepSpeed reduces the experts that are marked.
            if ranks.ep_size > 1:
                engine.has_moe_layers = True
        self._groups = _find_process_groups(stages)
        # A stage reads its own micro-batches, so DeepSpeed gets none.
        nothing = torch.zeros(1, device=engine.device)
        engine.set_dataiterator(itertools.repeat((nothing, nothing)))
        backward = engine._INSTRUCTION_MAP[schedule.BackwardPass]
        engine._INSTRUCTION_MAP = {
            **engine._INSTRUCTION_MAP,
            schedule.BackwardPass: phase("backward")(backward),
            schedule.ReduceTiedGrads: lambda _: self._shared.sum_gradients(self._gradient),
            schedule.OptimizerStep: lambda _: None,
        }
        return engine

    def _gradient(self, parameter: Any) -> Tensor:
        """Returns the accumulated gradient of a parameter that this stage updates."""
        if self._engine.using_bf16_optimizer:
            return parameter._hp_grad.view_as(parameter)  # it is flat
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def forward_backward(self, forward: Forward, micro_batches: int) -> Tensor:
        self._layer.begin(forward)
        between_calls = self._pipeline.transfer
        self._pipeline.transfer = self._layer.transfer
        engine = self._engine
        # What `train_batch` does, without its own sum of the losses and without printing it.
        engine.total_loss = None
        engine._compute_loss = True
        try:
            engine._exec_schedule(engine._train_schedule())
        finally:
            self._pipeline.transfer = between_calls
        return torch.stack(self._layer.losses)

    def step(self, found_inf: Tensor | None = None) -> StepOutcome:
        norm: Any = None
        if not self._zero:
            norm = clip_gradients(list(self._owners), self._clip_grad, self.optimizer, self._mesh)
        self._engine._exec_optimizer_step()
        self._shared.send_values()
        self.applied_steps += 1
        if norm is None:
            norm = self._engine.get_global_grad_norm()
        return StepOutcome(torch.as_tensor(norm), applied=True)

    def close(self, *, whole: bool) -> None:
        super().close(whole=whole)
        for group in self._groups:
            dist.destroy_process_group(group)


class ScheduledTransfer:
    """Moves hidden states as DeepSpeed's schedule says, which passes them to a stage's layer and
    takes its result.
    """

    def __init__(self) -> None:
        self.received: Tensor | None = None
        self.sent: Tensor | None = None

    def receive(self) -> Tensor:
        received = self.received
        assert received is not None
        self.received = None
        return received

    def send(self, hidden: Tensor) -> None:
        self.sent = hidden

    def take_sent(self) -> Tensor:
        """Returns what the stage has sent, and forgets it."""
        sent = self.sent
        assert sent is not None
        self.sent = None
        return sent


class _StageLayer(nn.Module):
    """The only layer that DeepSpeed sees of a stage: hidden states of the previous one -> those for
    the next one.

    It runs the micro-batches of a step in their order. The last stage returns losses, multiplied by
    `scale`, because DeepSpeed averages over micro-batches and replicas and the losses already add
    up to the mean.
    """

    def __init__(self, stage: StagePlace, scale: int) -> None:
        super().__init__()
        self._stage = stage
        self._scale = scale
        self.transfer = ScheduledTransfer()
        self.losses: list[Tensor] = []

    def begin(self, forward: Forward) -> None:
        """Begins a step, whose micro-batches `forward` computes."""
        self._forward = forward
        self.losses = []

    def forward(self, received: Tensor) -> Tensor:
        if not self._stage.is_first:
            self.transfer.received = received
        loss = self._forward(len(self.losses))
        self.losses.append(loss.detach().view(()))
        if self._stage.is_last:
            return loss * self._scale
        return self.transfer.take_sent()


class SharedParameters:
    """The parameters that several stages hold, such as a word embedding that is also the output
    head.

    The first of the stages owns a parameter. It adds up the gradients and updates the parameter;
    the others hold a copy, which gets the owner's new values. Copies are in no optimizer, gradient
    norm or checkpoint.
    """

    def __init__(self, model: nn.Module, stage: StagePlace) -> None:
        own = dict(model.named_parameters())
        self._stage = stage
        self._held = {name: own[name] for name in sorted(stage.holders) if name in own}
        self.copies = {self._held[name] for name in find_copied_parameters(model)}
        self._sums: dict[nn.Parameter, Tensor] = {}
        for parameter in self.copies:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulate)

    def mark_copies(self) -> None:
        """Sets DeepSpeed's mark of parameters that another stage counts in norms."""
        parameter: Any
        for parameter in self._held.values():
            parameter.ds_pipe_replicated = parameter in self.copies

    def _accumulate(self, parameter: Any) -> None:
        """Adds a copy's gradient to its sum over the micro-batches, in fp32."""
        gradient = parameter.grad.float()
        parameter.grad = None
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = gradient

    @torch.no_grad()
    def sum_gradients(self, gradient: Any) -> None:
        """Adds the gradients of the copies to `gradient(parameter)` of their owners, in the order
        of the stages.
        """
        for parameter, owner, others in self._exchanges():
            if self._stage.index != owner:
                zeros = torch.zeros_like(parameter, dtype=torch.float32)
                send_to_stage(self._sums.pop(parameter, zeros), owner, self._stage.mesh)
                continue
            for other in others:
                gradient(parameter).add_(receive_from_stage(other, self._stage.mesh))

    @torch.no_grad()
    def send_values(self) -> None:
        """Copies the owners' values to the copies."""
        for parameter, owner, others in self._exchanges():
            if self._stage.index != owner:
                parameter.copy_(receive_from_stage(owner, self._stage.mesh))
                continue
            for other in others:
                send_to_stage(parameter, other, self._stage.mesh)

    def _exchanges(self) -> Generator[tuple[Any, int, tuple[int, ...]]]:
        """Yields the trained parameters that this stage shares, in the same order on all: the
        owner, and the others.
        """
        for name, parameter in self._held.items():
            owner, *others = self._stage.holders[name]
            if parameter.requires_grad:
                yield parameter, owner, tuple(others)


def _remove_from_groups(optimizer: torch.optim.Optimizer, parameters: set[nn.Parameter]) -> None:
    """Removes parameters from an optimizer's groups, and then the groups that are empty."""
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if each not in parameters]
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def _even_out_norms(optimizer: Any, ranks: Ranks) -> None:
    """Lets a stage take part in all sums over the stages that ZeRO makes for a gradient norm, one
    for each group.

    A stage may have fewer parameter groups than another one, for example if it trains no bias.
    """
    groups = len(optimizer.param_groups)
    missing = max(ranks.gather(groups)) - groups
    if not missing or not hasattr(optimizer, "scaled_global_norm"):
        return

    def scaled_global_norm() -> Tensor:
        norms: list[Any] = []
        for i in range(groups):
            gradients = optimizer.averaged_gradients[i]
            parameters = optimizer.params_in_partition[i]
            norms.append(optimizer.get_grad_norm_direct(gradients, parameters))
        for _ in range(missing):
            norms.append(optimizer.get_grad_norm_direct([], []))
        return combine_grad_norm_groups(norms)

    optimizer.scaled_global_norm = scaled_global_norm


def _find_process_groups(stages: Any) -> list[Any]:
    """Returns the process groups that DeepSpeed made for a pipeline, to destroy them with it."""
    found: dict[int, Any] = {}
    for owner in (stages, stages.mpu()):
        for value in vars(owner).values():
            if isinstance(value, dist.ProcessGroup):
                found[id(value)] = value
    return list(found.values())


@contextlib.contextmanager
def _local_rank() -> Generator[None]:
    """Sets LOCAL_RANK, which DeepSpeed's pipelines read, if no launcher has."""
    missing = "LOCAL_RANK" not in os.environ
    if missing:
        os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        if missing:
            del os.environ["LOCAL_RANK"]
