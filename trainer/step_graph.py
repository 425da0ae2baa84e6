"""Queues a whole step on a GPU at once, as a CUDA graph that an earlier step was recorded into.

A step of a small model calls thousands of functions in Python and launches hundreds of kernels, and
the GPU waits for the host. A graph has all its kernels with their arguments, so that queuing it is one
call. What differs between steps is therefore in tensors that keep their place, which are filled
before the graph runs: the micro-batches, the number of the first sample (dropout's masks depend on
it), the numbers of targets, the rates, and whether an earlier update was skipped.

The first step runs without a graph: it makes the optimizer's states, and shows which uses of dropout a
step has. The second is a rehearsal: it does what is recorded afterwards, so that each kernel has been
compiled and loaded. A step whose micro-batches have other shapes than the recorded ones runs without a
graph too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..mpu import dropout_state, expert_load_counting
from ..ops.device import can_record_graphs, record_graph
from .arguments.training_arguments import TrainingArguments
from .batches.loss_normalization import LossNormalizer, find_loss
from .engines.engine import Engine, ForwardStep
from .engines.torch_engine import TorchEngine
from .logging.expert_load import find_token_masks
from .optimizers.adamw import AdamW

# Steps before the one that rehearses what is recorded.
EAGER_STEPS = 1

Signature = tuple[tuple[tuple[str, tuple[int, ...], torch.dtype], ...], ...]


@dataclass(frozen=True)
class GraphResults:
    """What a step has computed, in memory that the next one renews.

    Attributes:
        losses: The loss of each micro-batch, fp64 [micro-batches].
        grad_norm: As in `StepOutcome`, [].
        found_inf: Not 0 if the update was skipped, fp64 [].
    """

    losses: Tensor
    grad_norm: Tensor
    found_inf: Tensor


class StepGraph:
    """The forward and backward passes of a step and its update, recorded once.

    Args:
        tell: Gets a line for the user: why steps run without a graph.
    """

    def __init__(
        self,
        arguments: TrainingArguments,
        engine: Engine,
        forward_step: ForwardStep,
        normalizer: LossNormalizer,
        device: torch.device,
        tell: Callable[[str], None],
    ) -> None:
        self._arguments = arguments
        self._engine = engine
        self._forward_step = forward_step
        self._normalizer = normalizer
        self._device = device
        self._tell = tell
        self._told: set[str] = set()
        self._eager_steps = 0
        self._has_rehearsed = False
        self._signature: Signature | None = None
        self._replay: Callable[[], None] | None = None
        self._results: GraphResults | None = None
        # What the graph reads and nothing else may hold: tables of launches, and the keys of dropout's uses.
        self._read_by_graph: list[Any] = []
        self.obstacle = find_obstacle(arguments, engine, device)
        if self.obstacle is not None:
            self._say(self.obstacle)

    def takes(self, micro_batches: list[Any]) -> bool:
        """Returns whether `run` takes the next step; counts it as one before the recording if not."""
        if self.obstacle is not None:
            return False
        signature = describe_inputs(micro_batches)
        if signature is None:
            self._say("micro-batches have other values than tensors")
            return False
        if self._eager_steps < EAGER_STEPS:
            self._eager_steps += 1
            return False
        if self._signature is not None and signature != self._signature:
            self._say("micro-batches have other shapes than the recorded ones (only such steps do)")
            return False
        return True

    def run(
        self,
        micro_batches: list[Any],
        first_samples: list[int],
        own_counts: list[list[float]],
        target_counts: list[float],
        previous_found_inf: Tensor | None,
    ) -> GraphResults | None:
        """Queues a step; returns its results, or None if it cannot be recorded: then nothing has run.

        The first one is computed without a graph, and the second recorded.

        Args:
            micro_batches: In the host's memory.
            first_samples: The number of the first sample of each micro-batch.
            own_counts, target_counts: The targets of each micro-batch, and of the global batch.
            previous_found_inf: Not 0 if the update before was skipped, []; None for 0.
        """
        if self._signature is None:
            self._allocate(micro_batches, target_counts)
            self._signature = describe_inputs(micro_batches)
        self._fill(micro_batches, first_samples, own_counts, target_counts, previous_found_inf)
        if not self._has_rehearsed:
            self._has_rehearsed = True
            with self._rates_on_device():
                return self._compute()
        if self._replay is None and not self._record():
            return None
        assert self._replay is not None
        assert self._results is not None
        assert isinstance(self._engine, TorchEngine)  # as `find_obstacle` has seen
        self._replay()
        self._engine.note_applied_step()
        return self._results

    def _allocate(self, micro_batches: list[Any], target_counts: list[float]) -> None:
        """Makes the tensors that a graph reads."""
        device = self._device
        self._inputs = [
            {name: torch.empty_like(value, device=device) for name, value in batch.items()}
            for batch in micro_batches
        ]
        count = len(micro_batches)
        self._first_samples = torch.zeros(count, dtype=torch.int64, device=device)
        self._totals = torch.ones(len(target_counts), device=device)
        self._shares = torch.ones(count, device=device)
        self._previous_found_inf = torch.zeros((), dtype=torch.float64, device=device)
        groups = self._engine.optimizer.param_groups
        self._rates = torch.zeros(len(groups), device=device)

    def _fill(
        self,
        micro_batches: list[Any],
        first_samples: list[int],
        own_counts: list[list[float]],
        target_counts: list[float],
        previous_found_inf: Tensor | None,
    ) -> None:
        """Sends what differs between steps. The host waits for nothing if its memory is pinned."""
        for inputs, batch in zip(self._inputs, micro_batches, strict=True):
            for name, value in batch.items():
                _send(value, inputs[name])
        _send(torch.tensor(first_samples), self._first_samples)
        _send(torch.tensor([max(total, 1.0) for total in target_counts]), self._totals)
        shares = [counts[0] / max(target_counts[0], 1.0) for counts in own_counts]
        _send(torch.tensor(shares), self._shares)
        groups = self._engine.optimizer.param_groups
        _send(torch.tensor([float(group["lr"]) for group in groups]), self._rates)
        if previous_found_inf is None:
            self._previous_found_inf.zero_()
        else:
            self._previous_found_inf.copy_(previous_found_inf)

    def _record(self) -> bool:
        """Records a step; returns whether it can be recorded."""
        applied = self._engine.counters()
        optimizer = self._engine.optimizer
        launches = optimizer.recording() if isinstance(optimizer, AdamW) else nullcontext([])
        try:
            with launches as tables, self._rates_on_device():
                self._replay, self._results = record_graph(self._device, self._compute)
        except RuntimeError as error:
            self.obstacle = f"it cannot be recorded: {str(error).splitlines()[0]}"
            self._say(self.obstacle)
            optimizer.zero_grad(set_to_none=True)
            return False
        finally:
            self._engine.load_counters(applied)
        for table in tables:
            table.send()
        self._read_by_graph = [tables, dropout_state.capture()]
        return True

    @contextmanager
    def _rates_on_device(self) -> Generator[None]:
        """Within the context, the optimizer reads its rates from the device."""
        groups = self._engine.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, self._rates.unbind(), strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _compute(self) -> GraphResults:
        """Computes a step from the tensors that `_fill` has filled."""
        losses = self._engine.forward_backward(self._compute_loss, len(self._inputs)).double()
        found_inf = losses.isfinite().logical_not().any().double() + self._previous_found_inf
        outcome = self._engine.step(found_inf)
        assert outcome.grad_norm is not None
        return GraphResults(losses, outcome.grad_norm, found_inf)

    def _compute_loss(self, k: int) -> Tensor:
        dropout_state.set(self._arguments.seed, self._first_samples[k])
        names = self._normalizer.arguments
        counts = dict(zip(names, self._totals.unbind(), strict=False))
        masks = find_token_masks(self._inputs[k], self._engine.module)
        with expert_load_counting.over(masks):
            output = self._forward_step({**self._inputs[k], **counts}, self._engine.model, None)
        loss = find_loss(output)
        return loss if names else loss * self._shares[k]

    def _say(self, reason: str) -> None:
        """Tells the user once why steps run without a graph."""
        if reason not in self._told:
            self._told.add(reason)
            self._tell(f"cuda_graph: steps run without a CUDA graph, because {reason}")


def find_obstacle(arguments: TrainingArguments, engine: Engine, device: torch.device) -> str | None:
    """Returns why no step of a run can be a graph, as one clause, or None."""
    if not can_record_graphs(device):
        return f"the model is on {device.type}, and only CUDA devices record graphs"
    if type(engine) is not TorchEngine:
        return f"env_type={arguments.env_type!r} is not 'pytorch', which exchanges nothing"
    if not engine.takes_found_inf:
        return (
            f"precision={arguments.precision!r} with optimizer={arguments.optimizer!r} and "
            f"optimizer_in_backward={arguments.optimizer_in_backward} reads results on the host; use "
            "fp32 or bf16, and adamw"
        )
    if arguments.recompute == "offload":
        return "recompute='offload' copies to the host"
    return None


def describe_inputs(micro_batches: list[Any]) -> Signature | None:
    """Returns the names, shapes and dtypes of the micro-batches; None if not all are tensors."""
    described: list[Any] = []
    for batch in micro_batches:
        if not isinstance(batch, Mapping):
            return None
        own: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        for name, value in batch.items():
            if not isinstance(value, Tensor):
                return None
            own.append((name, tuple(value.shape), value.dtype))
        described.append(tuple(own))
    return tuple(described)


def _send(values: Tensor, target: Tensor) -> None:
    """Copies values of the host to their place on the device, behind what is queued there."""
    if target.is_cuda and not values.is_cuda:
        values = values.pin_memory()
    target.copy_(values, non_blocking=True)
