"""`Trainer`: one object that trains a model of the zoo or of transformers, on one process or on many."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..data import Share
from ..mpu import ParallelMesh
from .arguments.training_arguments import TrainingArguments
from .batches.collate import DefaultCollate
from .batches.loss_normalization import LossNormalizer
from .batches.training_data import make_training_data
from .checkpointing.model_files import model_files
from .checkpointing.random_state import seed_everything
from .checkpointing.resume import ResumePoint, open_run, restore_random
from .checkpointing.saver import BackgroundSaver
from .engines.deepspeed_config import zero_stage
from .engines.engine import Engine
from .engines.optimizers import check_optimizer, make_optimizer
from .engines.precision import prepare_model
from .engines.schedule import make_schedule
from .evaluation import Metric, check_samples, evaluate, metric_functions
from .launch.environment import initialize_distributed, keep_freed_memory, single_device
from .launch.launch import ensure_processes_of
from .launch.ranks import Ranks, on_first_rank
from .logging.performance import StepProfiler
from .logging.report import write_report
from .logging.reporter import MetricsFile, Reporter, RunReporter, SilentReporter, TensorBoard, WeightsAndBiases
from .loop import TrainingLoop
from .run_folder import RunFolder


class Trainer:
    """Trains with the engine that `env_type` names.

        trainer = Trainer(env_type="deepspeed+mpu", model_parallel_size=2, num_gpus=2, epochs=1, batch_size=4)
        model = shardzoo.from_pretrained(path, mesh=trainer.mesh)
        trainer.train(model, train_dataset=samples)

    Made from `TrainingArguments`, or from its fields and FlagAI's names as keywords. Where processes are missing, it
    starts them, waits for them, and ends this one with their exit code; what follows then runs in each of them.

    mesh: one that was made before; by default a new one, or None in one process.
    """

    def __init__(
        self, arguments: TrainingArguments | None = None, *, mesh: ParallelMesh | None = None, **keywords: Any
    ) -> None:
        if arguments is not None and keywords:
            raise ValueError(f"pass TrainingArguments or keywords ({', '.join(keywords)}), not both")
        if not isinstance(arguments, TrainingArguments | None):
            raise ValueError(
                f"pass TrainingArguments, or keywords as in Trainer(lr=1e-3), not a {type(arguments).__name__}"
            )
        self.arguments = arguments or TrainingArguments(**keywords)
        if self.arguments.env_type.startswith("deepspeed"):
            zero_stage(self.arguments)
        self.mesh, self.device = self._join(mesh)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.ranks = Ranks(self.mesh)
        name = self.arguments.experiment_name
        self.run_folder = RunFolder(Path(self.arguments.save_dir, name) if name else Path(self.arguments.save_dir))
        self.console = Console(quiet=self.ranks.rank != 0, markup=False)
        seed_everything(self.arguments.seed + self.ranks.dp_rank)

    @property
    def share(self) -> Share:
        """This rank's share of a global batch, for a `ResumableLoader` or `ResumableStream`."""
        return Share(self.arguments.micro_batch_size, self.ranks.dp_rank, self.ranks.dp_size)

    def forward_step(self, data: dict[str, Any], model: Any, mems: Any) -> Any:
        """One forward pass, to be overridden: returns a dict or a ModelOutput with `loss`; for metrics also `logits`.

        data: a batch on this rank's device. An overriding method's loss is the mean over the micro-batch's targets.
        mems: GLM's memory of earlier positions, or None.
        """
        return model(**data) if mems is None else model(**data, mems=mems)

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        train_dataset: Any = None,
        valid_dataset: Any = None,
        metric_methods: Mapping[str, Metric] | Iterable[Sequence[Any]] | None = None,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
        *,
        reporter: Reporter | None = None,
        extra_files: Path | None = None,
    ) -> dict[str, float]:
        """Trains `model` in place and returns the last validation values, with `step`.

        train_dataset: a map-style dataset of dicts, an iterable of them, or a resumable loader or stream of batches.
        valid_dataset: a map-style dataset. metric_methods: name -> function of whole logits and labels, which returns
        a mean over the rows or (sum, count). collate_fn: samples to a batch; by default equal lengths are stacked and
        others padded. reporter: an open one of the caller's, who also evaluates at the end. extra_files: a folder, such
        as a tokenizer's, whose files each checkpoint gets too.

        Raises `ValueError` for arguments, data or a model that do not fit together, `FloatingPointError` where the loss
        is no longer finite, and `OSError` where a checkpoint cannot be written.
        """
        arguments, ranks = self.arguments, self.ranks
        metrics = metric_functions(metric_methods)
        self._check_task(train_dataset, valid_dataset, metrics)
        prepare_model(model, self.device, arguments, ranks)
        optimizer = make_optimizer(model, arguments) if optimizer is None else optimizer
        check_optimizer(optimizer, model, ranks.tp_size)
        data = make_training_data(train_dataset, arguments, ranks, collate_fn, _pad_token_id(model))
        total_steps = arguments.train_steps or data.steps
        schedule = make_schedule(lr_scheduler, optimizer, arguments, total_steps)
        point = open_run(self.run_folder, arguments, ranks, self.console.print)
        files = model_files(model)
        if point:
            files.load_weights(point.folder, ranks)
        engine = make_engine(model, optimizer, arguments, ranks)
        collate = collate_fn or DefaultCollate(_pad_token_id(model))
        validate = partial(self.validate, engine.model, engine.module, valid_dataset, metrics, collate)
        loop = TrainingLoop(
            arguments=arguments,
            engine=engine,
            ranks=ranks,
            batches=data.batches,
            schedule=schedule,
            forward_step=self.forward_step,
            normalizer=LossNormalizer(model, mean_losses=type(self).forward_step is not Trainer.forward_step),
            evaluate=validate if valid_dataset is not None else None,
            model_files=files,
            saver=BackgroundSaver(self.run_folder, ranks, arguments.save_total_limit),
            reporter=reporter or self.make_reporter(point.step if point else 0, total_steps),
            profiler=self._make_profiler(),
            total_steps=total_steps,
            extra_files=extra_files,
            evaluate_last=reporter is None,
        )
        return self._run(loop, point, loop.reporter if reporter is None else contextlib.nullcontext())

    def evaluate(
        self,
        model: nn.Module,
        dataset: Any,
        metric_methods: Mapping[str, Metric] | Iterable[Sequence[Any]] | None = None,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """The mean loss over the targets of a map-style dataset, and the metrics, as in training."""
        collate = collate_fn or DefaultCollate(_pad_token_id(model))
        return self.validate(model, model, dataset, metric_functions(metric_methods), collate)

    def validate(
        self, model: Any, module: nn.Module, dataset: Any, metrics: Mapping[str, Metric], collate: Callable[[Any], Any]
    ) -> dict[str, float]:
        """The values of one evaluation, the same on every rank; to be extended. model: what a forward pass is called
        on; module: the model itself."""
        return evaluate(
            self.forward_step,
            model,
            module,
            dataset,
            self.ranks,
            batch_size=self.arguments.micro_batch_size,
            collate=collate,
            metrics=metrics,
        )

    def check_arguments(self, names: Sequence[str] | None) -> None:
        """ValueError unless the arguments say how long to train and `save_best` is a validation value.

        names: of these values; None where they are not known before the first evaluation.
        """
        arguments, best = self.arguments, self.arguments.save_best
        if arguments.train_steps is None and not arguments.epochs:
            raise ValueError("say how long to train: set epochs or train_steps")
        if best is not None and names is not None and best not in names:
            raise ValueError(f"save_best={best!r} is none of the validation values: {', '.join(names)}")

    def _check_task(self, train_dataset: Any, valid_dataset: Any, metrics: Mapping[str, Metric]) -> None:
        if train_dataset is None:
            raise ValueError("train needs a train_dataset")
        best = self.arguments.save_best
        if best is not None and valid_dataset is None:
            raise ValueError(f"save_best={best!r} is a value of validation: pass a valid_dataset too")
        plain = type(self).validate is Trainer.validate  # else its data and values are its own
        if valid_dataset is not None and plain:
            check_samples(valid_dataset)
        self.check_arguments(["loss", *metrics] if plain else None)

    def _join(self, mesh: ParallelMesh | None) -> tuple[ParallelMesh | None, torch.device]:
        """Joins the other processes, or starts them all and ends this one."""
        arguments, launch = self.arguments, ensure_processes_of(self.arguments)
        if arguments.env_type == "pytorch":
            if launch.world_size > 1:
                raise ValueError(
                    f"env_type='pytorch' is one process, and {launch.world_size} were started; use 'pytorchDDP', "
                    "'deepspeed' or 'deepspeed+mpu'"
                )
            return None, single_device(arguments.pytorch_device)
        device = initialize_distributed(launch)
        return mesh or ParallelMesh(arguments.model_parallel_size), device

    def _run(
        self, loop: TrainingLoop, point: ResumePoint | None, reporting: contextlib.AbstractContextManager[Any]
    ) -> dict[str, float]:
        """Runs the loop, from a checkpoint if there is one; returns the last validation values, with `step`.

        reporting: is open meanwhile.
        """
        succeeded = False
        try:
            if point:
                self._resume(loop, point)
            with reporting:
                loop.run()
            on_first_rank(self.write_report)
            succeeded = True
        finally:
            loop.saver.close()
            loop.engine.close(whole=succeeded)
        return {**loop.validation, "step": loop.step}

    def _resume(self, loop: TrainingLoop, point: ResumePoint) -> None:
        """Loads what the checkpoint holds besides the weights, as far as the arguments ask for it."""
        if not point.optimizer:
            return
        loop.resume(point)
        if point.random and not restore_random(point.folder, point.state, self.ranks, self.arguments.seed):
            loop.reporter.notice("random generators are seeded anew: their states are of another layout")

    def _make_profiler(self) -> StepProfiler | None:
        steps = self.arguments.profile_steps
        return StepProfiler(steps, self.run_folder.trace) if steps and self.ranks.rank == 0 else None

    def write_report(self) -> None:
        """Writes `report.html` into the run's folder, from what was logged."""
        records, name = self.run_folder.metrics(), self.arguments.experiment_name or self.run_folder.path.name
        if records:
            write_report(self.run_folder.report, records, asdict(self.arguments), title=name)

    def make_reporter(self, first_step: int, total_steps: int | None) -> Reporter:
        """What shows and logs a run that goes on from `first_step`."""
        if self.ranks.rank:
            return SilentReporter()
        arguments, folder = self.arguments, self.run_folder
        board = Path(arguments.tensorboard_dir) if arguments.tensorboard_dir else folder.tensorboard
        sinks: list[Any] = [MetricsFile(folder.metrics_file), TensorBoard(board, first_step)]
        if arguments.wandb:
            sinks.append(WeightsAndBiases(arguments.experiment_name, asdict(arguments), folder.path))
        return RunReporter(self.console, sinks, first_step=first_step, total_steps=total_steps)


def _pad_token_id(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    return getattr(config, "pad_token_id", None) or 0


def make_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, arguments: TrainingArguments, ranks: Ranks
) -> Engine:
    """The engine of `arguments.env_type` around a model that is on its device and in its precision."""
    if arguments.env_type == "pytorch":
        from .engines.torch_engine import TorchEngine

        return TorchEngine(model, optimizer, arguments)
    if arguments.env_type == "pytorchDDP":
        from .engines.ddp_engine import DDPEngine

        return DDPEngine(model, optimizer, arguments, ranks)
    from .engines.deepspeed_engine import DeepSpeedEngine  # takes seconds to import

    return DeepSpeedEngine(model, optimizer, arguments, ranks)
