"""Provides `Trainer`, which trains a model of the zoo or of transformers in one process or in many."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..data import Share
from ..data.loading.collate import DataCollator, with_loss_mask
from ..mpu import ParallelMesh, set_reduction
from ..mpu.fused_products import use_symmetric_memory
from .arguments.deepspeed_file import deepspeed_notice
from .arguments.training_arguments import TrainingArguments
from .batches.dataset_kinds import check_agreement, length_of, makes_batches
from .batches.loss_normalization import LossNormalizer
from .batches.training_data import make_training_data
from .checkpointing.extra_files import read_extra_files, with_tokenizer
from .checkpointing.model_files import model_files
from .checkpointing.random_state import seed_everything
from .checkpointing.resume import ResumePoint, open_run, restore_random
from .checkpointing.saver import BackgroundSaver
from .engines.deepspeed_config import zero_stage
from .engines.engine import Engine
from .engines.optimizers import check_optimizer, check_stages, make_optimizer
from .engines.precision import prepare_model
from .engines.schedule import make_schedule
from .evaluation import Metric, check_samples, evaluate, metric_functions
from .launch.environment import (
    initialize_distributed,
    keep_freed_memory,
    set_collective_timeout,
    single_device,
)
from .launch.launch import ensure_processes_of
from .launch.rank_process import is_restarted
from .launch.ranks import Ranks, on_first_rank
from .logging.diagnostics import StepProfiler
from .logging.provenance import command_line, git_commit, hardware, versions
from .logging.report import Section, write_report
from .logging.reporter import MetricsFile, Reporter, RunReporter, SilentReporter
from .logging.trackers import TrackedRun, open_trackers
from .loop import TrainingLoop
from .lora import apply_lora
from .run_folder import RunFolder
from .run_lock import return_folder

PACKAGE = __name__.partition(".")[0]
# Keywords that only the arguments of a recipe have -> their class.
KINDS = dict.fromkeys(
    ("model_name_or_path", "train_file"), (f"{PACKAGE}.finetuning.arguments", "FinetuningArguments")
)
OF_FINETUNING = (
    "convert_to_lora", "convert_to_prompt_tuning", "freeze", "generate_single", "generate_diverse", "model",
    "model_summary", "save_model", "test", "tokenizer",
)  # fmt: skip
INTERVALS = {
    "eval_strategy": "eval_interval",
    "logging_strategy": "log_interval",
    "save_strategy": "save_interval",
}
NEVER = 1 << 62  # steps
DEVELOPMENT_STEPS = 10  # of `dev_mode`, as in t2t-tuner


def arguments_kind(keywords: Mapping[str, Any]) -> type[TrainingArguments]:
    """Returns the class of the arguments that the keywords belong to."""
    module, name = next((kind for key, kind in KINDS.items() if key in keywords), ("", ""))
    return getattr(import_module(module), name) if module else TrainingArguments


class Recipe(Protocol):
    """Makes model, data and metrics from arguments alone, such as fine-tuning does."""

    def train(self, *, valid: bool) -> dict[str, float]: ...

    def evaluate(self, file: str | Path | None = None) -> dict[str, float]: ...

    def collect(self, rows: range, batch: Mapping[str, Any], output: Any) -> None:
        """Takes the output of an evaluation's forward pass on the samples `rows`."""
        ...

    def validation_values(self, values: dict[str, float], module: nn.Module) -> dict[str, float]:
        """Returns the values of an evaluation of the unwrapped model with further ones. Collective."""
        ...


class Trainer:
    """Trains with the engine that `env_type` names.

        trainer = Trainer(env_type="deepspeed+mpu", model_parallel_size=2, num_gpus=2, epochs=1, batch_size=4)
        model = shardzoo.from_pretrained(path, mesh=trainer.mesh)
        trainer.train(model, train_dataset=samples)

    If the processes of the run do not exist yet, the constructor starts them, waits for them, and ends this process
    with their exit code. The code after it then runs in each of the started processes.

    `keywords` are fields of `TrainingArguments`, or FlagAI's names. The default mesh is a new one; None in one process.

    With the arguments of a recipe, model and data come from them, and the recipe's methods are the trainer's too:

        trainer = Trainer(model_name_or_path="t5", train_file="pairs.json")  # FinetuningArguments
        trainer.freeze(embeddings=True)
        trainer.train()

    Attributes:
        recipe: `finetuning.recipe.Finetuning` for fine-tuning; None if model and data are passed to `train`.
    """

    recipe: Any = None

    def __init__(
        self,
        arguments: TrainingArguments | None = None,
        *,
        mesh: ParallelMesh | None = None,
        **keywords: Any,
    ) -> None:
        if arguments is not None and keywords:
            raise ValueError(
                f"pass TrainingArguments or keywords ({', '.join(keywords)}), not both"
            )
        if not isinstance(arguments, TrainingArguments | None):
            raise ValueError(
                f"pass TrainingArguments or FinetuningArguments, or keywords as in Trainer(lr=1e-3), not a "
                f"{type(arguments).__name__}"
            )
        self.arguments = (arguments or arguments_kind(keywords)(**keywords)).resolved()
        if is_restarted():
            self.arguments = _of_restart(self.arguments)
        if self.arguments.env_type.startswith("deepspeed"):
            zero_stage(self.arguments)
        recipe = self._recipe_class()
        if recipe is not None and mesh is None and self.arguments.env_type != "pytorch":
            recipe.check_layout(self.arguments)
        self.mesh, self.device = self._join(mesh)
        if self.device.type == "cpu":
            keep_freed_memory()
        if self.arguments.tf32 is not None and self.device.type == "cuda":
            torch.set_float32_matmul_precision("high" if self.arguments.tf32 else "highest")
        self.ranks = Ranks(self.mesh)
        name = self.arguments.experiment_name
        self.run_folder = RunFolder(
            Path(self.arguments.save_dir, name) if name else Path(self.arguments.save_dir)
        )
        self.console = Console(quiet=self.ranks.rank != 0, markup=False)
        if notice := deepspeed_notice(self.arguments.deepspeed_config, vars(self.arguments)):
            self.console.print(notice)
        seed_everything(self.arguments.seed + self.ranks.dp_rank)
        if recipe is not None:
            self.recipe = recipe(self)

    def _recipe_class(self) -> Any:
        if self.arguments.recipe is None:
            return None
        module, _, name = self.arguments.recipe.partition(":")
        return getattr(import_module(f"{PACKAGE}.{module}"), name)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the recipe."""
        if name.startswith("_") or self.recipe is None:
            of = (
                "; it belongs to fine-tuning: Trainer(model_name_or_path=…)"
                if name in OF_FINETUNING
                else ""
            )
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{of}")
        return getattr(self.recipe, name)

    @property
    def share(self) -> Share:
        """Returns this rank's share of a global batch, for a `ResumableLoader` or `ResumableStream`."""
        return Share(self.arguments.micro_batch_size, self.ranks.dp_rank, self.ranks.dp_size)

    def forward_step(self, data: dict[str, Any], model: Any, mems: Any) -> Any:
        """Runs one forward pass on a batch on this rank's device. Subclasses may override it.

        Returns a dict or a ModelOutput with `loss`, the mean over the micro-batch's targets, and with `logits` if there
        are metrics. `mems` is GLM's memory of earlier positions, or None.
        """
        if self.recipe is not None and self.recipe.weighted_loss is not None:
            return self.recipe.weighted_loss(data, model)
        return model(**data) if mems is None else model(**data, mems=mems)

    def train(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        train_dataset: Any = None,
        valid_dataset: Any = None,
        metric_methods: Mapping[str, Metric] | Iterable[Sequence[Any]] | None = None,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
        *,
        reporter: Reporter | None = None,
        extra_files: str | Path | None = None,
        valid: bool = True,
        batch_size: int | None = None,
        dev_mode: bool = False,
    ) -> dict[str, float]:
        """Trains `model` in place and returns the last validation values, with `step`.

        Args:
            model: None for the recipe's, whose data and metrics are then used too.
            train_dataset: A map-style dataset or an iterable of dicts, or a resumable loader or stream of batches.
            valid_dataset: A map-style dataset.
            metric_methods: Name -> function of the whole logits and the labels: a mean over the rows, or (sum, count).
            collate_fn: Makes a batch from samples. By default equal lengths are stacked and others padded.
            reporter: A reporter that the caller has opened. The caller then evaluates after the last step, and calls
                `write_report`.
            extra_files: A folder, such as a tokenizer's, whose files are copied into each checkpoint. Without one, each
                holds the tokenizer of the data, or of the folder that the model was loaded from.
            valid: For a recipe, whether to evaluate.
            batch_size: Replaces the micro_batch_size of the arguments.
            dev_mode: Runs 10 steps only.

        Raises ValueError if arguments, data and model do not fit together, FloatingPointError if the loss is no longer
        finite, and OSError if a checkpoint cannot be written.
        """
        self._change_arguments(batch_size, dev_mode, train_dataset)
        if model is None and self.recipe is not None:
            return self.recipe.train(valid=valid)
        arguments, ranks = self.arguments, self.ranks
        metrics = metric_functions(metric_methods)
        model = self._check_task(model, train_dataset, valid_dataset, metrics)
        collate_fn = with_loss_mask(collate_fn) if collate_fn else None
        extras = read_extra_files(extra_files, model, self.console.print)
        apply_lora(model, arguments)
        prepare_model(model, self.device, arguments, ranks)
        check_stages(model, ranks)
        optimizer = make_optimizer(model, arguments) if optimizer is None else optimizer
        check_optimizer(optimizer, model, ranks.tp_size)
        data = make_training_data(train_dataset, arguments, ranks, collate_fn, _pad_token_id(model))
        total_steps = arguments.train_steps or data.steps
        schedule = make_schedule(lr_scheduler, optimizer, arguments, total_steps)
        point = open_run(self.run_folder, arguments, ranks, self.console.print)
        extras = with_tokenizer(
            extras, model, point.folder if point else None, train_dataset, self.console.print
        )
        files = model_files(model)
        if point:
            files.load_weights(point.folder, ranks)
        # Before an engine shards the model: it may have to ask the model how it treats labels.
        normalizer = LossNormalizer(
            model, mean_losses=type(self).forward_step is not Trainer.forward_step
        )
        engine = make_engine(model, optimizer, arguments, ranks)
        collate = collate_fn or DataCollator(_pad_token_id(model), arguments.length_multiple)
        validate = partial(
            self.validate, engine.model, engine.module, valid_dataset, metrics, collate
        )
        loop = TrainingLoop(
            arguments=arguments,
            engine=engine,
            ranks=ranks,
            batches=data.batches,
            schedule=schedule,
            forward_step=self.forward_step,
            normalizer=normalizer,
            evaluate=validate if valid_dataset is not None else None,
            model_files=files,
            saver=BackgroundSaver(
                self.run_folder,
                ranks,
                arguments.save_total_limit,
                seconds=2 * arguments.collective_timeout,
            ),
            reporter=reporter or self.make_reporter(point.step if point else 0, total_steps),
            profiler=self._make_profiler(),
            total_steps=total_steps,
            extra_files=extras,
            evaluate_last=reporter is None,
        )
        return self._run(
            loop, point, loop.reporter if reporter is None else contextlib.nullcontext()
        )

    def evaluate(
        self,
        model: nn.Module | str | Path | None = None,
        dataset: Any = None,
        metric_methods: Mapping[str, Metric] | Iterable[Sequence[Any]] | None = None,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Returns the mean loss over the targets of a map-style dataset, and the metrics, as in training.

        A recipe evaluates its own model on a file, which replaces `model`, or on its validation data.
        """
        if not isinstance(model, nn.Module):
            if self.recipe is None:
                raise ValueError(f"evaluate needs a model and a dataset, not {model!r}")
            return self.recipe.evaluate(model)
        pad, multiple = _pad_token_id(model), self.arguments.length_multiple
        collate = with_loss_mask(collate_fn) if collate_fn else DataCollator(pad, multiple)
        return self.validate(model, model, dataset, metric_functions(metric_methods), collate)

    def validate(
        self,
        model: Any,
        module: nn.Module,
        dataset: Any,
        metrics: Mapping[str, Metric],
        collate: Callable[[Any], Any],
    ) -> dict[str, float]:
        """Returns the values of one evaluation, the same on every rank. Subclasses may extend it.

        `model` runs forward passes: it is the model, or the engine's wrapper of it. `module` is the model itself.
        """
        values = evaluate(
            self.forward_step,
            model,
            module,
            dataset,
            self.ranks,
            batch_size=self.arguments.eval_batch_size or self.arguments.micro_batch_size,
            collate=collate,
            metrics=metrics,
            collect=None if self.recipe is None else self.recipe.collect,
        )
        return values if self.recipe is None else self.recipe.validation_values(values, module)

    def check_arguments(self, names: Sequence[str] | None) -> None:
        """Raises ValueError unless the arguments say how long to train and `save_best` is a validation value.

        `names` are those of the validation values; None if they are unknown before the first evaluation.
        """
        arguments, best = self.arguments, self.arguments.save_best
        if arguments.train_steps is None and not arguments.epochs:
            raise ValueError("set epochs or train_steps to define how long to train")
        if best is not None and names is not None and best not in names:
            raise ValueError(
                f"save_best={best!r} is not among the validation values: {', '.join(names)}"
            )

    def _change_arguments(self, batch_size: int | None, dev_mode: bool, dataset: Any) -> None:
        """Applies the arguments of `train` that replace the run's, and counts the steps of intervals of an epoch."""
        changes: dict[str, Any] = {} if batch_size is None else {"micro_batch_size": batch_size}
        if dev_mode:
            changes["train_steps"] = DEVELOPMENT_STEPS
        self.arguments = replace(self.arguments, **changes) if changes else self.arguments
        for strategy, interval in INTERVALS.items():
            kind = getattr(self.arguments, strategy)
            if kind == "steps" or dataset is None:
                continue
            size = NEVER if kind == "no" else None if makes_batches(dataset) else length_of(dataset)
            if size is None:
                raise ValueError(
                    f"{strategy}='epoch' needs a dataset of known length; use 'steps' with {interval}"
                )
            steps = (
                NEVER
                if kind == "no"
                else max(1, size // self.arguments.global_batch(self.ranks.dp_size))
            )
            self.arguments = replace(self.arguments, **{interval: steps, strategy: "steps"})

    def _check_task(
        self,
        model: nn.Module | None,
        train_dataset: Any,
        valid_dataset: Any,
        metrics: Mapping[str, Metric],
    ) -> nn.Module:
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model must be a torch.nn.Module, such as shardzoo.from_pretrained(path), not {model!r}; options of a "
                "recipe are keywords: train(valid=False)"
            )
        if train_dataset is None:
            raise ValueError("train needs a train_dataset")
        best = self.arguments.save_best
        if best is not None and valid_dataset is None:
            raise ValueError(f"save_best={best!r} is a validation value: pass a valid_dataset too")
        # an overriding method or a recipe may use other data and values
        plain = type(self).validate is Trainer.validate and self.recipe is None
        if valid_dataset is not None and plain:
            check_samples(valid_dataset)
            check_agreement(valid_dataset, self.ranks, name="valid_dataset")
        self.check_arguments(["loss", *metrics] if plain else None)
        return model

    def _join(self, mesh: ParallelMesh | None) -> tuple[ParallelMesh | None, torch.device]:
        """Joins the process group, or starts the processes and ends this one. Returns the mesh and the device."""
        arguments, launch = self.arguments, ensure_processes_of(self.arguments)
        if arguments.env_type == "pytorch":
            if launch.world_size > 1:
                raise ValueError(
                    f"env_type='pytorch' runs in one process, but {launch.world_size} were started; use 'pytorchDDP', "
                    "'deepspeed' or 'deepspeed+mpu'"
                )
            return None, single_device(arguments.pytorch_device)
        wait, backend = arguments.collective_timeout, arguments.distributed_backend
        device = initialize_distributed(
            launch, backend=backend, collective_timeout=wait, stall_timeout=arguments.stall_timeout
        )
        if arguments.pipeline_parallel_size > 1 and device.type != "cpu" and backend == "gloo":
            raise ValueError(
                "distributed_backend='gloo' cannot pass a GPU's tensors between pipeline stages; use 'nccl' with a GPU "
                "for each process, or pipeline_parallel_size=1"
            )
        mesh = mesh or ParallelMesh(arguments.model_parallel_size, arguments.pipeline_parallel_size)
        set_collective_timeout(mesh, wait)
        set_reduction(mesh.tp_group, arguments.tensor_parallel_reduction)
        if arguments.symmetric_memory:
            use_symmetric_memory(mesh.tp_group)
        return mesh, device

    def _run(
        self,
        loop: TrainingLoop,
        point: ResumePoint | None,
        reporting: contextlib.AbstractContextManager[Any],
    ) -> dict[str, float]:
        """Runs the loop in the context `reporting`, from a checkpoint if given; returns the last validation values."""
        succeeded = False
        try:
            if point:
                self._resume(loop, point)
            with reporting:
                loop.run()
            if loop.evaluate_last:
                on_first_rank(self.write_report)
            succeeded = True
        finally:
            loop.saver.close()
            if self.ranks.rank == 0:
                return_folder(self.run_folder.path)
            loop.engine.close(whole=succeeded)
        return {**loop.validation, "step": loop.step}

    def _resume(self, loop: TrainingLoop, point: ResumePoint) -> None:
        """Loads the parts of the checkpoint besides the weights that the arguments ask for."""
        if not point.optimizer:
            return
        loop.resume(point)
        if point.random and not restore_random(
            point.folder, point.state, self.ranks, self.arguments.seed
        ):
            loop.reporter.notice(
                "random generators are seeded again: their states were saved for another layout"
            )

    def _make_profiler(self) -> StepProfiler | None:
        steps = self.arguments.profile_steps
        return (
            StepProfiler(steps, self.run_folder.trace) if steps and self.ranks.rank == 0 else None
        )

    def write_report(self, sections: Mapping[str, Section] | None = None) -> None:
        """Writes `report.html` into the run's folder, from the logged values. Called by the first rank.

        `sections` are further ones, heading -> text or table rows; versions, hardware and command follow them.
        """
        records, name = (
            self.run_folder.metrics(),
            self.arguments.experiment_name or self.run_folder.path.name,
        )
        if not records:
            return
        ranks = self.ranks
        mesh = (
            f"{ranks.world_size}: {ranks.tp_size} tensor-parallel x {ranks.dp_size} data-parallel"
        )
        mesh += f" x {ranks.pp_size} pipeline stages" if ranks.pp_size > 1 else ""
        environment = {
            "Versions": {**versions(), "git commit": git_commit() or "none: not in a repository"},
            "Hardware": {**hardware(), "processes": mesh},
            "Command": command_line(),
        }
        parts = {**(sections or {}), **environment}
        write_report(
            self.run_folder.report, records, asdict(self.arguments), title=name, sections=parts
        )

    def make_reporter(self, first_step: int, total_steps: int | None) -> Reporter:
        """Returns the reporter that shows and logs a run starting at `first_step`."""
        if self.ranks.rank:
            return SilentReporter()
        arguments, folder = self.arguments, self.run_folder
        board = Path(arguments.tensorboard_dir) if arguments.tensorboard_dir else folder.tensorboard
        name = arguments.experiment_name or folder.path.name
        run = TrackedRun(name, asdict(arguments), folder.path, first_step)
        trackers = open_trackers(
            arguments.report_to, run, board, partial(self.console.print, markup=False)
        )
        logs = [MetricsFile(folder.metrics_file), *trackers]
        return RunReporter(self.console, logs, first_step=first_step, total_steps=total_steps)


def _of_restart(arguments: TrainingArguments) -> TrainingArguments:
    """Returns the arguments of a job that is started again: it resumes its run, or begins it again if none is saved."""
    folder = getattr(arguments, "output_dir", None) or Path(
        arguments.save_dir, arguments.experiment_name or ""
    )
    saved = RunFolder(Path(folder)).latest_step() is not None
    again = {"overwrite": not saved} if hasattr(arguments, "overwrite") else {}
    return replace(arguments, resume=saved, **again)


def _pad_token_id(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    return getattr(config, "pad_token_id", None) or 0


def make_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer, arguments: TrainingArguments, ranks: Ranks
) -> Engine:
    """Returns the engine of `arguments.env_type`. The model already has its device and precision."""
    if arguments.env_type == "pytorch":
        from .engines.torch_engine import TorchEngine

        return TorchEngine(model, optimizer, arguments)
    if arguments.env_type == "pytorchDDP":
        from .engines.ddp_engine import DDPEngine

        return DDPEngine(model, optimizer, arguments, ranks)
    if ranks.pp_size > 1:
        from .engines.pipeline_engine import PipelineEngine

        return PipelineEngine(model, optimizer, arguments, ranks)
    from .engines.deepspeed_engine import DeepSpeedEngine  # takes seconds to import

    return DeepSpeedEngine(model, optimizer, arguments, ranks)
