"""The training loop: fetch, forward, backward, step, and now and then evaluate and save."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from ..models.common.causal_lm import CausalLM
from ..mpu import ParallelMesh, dropout_state
from .arguments import TrainingArguments
from .batches import Batch, collate
from .checkpoint import TrainerState, load_checkpoint, save_checkpoint
from .coordination import sum_over
from .deepspeed_engine import DeepSpeedEngine
from .evaluation import evaluate
from .run_folder import RunFolder
from .schedule import warmup_cosine


class Dataset(Protocol):
    """Sample `i` is a function of `i` alone; there is one for every i."""

    def __getitem__(self, index: int) -> Batch: ...


class HeldOut(Dataset, Protocol):
    """Samples of which there are a certain number."""

    def __len__(self) -> int: ...


class Reporter(Protocol):
    """Is told what happens; only the first rank's shows it. Open while training runs."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> None: ...

    def training(self, step: int, values: dict[str, float]) -> None: ...

    def evaluation(self, step: int, loss: float) -> None: ...

    def saved(self, step: int, folder: Path) -> None: ...


class Trainer:
    """Trains a model of the zoo with the DeepSpeed engine.

    A step's batch is a function of the step alone: sample `step * global_batch_size + p` is the p-th of the global
    batch, whichever rank and micro-batch it falls to. The loss is the mean over the targets of the global batch.
    """

    def __init__(
        self,
        model: CausalLM,
        arguments: TrainingArguments,
        mesh: ParallelMesh,
        *,
        train_data: Dataset,
        valid_data: HeldOut,
        run_folder: RunFolder,
        reporter: Reporter,
        tokenizer: Path | None = None,
    ) -> None:
        self.model, self.arguments, self.mesh = model, arguments, mesh
        self.train_data, self.valid_data = train_data, valid_data
        self.run_folder, self.reporter, self.tokenizer = run_folder, reporter, tokenizer
        self.device = next(model.parameters()).device
        self.engine = DeepSpeedEngine(model, arguments, mesh)
        self.accumulation_steps = arguments.accumulation_steps(mesh.dp_size)
        self.global_batch_size = arguments.micro_batch_size * self.accumulation_steps * mesh.dp_size
        self.step = 0

    def resume(self, step: int) -> None:
        """Goes on from a checkpoint whose weights the model already has.

        ValueError if the global batch has another size now, since the data's position counts in batches.
        """
        state = load_checkpoint(self.run_folder.checkpoint(step), self.engine, self.mesh)
        if state.consumed_samples != state.step * self.global_batch_size:
            raise ValueError(
                f"the run was trained with a global batch of {state.consumed_samples // state.step} sequences and "
                f"cannot go on with {self.global_batch_size}; set micro_batch_size and global_batch_size to match"
            )
        self.step = state.step

    def train(self) -> None:
        """Runs from the current step to the last; evaluates and saves on the way and at the end."""
        arguments = self.arguments
        while self.step < arguments.train_steps:
            values = self._train_step()
            self.step += 1
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(
                    f"the loss is {values['loss']} at step {self.step}; the last checkpoint is kept"
                )
            last = self.step == arguments.train_steps
            if last or self.step % arguments.log_interval == 0:
                self.reporter.training(self.step, values)
            if not last and self.step % arguments.eval_interval == 0:
                self.reporter.evaluation(self.step, self.evaluate(arguments.eval_sequences))
            if last or self.step % arguments.save_interval == 0:
                self.save()

    def evaluate(self, sequences: int | None = None) -> float:
        """Held-out loss in nats per token, on the first `sequences` held-out sequences or on all."""
        data = [self.valid_data[i] for i in range(len(self.valid_data))[:sequences]]
        return evaluate(self.engine.module, data, self.mesh, self.arguments.micro_batch_size)

    def save(self) -> None:
        folder = self.run_folder.checkpoint(self.step)
        state = TrainerState(self.step, self.step * self.global_batch_size)
        save_checkpoint(folder, self.engine, self.model.config, self.mesh, state, self.tokenizer)
        self.reporter.saved(self.step, folder)

    def _train_step(self) -> dict[str, float]:
        started = time.perf_counter()
        self.engine.module.train()
        micro_batches = list(self._micro_batches())
        targets = torch.stack([self.model.count_targets(batch["labels"]) for batch in micro_batches]).sum()
        (total_targets,) = sum_over(self.mesh.dp_group, float(targets))
        lr = self._learning_rate()
        share, norm = 0.0, None
        for k, batch in enumerate(micro_batches):
            dropout_state.set(self.arguments.seed, self._first_sample(k))
            loss = self.engine.forward(**batch, num_items_in_batch=total_targets).loss
            self.engine.backward(loss)
            share += loss.item()
            norm = self.engine.end_micro_batch(lr)
        (loss,) = sum_over(self.mesh.dp_group, share)
        seconds = time.perf_counter() - started
        values = {"loss": loss, "lr": lr, "tokens_per_second": total_targets / seconds}
        return values if norm is None else {**values, "grad_norm": norm}

    def _micro_batches(self) -> Iterator[Batch]:
        for k in range(self.accumulation_steps):
            first = self._first_sample(k)
            samples = [self.train_data[first + i] for i in range(self.arguments.micro_batch_size)]
            yield collate(samples, self.device)

    def _first_sample(self, k: int) -> int:
        """Index of the first sample of this rank's k-th micro-batch of this step."""
        size = self.arguments.micro_batch_size
        return self.step * self.global_batch_size + (k * self.mesh.dp_size + self.mesh.dp_rank) * size

    def _learning_rate(self) -> float:
        arguments = self.arguments
        return warmup_cosine(
            self.step,
            peak=arguments.lr,
            warmup_steps=arguments.warmup_steps,
            total_steps=arguments.train_steps,
        )
