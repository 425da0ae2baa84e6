"""Prepares a run's text, its tokenizer, and the samples that are made of them.

The text is a mixture of corpora, which are written to the run's folder, or of streams, of which
only the held-out part is written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.utils.data import Subset

from ..data import (
    BlockStream,
    IndexedDataset,
    IndexedDatasetWriter,
    MixedSamples,
    PadBatch,
    Share,
    TextStream,
    build_dataset,
    documents_in_memory,
    load_tokenizer,
    parse_mixture,
    prepare_corpora,
    train_tokenizer,
)
from ..data.indexed.meta import CorpusMeta
from ..data.objectives.objective import PretrainingData, PretrainingSamples
from ..data.text.encoding import find_end_token
from ..data.tokenizers.files import has_tokenizer
from ..data.tokenizers.tokenizer import Tokenizer, save_tokenizer
from ..data.tokenizers.vocabulary import Vocabulary
from ..models import family
from .arguments import PretrainingArguments
from .inputs import Inputs, prepare_tokenizer
from .tables import corpus_progress

TOKENIZER = "tokenizer"
"""The folder of the model's tokenizer in the run's data."""
PAIRS = "pairs.json"
"""The file in the run's data that names the .bin/.idx pairs."""
TOKENIZER_CHARACTERS = 50_000_000
"""Characters of the streams on which a new tokenizer is trained."""
HELD_OUT_CHARACTERS = 1_000_000
"""Characters of each stream that are held out."""


def held_out_samples(dataset: PretrainingSamples, count: int | None = None) -> Subset[Any]:
    """Returns the samples of one pass over the held-out text.

    They are shuffled, so that the first `count` are representative.
    """
    samples = max(1, int(dataset.samples_per_epoch))
    order = np.random.default_rng(0).permutation(samples).tolist()
    return Subset(dataset, order[:count])  # type: ignore[arg-type]


@dataclass(frozen=True)
class PretrainingCollate:
    """Pads samples to the objective's lengths.

    A mask without padding is left out, because attention is faster without one.
    """

    pad: PadBatch

    def __call__(self, samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        batch = self.pad(samples)
        mask = batch["attention_mask"]
        if mask.dim() == 2 and bool(mask.all()):
            del batch["attention_mask"]
        return batch


@dataclass(frozen=True)
class PaddedSamples:
    """Samples of equal lengths, for evaluations during a stream, which makes its own batches."""

    samples: Subset[Any]
    collate: PretrainingCollate

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        batch = self.collate.pad([self.samples[index]])
        return {name: value[0] for name, value in batch.items()}


@dataclass(frozen=True)
class CorpusPair:
    """The training and the held-out text of a component of the corpus, and its share of the
    samples.

    A stream has no training pair.
    """

    train: Path | None
    valid: Path
    share: Fraction


def write_pairs(folder: Path, pairs: Sequence[CorpusPair]) -> None:
    """Records which pairs a run trains on.

    Those inside the folder are recorded relative to it, because it is moved.
    """

    def recorded(path: Path | None) -> str | None:
        if path is None:
            return None
        return str(path.relative_to(folder) if path.is_relative_to(folder) else path.absolute())

    values = [
        {"train": recorded(pair.train), "valid": recorded(pair.valid), "share": str(pair.share)}
        for pair in pairs
    ]
    (folder / PAIRS).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_pairs(folder: Path) -> list[CorpusPair]:
    """Returns the pairs that `write_pairs` recorded."""
    values = json.loads((folder / PAIRS).read_text(encoding="utf-8"))
    pairs: list[CorpusPair] = []
    for value in values:
        train = folder / value["train"] if value["train"] else None
        pairs.append(CorpusPair(train, folder / value["valid"], Fraction(value["share"])))
    return pairs


def prepare_data(
    arguments: PretrainingArguments, inputs: Inputs, folder: Path, console: Console
) -> None:
    """Writes the corpora and the tokenizer, and tries whether the objective can make samples of
    them.
    """
    folder.mkdir()
    if arguments.stream:
        hold_out(arguments, inputs, folder)
    else:
        prepare_mixture(arguments, inputs, folder, console)
    make_samples(arguments, inputs, folder, load_tokenizer(folder / TOKENIZER), Share(1))


def prepare_mixture(
    arguments: PretrainingArguments, inputs: Inputs, folder: Path, console: Console
) -> None:
    """Writes the corpora of the run's sources, each as a training and a held-out pair."""
    mixture = parse_mixture(arguments.data)
    kind = family(inputs.config.model_type).tokenizer_of(inputs.config)
    with corpus_progress(console) as progress:
        corpora = prepare_corpora(
            mixture,
            folder,
            tokenizer=inputs.tokenizer or kind,
            vocab_size=arguments.vocab_size or inputs.config.vocab_size,
            split_sentences=inputs.objective.split_sentences,
            held_out_fraction=arguments.held_out_fraction,
            seed=arguments.seed,
            progress=progress,
        )
    notes = dict.fromkeys(note for corpus in corpora for note in corpus.notes)
    for note in notes:
        console.print(note)
    place_tokenizer(inputs, corpora[0].tokenizer_dir, folder / TOKENIZER)
    pairs = [
        CorpusPair(corpus.train_prefix, corpus.valid_prefix, share)
        for corpus, (_, share) in zip(corpora, mixture, strict=True)
    ]
    write_pairs(folder, pairs)


def hold_out(arguments: PretrainingArguments, inputs: Inputs, folder: Path) -> None:
    """Writes the held-out text, which is at the beginning of each stream.

    Also writes the tokenizer; a new one is trained on the beginnings of the streams.
    """
    streams = open_streams(arguments)
    if inputs.tokenizer is None:
        most = TOKENIZER_CHARACTERS // len(streams)
        texts = chain.from_iterable(stream.beginning(most) for stream, _ in streams)
        size = arguments.vocab_size or inputs.config.vocab_size
        kind: Any = family(inputs.config.model_type).tokenizer_of(inputs.config)
        train_tokenizer(kind, texts, size, folder / TOKENIZER)
    tokenizer = place_tokenizer(inputs, folder / TOKENIZER, folder / TOKENIZER)
    split = inputs.objective.split_sentences
    end = find_end_token(tokenizer, split_sentences=split)
    meta = CorpusMeta(Vocabulary.from_tokenizer(tokenizer), end, split)
    pairs: list[CorpusPair] = []
    for number, (stream, share) in enumerate(streams):
        texts = stream.beginning(HELD_OUT_CHARACTERS, held_out=True)
        held_out = documents_in_memory(texts, tokenizer, split_sentences=split)
        pair = CorpusPair(None, folder / f"valid_{number}", share)
        pairs.append(pair)
        with IndexedDatasetWriter(pair.valid, held_out.dtype, meta=meta) as writer:
            writer.add_dataset(held_out)
    write_pairs(folder, pairs)


def open_streams(arguments: PretrainingArguments) -> list[tuple[TextStream, Fraction]]:
    """Returns the streams of the run's sources, and their shares."""
    how = {"held_out_fraction": arguments.held_out_fraction, "seed": arguments.seed}
    return [(TextStream(source, **how), share) for source, share in parse_mixture(arguments.data)]


def place_tokenizer(inputs: Inputs, trained: Path, folder: Path) -> Tokenizer:
    """Writes the model's tokenizer, with the objective's special tokens, to the folder.

    Args:
        trained: Where the tokenizer is that was trained, or found beside a corpus. It is used
            unless one was chosen before.

    Returns:
        The tokenizer.
    """
    tokenizer = inputs.tokenizer
    if tokenizer is None:
        tokenizer = load_tokenizer(trained)
        prepare_tokenizer(tokenizer, str(trained), inputs.objective, None)
    is_there = has_tokenizer(folder) and (
        Vocabulary.from_tokenizer(load_tokenizer(folder)) == Vocabulary.from_tokenizer(tokenizer)
    )
    if not is_there:
        save_tokenizer(tokenizer, folder)
    return tokenizer


def make_data(arguments: PretrainingArguments, inputs: Inputs) -> PretrainingData:
    """Returns what the samples are: objective, lengths and seed."""
    return PretrainingData(
        inputs.objective,
        inputs.sequence_length,
        inputs.target_length,
        micro_batch_size=arguments.micro_batch_size,
        seed=arguments.seed,
    )


def make_samples(
    arguments: PretrainingArguments,
    inputs: Inputs,
    folder: Path,
    tokenizer: Tokenizer,
    share: Share,
) -> tuple[PretrainingSamples | BlockStream, PretrainingSamples]:
    """Returns what a rank trains on, and the samples of the held-out text.

    A rank trains on endless samples, or on a stream of batches.
    """
    data = make_data(arguments, inputs)
    pairs = read_pairs(folder)
    shares = [pair.share for pair in pairs]

    def mixed(prefixes: Sequence[Path], data: PretrainingData) -> PretrainingSamples:
        datasets = [build_dataset(data, IndexedDataset(prefix), tokenizer) for prefix in prefixes]
        return datasets[0] if len(datasets) == 1 else MixedSamples(datasets, shares)

    held_out = mixed([pair.valid for pair in pairs], replace(data, seed=0))
    prefixes = [pair.train for pair in pairs if pair.train]
    if prefixes:
        return mixed(prefixes, data), held_out
    streams = [stream for stream, _ in open_streams(arguments)]
    train = BlockStream(
        streams,
        tokenizer,
        data,
        shares=shares,
        rank=share.rank,
        world_size=share.world_size,
        num_workers=arguments.num_workers,
    )
    return train, held_out
