"""Runs one optimizer step: upload, count targets, forward and backward, reduce, clip, update, log.

`TrainingStep.run` is the whole step, from top to bottom. The rest of this file is what it uses.

**Pending steps.** A GPU computes what the host has queued. If the host read the loss of a step
before it queued the update, the GPU would stand idle for as long as the host needs to go on. So on
a GPU the loss stays there: `found_inf`, a number on the GPU, tells the optimizer to skip an update
whose loss is not finite, as in `torch.amp.GradScaler`. The step is then *pending*. The host reads
its results one step later, when the GPU already has its next work, or earlier if they are to be
logged or the weights are to be saved. On a CPU, and with optimizers that do not know `found_inf`,
the host reads the loss before the update.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from ..models.blocks.corrected_moe import CorrectionUpdate
from ..mpu import dropout_state, expert_load_counting
from ..ops.device import computes_on_host, make_copy_stream, pins_host_memory
from .arguments.training_arguments import TrainingArguments
from .batches.loss_normalization import LossNormalizer, describe_label_problem, find_loss, to_device
from .checkpointing.saver import BackgroundSaver
from .engines.engine import Engine, ForwardStep, StepOutcome
from .engines.schedule import LearningRate
from .launch.phase import phase
from .launch.ranks import Ranks
from .launch.stop_signal import StopSignal
from .logging.diagnostics import Throughput, diagnose_non_finite, memory_by_rank
from .logging.expert_load import ExpertLoad, find_token_masks
from .step_graph import GraphResults, StepGraph


@dataclass(frozen=True)
class StepResult:
    """What the host knows of a step when its update is queued. Its loss may still be on the device.

    Attributes:
        targets: Number of target tokens in the global batch.
        tokens: Number of input ids on this rank.
        lr: Learning rate of the first parameter group, if it has one.
        started: When the step began, as `time.perf_counter` returns it.
    """

    targets: float
    tokens: int
    lr: float | None
    outcome: StepOutcome
    started: float


@dataclass(frozen=True)
class PendingStep:
    """A step whose update is queued, and whose results the host has not read.

    Attributes:
        number: The step's number; the first is 1.
        target_counts: Target counts of the global batch.
        found_inf: Not 0 if the device has skipped the update, []; None if the host knew the loss
            before the update.
        results: The gradient norm. If `found_inf` is not None, then also the three sums over all
            ranks that `TrainingStep._sum_on_device` describes, and the loss of each of this rank's
            micro-batches.
    """

    number: int
    micro_batches: list[Any]
    target_counts: list[float]
    found_inf: Tensor | None
    results: HostCopy


class TrainingStep:
    """Runs the optimizer steps of a run, one a call. The loss is the mean over the targets of the
    global batch.

    The p-th sample of step s's global batch has the number `s * global_batch_size + p`, whichever
    rank and micro-batch it belongs to. Dropout masks are derived from this number.

    Attributes:
        loss: The loss of the last step that was read; NaN before the first.
        unlogged_losses: The losses of the steps since the last logged one.
        stop_requested: Whether any rank had received a signal to stop by the last step that was
            read.
        pending: The last step, if the host has not read its results.
    """

    def __init__(
        self,
        arguments: TrainingArguments,
        engine: Engine,
        ranks: Ranks,
        schedule: LearningRate,
        forward_step: ForwardStep,
        normalizer: LossNormalizer,
        saver: BackgroundSaver,
        tell: Callable[[str], None],
    ) -> None:
        self.arguments = arguments
        self.engine = engine
        self.ranks = ranks
        self.schedule = schedule
        self.forward_step = forward_step
        self.normalizer = normalizer
        self.saver = saver
        mesh = getattr(engine.module, "mesh", None)
        self.corrections = CorrectionUpdate(engine.module, arguments.router_bias_update_rate, mesh)
        self.accumulation_steps = arguments.accumulation_steps(ranks.dp_size)
        self.global_batch_size = arguments.global_batch(ranks.dp_size)
        self.device = next(engine.module.parameters()).device
        self.throughput = Throughput(self.device)
        self.expert_load = ExpertLoad(engine.module, ranks, self.device)
        self.reads_late = not computes_on_host(self.device)
        self.copy_stream = make_copy_stream(self.device)
        self.graph: StepGraph | None = None
        if arguments.cuda_graph:
            self.graph = StepGraph(arguments, engine, forward_step, normalizer, self.device, tell)
        self.pending: PendingStep | None = None
        self.loss = math.nan
        self.unlogged_losses: list[float] = []
        self.stop_requested = False
        self._end = 0.0  # when the last step ended whose results were read
        self._previous_end = 0.0

    def run(self, step: int, batches: Iterator[Any], stop_signal: StopSignal) -> StepResult | None:
        """Runs the step that follows `step` steps; returns None if the data of any rank has ended.
        Collective.

        Raises:
            FloatingPointError: On every rank, if the loss or the gradient norm of this step is not
                finite; if results are read late, it is of the step before.
            ValueError: On every rank, if the labels of any rank are out of range or there are none.
        """
        started = time.perf_counter()
        engine = self.engine
        engine.module.train()

        # Upload. The first micro-batch begins its way to the device; each other one does so while
        # its predecessor is computed.
        with phase("data"):
            micro_batches = list(islice(batches, self.accumulation_steps))
        sent = micro_batches if self.graph is None else []
        on_device = DevicePrefetcher(sent, self.device, self.copy_stream)

        # Count targets. The loss is a mean over the targets of the global batch, so their number
        # must be known before the first forward pass. The first all-reduce of the step sums the
        # counts of the ranks.
        own_counts, target_counts = self._count_targets(step, micro_batches)
        if target_counts is None:
            return None

        self.schedule.before_step(step)
        lr = engine.optimizer.param_groups[0].get("lr")

        # Forward and backward passes of all micro-batches. The engine decides about their order,
        # because the stages of a pipeline take turns. Each loss is this rank's share of the step's
        # loss, so gradients just add up. A recorded step has all this and its update in one graph.
        recorded: GraphResults | None = None
        if self.graph is not None:
            recorded = self._run_recorded(
                self.graph, step, micro_batches, own_counts, target_counts
            )
            if recorded is None:
                on_device = DevicePrefetcher(micro_batches, self.device, self.copy_stream)

        @phase("forward")
        def forward(k: int) -> Tensor:
            dropout_state.set(self.arguments.seed, self.first_sample(step, k))
            inputs = {**on_device.get(k), **self.normalizer.model_arguments(target_counts)}
            masks = find_token_masks(inputs, engine.module)
            with self._flops_counted_once(inputs), expert_load_counting.over(masks):
                output = self.forward_step(inputs, engine.model, None)
            return self.normalizer.normalize(find_loss(output), own_counts[k], target_counts)

        if engine.updates_in_backward:
            self._wait_for_saver()
        if recorded is not None:
            losses = recorded.losses
        else:
            losses = engine.forward_backward(
                forward, len(micro_batches)
            ).double()  # [micro-batches]

        # Reduce. The engine has already summed the gradients over the data-parallel ranks. The
        # second all-reduce of the step sums the loss, and lets all ranks decide alike whether to
        # update, and whether to stop.
        found_inf: Tensor | None = None
        late_results: list[Tensor] = []
        if recorded is not None:
            found_inf = recorded.found_inf
            late_results = [self._sum_on_device(losses, stop_signal), losses]
        elif self.reads_late and engine.takes_found_inf:
            sums = self._sum_on_device(losses, stop_signal)
            found_inf = sums[1]
            # Once one update has been skipped, skip all later ones too: the weights that produced
            # the bad loss must still be there when we diagnose it.
            if self.pending is not None and self.pending.found_inf is not None:
                found_inf = found_inf + self.pending.found_inf
            late_results = [sums, losses]
        else:
            self.read_pending()
            own_losses = losses.tolist()
            host_sums = self._sum_on_host(own_losses, stop_signal)
            self._take_losses(step + 1, micro_batches, target_counts, host_sums, own_losses)

        self._wait_for_saver()

        # Clip and update.
        if recorded is not None:
            outcome = StepOutcome(recorded.grad_norm, applied=True)
        else:
            with phase("optimizer step"):
                outcome = engine.step(found_inf)
        if outcome.applied:
            self.corrections.apply(found_inf)
        self.schedule.after_step()

        # Log. Now that the device has this step's work, the host has time to read the results of
        # the step before. Those of this step become pending. Reading the gradient norm at once
        # costs nothing if it is on the host already.
        if found_inf is not None:
            self.read_pending()
        norm = outcome.grad_norm
        if outcome.applied and norm is not None:
            results = HostCopy(torch.cat([norm.double().view(1), *late_results]))
            self.pending = PendingStep(step + 1, micro_batches, target_counts, found_inf, results)
            if not self.reads_late or norm.device != self.device:
                self.read_pending()
        if found_inf is None:
            self._note_end()
        tokens = sum(count_tokens(batch) for batch in micro_batches)
        return StepResult(target_counts[0], tokens, lr, outcome, started)

    def _run_recorded(
        self,
        graph: StepGraph,
        step: int,
        micro_batches: list[Any],
        own_counts: list[list[float]],
        target_counts: list[float],
    ) -> GraphResults | None:
        """Queues the passes and the update of a step as a graph; returns None if they are to be
        computed without one.
        """
        if not graph.takes(micro_batches):
            return None
        self._wait_for_saver()
        first_samples = [self.first_sample(step, k) for k in range(len(micro_batches))]
        found_inf = None if self.pending is None else self.pending.found_inf
        with phase("optimizer step"):
            return graph.run(micro_batches, first_samples, own_counts, target_counts, found_inf)

    def read_pending(self) -> None:
        """Reads the results of the pending step, if there is one. Waits until the device has
        computed them.

        Raises FloatingPointError on every rank if its loss or its gradient norm is not finite.
        """
        pending = self.pending
        self.pending = None
        if pending is None:
            return
        norm, *results = pending.results.read()
        if pending.found_inf is not None:
            self._note_end()
            sums = results[:3]
            own_losses = results[3:]
            self._take_losses(
                pending.number, pending.micro_batches, pending.target_counts, sums, own_losses
            )
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm} at step {pending.number}, where the loss is "
                f"{self.loss}; the last checkpoint is kept"
            )

    def values_to_log(self, step: int, result: StepResult) -> dict[str, float]:
        """Returns the values to log for step number `step`, whose results have been read.

        Collective.
        """
        seconds = self._end - max(result.started, self._previous_end)
        unlogged = self.unlogged_losses or [self.loss]
        self.unlogged_losses = []
        values = {
            "loss": self.loss,
            "mean_loss": math.fsum(unlogged) / len(unlogged),
            "tokens_per_second": result.targets / seconds,
            "seconds": seconds,
            "samples": step * self.global_batch_size,
            "samples_per_second": self.global_batch_size / seconds,
            **self.throughput.values(result.tokens, seconds),
            **memory_by_rank(self.device, self.ranks),
            **self.expert_load.read(),
        }
        if result.outcome.grad_norm is not None:
            values["grad_norm"] = float(result.outcome.grad_norm)
        if self.engine.loss_scale is not None:
            values["loss_scale"] = self.engine.loss_scale
        if result.lr is not None:
            values["lr"] = float(result.lr)
        return values

    def first_sample(self, steps: int, k: int) -> int:
        """Returns the number of the first sample of this rank's k-th micro-batch after `steps`
        steps.
        """
        size = self.arguments.micro_batch_size
        return steps * self.global_batch_size + (k * self.ranks.dp_size + self.ranks.dp_rank) * size

    def _count_targets(
        self, step: int, micro_batches: list[Any]
    ) -> tuple[list[list[float]], list[float] | None]:
        """Returns the target counts of each micro-batch, and those of the global batch. Runs one
        all-reduce.

        The second is None if any rank has too few micro-batches, because its data has ended.

        Raises ValueError on every rank if one rank's labels are out of range, or if there is no
        target at all.
        """
        problem = ""
        own_counts: list[list[float]] = []
        for k, batch in enumerate(micro_batches):
            problem = problem or describe_label_problem(
                batch, self.engine.module, self.first_sample(step, k)
            )
            own_counts.append(self.normalizer.count(batch))
        zeros = [0.0] * max(1, len(self.normalizer.arguments))
        own_sums = [sum(column) for column in zip(zeros, *own_counts, strict=True)]
        *totals, ended, problems = self.ranks.sum_replicas(
            *own_sums, float(len(micro_batches) < self.accumulation_steps), float(bool(problem))
        )
        if problems:
            raise ValueError(problem or "another rank's labels are out of range")
        if ended:
            return own_counts, None
        if not totals[0]:
            raise ValueError(
                f"the global batch of step {step + 1} has no target: all its labels are -100"
            )
        return own_counts, totals

    def _sum_on_host(self, own_losses: list[float], stop_signal: StopSignal) -> list[float]:
        """Returns sums over all ranks: the loss, the ranks with a loss that is not finite, those
        with a signal.
        """
        loss = sum(own_losses) if self.ranks.reports else 0.0
        is_bad = not all(math.isfinite(own) for own in own_losses)
        return self.ranks.sum(loss, float(is_bad), float(stop_signal.is_set))

    def _sum_on_device(self, losses: Tensor, stop_signal: StopSignal) -> Tensor:
        """Returns the sums of `_sum_on_host`, fp64 [3], without waiting for the device."""
        loss = losses.sum() * self.ranks.reports
        is_bad = losses.isfinite().logical_not().any().double()
        is_stopped = torch.full_like(is_bad, stop_signal.is_set)
        return self.ranks.sum_on_device(torch.stack([loss, is_bad, is_stopped]))

    def _take_losses(
        self,
        number: int,
        micro_batches: list[Any],
        target_counts: list[float],
        sums: list[float],
        own_losses: list[float],
    ) -> None:
        """Takes the sums of `_sum_on_host`.

        Raises FloatingPointError on every rank if the loss of one is not finite.
        """
        loss, bad_ranks, stopped_ranks = sums
        self.loss = loss
        self.unlogged_losses.append(loss)
        self.stop_requested = bool(stopped_ranks)
        if bad_ranks:
            self._raise_non_finite(number, micro_batches, target_counts, own_losses)

    def _raise_non_finite(
        self,
        number: int,
        micro_batches: list[Any],
        target_counts: list[float],
        own_losses: list[float],
    ) -> None:
        """Raises FloatingPointError with the cause.

        Every rank repeats a forward pass, because it may be collective.
        """
        bad = next((k for k, loss in enumerate(own_losses) if not math.isfinite(loss)), None)
        # The ranks of one replica repeat the same micro-batch, also those whose own loss is finite.
        bad_of_ranks = self.ranks.gather((self.ranks.dp_rank, bad))
        bad_of_replica = [
            k for dp_rank, k in bad_of_ranks if dp_rank == self.ranks.dp_rank and k is not None
        ]
        k = bad_of_replica[0] if bad_of_replica else 0
        first = self.first_sample(number - 1, k)
        dropout_state.set(self.arguments.seed, first)
        inputs = {
            **to_device(micro_batches[k], self.device),
            **self.normalizer.model_arguments(target_counts),
        }
        where = diagnose_non_finite(self.engine, self.forward_step, inputs, self.ranks)
        last = first + self.arguments.micro_batch_size - 1
        samples = f"training samples {first} to {last} on rank {self.ranks.rank}"
        found = f"{samples}: {where}" if bad_of_replica and where else ""
        fallback = f"{samples}: the loss alone is not finite" if bad is not None else ""
        # In the order of the ranks, so of a pipeline this is the first stage where something is not
        # finite.
        causes = [*self.ranks.gather(found), *self.ranks.gather(fallback)]
        cause = next(text for text in causes if text)
        raise FloatingPointError(
            f"the loss is {self.loss} at step {number}, from {cause}; the last checkpoint is kept"
        )

    @contextlib.contextmanager
    def _flops_counted_once(self, inputs: dict[str, Any]) -> Generator[None]:
        """Counts the FLOPs of the enclosed forward pass, if it is the run's first one."""
        tokens = count_tokens(inputs)
        if self.throughput.flops_per_token is not None or not tokens:
            yield
        elif self.arguments.torch_compile:
            # Compiled code cannot be watched, nor repeated by other code, so count in a forward
            # pass of its own.
            key = dropout_state.capture()
            eager = torch.compiler.set_stance("force_eager")
            with (
                dropout_state.replay(key),
                torch.random.fork_rng(),
                torch.no_grad(),
                eager,
                self.throughput.counting(tokens),
            ):
                self.forward_step(inputs, self.engine.model, None)
            yield
        else:
            with self.throughput.counting(tokens):
                yield

    def _wait_for_saver(self) -> None:
        """Waits until the saver has copied the weights of the last checkpoint, which an update is
        about to change.
        """
        if not self.saver.copied.is_set():
            self.saver.wait_for_copy()

    def _note_end(self) -> None:
        """Notes the time as that at which a step has ended, so far as the host knows."""
        self._previous_end = self._end
        self._end = time.perf_counter()


class DevicePrefetcher:
    """Brings the micro-batches of a step to the device, in their order.

    A GPU copies a micro-batch on a stream of its own while it computes the one before it.
    """

    def __init__(
        self,
        micro_batches: Sequence[Any],
        device: torch.device,
        copy_stream: torch.cuda.Stream | None,
    ) -> None:
        self._micro_batches = micro_batches
        self._device = device
        self._copy_stream = copy_stream
        self._copies: dict[int, tuple[dict[str, Any], Any]] = {}
        self._start_copy(0)

    def get(self, k: int) -> dict[str, Any]:
        """Returns micro-batch `k` on the device, and starts to copy the next one."""
        if self._copy_stream is None:
            return to_device(self._micro_batches[k], self._device)
        self._start_copy(k)
        batch, copied = self._copies.pop(k)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)
        _keep_for(computing, batch)
        self._start_copy(k + 1)
        return batch

    def _start_copy(self, k: int) -> None:
        if self._copy_stream is None or k in self._copies or k >= len(self._micro_batches):
            return
        with torch.cuda.stream(self._copy_stream):
            batch = to_device(self._micro_batches[k], self._device)
            self._copies[k] = (batch, self._copy_stream.record_event())


def _keep_for(stream: torch.cuda.Stream, batch: Mapping[str, Any]) -> None:
    """Lets the memory of a batch not be used again before a stream has read it."""
    for value in batch.values():
        if isinstance(value, Tensor):
            value.record_stream(stream)
        elif isinstance(value, Mapping):
            _keep_for(stream, cast(Mapping[str, Any], value))


class HostCopy:
    """The values of a tensor on their way to the host.

    From a GPU the copy is queued behind the work that computes the values. Reading waits for that
    work alone, and not for what is queued later.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._arrived: torch.cuda.Event | None = None
        if pins_host_memory(values.device):
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[float]:
        """Returns the values. Waits until they have been computed and copied."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


def count_tokens(batch: dict[str, Any]) -> int:
    """Returns the number of input ids in a batch."""
    ids = batch.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else 0
