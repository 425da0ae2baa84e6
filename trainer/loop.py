"""The training loop: fetch, forward, backward, step, and now and then evaluate and save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from ..mpu import dropout_state
from .arguments.training_arguments import TrainingArguments
from .batches.loss_normalization import LossNormalizer, label_problem, loss_of, to_device
from .batches.training_data import Batches
from .checkpointing.model_files import ModelFiles, read_optimizer
from .checkpointing.random_state import random_state_tensors, restore_random_state
from .checkpointing.resume import ResumePoint
from .checkpointing.saver import BackgroundSaver
from .checkpointing.snapshot import TrainerState, take_snapshot
from .engines.engine import Engine, ForwardStep, StepOutcome
from .engines.schedule import LearningRate
from .engines.state import group_changes, group_values, load_group_changes
from .launch.rank_process import StopSignal
from .launch.ranks import Ranks
from .logging.nan_diagnosis import diagnose_non_finite
from .logging.performance import StepProfiler, Throughput


class Reporter(Protocol):
    """Is told what happens; only the first rank's shows it. Open while training runs."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> None: ...

    def training(self, step: int, values: dict[str, float]) -> None: ...

    def evaluation(self, step: int, values: dict[str, float]) -> None: ...

    def saved(self, step: int, folder: Path) -> None: ...

    def notice(self, text: str) -> None: ...


@dataclass
class Parts:
    """What a loop is made of."""

    engine: Engine
    ranks: Ranks
    batches: Batches
    learning_rate: LearningRate
    forward_step: ForwardStep
    normalizer: LossNormalizer
    evaluate: Callable[[], dict[str, float]] | None
    model_files: ModelFiles
    saver: BackgroundSaver
    reporter: Reporter
    profiler: StepProfiler
    extra_files: Path | None = None


class TrainingLoop:
    """Runs optimizer steps. The loss is the mean over the targets of the global batch.

    The p-th sample of step s's global batch has the number `s * global_batch_size + p`, whichever rank and micro-batch
    it falls to; dropout masks follow from it.
    """

    def __init__(
        self, arguments: TrainingArguments, parts: Parts, total_steps: int | None, *, evaluate_last: bool = True
    ) -> None:
        self.arguments, self.parts, self.total_steps = arguments, parts, total_steps
        self.evaluate_last = evaluate_last
        self.ranks, self.engine = parts.ranks, parts.engine
        self.accumulation_steps = arguments.accumulation_steps(self.ranks.dp_size)
        self.global_batch_size = arguments.global_batch(self.ranks.dp_size)
        self.device = next(self.engine.module.parameters()).device
        self.step = 0
        self.best: dict[str, Any] = {}
        self.validation: dict[str, float] = {}
        self.throughput = Throughput(self.device)
        self._first_groups = group_values(self.engine.optimizer)
        self._saved_at: int | None = None
        self._iterator: Any = None
        self._position: dict[str, Any] = {}  # of the data, behind the last whole step

    def resume(self, start: ResumePoint) -> None:
        """Goes on from a checkpoint whose weights the model already has.

        ValueError if the global batch has another size now, since the data's position counts in batches, or if the
        checkpoint is of other data or another optimizer.
        """
        state, folder = start.state, start.folder
        if state.consumed_samples != state.step * self.global_batch_size:
            raise ValueError(
                f"the run was trained with a global batch of {state.consumed_samples // state.step} sequences and "
                f"cannot go on with {self.global_batch_size}; set micro_batch_size and global_batch_size to match"
            )
        kind = type(self.engine.optimizer).__name__
        if state.optimizer and state.optimizer != kind:
            raise ValueError(
                f"the run was trained by {state.optimizer} and cannot go on with {kind}; begin another run with its "
                "weights, by load_dir, load_optim=False and another save_dir"
            )
        self.step, self.validation = state.step, dict(state.validation)
        if start.own:
            self._saved_at = state.step
            self.best = dict(state.best) if state.best.get("name") == self.arguments.save_best else {}
        self.engine.load_counters(state.counters)
        self.engine.load_optimizer_tensors(read_optimizer(folder, self.engine.module, self.ranks))
        self.parts.learning_rate.load_state_dict(state.schedule)
        load_group_changes(self.engine.optimizer, state.groups)
        self.parts.batches.load_state_dict(state.data)

    def run(self) -> None:
        """From the current step to the last; evaluates and saves on the way, and saves at the end.

        On SIGTERM saves, and ends the process with exit code 143; the evaluation that is then left out comes when the
        run goes on.
        """
        arguments, reporter = self.arguments, self.parts.reporter
        self._iterator, self._position = iter(self.parts.batches), self.parts.batches.state_dict()
        with StopSignal() as signalled, self.parts.profiler as profiler:
            if 0 < self.step != self.total_steps and self.step % arguments.eval_interval == 0:
                self._catch_up_on_evaluation()
            while self.total_steps is None or self.step < self.total_steps:
                values, stop = self._train_step(signalled)
                if values is None:
                    break
                self.step += 1
                self._position = self.parts.batches.state_dict()
                profiler.step()
                last = self.step == self.total_steps
                if last or self.step % arguments.log_interval == 0:
                    reporter.training(self.step, values)
                due = last or stop or self.step % arguments.save_interval == 0
                evaluates = self.step % arguments.eval_interval == 0 and not last and not stop
                if self.parts.evaluate and evaluates:
                    due |= self._evaluate()
                if due:
                    self.save()
                if stop:
                    self.parts.saver.wait()
                    reporter.notice(f"stopped by a signal at step {self.step}, which is saved")
                    raise SystemExit(143)
            self._finish()

    def _finish(self) -> None:
        """Saves the last step before it is evaluated, which may fail, or take longer than the machine is lent."""
        if not self.step:
            raise ValueError(f"train_dataset has fewer samples than the {self.global_batch_size} of one optimizer step")
        if self._saved_at != self.step:
            self.save()
        if self.evaluate_last:
            self._catch_up_on_evaluation()
        self.parts.saver.wait()

    def save(self) -> None:
        """Begins to save this step; it is complete after the saver's `wait`."""
        arguments, parts = self.arguments, self.parts
        state = TrainerState(
            step=self.step,
            consumed_samples=self.step * self.global_batch_size,
            data=self._position,
            schedule=parts.learning_rate.state_dict(),
            counters=self.engine.counters(),
            optimizer=type(self.engine.optimizer).__name__,
            groups=group_changes(self._first_groups, group_values(self.engine.optimizer)),
            world_size=self.ranks.world_size,
            validation=self.validation,
            best=self.best,
        )
        parts.saver.wait()
        snapshot = take_snapshot(
            self.engine,
            parts.model_files,
            self.ranks,
            state,
            optimizer=arguments.save_optim,
            random=arguments.save_rng,
            extra_files=parts.extra_files,
        )
        parts.reporter.saved(self.step, parts.saver.save(snapshot))
        self._saved_at = self.step

    def _catch_up_on_evaluation(self) -> None:
        """Evaluates this step unless that was done; a checkpoint of it that is there already learns the values."""
        if self.parts.evaluate is None or self.validation.get("step") == self.step:
            return
        is_best = self._evaluate()
        if self._saved_at == self.step:
            self.parts.saver.amend(self.step, validation=self.validation, best=self.best)
        elif is_best:
            self.save()

    def _evaluate(self) -> bool:
        """Whether this step is the best one so far."""
        assert self.parts.evaluate is not None
        states = random_state_tensors()  # training goes on as if there had been no evaluation
        values = {name: float(value) for name, value in self.parts.evaluate().items()}
        restore_random_state(states)
        self.validation = {"step": self.step, **values}
        self.parts.reporter.evaluation(self.step, values)
        name = self.arguments.save_best
        if name is None:
            return False
        if name not in values:
            raise ValueError(f"save_best={name!r} is none of the validation values: {', '.join(values)}")
        value, best = values[name], self.best.get("value", math.nan)
        if name.endswith(("loss", "perplexity")):
            value, best = -value, -best
        if math.isnan(value) or value <= best:
            return False
        self.best = {"name": name, "value": values[name], "step": self.step}
        return True

    def _train_step(self, signalled: StopSignal) -> tuple[dict[str, float] | None, bool]:
        """One optimizer step: what to report, or None where the data has ended, and whether to stop."""
        started = time.perf_counter()
        parts, engine, ranks = self.parts, self.engine, self.ranks
        engine.module.train()
        micro_batches = list(islice(self._iterator, self.accumulation_steps))
        totals = self._agree_on(micro_batches)
        if totals is None:
            return None, False
        parts.learning_rate.before_step(self.step)
        lr = engine.optimizer.param_groups[0].get("lr")
        share, total, stop = 0.0, 0.0, 0.0
        bad: int | None = None
        outcome: StepOutcome | None = None
        for k, batch in enumerate(micro_batches):
            is_last = k == self.accumulation_steps - 1
            dropout_state.set(self.arguments.seed, self.first_sample(k))
            engine.begin_micro_batch(is_last=is_last)
            batch = to_device(batch, self.device)
            with self.throughput.counting(batch):
                output = parts.forward_step({**batch, **parts.normalizer.model_arguments(totals)}, engine.model, None)
            loss = parts.normalizer.normalize(loss_of(output), batch, totals)
            del output  # what else it holds is freed as the backward pass goes
            engine.backward(loss)
            value = loss.item()
            share += value
            if bad is None and not math.isfinite(value):
                bad = k
            if is_last:
                total, unusable, stop = ranks.sum(
                    share if ranks.tp_rank == 0 else 0.0, float(bad is not None), float(signalled.is_set)
                )
                if unusable:
                    self._raise_non_finite(total, bad, micro_batches, totals)
                parts.saver.wait_for_copy()
            outcome = engine.end_micro_batch()
        parts.learning_rate.after_step()
        assert outcome is not None
        if outcome.applied and outcome.grad_norm is not None and not math.isfinite(outcome.grad_norm):
            raise FloatingPointError(
                f"the gradient norm is {outcome.grad_norm} at step {self.step + 1}, where the loss is {total}; the "
                "last checkpoint is kept"
            )
        values = self._values(total, totals[0], outcome, time.perf_counter() - started)
        return ({**values, "lr": float(lr)} if lr is not None else values), bool(stop)

    def _agree_on(self, micro_batches: list[Any]) -> list[float] | None:
        """The global batch's number of targets of each kind; None if the data of any rank has ended.

        ValueError on every rank if one has labels that the model cannot have.
        """
        ended = len(micro_batches) < self.accumulation_steps
        problem, counts = "", [0.0] * max(1, len(self.parts.normalizer.arguments))
        for k, batch in enumerate(micro_batches):
            problem = problem or label_problem(batch, self.engine.module, self.first_sample(k))
            counts = [a + b for a, b in zip(counts, self.parts.normalizer.count(batch), strict=True)]
        *totals, ends, problems = self.ranks.sum_replicas(*counts, float(ended), float(bool(problem)))
        if problems:
            raise ValueError(problem or "another rank's labels are out of range")
        if ends:
            return None
        if not totals[0]:
            raise ValueError(f"the global batch of step {self.step + 1} has no target: all its labels are -100")
        return totals

    def _raise_non_finite(self, total: float, bad: int | None, micro_batches: list[Any], totals: list[float]) -> None:
        """Ends training before the parameters are touched; every rank runs one micro-batch again to say where."""
        k = bad or 0
        dropout_state.set(self.arguments.seed, self.first_sample(k))
        batch = {**to_device(micro_batches[k], self.device), **self.parts.normalizer.model_arguments(totals)}
        where = diagnose_non_finite(self.engine, self.parts.forward_step, batch)
        first = self.first_sample(k)
        text = (
            f"training samples {first} to {first + self.arguments.micro_batch_size - 1} on rank {self.ranks.rank}: "
            f"{where}"
            if bad is not None
            else ""
        )
        found = next(filter(None, self.ranks.gather(text)))
        raise FloatingPointError(
            f"the loss is {total} at step {self.step + 1}, from {found}; the last checkpoint is kept"
        )

    def first_sample(self, k: int) -> int:
        """Number of the first sample of this rank's k-th micro-batch of this step."""
        size = self.arguments.micro_batch_size
        return self.step * self.global_batch_size + (k * self.ranks.dp_size + self.ranks.dp_rank) * size

    def _values(self, loss: float, targets: float, outcome: StepOutcome, seconds: float) -> dict[str, float]:
        values = {"loss": loss, "tokens_per_second": targets / seconds, "seconds": seconds}
        values |= self.throughput.values(seconds)
        if outcome.grad_norm is not None:
            values["grad_norm"] = outcome.grad_norm
        if self.engine.loss_scale is not None:
            values["loss_scale"] = self.engine.loss_scale
        return values
