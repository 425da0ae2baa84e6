"""Runs the training loop: optimizer steps, and at intervals logs, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .arguments.training_arguments import TrainingArguments
from .batches.loss_normalization import LossNormalizer
from .batches.training_data import Batches
from .checkpointing.extra_files import ExtraFiles
from .checkpointing.model_files import ModelFiles, StoredOptimizer
from .checkpointing.random_state import random_state_tensors, restore_random_state
from .checkpointing.resume import ResumePoint
from .checkpointing.saver import BackgroundSaver
from .checkpointing.snapshot import TrainerState, take_snapshot
from .engines.engine import Engine, ForwardStep
from .engines.schedule import LearningRate
from .engines.state import group_changes, group_values, load_group_changes
from .launch.phase import SAVE, phase
from .launch.ranks import Ranks
from .launch.stop_signal import StopSignal
from .logging.diagnostics import StepProfiler
from .logging.reporter import Reporter
from .step import TrainingStep

# A validation value that ends so, or has one of these names, is best where it is lowest; any other
# where it is highest.
LOWER_IS_BETTER_ENDINGS = ("loss", "perplexity")
LOWER_IS_BETTER = ("mse", "mae", "ter")


@dataclass(eq=False)
class TrainingLoop:
    """Runs the steps of a run, and evaluates, logs and saves between them. See `step.py` for a step
    itself.

    Args:
        evaluate: Returns the validation values; None without validation data.
        total_steps: The last step; None to train until the data ends.
        extra_files: Further files of each checkpoint, such as the tokenizer's.
        evaluate_last: Whether to evaluate after the last step.

    Attributes:
        completed_steps: The number of steps that the run has completed.
        validation: The values of the last evaluation, with its `step`.
        best: The name, value and step of the best evaluation, and how many have followed `since`.
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
    extra_values: Callable[[], dict[str, float]]

    def __post_init__(self) -> None:
        self.training_step = TrainingStep(
            self.arguments,
            self.engine,
            self.ranks,
            self.schedule,
            self.forward_step,
            self.normalizer,
            self.saver,
            self.reporter.notice,
        )
        self.global_batch_size = self.training_step.global_batch_size
        self.completed_steps = 0
        self.best: dict[str, Any] = {}
        self.validation: dict[str, float] = {}
        self._first_groups = group_values(self.engine.optimizer)
        self._saved_at: int | None = None
        self._position: dict[str, Any] = {}  # the data's position after the last complete step

    def resume(self, point: ResumePoint) -> None:
        """Continues from a checkpoint whose weights the model already has.

        Raises ValueError if the checkpoint comes from other data or another optimizer, or if the
        size of the global batch has changed, because the data's position is counted in global
        batches.
        """
        state = point.state
        if state.consumed_samples != state.step * self.global_batch_size:
            trained_with = state.consumed_samples // max(1, state.step)
            raise ValueError(
                f"the run was trained with a global batch of {trained_with} sequences and cannot "
                f"resume with {self.global_batch_size}; set micro_batch_size and global_batch_size "
                "to match"
            )
        kind = type(self.engine.optimizer).__name__
        if state.optimizer and state.optimizer != kind:
            raise ValueError(
                f"the run was trained with {state.optimizer} and cannot resume with {kind}; to "
                "start another run from its weights, set load_dir, load_optim=False and another "
                "save_dir"
            )
        self.completed_steps = state.step
        self.validation = dict(state.validation)
        if point.own:
            self._saved_at = state.step
            if state.best.get("name") == self.arguments.save_best:
                self.best = dict(state.best)
            if self._has_lost_patience():
                self.total_steps = self.completed_steps
        self.training_step.unlogged_losses = list(state.unlogged_losses)
        self.engine.load_counters(state.counters)
        with StoredOptimizer(point.folder, self.engine.module, self.ranks) as tensors:
            self.engine.load_optimizer_tensors(tensors)
        self.schedule.load_state_dict(state.schedule)
        load_group_changes(self.engine.optimizer, state.groups)
        self.batches.load_state_dict(state.data)

    @phase("training step")
    def run(self) -> None:
        """Trains from the current step to the last. Evaluates and saves at intervals, and saves at
        the end.

        On SIGTERM it saves, and ends the process with exit code 143; on SIGHUP, which a closed
        terminal sends, with 129. An evaluation that is skipped for this reason takes place when the
        run resumes.
        """
        arguments = self.arguments
        training_step = self.training_step
        profiler = self.profiler or contextlib.nullcontext()
        iterator = iter(self.batches)
        self._position = self.batches.state_dict()
        with StopSignal(arguments.grace_period) as stop_signal, profiler:
            if (
                0 < self.completed_steps != self.total_steps
                and self.completed_steps % arguments.eval_interval == 0
            ):
                self._catch_up_on_evaluation()
            while self.total_steps is None or self.completed_steps < self.total_steps:
                result = training_step.run(self.completed_steps, iterator, stop_signal)
                if result is None:
                    break
                self.completed_steps += 1
                self._position = self.batches.state_dict()
                if self.profiler:
                    self.profiler.step()
                is_last = self.completed_steps == self.total_steps
                logs = is_last or self.completed_steps % arguments.log_interval == 0
                saves = is_last or self.completed_steps % arguments.save_interval == 0
                evaluates = self.completed_steps % arguments.eval_interval == 0 and not is_last
                # What is logged or saved must be known to be finite.
                if logs or saves or evaluates or training_step.stop_requested:
                    training_step.read_pending()
                if logs:
                    values = training_step.values_to_log(self.completed_steps, result)
                    values |= self.extra_values()
                    self.reporter.training(self.completed_steps, values)
                if self.evaluate and evaluates and not training_step.stop_requested:
                    is_best = self._evaluate()
                    saves = saves or is_best
                if saves or training_step.stop_requested:
                    self.save()
                if training_step.stop_requested:
                    self.saver.wait()
                    self.reporter.notice(
                        f"stopped by a signal after step {self.completed_steps}, which has been "
                        "saved"
                    )
                    raise SystemExit(stop_signal.exit_code)
            # A signal has nothing left to stop here: what remains is the last evaluation and save.
            self._tell_left_out()
            self._finish()

    def _tell_left_out(self) -> None:
        """Says how many samples at the end of the data were too few for another step."""
        total: int | None = getattr(self.batches, "total", None)
        if total is None:
            return
        left = total - self.completed_steps * self.global_batch_size
        if 0 < left < self.global_batch_size:
            self.reporter.notice(
                f"{left} of {total} samples were left out at the end, because a step takes "
                f"{self.global_batch_size}"
            )

    @phase(SAVE)
    def save(self) -> None:
        """Starts saving this step. The checkpoint is complete after the saver's `wait`."""
        groups = group_changes(self._first_groups, group_values(self.engine.optimizer))
        state = TrainerState(
            step=self.completed_steps,
            consumed_samples=self.completed_steps * self.global_batch_size,
            data=self._position,
            schedule=self.schedule.state_dict(),
            rates=self.schedule.next_rates(self.completed_steps),
            counters=self.engine.counters(),
            optimizer=type(self.engine.optimizer).__name__,
            groups=groups,
            world_size=self.ranks.world_size,
            validation=self.validation,
            best=self.best,
            unlogged_losses=list(self.training_step.unlogged_losses),
        )
        self.saver.wait()
        snapshot = take_snapshot(
            self.engine,
            self.model_files,
            self.ranks,
            state,
            optimizer=self.arguments.save_optim,
            random=self.arguments.save_rng,
            extra_files=self.extra_files,
        )
        self.saver.save(snapshot)
        self._saved_at = self.completed_steps

    def _catch_up_on_evaluation(self) -> None:
        """Evaluates this step if that has not been done.

        Adds the values to its checkpoint if that exists already.
        """
        if self.evaluate is None or self.validation.get("step") == self.completed_steps:
            return
        is_best = self._evaluate()
        if self._saved_at == self.completed_steps:
            self.saver.amend(self.completed_steps, validation=self.validation, best=self.best)
        elif is_best:
            self.save()

    @phase("evaluation")
    def _evaluate(self) -> bool:
        """Evaluates; returns whether this step is the best one so far."""
        assert self.evaluate is not None
        # Training continues as if there had been no evaluation.
        random_states = random_state_tensors()
        values = {name: float(value) for name, value in self.evaluate().items()}
        restore_random_state(random_states)
        self.validation = {"step": self.completed_steps, **values}
        self.reporter.evaluation(self.completed_steps, values)

        name = self.arguments.save_best
        if name is None:
            return False
        if name not in values:
            raise ValueError(
                f"save_best={name!r} is not among the validation values: {', '.join(values)}"
            )
        score = values[name]
        best_score = self.best.get("value", math.nan)
        if name.endswith(LOWER_IS_BETTER_ENDINGS) or name in LOWER_IS_BETTER:
            score = -score
            best_score = -best_score
        if math.isnan(score) or score <= best_score:
            if self.arguments.early_stopping_patience is not None:
                self._count_worse_evaluation(name)
            return False
        self.best = {"name": name, "value": values[name], "step": self.completed_steps}
        return True

    def _count_worse_evaluation(self, name: str) -> None:
        """Counts an evaluation that was not the best, and ends the run if there were as many as the
        patience.
        """
        since = self.best.get("since", 0) + 1
        self.best = {**self.best, "since": since}
        if self._has_lost_patience():
            self.reporter.notice(
                f"stopped early after step {self.completed_steps}: {since} evaluations without a "
                f"better {name}"
            )
            self.total_steps = self.completed_steps

    def _has_lost_patience(self) -> bool:
        """Returns whether as many evaluations as the patience have brought nothing better."""
        patience = self.arguments.early_stopping_patience
        return patience is not None and self.best.get("since", 0) >= patience

    def _finish(self) -> None:
        """Saves and evaluates the last step.

        It saves first, because the evaluation may fail or be interrupted.
        """
        if not self.completed_steps:
            raise ValueError(
                f"train_dataset has fewer samples than the {self.global_batch_size} of one "
                "optimizer step"
            )
        self.training_step.read_pending()
        if self._saved_at != self.completed_steps:
            self.save()
        if self.evaluate_last:
            self._catch_up_on_evaluation()
        self.saver.wait()
