"""Runs the training loop: micro-batches, forward, backward, step; logs, evaluates and saves at intervals."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..mpu import dropout_state
from .arguments.training_arguments import TrainingArguments
from .batches.loss_normalization import (
    HostCopy,
    LossNormalizer,
    Uploads,
    label_problem,
    loss_of,
    to_device,
)
from .batches.training_data import Batches
from .checkpointing.extra_files import ExtraFiles
from .checkpointing.model_files import ModelFiles, read_optimizer
from .checkpointing.random_state import random_state_tensors, restore_random_state
from .checkpointing.resume import ResumePoint
from .checkpointing.saver import BackgroundSaver
from .checkpointing.snapshot import TrainerState, take_snapshot
from .engines.engine import Engine, ForwardStep, StepOutcome
from .engines.schedule import LearningRate
from .engines.state import group_changes, group_values, load_group_changes
from .launch.phase import SAVE, phase
from .launch.rank_process import StopSignal
from .launch.ranks import Ranks
from .logging.diagnostics import StepProfiler, Throughput, diagnose_non_finite, memory_by_rank
from .logging.reporter import Reporter


@dataclass(frozen=True)
class StepResult:
    """What the host knows of an optimizer step, whose loss may still be on the device.

    Attributes:
        targets: Number of targets in the global batch.
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
class UnreadStep:
    """What the host has not read of a step whose update is queued.

    Attributes:
        number: The step's number; the first is 1.
        hold: Not 0 if the device held the update back, []; None if the host knew the loss before the update.
        results: The gradient norm. With `hold` then the loss, the number of ranks where it is not finite, the number of
            those that received a signal, and the loss of each of this rank's micro-batches.
    """

    number: int
    micro_batches: list[Any]
    totals: list[float]
    hold: Tensor | None
    results: HostCopy


@dataclass(eq=False)
class TrainingLoop:
    """Runs optimizer steps. The loss is the mean over the targets of the global batch.

    The p-th sample of step s's global batch has the number `s * global_batch_size + p`, whichever rank and micro-batch
    it belongs to. Dropout masks are derived from this number.

    Args:
        evaluate: Returns the validation values; None without validation data.
        total_steps: The last step; None to train until the data ends.
        extra_files: Further files of each checkpoint, such as the tokenizer's.
    """

    arguments: TrainingArguments
    engine: Engine
    ranks: Ranks
    batches: Batches
    schedule: LearningRate
    forward_step: ForwardStep
    normalizer: LossNormalizer
    evaluate: Callable[[], dict[str, float]] | None
    model_files: ModelFiles
    saver: BackgroundSaver
    reporter: Reporter
    profiler: StepProfiler | None
    total_steps: int | None
    extra_files: ExtraFiles
    evaluate_last: bool

    def __post_init__(self) -> None:
        self.accumulation_steps = self.arguments.accumulation_steps(self.ranks.dp_size)
        self.global_batch_size = self.arguments.global_batch(self.ranks.dp_size)
        self.device = next(self.engine.module.parameters()).device
        self.step = 0
        self.best: dict[str, Any] = {}
        self.validation: dict[str, float] = {}
        self.throughput = Throughput(self.device)
        self._distributed = self.ranks.world_size > 1
        self._first_groups = group_values(self.engine.optimizer)
        self._saved_at: int | None = None
        self._iterator: Any = None
        self._position: dict[str, Any] = {}  # the data's position after the last complete step
        self._reads_late = self.device.type != "cpu"
        self._upload_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._unread: UnreadStep | None = None
        self._loss, self._stop = (
            math.nan,
            False,
        )  # the last loss that was read; whether a rank received a signal
        self._ends = (0.0, 0.0)  # when the last two steps ended

    def resume(self, point: ResumePoint) -> None:
        """Continues from a checkpoint whose weights the model already has.

        Raises ValueError if the checkpoint comes from other data or another optimizer, or if the size of the global
        batch has changed, because the data's position is counted in global batches.
        """
        state, folder = point.state, point.folder
        if state.consumed_samples != state.step * self.global_batch_size:
            raise ValueError(
                f"the run was trained with a global batch of {state.consumed_samples // state.step} sequences and "
                f"cannot resume with {self.global_batch_size}; set micro_batch_size and global_batch_size to match"
            )
        kind = type(self.engine.optimizer).__name__
        if state.optimizer and state.optimizer != kind:
            raise ValueError(
                f"the run was trained with {state.optimizer} and cannot resume with {kind}; to start another run from "
                "its weights, set load_dir, load_optim=False and another save_dir"
            )
        self.step, self.validation = state.step, dict(state.validation)
        if point.own:
            self._saved_at = state.step
            self.best = (
                dict(state.best) if state.best.get("name") == self.arguments.save_best else {}
            )
            self.total_steps = self.step if self._is_stale() else self.total_steps
        self.engine.load_counters(state.counters)
        self.engine.load_optimizer_tensors(read_optimizer(folder, self.engine.module, self.ranks))
        self.schedule.load_state_dict(state.schedule)
        load_group_changes(self.engine.optimizer, state.groups)
        self.batches.load_state_dict(state.data)

    @phase("training step")
    def run(self) -> None:
        """Trains from the current step to the last. Evaluates and saves at intervals, and saves at the end.

        On SIGTERM it saves, and ends the process with exit code 143. An evaluation that is skipped for this reason
        takes place when the run resumes.
        """
        arguments, reporter, profiler = self.arguments, self.reporter, self.profiler
        self._iterator, self._position = iter(self.batches), self.batches.state_dict()
        with StopSignal(arguments.grace_period) as signalled, profiler or contextlib.nullcontext():
            if 0 < self.step != self.total_steps and self.step % arguments.eval_interval == 0:
                self._catch_up_on_evaluation()
            while self.total_steps is None or self.step < self.total_steps:
                result = self._train_step(signalled)
                if result is None:
                    break
                self.step += 1
                self._position = self.batches.state_dict()
                if profiler:
                    profiler.step()
                last = self.step == self.total_steps
                logs = last or self.step % arguments.log_interval == 0
                saves = last or self.step % arguments.save_interval == 0
                evaluates = self.step % arguments.eval_interval == 0 and not last
                if logs or saves or evaluates or self._stop:
                    self._read()
                if logs:
                    reporter.training(self.step, self._values(result))
                if self.evaluate and evaluates and not self._stop:
                    saves |= self._evaluate()
                if saves or self._stop:
                    self.save()
                if self._stop:
                    self.saver.wait()
                    reporter.notice(
                        f"stopped by a signal after step {self.step}, which has been saved"
                    )
                    raise SystemExit(143)
            self._finish()

    def _train_step(self, signalled: StopSignal) -> StepResult | None:
        """Runs one optimizer step; returns None if the data has ended.

        If the engine can hold an update back, a GPU gets the next step before the host has read the loss of this one.
        """
        started, engine = time.perf_counter(), self.engine
        engine.module.train()
        with phase("data"):
            micro_batches = list(islice(self._iterator, self.accumulation_steps))
        counts, totals = self._count_targets(micro_batches)
        if totals is None:
            return None
        self.schedule.before_step(self.step)
        lr = engine.optimizer.param_groups[0].get("lr")
        uploads = Uploads(micro_batches, self.device, self._upload_stream)
        losses = engine.forward_backward(
            partial(self._forward, uploads, counts, totals), len(micro_batches)
        ).double()
        hold, results = None, []
        if self._reads_late and engine.can_hold:
            sums = self._sum_on_device(losses, signalled)
            held = self._unread.hold if self._unread else None
            # After a held update all are, so that the host looks for the cause with the weights that it comes from.
            hold, results = sums[1] if held is None else sums[1] + held, [sums, losses]
        else:
            self._read()
            shares = losses.tolist()
            self._accept(
                self.step + 1, micro_batches, totals, self._sum_on_host(shares, signalled), shares
            )
        if not self.saver.copied.is_set():
            self.saver.wait_for_copy()
        with phase("optimizer step"):
            outcome = engine.step(hold)
        self.schedule.after_step()
        if hold is not None:
            self._read()
        norm = outcome.grad_norm
        if outcome.applied and norm is not None:
            copy = HostCopy(torch.cat([norm.double().view(1), *results]))
            self._unread = UnreadStep(self.step + 1, micro_batches, totals, hold, copy)
            if not self._reads_late or norm.device != self.device:
                self._read()
        if hold is None:
            self._ends = self._ends[1], time.perf_counter()
        return StepResult(totals[0], sum(map(_tokens, micro_batches)), lr, outcome, started)

    def _read(self) -> None:
        """Reads what is unread of the last step, once the device has computed it.

        Raises FloatingPointError on every rank if its loss or its gradient norm is not finite.
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return
        norm, *results = unread.results.read()
        if results:
            self._ends = self._ends[1], time.perf_counter()
            self._accept(
                unread.number, unread.micro_batches, unread.totals, results[:3], results[3:]
            )
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm} at step {unread.number}, where the loss is {self._loss}; the last "
                "checkpoint is kept"
            )

    def _accept(
        self,
        step: int,
        micro_batches: list[Any],
        totals: list[float],
        sums: list[float],
        shares: list[float],
    ) -> None:
        """Takes the sums over all ranks of a step's loss, of the ranks where it is not finite, and of signals.

        Raises FloatingPointError on every rank if the loss of one rank is not finite.
        """
        self._loss, unusable, stop = sums
        self._stop = bool(stop)
        if unusable:
            bad = next((k for k, share in enumerate(shares) if not math.isfinite(share)), None)
            self._raise_non_finite(step, bad, micro_batches, totals)

    @phase("forward")
    def _forward(
        self, uploads: Uploads, counts: list[list[float]], totals: list[float], k: int
    ) -> Tensor:
        """Runs the forward pass of micro-batch `k`; returns its share of the step's loss."""
        dropout_state.set(self.arguments.seed, self.first_sample(self.step, k))
        batch = uploads.take(k)
        inputs = {**batch, **self.normalizer.model_arguments(totals)}
        counting = self.throughput.flops_per_token is None and _tokens(batch)
        if counting and self.arguments.torch_compile:
            self._count_without_compiling(inputs, counting)
            counting = 0
        with self.throughput.counting(_tokens(batch)) if counting else contextlib.nullcontext():
            output = self.forward_step(inputs, self.engine.model, None)
        return self.normalizer.normalize(loss_of(output), counts[k], totals)

    def _count_without_compiling(self, inputs: dict[str, Any], tokens: int) -> None:
        """Counts FLOPs in a forward pass of its own: compiled code cannot be watched, nor repeated by other code."""
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

    def _count_targets(
        self, micro_batches: list[Any]
    ) -> tuple[list[list[float]], list[float] | None]:
        """Returns the target counts of each micro-batch and of the global batch, or None if any rank's data has ended.

        Raises ValueError on every rank if one rank's labels are out of range, or if there is no target at all.
        """
        problem, counts = "", []
        for k, batch in enumerate(micro_batches):
            problem = problem or label_problem(
                batch, self.engine.module, self.first_sample(self.step, k)
            )
            counts.append(self.normalizer.count(batch))
        zeros = [0.0] * max(1, len(self.normalizer.arguments))
        own = [sum(column) for column in zip(zeros, *counts, strict=True)]
        sums = [*own, float(len(micro_batches) < self.accumulation_steps), float(bool(problem))]
        *totals, ends, problems = self.ranks.sum_replicas(*sums) if self._distributed else sums
        if problems:
            raise ValueError(problem or "another rank's labels are out of range")
        if ends:
            return counts, None
        if not totals[0]:
            raise ValueError(
                f"the global batch of step {self.step + 1} has no target: all its labels are -100"
            )
        return counts, totals

    def _sum_on_host(self, shares: list[float], signalled: StopSignal) -> list[float]:
        """Returns the sums that `_accept` takes. Runs one collective."""
        bad = not all(map(math.isfinite, shares))
        sums = [sum(shares) if self.ranks.reports else 0.0, float(bad), float(signalled.is_set)]
        return self.ranks.sum(*sums) if self._distributed else sums

    def _sum_on_device(self, losses: Tensor, signalled: StopSignal) -> Tensor:
        """Returns the same sums, fp64 [3], without waiting for the device."""
        bad = losses.isfinite().logical_not().any()
        sums = torch.stack(
            [losses.sum() * self.ranks.reports, bad.double(), bad.double().fill_(signalled.is_set)]
        )
        return self.ranks.sum_on_device(sums)

    def _raise_non_finite(
        self, step: int, bad: int | None, micro_batches: list[Any], totals: list[float]
    ) -> None:
        """Ends training before the parameters change. Every rank repeats a forward pass to find the cause."""
        replicas = self.ranks.gather((self.ranks.dp_rank, bad))
        of_own = [
            number
            for replica, number in replicas
            if replica == self.ranks.dp_rank and number is not None
        ]
        k = of_own[0] if of_own else 0
        first = self.first_sample(step - 1, k)
        dropout_state.set(self.arguments.seed, first)
        batch = {
            **to_device(micro_batches[k], self.device),
            **self.normalizer.model_arguments(totals),
        }
        where = diagnose_non_finite(self.engine, self.forward_step, batch, self.ranks)
        last = first + self.arguments.micro_batch_size - 1
        samples = f"training samples {first} to {last} on rank {self.ranks.rank}"
        # By rank, so of a pipeline the first stage where something is not finite.
        texts = self.ranks.gather(f"{samples}: {where}" if of_own and where else "")
        texts += self.ranks.gather(
            f"{samples}: the loss alone is not finite" if bad is not None else ""
        )
        found = next(filter(None, texts))
        raise FloatingPointError(
            f"the loss is {self._loss} at step {step}, from {found}; the last checkpoint is kept"
        )

    def first_sample(self, steps: int, k: int) -> int:
        """Returns the number of the first sample of this rank's k-th micro-batch after `steps` steps."""
        size = self.arguments.micro_batch_size
        return steps * self.global_batch_size + (k * self.ranks.dp_size + self.ranks.dp_rank) * size

    def _values(self, result: StepResult) -> dict[str, float]:
        """Returns the values to log for a step."""
        outcome, seconds = result.outcome, self._ends[1] - max(result.started, self._ends[0])
        values = {
            "loss": self._loss,
            "tokens_per_second": result.targets / seconds,
            "seconds": seconds,
        }
        values |= {
            "samples": self.step * self.global_batch_size,
            "samples_per_second": self.global_batch_size / seconds,
        }
        values |= {
            **self.throughput.values(result.tokens, seconds),
            **memory_by_rank(self.device, self.ranks),
        }
        if outcome.grad_norm is not None:
            values["grad_norm"] = float(outcome.grad_norm)
        if self.engine.loss_scale is not None:
            values["loss_scale"] = self.engine.loss_scale
        return {**values, "lr": float(result.lr)} if result.lr is not None else values

    @phase(SAVE)
    def save(self) -> None:
        """Starts saving this step. The checkpoint is complete after the saver's `wait`."""
        arguments = self.arguments
        state = TrainerState(
            step=self.step,
            consumed_samples=self.step * self.global_batch_size,
            data=self._position,
            schedule=self.schedule.state_dict(),
            counters=self.engine.counters(),
            optimizer=type(self.engine.optimizer).__name__,
            groups=group_changes(self._first_groups, group_values(self.engine.optimizer)),
            world_size=self.ranks.world_size,
            validation=self.validation,
            best=self.best,
        )
        self.saver.wait()
        snapshot = take_snapshot(
            self.engine,
            self.model_files,
            self.ranks,
            state,
            optimizer=arguments.save_optim,
            random=arguments.save_rng,
            extra_files=self.extra_files,
        )
        self.reporter.saved(self.step, self.saver.save(snapshot))
        self._saved_at = self.step

    def _catch_up_on_evaluation(self) -> None:
        """Evaluates this step if that has not been done. Adds the values to its checkpoint if that exists already."""
        if self.evaluate is None or self.validation.get("step") == self.step:
            return
        is_best = self._evaluate()
        if self._saved_at == self.step:
            self.saver.amend(self.step, validation=self.validation, best=self.best)
        elif is_best:
            self.save()

    @phase("evaluation")
    def _evaluate(self) -> bool:
        """Evaluates; returns whether this step is the best one so far."""
        assert self.evaluate is not None
        states = random_state_tensors()  # training continues as if there had been no evaluation
        values = {name: float(value) for name, value in self.evaluate().items()}
        restore_random_state(states)
        self.validation = {"step": self.step, **values}
        self.reporter.evaluation(self.step, values)
        name = self.arguments.save_best
        if name is None:
            return False
        if name not in values:
            raise ValueError(
                f"save_best={name!r} is not among the validation values: {', '.join(values)}"
            )
        value, best = values[name], self.best.get("value", math.nan)
        if name.endswith(("loss", "perplexity")) or name in ("mse", "mae", "ter"):
            value, best = -value, -best
        if math.isnan(value) or value <= best:
            if self.arguments.early_stopping_patience is not None:
                self._count_stale_evaluation(name)
            return False
        self.best = {"name": name, "value": values[name], "step": self.step}
        return True

    def _count_stale_evaluation(self, name: str) -> None:
        """Counts an evaluation that was not the best, and ends the run if there were as many as the patience."""
        since = self.best.get("since", 0) + 1
        self.best = {**self.best, "since": since}
        if self._is_stale():
            self.reporter.notice(
                f"stopped early after step {self.step}: {since} evaluations without a better {name}"
            )
            self.total_steps = self.step

    def _is_stale(self) -> bool:
        """Returns whether as many evaluations as the patience have brought nothing better."""
        patience = self.arguments.early_stopping_patience
        return patience is not None and self.best.get("since", 0) >= patience

    def _finish(self) -> None:
        """Saves and evaluates the last step. It saves first, because the evaluation may fail or be interrupted."""
        if not self.step:
            raise ValueError(
                f"train_dataset has fewer samples than the {self.global_batch_size} of one optimizer step"
            )
        self._read()
        if self._saved_at != self.step:
            self.save()
        if self.evaluate_last:
            self._catch_up_on_evaluation()
        self.saver.wait()


def _tokens(batch: dict[str, Any]) -> int:
    ids = batch.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else 0
