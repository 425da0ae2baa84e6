"""Runs one pretraining, from the corpus to the Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.utils.data import Subset

from ..convert import merge
from ..data import Corpus, GPTDataset, IndexedDataset, prepare_corpus, unigram_entropy
from ..models import ParallelConfig, from_config
from ..models.common.config import ModelConfig
from ..models.common.language_model import CausalLM
from ..trainer.batches.collate import collate
from ..trainer.launch.rank_info import RankInfo
from ..trainer.launch.ranks import on_first_rank
from ..trainer.logging.report import plot_loss
from ..trainer.run_folder import RunFolder, make_run_folder
from ..trainer.trainer import Trainer
from .arguments import PretrainingArguments
from .tables import corpus_progress, run_results, run_summary


def held_out_samples(dataset: GPTDataset, count: int | None = None) -> Subset[dict[str, Tensor]]:
    """The samples of one pass over the held-out text, shuffled, so that the first `count` are representative."""
    samples = max(1, int(dataset.samples_per_epoch))
    order = np.random.default_rng(0).permutation(samples).tolist()
    return Subset(cast(Any, dataset), order[:count])


class Pretraining:
    """A checked run on this rank. The constructor joins the processes and prepares folder, corpus and model.

    Raises:
        ValueError: on every rank, if the output folder or the data is unusable.
    """

    def __init__(self, arguments: PretrainingArguments, config: ModelConfig, launch: RankInfo) -> None:
        self.arguments, self.config = arguments, config
        self.console = Console(quiet=not launch.is_first)
        self.trainer = Trainer(arguments)
        self.run_folder, self.first_step, self.corpus = on_first_rank(self._prepare_folder)
        self.trainer.run_folder = self.run_folder
        self.config = config.with_changes(
            vocab_size=self.corpus.vocab_size,
            bos_token_id=self.corpus.eos_token_id,
            eos_token_id=self.corpus.eos_token_id,
        )
        self.sequence_length = arguments.sequence_length or config.max_sequence_length
        self.valid = IndexedDataset(self.corpus.valid_prefix)
        self.train = GPTDataset(IndexedDataset(self.corpus.train_prefix), self.sequence_length, arguments.seed)
        self.held_out = GPTDataset(self.valid, self.sequence_length, seed=0)
        self.model = self._build_model()
        self.unigram_entropy = unigram_entropy(self.valid)
        self.console.print(self._summary())

    def run(self) -> None:
        """Trains and evaluates the model, exports it, and prints the results."""
        started = time.monotonic()
        arguments, trainer = self.arguments, self.trainer
        with trainer.make_reporter(self.first_step, arguments.train_steps) as reporter:
            step = trainer.train(
                self.model,
                train_dataset=self.train,
                valid_dataset=held_out_samples(self.held_out, arguments.eval_sequences),
                extra_files=self.corpus.tokenizer_dir,
                reporter=reporter,
            )["step"]
            if arguments.precision != "fp32":
                self.model.float()  # the exported model is evaluated in fp32
            values = trainer.evaluate(self.model, held_out_samples(self.held_out, arguments.final_eval_sequences))
            reporter.evaluation(int(step), values, kind="final")
        on_first_rank(lambda: self._finish(int(step), values["loss"], (time.monotonic() - started) / 60))

    def _prepare_folder(self) -> tuple[RunFolder, int, Corpus]:
        """Returns the run's folder, its first step and its corpus. An error leaves the folder's contents unchanged."""
        arguments = self.arguments
        folder = RunFolder(Path(arguments.output_dir)) if arguments.output_dir else None
        first_step = folder.first_step(resume=arguments.resume, overwrite=arguments.overwrite) if folder else 0
        if folder and first_step:
            folder.record_arguments(arguments.of_the_run())
            return folder, first_step, self._prepare_corpus(folder.data)
        goal = folder.path if folder else Path("runs", "new")
        nearest = next(parent for parent in goal.absolute().parents if parent.is_dir())
        with TemporaryDirectory(dir=nearest, prefix=f".{goal.name}-") as aside:
            prepared = Path(aside) / "data"
            prepared.mkdir()
            corpus = self._prepare_corpus(prepared)
            folder = folder or RunFolder(make_run_folder(arguments.model_name))
            folder.begin(arguments.of_the_run(), prepared)
        moved = {
            field.name: folder.data / path.relative_to(prepared)
            for field in fields(corpus)
            if isinstance(path := getattr(corpus, field.name), Path) and path.is_relative_to(prepared)
        }
        return folder, first_step, replace(corpus, **moved)

    def _prepare_corpus(self, folder: Path) -> Corpus:
        arguments = self.arguments
        with corpus_progress(self.console) as progress:
            return prepare_corpus(
                arguments.data[0] if arguments.data else None,
                folder,
                vocab_size=arguments.vocab_size or self.config.vocab_size,
                held_out_fraction=arguments.held_out_fraction,
                seed=arguments.seed,
                progress=progress,
            )

    def _build_model(self) -> CausalLM:
        arguments, trainer = self.arguments, self.trainer
        dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
        parallel_config = ParallelConfig(arguments.sequence_parallel, arguments.recompute)
        model = from_config(
            self.config,
            trainer.mesh,
            device=trainer.device,
            dtype=dtype,
            seed=arguments.seed,
            parallel_config=parallel_config,
        )
        assert isinstance(model, CausalLM)
        return model

    def _summary(self) -> Table:
        return run_summary(
            model_name=self.arguments.model_name,
            model=self.model,
            ranks=self.trainer.ranks,
            arguments=self.arguments,
            train_tokens=self.train.tokens_per_epoch,
            valid_tokens=self.valid.num_tokens,
            sequence_length=self.sequence_length,
            unigram_entropy=self.unigram_entropy,
            first_step=self.first_step,
        )

    def _finish(self, step: int, loss: float, minutes: float) -> None:
        folder, arguments, ranks = self.run_folder, self.arguments, self.trainer.ranks
        plot_loss(
            folder.metrics(),
            folder.loss_plot,
            tokens_per_step=arguments.global_batch(ranks.dp_size) * (self.sequence_length - 1),
            entropy=self.unigram_entropy,
            entropy_label="unigram entropy of the held-out text",
            title=f"{arguments.model_name} on {ranks.tp_size} tensor-parallel processes",
        )
        shutil.rmtree(folder.hf, ignore_errors=True)
        merge(folder.checkpoint(step), folder.hf)
        self.console.print("loading the exported folder with transformers …")
        evaluated = held_out_samples(self.held_out, arguments.final_eval_sequences)
        hf_loss = held_out_loss(folder.hf, [evaluated[i] for i in range(len(evaluated))])
        self.console.print(
            run_results(
                folder=folder.path,
                loss=loss,
                unigram_entropy=self.unigram_entropy,
                hf_loss=hf_loss,
                tensor_parallel_size=ranks.tp_size,
                minutes=minutes,
            )
        )
        text = sample_continuation(folder.hf, arguments.sample_prompt)
        self.trainer.write_report({"Sample": text})
        self.console.print(Panel(Text(text), title="the exported model continues", title_align="left"))


def load_with_transformers(folder: Path) -> Any:
    """Loads the folder's model in fp32. ValueError for missing or unexpected keys, of which transformers only warns."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # missing keys, of which it would warn, are an error here
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, report = loaded
    problems = {kind: sorted(keys) for kind, keys in report.items() if keys}
    if problems:
        raise ValueError(f"transformers does not load {folder} completely: {problems}")
    return model.eval()


@torch.no_grad()
def held_out_loss(folder: Path, samples: Sequence[dict[str, Tensor]], batch_size: int = 8) -> float:
    """Returns transformers' mean loss in nats per token over samples of equal length, computed on the CPU."""
    model = load_with_transformers(folder)
    total = 0.0
    with all_cores():
        for first in range(0, len(samples), batch_size):
            batch = collate(samples[first : first + batch_size], torch.device("cpu"))
            total += model(**batch).loss.double().item() * len(batch["labels"])
    return total / len(samples)


def sample_continuation(folder: Path, prompt: str, *, new_tokens: int = 120) -> str:
    """Returns `prompt` and its continuation by the exported model, the same at every call."""
    from transformers import AutoTokenizer

    model, tokenizer = load_with_transformers(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    torch.manual_seed(0)
    with all_cores():
        tokens = model.generate(
            inputs.input_ids,
            attention_mask=inputs.attention_mask,
            do_sample=True,
            temperature=0.7,
            top_k=40,
            max_new_tokens=min(new_tokens, model.config.max_position_embeddings - inputs.input_ids.shape[1]),
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


class all_cores:
    """Lets torch use all cores for work that one rank does while the others wait."""

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)

    def __exit__(self, *exception: object) -> None:
        torch.set_num_threads(self._threads)
