"""Runs one pretraining, from the corpus to the Hugging Face folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from torch import nn
from torch.utils.data import Subset

from ..convert import merge
from ..data import (
    Corpus,
    IndexedDataset,
    MixedSamples,
    PadBatch,
    build_dataset,
    parse_mixture,
    prepare_corpora,
    target_entropy,
)
from ..data.loading.mixture import Mixture
from ..data.objectives.pretraining import PretrainingData, PretrainingSamples, pad_batch
from ..data.tokenizers.files import has_tokenizer
from ..data.tokenizers.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from ..data.tokenizers.vocabulary import Vocabulary
from ..models import ParallelConfig, family, from_config, from_pretrained
from ..models.loading import missing_modules
from ..trainer.launch.rank_info import RankInfo
from ..trainer.launch.ranks import on_first_rank
from ..trainer.logging.provenance import command_line
from ..trainer.logging.report import plot_loss
from ..trainer.run_folder import RunFolder, make_run_folder
from ..trainer.trainer import Trainer
from .arguments import PretrainingArguments
from .export import check_export, exported_loss, write_card, write_sample
from .inputs import Inputs, prepare_tokenizer, with_vocabulary
from .tables import (
    compared_loss,
    corpus_facts,
    corpus_progress,
    facts_table,
    run_facts,
    run_files,
    run_results,
    step_time,
)

TOKENIZER = "tokenizer"  # the folder of the model's tokenizer in the run's data
PAIRS = "pairs.json"  # the file in the run's data that names the .bin/.idx pairs


def held_out_samples(dataset: PretrainingSamples, count: int | None = None) -> Subset[Any]:
    """The samples of one pass over the held-out text, shuffled, so that the first `count` are representative."""
    samples = max(1, int(dataset.samples_per_epoch))
    order = np.random.default_rng(0).permutation(samples).tolist()
    return Subset(dataset, order[:count])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Collate:
    """Pads samples to the objective's lengths. A mask without padding is left out, because attention is faster so."""

    pad: PadBatch

    def __call__(self, samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        batch = self.pad(samples)
        mask = batch["attention_mask"]
        if mask.dim() == 2 and bool(mask.all()):
            del batch["attention_mask"]
        return batch


@dataclass(frozen=True)
class Pair:
    """The training and the held-out text of a component of the corpus, and its share of the samples."""

    train: Path
    valid: Path
    share: Fraction


def write_pairs(folder: Path, pairs: Sequence[Pair]) -> None:
    """Records which pairs a run trains on. Those inside the folder are recorded relative to it, because it is moved."""

    def recorded(path: Path) -> str:
        return str(path.relative_to(folder) if path.is_relative_to(folder) else path.absolute())

    values = [
        {"train": recorded(pair.train), "valid": recorded(pair.valid), "share": str(pair.share)} for pair in pairs
    ]
    (folder / PAIRS).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_pairs(folder: Path) -> list[Pair]:
    """Returns the pairs that `write_pairs` recorded."""
    values = json.loads((folder / PAIRS).read_text(encoding="utf-8"))
    return [Pair(folder / part["train"], folder / part["valid"], Fraction(part["share"])) for part in values]


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
        self.run_folder, self.first_step = on_first_rank(self._prepare_folder)
        self.trainer.run_folder = self.run_folder
        tokenizer = load_tokenizer(self.run_folder.data / TOKENIZER)
        self.config = inputs.config if inputs.tokenizer else with_vocabulary(inputs.config, tokenizer)
        self.data = self._data_of(arguments)
        self.train, self.held_out = self._datasets(self.run_folder.data, tokenizer)
        self.collate = Collate(pad_batch(self.data, tokenizer))
        self.evaluated = held_out_samples(self.held_out, arguments.final_eval_sequences)
        self.entropy = on_first_rank(lambda: target_entropy(self.evaluated[i] for i in range(len(self.evaluated))))
        self.model = self._build_model()
        ranks, sizes = self.trainer.ranks, (self.train.tokens_per_epoch, self.held_out.tokens_per_epoch)
        self.facts = run_facts(arguments, inputs, self.config, ranks.tp_size, ranks.dp_size, self.first_step)
        self.facts |= corpus_facts(*sizes, self.entropy)
        self.console.print(facts_table("Run", self.facts))

    def run(self) -> None:
        """Trains and evaluates the model, exports it, and prints the results; with `eval_only` evaluates it alone."""
        started = time.monotonic()
        arguments, trainer = self.arguments, self.trainer
        if arguments.eval_only:
            self._show_evaluation(self.evaluate())
            return
        with trainer.make_reporter(self.first_step, arguments.train_steps) as reporter:
            step = trainer.train(
                self.model,
                train_dataset=self.train,
                valid_dataset=held_out_samples(self.held_out, arguments.eval_sequences),
                collate_fn=self.collate,
                extra_files=self.run_folder.data / TOKENIZER,
                reporter=reporter,
            )["step"]
            loss = self.evaluate()
            reporter.evaluation(int(step), {"loss": loss}, kind="final")
        on_first_rank(lambda: self._finish(int(step), loss, (time.monotonic() - started) / 60))

    def evaluate(self) -> float:
        """Returns the loss of the model, in fp32, over all held-out samples of the final evaluation."""
        if self.arguments.precision != "fp32":
            self.model.float()  # the exported model is evaluated in fp32
        if self.arguments.tf32:
            torch.set_float32_matmul_precision("highest")
        return self.trainer.evaluate(self.model, self.evaluated, collate_fn=self.collate)["loss"]

    def _show_evaluation(self, loss: float) -> None:
        self.console.print(facts_table("Result", {"held-out loss": compared_loss(loss, self.entropy)}))
        if not self.inputs.continues:
            on_first_rank(lambda: shutil.rmtree(self.run_folder.path))  # it held the corpus

    def _prepare_folder(self) -> tuple[RunFolder, int]:
        """Returns the run's folder and its first step. An error leaves the folder's contents unchanged."""
        arguments = self.arguments
        folder = RunFolder(Path(arguments.output_dir)) if arguments.output_dir else None
        if folder and self.inputs.continues and arguments.eval_only:
            return folder, 0
        if arguments.eval_only:
            folder = RunFolder(Path(mkdtemp(prefix="shardzoo-")))
            self._prepare_data(folder.data)
            return folder, 0
        first_step = folder.first_step(resume=arguments.resume, overwrite=arguments.overwrite) if folder else 0
        if folder and first_step:
            folder.record_arguments(arguments.of_the_run())
            return folder, first_step
        goal = folder.path if folder else Path("runs", "new")
        nearest = next(parent for parent in goal.absolute().parents if parent.is_dir())
        with TemporaryDirectory(dir=nearest, prefix=f".{goal.name}-") as aside:
            prepared = Path(aside) / "data"
            self._prepare_data(prepared)
            folder = folder or RunFolder(make_run_folder(arguments.model_name))
            folder.begin(arguments.of_the_run(), prepared)
        return folder, first_step

    def _prepare_data(self, folder: Path) -> None:
        """Writes the corpora and the tokenizer, and tries whether the objective can make samples of them."""
        folder.mkdir()
        mixture = parse_mixture(self.arguments.data)
        corpora = self._prepare_corpora(mixture, folder)
        for note in dict.fromkeys(note for corpus in corpora for note in corpus.notes):
            self.console.print(note)
        shares = [share for _, share in mixture]
        parts = zip(corpora, shares, strict=True)
        write_pairs(folder, [Pair(corpus.train_prefix, corpus.valid_prefix, share) for corpus, share in parts])
        self._datasets(folder, self._place_tokenizer(corpora[0], folder / TOKENIZER))

    def _prepare_corpora(self, mixture: Mixture, folder: Path) -> list[Corpus]:
        arguments, inputs = self.arguments, self.inputs
        with corpus_progress(self.console) as progress:
            return prepare_corpora(
                mixture,
                folder,
                tokenizer=inputs.tokenizer or family(inputs.config.model_type).tokenizer,
                vocab_size=arguments.vocab_size or inputs.config.vocab_size,
                split_sentences=inputs.objective.split_sentences,
                held_out_fraction=arguments.held_out_fraction,
                seed=arguments.seed,
                progress=progress,
            )

    def _place_tokenizer(self, corpus: Corpus, folder: Path) -> Tokenizer:
        """Writes the model's tokenizer, with the objective's special tokens, to the folder, and returns it."""
        inputs, tokenizer = self.inputs, self.inputs.tokenizer
        if tokenizer is None:
            tokenizer = load_tokenizer(corpus.tokenizer_dir)
            prepare_tokenizer(tokenizer, str(corpus.tokenizer_dir), inputs.objective, None)
        if not has_tokenizer(folder) or Vocabulary.of(load_tokenizer(folder)) != Vocabulary.of(tokenizer):
            save_tokenizer(tokenizer, folder)
        return tokenizer

    def _data_of(self, arguments: PretrainingArguments) -> PretrainingData:
        inputs, size = self.inputs, arguments.micro_batch_size
        lengths = inputs.sequence_length, inputs.target_length
        return PretrainingData(inputs.objective, *lengths, micro_batch_size=size, seed=arguments.seed)

    def _datasets(self, folder: Path, tokenizer: Tokenizer) -> tuple[PretrainingSamples, PretrainingSamples]:
        """Returns the endless samples of the training and of the held-out text."""
        data, pairs = self._data_of(self.arguments), read_pairs(folder)
        train = [build_dataset(data, IndexedDataset(pair.train), tokenizer) for pair in pairs]
        held_out = [build_dataset(replace(data, seed=0), IndexedDataset(pair.valid), tokenizer) for pair in pairs]
        if len(pairs) == 1:
            return train[0], held_out[0]
        shares = [pair.share for pair in pairs]
        return MixedSamples(train, shares), MixedSamples(held_out, shares)

    def _build_model(self) -> nn.Module:
        arguments, weights = self.arguments, self.inputs.weights
        made: dict[str, Any] = {
            "device": self.trainer.device,
            "dtype": torch.bfloat16 if arguments.precision == "bf16" else torch.float32,
            "seed": arguments.seed,
            "parallel_config": ParallelConfig(arguments.sequence_parallel, arguments.recompute),
        }
        if weights is None or self.first_step:  # the trainer loads the checkpoint that a run resumes from
            return from_config(self.config, self.trainer.mesh, **made)
        new = missing_modules(weights.folder, self.config)
        return from_pretrained(weights.folder, self.trainer.mesh, config=self.config, new=new, **made).train()

    def _finish(self, step: int, loss: float, minutes: float) -> None:
        """Plots the losses, exports the model, evaluates the exported one, and reports all of it."""
        folder, arguments, ranks = self.run_folder, self.arguments, self.trainer.ranks
        plot_loss(
            folder.metrics(),
            folder.loss_plot,
            tokens_per_step=arguments.global_batch(ranks.dp_size) * self.inputs.tokens_per_sample,
            entropy=self.entropy,
            entropy_label="entropy of the held-out targets",
            title=f"{arguments.model_name} on {ranks.tp_size} tensor-parallel processes",
        )
        shutil.rmtree(folder.hf, ignore_errors=True)
        merge(folder.checkpoint(step), folder.hf)
        self.console.print("loading the exported folder …")
        size = arguments.micro_batch_size
        exported = exported_loss(folder.hf, self.evaluated, batch_size=size, collate=self.collate)
        loader = "transformers" if family(self.config.model_type).in_transformers else "the unsplit model"
        results = run_results(
            loss=loss, exported=exported, entropy=self.entropy, loader=loader, ranks=ranks, minutes=minutes
        ) | step_time(folder.metrics(), arguments.global_batch(ranks.dp_size))
        sample = write_sample(folder.hf, self.held_out[0], arguments.sample_prompt)
        write_card(folder.hf, self.config, {**self.facts, **results}, command=command_line(), sample=sample)
        self.trainer.write_report({"Run": self.facts, "Export": results, "Sample": sample})
        self.console.print(facts_table("Result", results | run_files(folder, self.config.architecture)))
        self.console.print(Panel(Text(sample), title="the exported model wrote the parts in [[ ]]", title_align="left"))
        check_export(folder.hf, exported, loss)
