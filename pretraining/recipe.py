"""Runs one pretraining, from the corpus to the Hugging Face folder."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from torch import nn

from ..convert import merge
from ..data import target_entropy
from ..data.loading.pretraining import build_pad_batch
from ..data.tokenizers.tokenizer import load_tokenizer
from ..models import ParallelConfig, family, from_config, from_pretrained
from ..models.loading import check_pretrained, missing_modules
from ..models.lora import merge_lora
from ..trainer.checkpointing.extra_files import read_extra_files
from ..trainer.checkpointing.snapshot import write_model
from ..trainer.estimate import Job, estimate_stages
from ..trainer.estimate.tables import stage_table
from ..trainer.launch.rank_info import RankInfo
from ..trainer.launch.rank_process import mark_run_as_begun
from ..trainer.launch.ranks import on_first_rank
from ..trainer.logging.provenance import command_line
from ..trainer.logging.report import plot_loss
from ..trainer.run_folder import RunFolder, make_run_folder
from ..trainer.run_lock import return_folder, take_folder
from ..trainer.trainer import Trainer
from .arguments import PretrainingArguments
from .corpora import (
    TOKENIZER,
    Collate,
    PaddedSamples,
    data_of,
    held_out_samples,
    make_samples,
    prepare_data,
)
from .export import check_export, exported_loss, write_card, write_sample
from .inputs import Inputs, with_vocabulary
from .tables import (
    compared_loss,
    corpus_facts,
    estimated_job,
    facts_table,
    mesh_fact,
    run_facts,
    run_files,
    run_results,
    step_time,
    with_stages,
)


class Pretraining:
    """A checked run on this rank. The constructor joins the processes and prepares folder, corpora and model.

    Raises:
        ValueError: on every rank, if the output folder or the data is unusable.
    """

    def __init__(self, arguments: PretrainingArguments, inputs: Inputs, launch: RankInfo) -> None:
        self.arguments, self.inputs = arguments, inputs
        if arguments.tf32:
            torch.set_float32_matmul_precision("high")
        self.console = Console(quiet=not launch.is_first)
        self.trainer = Trainer(arguments)
        if dist.is_initialized():
            dist.barrier()  # every process has checked the folder that the first rank changes next
        path, self.first_step = on_first_rank(self._prepare_folder)
        self.run_folder = RunFolder(path)
        self.trainer.run_folder = self.run_folder
        tokenizer = load_tokenizer(self.run_folder.data / TOKENIZER)
        self.config = (
            inputs.config
            if inputs.tokenizer
            else with_vocabulary(inputs.config, tokenizer, inputs.objective)
        )
        self.train, self.held_out = make_samples(
            arguments, inputs, self.run_folder.data, tokenizer, self.trainer.share
        )
        self.collate = Collate(build_pad_batch(data_of(arguments, inputs), tokenizer))
        self.evaluated = held_out_samples(self.held_out, arguments.final_eval_sequences)
        self.entropy = on_first_rank(
            lambda: target_entropy(self.evaluated[i] for i in range(len(self.evaluated)))
        )
        self.job = self._plan_stages()
        self.model = self._build_model()
        ranks, train_tokens = self.trainer.ranks, getattr(self.train, "tokens_per_epoch", None)
        self.facts = run_facts(
            arguments, inputs, self.config, ranks.tp_size, ranks.dp_size, self.first_step
        )
        self.facts |= corpus_facts(train_tokens, self.held_out.tokens_per_epoch, self.entropy)
        self.console.print(facts_table("Run", self.facts))
        if ranks.pp_size > 1:
            self.console.print(stage_table(estimate_stages(self.config, self.job), self.job))

    def run(self) -> None:
        """Trains and evaluates the model, exports it, and prints the results; with `eval_only` evaluates it alone."""
        if self.arguments.eval_only:
            self._show_evaluation(self.evaluate())
            return
        try:
            self._train()
        finally:
            if self.trainer.ranks.rank == 0:
                return_folder(self.run_folder.path)

    def _train(self) -> None:
        started = time.monotonic()
        arguments, trainer = self.arguments, self.trainer
        valid = held_out_samples(self.held_out, arguments.eval_sequences)
        with trainer.make_reporter(self.first_step, arguments.train_steps) as reporter:
            step = trainer.train(
                self.model,
                train_dataset=self.train,
                valid_dataset=PaddedSamples(valid, self.collate) if arguments.stream else valid,
                collate_fn=None if arguments.stream else self.collate,
                extra_files=self.run_folder.data / TOKENIZER,
                reporter=reporter,
            )["step"]
            loss = self.evaluate()
            reporter.evaluation(int(step), {"loss": loss}, kind="final")
        trained = self._merge_adapter(trainer.run_folder.checkpoint(int(step)))
        on_first_rank(
            lambda: self._finish(int(step), trained, loss, (time.monotonic() - started) / 60)
        )

    def _merge_adapter(self, checkpoint: Path) -> Path:
        """Returns the folder with the trained model, where LoRA weights are merged into their base. Collective."""
        if getattr(self.model, "lora", None) is None:
            return checkpoint
        merge_lora(self.model)
        folder = checkpoint.with_name(".merged")
        extras = read_extra_files(self.run_folder.data / TOKENIZER, self.model, self.console.print)
        write_model(self.model, folder, self.trainer.ranks, extras)
        return folder

    def evaluate(self) -> float:
        """Returns the loss of the model, in fp32, over all held-out samples of the final evaluation."""
        if self.arguments.precision != "fp32":
            self.model.float()  # the exported model is evaluated in fp32
        if self.arguments.tf32:
            torch.set_float32_matmul_precision("highest")
        return self.trainer.evaluate(self.model, self.evaluated, collate_fn=self.collate)["loss"]

    def _show_evaluation(self, loss: float) -> None:
        self.console.print(
            facts_table("Result", {"held-out loss": compared_loss(loss, self.entropy)})
        )
        if not self.inputs.continues:
            on_first_rank(lambda: shutil.rmtree(self.run_folder.path))  # it held the corpus

    def _prepare_folder(self) -> tuple[Path, int]:
        """Returns the path of the run's folder and its first step. An error leaves the folder's contents unchanged."""
        arguments = self.arguments
        folder = RunFolder(Path(arguments.output_dir)) if arguments.output_dir else None
        if folder and self.inputs.continues and arguments.eval_only:
            return folder.path, 0
        if arguments.eval_only:
            folder = RunFolder(Path(mkdtemp(prefix="shardzoo-")))
            try:
                prepare_data(arguments, self.inputs, folder.data, self.console)
            except BaseException:
                shutil.rmtree(folder.path)
                raise
            return folder.path, 0
        folder = folder or RunFolder(make_run_folder(arguments.model_name))
        take_folder(folder.path, self.console.print)
        try:
            return folder.path, self._fill_folder(folder)
        except BaseException:
            return_folder(folder.path)
            raise

    def _fill_folder(self, folder: RunFolder) -> int:
        arguments = self.arguments
        first_step = folder.first_step(resume=arguments.resume, overwrite=arguments.overwrite)
        if first_step:
            folder.record_arguments(arguments.of_the_run())
            mark_run_as_begun()
            return first_step
        if self.inputs.weights is not None:
            check_pretrained(
                self.inputs.weights.folder
            )  # before the corpus is prepared, which may take hours
        with folder.new_data() as prepared:
            prepare_data(arguments, self.inputs, prepared, self.console)
            folder.begin(arguments.of_the_run(), prepared)
            mark_run_as_begun()
        return 0

    def _plan_stages(self) -> Job:
        """Returns the job of a rank, with the blocks of each pipeline stage. The first rank may measure them."""
        arguments = self.arguments
        _, job = estimated_job(arguments, self.inputs, self.trainer.ranks.dp_size)
        blocks = on_first_rank(lambda: with_stages(arguments, self.config, job).pipeline_blocks)
        return replace(job, pipeline_blocks=blocks)

    def _build_model(self) -> nn.Module:
        arguments, weights = self.arguments, self.inputs.weights
        made: dict[str, Any] = {
            "device": self.trainer.device,
            "dtype": torch.bfloat16 if arguments.precision == "bf16" else torch.float32,
            "seed": arguments.seed,
            "parallel_config": ParallelConfig(
                arguments.sequence_parallel, arguments.recompute, self.job.pipeline_blocks
            ),
        }
        adapts = arguments.lora_rank or arguments.adapter is not None
        if weights is None or (
            self.first_step and not adapts
        ):  # the trainer loads what a run resumes from
            return from_config(self.config, self.trainer.mesh, **made)
        new = missing_modules(weights.folder, self.config)
        return from_pretrained(
            weights.folder, self.trainer.mesh, config=self.config, new=new, **made
        ).train()

    def _finish(self, step: int, trained: Path, loss: float, minutes: float) -> None:
        """Plots the losses, exports the model, evaluates the exported one, and reports all of it."""
        folder, arguments, ranks = self.run_folder, self.arguments, self.trainer.ranks
        plot_loss(
            folder.metrics(),
            folder.loss_plot,
            tokens_per_step=arguments.global_batch(ranks.dp_size) * self.inputs.tokens_per_sample,
            entropy=self.entropy,
            entropy_label="entropy of the held-out targets",
            title=f"{arguments.model_name} on {mesh_fact(ranks.pp_size, ranks.dp_size, ranks.tp_size)}",
        )
        shutil.rmtree(folder.hf, ignore_errors=True)
        merge(trained, folder.hf)
        if trained != folder.checkpoint(step):
            shutil.rmtree(trained)
        self.console.print("loading the exported folder …")
        how = {
            "batch_size": arguments.micro_batch_size,
            "collate": self.collate,
            "device": self.trainer.device,
        }
        exported = exported_loss(folder.hf, self.evaluated, **how)
        loader = (
            "transformers"
            if family(self.config.model_type).in_transformers
            else "the unsplit model"
        )
        results = run_results(
            loss=loss,
            exported=exported,
            entropy=self.entropy,
            loader=loader,
            ranks=ranks,
            minutes=minutes,
        ) | step_time(folder.metrics(), arguments.global_batch(ranks.dp_size))
        blanks = getattr(self.inputs.objective, "vocabulary", None)
        sample = write_sample(folder.hf, self.held_out[0], arguments.sample_prompt, blanks=blanks)
        write_card(
            folder.hf, self.config, {**self.facts, **results}, command=command_line(), sample=sample
        )
        self.trainer.write_report({"Run": self.facts, "Export": results, "Sample": sample})
        self.console.print(
            facts_table("Result", results | run_files(folder, self.config.architecture))
        )
        self.console.print(
            Panel(
                Text(sample),
                title="the exported model wrote the parts in [[ ]]",
                title_align="left",
            )
        )
        check_export(folder.hf, exported, loss)
