"""Runs one pretraining, from the corpus to the Hugging Face folder.

`Pretraining.__init__` prepares the run: processes, folder, corpora, samples, model.
`Pretraining.run` trains, evaluates, exports, evaluates the export, and reports.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from rich.panel import Panel
from rich.text import Text
from torch import nn

from ..convert import merge
from ..data import target_entropy
from ..data.loading.pretraining import build_pad_batch
from ..data.tokenizers.tokenizer import load_tokenizer
from ..files.verbosity import is_quiet
from ..models import ParallelConfig, from_config, from_pretrained
from ..models.loading import check_pretrained, missing_modules
from ..models.lora import merge_lora
from ..trainer.checkpointing.extra_files import read_extra_files
from ..trainer.checkpointing.snapshot import write_model
from ..trainer.distillation import Distillation, Teacher, make_teacher_mesh
from ..trainer.engines.factory import compute_in_fp32, gather_parameters
from ..trainer.engines.precision import DTYPES
from ..trainer.environments import ENVIRONMENTS
from ..trainer.estimate import Job, estimate_stages
from ..trainer.estimate.tables import stage_table
from ..trainer.launch.rank_info import RankInfo
from ..trainer.launch.rank_process import mark_run_as_begun
from ..trainer.launch.ranks import on_first_rank
from ..trainer.logging.console import make_console
from ..trainer.logging.descriptions import describe_mesh
from ..trainer.logging.provenance import command_line
from ..trainer.logging.report import plot_loss
from ..trainer.run_folder import RunFolder, make_run_folder
from ..trainer.run_lock import return_folder, take_folder
from ..trainer.trainer import Trainer
from .arguments import PretrainingArguments
from .corpora import (
    TOKENIZER,
    PaddedSamples,
    PretrainingCollate,
    held_out_samples,
    make_data,
    make_samples,
    prepare_data,
)
from .export import (
    MARKS,
    check_export,
    check_tokenizer,
    complete_tokenizer,
    evaluates_in_transformers,
    exported_loss,
    write_card,
    write_sample,
)
from .inputs import Inputs, Weights, with_vocabulary
from .tables import (
    compared_loss,
    corpus_facts,
    estimated_job,
    facts_table,
    run_facts,
    run_files,
    run_results,
    step_time,
    with_stages,
)


class PretrainingTrainer(Trainer):
    """Trains a model on its targets, and on a teacher's distributions of them if there is one.

    Attributes:
        distillation: None without a teacher.
    """

    distillation: Distillation | None = None

    def run_model(self, data: dict[str, Any], model: Any, mems: Any) -> Any:
        """Runs one forward pass; the loss of training has the divergence from the teacher."""
        output = super().run_model(data, model, mems)
        if self.distillation is None or not torch.is_grad_enabled():
            return output
        return {"loss": self.distillation.add_to_loss(output, data)}


class Pretraining:
    """A checked run on this rank.

    The constructor joins the processes and prepares folder, corpora and model.

    Raises:
        ValueError: On every rank, if the output folder or the data is unusable.
    """

    def __init__(self, arguments: PretrainingArguments, inputs: Inputs, launch: RankInfo) -> None:
        self.arguments = arguments
        self.inputs = inputs
        if arguments.tf32:
            torch.set_float32_matmul_precision("high")
        self.console = make_console(quiet=not launch.is_first or is_quiet())
        self.trainer = PretrainingTrainer(arguments)
        if dist.is_initialized():
            # Every process has checked the folder that the first rank changes next.
            dist.barrier()
        path, self.first_step = on_first_rank(self._prepare_folder)
        self.run_folder = RunFolder(path)
        self.trainer.run_folder = self.run_folder
        self._make_samples()
        self.job = self._plan_stages()
        self.model = self._build_model()
        if inputs.teacher is not None and not arguments.eval_only:
            self.trainer.distillation = self._load_teacher(inputs.teacher)
        self._show_facts()

    def _make_samples(self) -> None:
        """Sets the tokenizer's configuration, the samples, and the entropy of the held-out targets."""
        arguments = self.arguments
        inputs = self.inputs
        tokenizer = load_tokenizer(self.run_folder.data / TOKENIZER)
        self.config = inputs.config
        if inputs.tokenizer is None:  # It was trained on the corpus, so its size is new.
            self.config = with_vocabulary(inputs.config, tokenizer, inputs.objective)
        on_first_rank(lambda: check_tokenizer(tokenizer, self.config))
        self.train, self.held_out = make_samples(
            arguments, inputs, self.run_folder.data, tokenizer, self.trainer.share
        )
        self.collate = PretrainingCollate(build_pad_batch(make_data(arguments, inputs), tokenizer))
        self.evaluated = held_out_samples(self.held_out, arguments.final_eval_sequences)
        samples = (self.evaluated[index] for index in range(len(self.evaluated)))
        self.entropy = on_first_rank(lambda: target_entropy(samples))

    def _show_facts(self) -> None:
        """Prints what is known of the run before its first step."""
        ranks = self.trainer.ranks
        self.facts = run_facts(
            self.arguments, self.inputs, self.config, ranks.tp_size, ranks.dp_size, self.first_step
        )
        train_tokens = getattr(self.train, "tokens_per_epoch", None)
        self.facts |= corpus_facts(train_tokens, self.held_out.tokens_per_epoch, self.entropy)
        self.console.print(facts_table("Run", self.facts))
        if ranks.pp_size > 1:
            self.console.print(stage_table(estimate_stages(self.config, self.job), self.job))

    def run(self) -> None:
        """Trains, evaluates and exports the model, and prints the results.

        With `eval_only` it evaluates the model alone.
        """
        if self.arguments.eval_only:
            self._show_evaluation(self.evaluate())
            if not self.inputs.continues:
                # The folder was made for this evaluation, and held only its corpus.
                on_first_rank(lambda: shutil.rmtree(self.run_folder.path))
            return
        try:
            self._train()
        finally:
            if self.trainer.ranks.rank == 0:
                return_folder(self.run_folder.path)

    def _train(self) -> None:
        started = time.monotonic()
        arguments = self.arguments
        trainer = self.trainer
        valid: Any = held_out_samples(self.held_out, arguments.eval_sequences)
        collate: Any = self.collate
        if arguments.stream:  # A stream makes its own batches.
            valid = PaddedSamples(valid, self.collate)
            collate = None
        with trainer.make_reporter(self.first_step, arguments.train_steps) as reporter:
            results = trainer.train(
                self.model,
                train_dataset=self.train,
                valid_dataset=valid,
                collate_fn=collate,
                extra_files=self.run_folder.data / TOKENIZER,
                reporter=reporter,
            )
            step = int(results["step"])
            loss = self.evaluate()
            reporter.evaluation(step, {"loss": loss}, kind="final")
        trained = self._merge_adapter(trainer.run_folder.checkpoint(step))
        minutes = (time.monotonic() - started) / 60
        on_first_rank(lambda: self._finish(step, trained, loss, minutes))

    def _merge_adapter(self, checkpoint: Path) -> Path:
        """Returns the folder with the trained model. Collective.

        LoRA weights are merged into their base there.
        """
        if getattr(self.model, "lora", None) is None:
            return checkpoint
        gather_parameters(self.model)
        merge_lora(self.model)
        folder = checkpoint.with_name(".merged")
        extras = read_extra_files(self.run_folder.data / TOKENIZER, self.model, self.console.print)
        write_model(self.model, folder, self.trainer.ranks, extras)
        return folder

    def evaluate(self) -> float:
        """Returns the loss of the model over all held-out samples of the final evaluation.

        It is computed in fp32, as that of the exported model.
        """
        if self.arguments.precision != "fp32":
            compute_in_fp32(self.model, self.arguments, self.trainer.ranks)
        if self.arguments.tf32:
            torch.set_float32_matmul_precision("highest")
        return self.trainer.evaluate(self.model, self.evaluated, collate_fn=self.collate)["loss"]

    def _show_evaluation(self, loss: float) -> None:
        facts = {"held-out loss": compared_loss(loss, self.entropy)}
        self.console.print(facts_table("Result", facts))

    def _prepare_folder(self) -> tuple[Path, int]:
        """Returns the path of the run's folder and its first step.

        An error leaves the folder's contents unchanged.
        """
        arguments = self.arguments
        if arguments.eval_only:
            if arguments.output_dir and self.inputs.continues:
                return RunFolder.named(arguments.output_dir).path, 0
            folder = RunFolder(Path(mkdtemp(prefix="shardzoo-")))
            try:
                prepare_data(arguments, self.inputs, folder.data, self.console)
            except BaseException:
                shutil.rmtree(folder.path)
                raise
            return folder.path, 0
        path = arguments.output_dir or make_run_folder(arguments.model_name)
        folder = RunFolder.named(path)
        take_folder(folder.path, self.console.print)
        try:
            return folder.path, self._fill_folder(folder)
        except BaseException:
            return_folder(folder.path)
            raise

    def _fill_folder(self, folder: RunFolder) -> int:
        """Begins a run in its folder, or continues the one that is there; returns its first step."""
        arguments = self.arguments
        first_step = folder.first_step(resume=arguments.resume, overwrite=arguments.overwrite)
        if first_step:
            folder.record_arguments(arguments.run_arguments())
            folder.record_command(first_step, command_line())
            mark_run_as_begun()
            return first_step
        if self.inputs.weights is not None:
            # Preparing the corpus may take hours, so look at the weights before.
            check_pretrained(self.inputs.weights.folder)
        with folder.new_data() as prepared:
            prepare_data(arguments, self.inputs, prepared, self.console)
            folder.begin(arguments.run_arguments(), prepared)
            folder.record_command(0, command_line())
            mark_run_as_begun()
        return 0

    def _plan_stages(self) -> Job:
        """Returns the job of a rank, with the blocks of each pipeline stage.

        The first rank may measure them.
        """
        arguments = self.arguments
        _, job = estimated_job(arguments, self.inputs, self.trainer.ranks.dp_size)
        blocks = on_first_rank(lambda: with_stages(arguments, self.config, job).pipeline_blocks)
        return replace(job, pipeline_blocks=blocks)

    def _build_model(self) -> nn.Module:
        arguments = self.arguments
        weights = self.inputs.weights
        options: dict[str, Any] = {
            "device": self.trainer.device,
            "dtype": torch.bfloat16 if arguments.precision == "bf16" else torch.float32,
            "seed": arguments.seed,
            "parallel_config": ParallelConfig(
                arguments.sequence_parallel,
                arguments.recompute,
                self.job.pipeline_blocks,
                arguments.context_exchange,
            ),
        }
        adapts = arguments.lora_rank or arguments.adapter is not None
        if ENVIRONMENTS[arguments.env_type].uses_fsdp and not adapts:
            # The trainer reads the weights when it has split the model.
            options["device"] = "meta"
        # The trainer itself loads the checkpoint that a run resumes from; of LoRA, the adapter.
        loaded_by_trainer = self.first_step and not adapts
        if weights is None or loaded_by_trainer:
            return from_config(self.config, self.trainer.mesh, **options)
        new = missing_modules(weights.folder, self.config)
        model = from_pretrained(
            weights.folder, self.trainer.mesh, config=self.config, new=new, **options
        )
        return model.train()

    def _load_teacher(self, teacher: Weights) -> Distillation:
        """Returns what is learned of the teacher. Collective."""
        arguments = self.arguments
        size = arguments.teacher_parallel_size
        mesh = make_teacher_mesh(self.trainer.mesh, size)
        model = from_pretrained(
            teacher.folder,
            mesh,
            config=teacher.config,
            device=self.trainer.device,
            dtype=DTYPES[arguments.precision],
            parallel_config=ParallelConfig(arguments.sequence_parallel and size is None),
        )
        return Distillation(
            self.model,
            Teacher(model, mesh, self.trainer.mesh),
            arguments.teacher_weight,
            arguments.teacher_temperature,
            self.trainer.mesh,
        )

    def _finish(self, step: int, trained: Path, loss: float, minutes: float) -> None:
        """Plots the losses, exports the model, evaluates the exported one, and reports all of it.

        Args:
            trained: The folder with the trained model.
            loss: Of the model as it was trained, on the held-out samples.
        """
        folder = self.run_folder
        arguments = self.arguments
        ranks = self.trainer.ranks
        global_batch = arguments.global_batch(ranks.dp_size)
        mesh = describe_mesh(
            ranks.pp_size, ranks.dp_size, ranks.tp_size, ranks.cp_size, ranks.ep_size
        )
        plot_loss(
            folder.metrics(),
            folder.loss_plot,
            tokens_per_step=global_batch * self.inputs.tokens_per_sample,
            entropy=self.entropy,
            entropy_label="entropy of the held-out targets, which frequencies alone reach",
            title=f"{arguments.model_name} on {mesh}",
        )

        # Export, and evaluate what was exported.
        shutil.rmtree(folder.hf, ignore_errors=True)
        merge(trained, folder.hf)
        tokenizer = load_tokenizer(folder.data / TOKENIZER)
        complete_tokenizer(tokenizer, folder.hf, self.held_out[0])
        if trained != folder.checkpoint(step):
            shutil.rmtree(trained)
        self.console.print("loading the exported folder …")
        exported = exported_loss(
            folder.hf,
            self.evaluated,
            batch_size=arguments.micro_batch_size,
            collate=self.collate,
            device=self.trainer.device,
        )
        in_transformers = evaluates_in_transformers(self.config)
        results = run_results(
            loss=loss,
            exported=exported,
            entropy=self.entropy,
            loader="transformers" if in_transformers else "the unsplit model",
            ranks=ranks,
            minutes=minutes,
        )
        results |= step_time(folder.metrics(), global_batch)

        # Let the exported model write, and report.
        blanks = getattr(self.inputs.objective, "vocabulary", None)
        sample = write_sample(folder.hf, self.held_out[0], arguments.sample_prompt, blanks=blanks)
        commands = [(record["step"], record["command"]) for record in folder.commands()]
        write_card(
            folder.hf, self.config, {**self.facts, **results}, commands=commands, sample=sample
        )
        heading = f"Sample: the exported model wrote the parts in {MARKS[0]} {MARKS[1]}"
        self.trainer.write_report({"Run": self.facts, "Export": results, heading: sample})
        files = run_files(folder, self.config.architecture)
        self.console.print(facts_table("Result", results | files))
        panel = Panel(Text(sample), title=Text(heading), title_align="left", expand=False)
        self.console.print(panel)
        check_export(folder.hf, exported, loss)
