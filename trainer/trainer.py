"""Provides `Trainer`: trains a model of the zoo or of transformers in one process or in many."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..data import Share
from ..data.loading.collate import DataCollator, with_loss_mask
from ..files.heap import keep_freed_memory
from ..files.verbosity import is_quiet
from ..files.working_copies import name_urls
from ..mpu import ParallelMesh, dropout_state, set_reduction
from ..mpu.fused_products import use_symmetric_memory
from ..mpu.mesh import print_once
from ..ops.device import computes_on_host, has_tf32
from .arguments.deepspeed_file import deepspeed_notice
from .arguments.training_arguments import TrainingArguments
from .batches.dataset_kinds import check_agreement, find_length, makes_batches
from .batches.loss_normalization import LossNormalizer
from .batches.training_data import make_training_data
from .checkpointing.extra_files import read_extra_files, with_tokenizer
from .checkpointing.model_files import model_files
from .checkpointing.random_state import seed_everything
from .checkpointing.resume import ResumePoint, explain_other_run, open_run, restore_random
from .checkpointing.saver import BackgroundSaver
from .engines.deepspeed_config import zero_stage
from .engines.factory import make_engine, shard_model, take_rows
from .engines.optimizers import check_optimizer, check_stages, make_optimizer
from .engines.precision import prepare_model
from .engines.schedule import make_schedule
from .environments import ENVIRONMENTS
from .evaluation import Metric, check_samples, evaluate, metric_functions
from .launch.environment import initialize_distributed, set_collective_timeout, single_device
from .launch.launch import ensure_processes_for
from .launch.rank_process import is_restarted
from .launch.ranks import Ranks, on_first_rank
from .logging.console import make_console
from .logging.diagnostics import StepProfiler
from .logging.provenance import command_line, git_commit, hardware, versions
from .logging.report import Section, write_report
from .logging.reporter import MetricsFile, Reporter, RunReporter, SilentReporter
from .logging.trackers import TrackedRun, open_trackers
from .loop import TrainingLoop
from .lora import apply_lora
from .run_folder import RunFolder
from .run_lock import return_folder

# The argument that says when something is done -> the number of steps between.
INTERVALS = {
    "eval_strategy": "eval_interval",
    "logging_strategy": "log_interval",
    "save_strategy": "save_interval",
}
NEVER = 1 << 62  # steps
DEVELOPMENT_STEPS = 10  # of `dev_mode`, as in t2t-tuner


class Trainer:
    """Trains with the engine that `env_type` names.

        trainer = Trainer(env_type="deepspeed+mpu", model_parallel_size=2, num_gpus=2, epochs=1)
        model = shardzoo.from_pretrained(path, mesh=trainer.mesh)
        trainer.train(model, train_dataset=samples)

    If the processes of the run do not exist yet, the constructor starts them, waits for them, and
    ends this process with their exit code. The code after it then runs in each of the started
    processes.

    A subclass may override `forward_step`, `run_model`, `validate` and `collect_output`.

    Args:
        arguments: How to train.
        mesh: By default a new one of the sizes in the arguments; None in one process.
        keywords: Instead of `arguments`, the fields of `arguments_class`, also under FlagAI's
            names.

    Attributes:
        arguments: How to train, with the defaults that depend on this machine.
        mesh: To build the model with; None in one process.
        device: This rank's.
        ranks: This process's place among the others.
        run_folder: Where the run writes.
        console: Prints on the first rank alone.

    Raises:
        ValueError: The arguments do not fit together or this machine.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = TrainingArguments

    def __init__(
        self,
        arguments: TrainingArguments | None = None,
        *,
        mesh: ParallelMesh | None = None,
        **keywords: Any,
    ) -> None:
        kind = self.arguments_class
        if arguments is not None and keywords:
            raise ValueError(f"pass {kind.__name__} or keywords ({', '.join(keywords)}), not both")
        if arguments is not None and not isinstance(arguments, kind):
            raise ValueError(
                f"pass {kind.__name__}, or keywords as in Trainer(lr=1e-3), not a "
                f"{type(arguments).__name__}"
            )
        given = arguments or kind(**keywords)
        self.arguments = given.resolved()
        if is_restarted():
            self.arguments = _resume_after_restart(self.arguments)
        environment = ENVIRONMENTS[self.arguments.env_type]
        if environment.uses_deepspeed:
            zero_stage(self.arguments)  # refuses a stage that does not work
        name = self.arguments.experiment_name
        save_dir = Path(self.arguments.save_dir)
        self.run_folder = RunFolder.named(save_dir / name if name else save_dir)
        self._check_run_folder()
        # A dry run ends where processes are joined.
        if mesh is None and (self.arguments.dry_run or not environment.is_one_process):
            self.check_before_launch()

        self.mesh, self.device = self._join_processes(mesh)
        if computes_on_host(self.device):
            keep_freed_memory()
        if self.arguments.tf32 is not None and has_tf32(self.device):
            torch.set_float32_matmul_precision("high" if self.arguments.tf32 else "highest")
        self.ranks = Ranks(self.mesh)
        self.console = make_console(quiet=self.ranks.rank != 0 or is_quiet(), markup=False)
        self._notices: set[str] = set()
        notice = deepspeed_notice(self.arguments.deepspeed_config, vars(self.arguments))
        if notice:
            self.console.print(notice)
        idle = explain_idle_gpus(self.arguments, self.ranks.world_size, torch.cuda.device_count())
        if idle:
            self.console.print(idle)
        if given.unused:
            self.console.print(
                f"env_type={self.arguments.env_type!r} does not use {', '.join(given.unused)}; "
                "env_type='deepspeed+mpu' does"
            )
        seed_everything(self.arguments.seed + self.ranks.dp_rank)

    @property
    def share(self) -> Share:
        """Returns this rank's share of a global batch, for a `ResumableLoader` or
        `ResumableStream`.
        """
        return Share(self.arguments.micro_batch_size, self.ranks.dp_rank, self.ranks.dp_size)

    # What subclasses may override

    def check_before_launch(self) -> None:
        """Raises ValueError for what can be known before the processes of the run are started."""

    def _check_run_folder(self) -> None:
        """Raises ValueError if the folder of the run that the arguments describe holds another one.

        It is checked again when training begins; here it costs nobody the time to load a model.
        """
        arguments = self.arguments
        if type(arguments) is not TrainingArguments or not (
            arguments.epochs or arguments.train_steps
        ):
            return  # Others have folders of their own, or only evaluate.
        load_dir = arguments.load_dir
        loads_own = load_dir is not None and self.run_folder.owns(Path(load_dir))
        step = self.run_folder.latest_step()
        if step is not None and not (arguments.resume or arguments.overwrite or loads_own):
            error = ValueError(explain_other_run(self.run_folder, step))
            print_once(error, int(os.environ.get("RANK", "0")))
            raise error

    def forward_step(self, data: dict[str, Any], model: Any, mems: Any) -> Any:
        """Runs one forward pass on a batch on this rank's device.

        Args:
            data: The batch.
            model: What runs the forward pass: the model, or the engine's wrapper of it.
            mems: GLM's memory of earlier positions, or None.

        Returns:
            A dict or a ModelOutput with `loss`, and with `logits` if there are metrics. The loss of
            an overriding method is the mean over the micro-batch's targets.
        """
        return self.run_model(data, model, mems)

    def run_model(self, data: dict[str, Any], model: Any, mems: Any) -> Any:
        """Runs one forward pass as `forward_step` does.

        Other than there, the loss of an overriding method is what the model's own would be: if the
        model takes `num_items_in_batch`, the number of targets in the global batch, the loss is a
        sum divided by it.
        """
        return model(**data) if mems is None else model(**data, mems=mems)

    def validate(
        self,
        model: Any,
        module: nn.Module,
        dataset: Any,
        metrics: Mapping[str, Metric],
        collate: Callable[[Any], Any],
    ) -> dict[str, float]:
        """Returns the values of one evaluation, the same on every rank. Collective.

        Args:
            model: What runs forward passes: the model, or the engine's wrapper of it.
            module: The model itself.
        """
        return evaluate(
            self.forward_step,
            model,
            module,
            dataset,
            self.ranks,
            batch_size=self.arguments.eval_batch_size or self.arguments.micro_batch_size,
            collate=collate,
            metrics=metrics,
            collect=self.collect_output,
            notify=self._notify_once,
        )

    def collect_output(self, rows: range, batch: Mapping[str, Any], output: Any) -> None:
        """Is given the output of a forward pass of an evaluation, on the samples `rows`."""

    def extra_training_values(self) -> dict[str, float]:
        """Returns what else is logged beside the loss, over the steps since the last call.

        Collective, and the same on every rank.
        """
        return {}

    def _notify_once(self, text: str) -> None:
        """Prints a line that this trainer has not printed before."""
        if text not in self._notices:
            self._notices.add(text)
            self.console.print(text)

    # Training and evaluation

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
        extra_files: str | Path | None = None,
        batch_size: int | None = None,
        dev_mode: bool = False,
    ) -> dict[str, float]:
        """Trains `model` in place and returns the last validation values, with `step`.

        Args:
            train_dataset: A map-style dataset or an iterable of dicts, or a resumable loader or
                stream of batches.
            valid_dataset: A map-style dataset.
            metric_methods: Name -> function of the whole logits and the labels: a mean over the
                rows, or (sum, count).
            collate_fn: Makes a batch from samples. By default equal lengths are stacked and others
                padded.
            reporter: A reporter that the caller has opened. The caller then evaluates after the
                last step, and calls `write_report`.
            extra_files: A folder, such as a tokenizer's, whose files are copied into each
                checkpoint. Without one, each holds the tokenizer of the data, or of the folder that
                the model was loaded from.
            batch_size: Replaces the micro_batch_size of the arguments.
            dev_mode: Runs 10 steps only.

        Raises:
            ValueError: Arguments, data and model do not fit together.
            FloatingPointError: The loss is no longer finite.
            OSError: A checkpoint cannot be written.
        """
        self._replace_arguments(batch_size, dev_mode)
        self._count_interval_steps(train_dataset)
        arguments = self.arguments
        ranks = self.ranks

        # The model: checked, on its device, in its precision.
        metrics = metric_functions(metric_methods)
        self._check_task(model, train_dataset, valid_dataset, metrics)
        extras = read_extra_files(extra_files, model, self.console.print)
        rows = take_rows(model, arguments)
        apply_lora(model, arguments)
        prepare_model(model, self.device, arguments, ranks)
        check_stages(model, ranks)

        sharded = shard_model(model, arguments, ranks, optimizer, rows)

        # Optimizer, data and schedule.
        if optimizer is None:
            optimizer = make_optimizer(model, arguments)
        check_optimizer(optimizer, model, ranks.tp_size)
        pad_token_id = _find_pad_token_id(model)
        own_collate = with_loss_mask(collate_fn) if collate_fn else None
        data = make_training_data(train_dataset, arguments, ranks, own_collate, pad_token_id)
        total_steps = arguments.train_steps or data.steps
        schedule = make_schedule(lr_scheduler, optimizer, arguments, total_steps)

        # The run's folder, and the checkpoint in it to resume from.
        point = open_run(self.run_folder, arguments, ranks, self.console.print)
        if point and point.own:
            folder = name_urls(str(self.run_folder.path))
            self.console.print(f"resuming from step {point.step} of {folder}")
        checkpoint = point.folder if point else None
        extras = with_tokenizer(extras, model, checkpoint, train_dataset, self.console.print)
        files = model_files(model)
        if point:
            files.load_weights(point.folder, ranks)

        # Before an engine shards the model: it may have to ask the model how it treats labels.
        forward_step_is_users = type(self).forward_step is not Trainer.forward_step
        normalizer = LossNormalizer(model, mean_losses=forward_step_is_users)
        engine = make_engine(model, optimizer, arguments, ranks, sharded)
        collate = own_collate or DataCollator(pad_token_id, arguments.length_multiple)
        validate = partial(
            self.validate, engine.model, engine.module, valid_dataset, metrics, collate
        )
        shown = reporter or self.make_reporter(point.step if point else 0, total_steps)
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
                notify=shown.saved,
            ),
            reporter=shown,
            profiler=self._make_profiler(),
            total_steps=total_steps,
            extra_files=extras,
            evaluate_last=reporter is None,
            extra_values=self.extra_training_values,
        )
        # A reporter that the caller has opened is the caller's to close.
        reporting = loop.reporter if reporter is None else contextlib.nullcontext()
        return self._run(loop, point, reporting)

    def evaluate(
        self,
        model: nn.Module,
        dataset: Any = None,
        metric_methods: Mapping[str, Metric] | Iterable[Sequence[Any]] | None = None,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Returns the mean loss over the targets of a map-style dataset, and the metrics, as in
        training.
        """
        if not isinstance(model, nn.Module):
            raise ValueError(f"evaluate needs a model and a dataset, not {model!r}")
        if collate_fn:
            collate = with_loss_mask(collate_fn)
        else:
            collate = DataCollator(_find_pad_token_id(model), self.arguments.length_multiple)
        if any(parameter.is_meta for parameter in model.parameters()):
            prepare_model(model, self.device, self.arguments, self.ranks)
            shard_model(model, self.arguments, self.ranks, None)
        return self.validate(model, model, dataset, metric_functions(metric_methods), collate)

    def check_arguments(self, names: Sequence[str] | None) -> None:
        """Raises ValueError unless the arguments say how long to train and `save_best` is a
        validation value.

        Args:
            names: Those of the validation values; None if they are unknown before the first
                evaluation.
        """
        arguments = self.arguments
        best = arguments.save_best
        if arguments.train_steps is None and not arguments.epochs:
            raise ValueError("set epochs or train_steps to define how long to train")
        if best is not None and names is not None and best not in names:
            raise ValueError(
                f"save_best={best!r} is not among the validation values: {', '.join(names)}"
            )

    # Reports

    def make_reporter(self, first_step: int, total_steps: int | None) -> Reporter:
        """Returns the reporter that shows and logs a run starting at `first_step`."""
        if self.ranks.rank:
            return SilentReporter()
        arguments = self.arguments
        folder = self.run_folder
        board = Path(arguments.tensorboard_dir) if arguments.tensorboard_dir else folder.tensorboard
        name = arguments.experiment_name or folder.path.name
        run = TrackedRun(name, asdict(arguments), folder.path, first_step)
        notify = partial(self.console.print, markup=False)
        trackers = open_trackers(arguments.report_to, run, board, notify)
        logs = [MetricsFile(folder.metrics_file), *trackers]
        return RunReporter(
            self.console,
            logs,
            first_step=first_step,
            total_steps=total_steps,
            log_interval=arguments.log_interval,
        )

    def write_report(self, sections: Mapping[str, Section] | None = None) -> None:
        """Writes `report.html` into the run's folder, from the logged values. Called by the first
        rank.

        Args:
            sections: Further ones, heading -> text or table rows; versions, hardware and command
                follow them.
        """
        records = self.run_folder.metrics()
        if not records:
            return
        name = self.arguments.experiment_name or self.run_folder.path.name
        ranks = self.ranks
        processes = (
            f"{ranks.world_size}: {ranks.tp_size} tensor-parallel x {ranks.dp_size} data-parallel"
        )
        if ranks.cp_size > 1:
            processes += f" x {ranks.cp_size} context-parallel"
        if ranks.ep_size > 1:
            processes += f", of which {ranks.ep_size} share the experts"
        if ranks.pp_size > 1:
            processes += f" x {ranks.pp_size} pipeline stages"
        environment = {
            "Versions": {**versions(), "git commit": git_commit() or "none: not in a repository"},
            "Hardware": {**hardware(), "processes": processes},
            "Command": command_line(),
        }
        write_report(
            self.run_folder.report,
            records,
            asdict(self.arguments),
            title=name,
            sections={**(sections or {}), **environment},
        )

    def _join_processes(
        self, mesh: ParallelMesh | None
    ) -> tuple[ParallelMesh | None, torch.device]:
        """Joins the process group, or starts the processes and ends this one.

        Returns the mesh and the device.
        """
        arguments = self.arguments
        launch = ensure_processes_for(arguments)
        if ENVIRONMENTS[arguments.env_type].is_one_process:
            if launch.world_size > 1:
                raise ValueError(
                    f"env_type={arguments.env_type!r} runs in one process, but "
                    f"{launch.world_size} were started; use 'pytorchDDP', 'deepspeed' or "
                    "'deepspeed+mpu'"
                )
            return None, single_device(arguments.pytorch_device)
        backend = arguments.distributed_backend
        device = initialize_distributed(
            launch,
            backend=backend,
            collective_timeout=arguments.collective_timeout,
            stall_timeout=arguments.stall_timeout,
        )
        has_stages = arguments.pipeline_parallel_size > 1
        if has_stages and not computes_on_host(device) and backend == "gloo":
            raise ValueError(
                "distributed_backend='gloo' cannot pass a GPU's tensors between pipeline stages; "
                "use 'nccl' with a GPU for each process, or pipeline_parallel_size=1"
            )
        if mesh is None:
            mesh = ParallelMesh(
                arguments.model_parallel_size,
                arguments.pipeline_parallel_size,
                arguments.context_parallel_size,
                arguments.expert_parallel_size,
            )
        dealt = mesh.size("expert")
        if dealt != arguments.expert_parallel_size:
            raise ValueError(
                f"the mesh deals experts over {dealt} processes, but expert_parallel_size is "
                f"{arguments.expert_parallel_size}; make them equal, or leave mesh out"
            )
        set_collective_timeout(mesh, arguments.collective_timeout)
        set_reduction(mesh.tp_group, arguments.tensor_parallel_reduction)
        if arguments.symmetric_memory:
            use_symmetric_memory(mesh.tp_group)
        return mesh, device

    def _replace_arguments(self, batch_size: int | None, dev_mode: bool) -> None:
        """Applies the arguments of `train` that replace the run's."""
        changes: dict[str, Any] = {}
        if batch_size is not None:
            changes["micro_batch_size"] = batch_size
        if dev_mode:
            changes["train_steps"] = DEVELOPMENT_STEPS
        if changes:
            self.arguments = replace(self.arguments, **changes)

    def _count_interval_steps(self, dataset: Any) -> None:
        """Replaces strategies other than "steps" by the number of steps between."""
        if dataset is None:
            return
        for strategy, interval in INTERVALS.items():
            chosen = getattr(self.arguments, strategy)
            if chosen == "steps":
                continue
            if chosen == "no":
                steps = NEVER
            else:
                size = None if makes_batches(dataset) else find_length(dataset)
                if size is None:
                    raise ValueError(
                        f"{strategy}='epoch' needs a dataset of known length; use 'steps' with "
                        f"{interval}"
                    )
                steps = max(1, size // self.arguments.global_batch(self.ranks.dp_size))
            self.arguments = replace(self.arguments, **{interval: steps, strategy: "steps"})

    def _check_task(
        self, model: Any, train_dataset: Any, valid_dataset: Any, metrics: Mapping[str, Metric]
    ) -> None:
        """Raises ValueError if `train` lacks something, or validation would not work."""
        if not isinstance(model, nn.Module):
            raise ValueError(
                "model must be a torch.nn.Module, such as shardzoo.from_pretrained(path), not "
                f"{model!r}"
            )
        if train_dataset is None:
            raise ValueError("train needs a train_dataset")
        best = self.arguments.save_best
        if best is not None and valid_dataset is None:
            raise ValueError(f"save_best={best!r} is a validation value: pass a valid_dataset too")
        # An overriding method may use other data, and may return other values.
        validates_here = type(self).validate is Trainer.validate
        if valid_dataset is not None and validates_here:
            check_samples(valid_dataset)
            check_agreement(valid_dataset, self.ranks, name="valid_dataset")
        self.check_arguments(["loss", *metrics] if validates_here else None)

    def _run(
        self,
        loop: TrainingLoop,
        point: ResumePoint | None,
        reporting: contextlib.AbstractContextManager[Any],
    ) -> dict[str, float]:
        """Runs the loop in the context `reporting`, from a checkpoint if given; returns the last
        validation values.
        """
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
            dropout_state.clear()  # later calls of the model draw their masks again
            loop.saver.close()
            if self.ranks.rank == 0:
                return_folder(self.run_folder.path)
            loop.engine.close(whole=succeeded)
        return {**loop.validation, "step": loop.completed_steps}

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
        if steps and self.ranks.rank == 0:
            return StepProfiler(steps, self.run_folder.trace)
        return None


def _resume_after_restart(arguments: TrainingArguments) -> TrainingArguments:
    """Returns the arguments of a job that is started again: it resumes its run, or begins it again
    if none is saved.
    """
    folder = getattr(arguments, "output_dir", None)
    if not folder:
        folder = Path(arguments.save_dir, arguments.experiment_name or "")
    is_saved = RunFolder(Path(folder)).latest_step() is not None
    changes: dict[str, Any] = {"resume": is_saved}
    if hasattr(arguments, "overwrite"):
        changes["overwrite"] = not is_saved
    return replace(arguments, **changes)


def explain_idle_gpus(arguments: TrainingArguments, processes: int, gpus: int) -> str:
    """Returns how a run would use the GPUs of this machine that it leaves idle; "" if it uses all.

    Args:
        processes: Those of the run.
        gpus: Those of this machine.
    """
    if not gpus or arguments.num_nodes > 1:
        return ""
    if ENVIRONMENTS[arguments.env_type].is_one_process:
        if arguments.pytorch_device == "cpu":
            return "training on the CPU; pytorch_device='cuda' uses a GPU of this machine"
        if arguments.pytorch_device == "auto" and gpus > 1:
            return (
                f"training on 1 of this machine's {gpus} GPUs; env_type='pytorchDDP' and "
                f"num_gpus={gpus} use all"
            )
        return ""
    if processes >= gpus:
        return ""
    return f"training on {processes} of this machine's {gpus} GPUs; num_gpus={gpus} uses all"


def _find_pad_token_id(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    return getattr(config, "pad_token_id", None) or 0
