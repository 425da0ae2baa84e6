"""Turns a prepared corpus into batches for any pretraining objective, from one configuration.

An objective is a file of this folder. Its function that builds samples registers itself under the objective's name.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from ..indexed.dataset import IndexedDataset
from ..loading.loader import PadBatch, ResumableLoader, Samples, Share
from ..tokenizers.glm_tokens import DEFAULT_VOCABULARY, GLMVocabulary
from ..tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class PretrainingData:
    """The objective and shape of batches.

    Args:
        objective: gpt (packed, every token predicted); bert-nsp, bert-sop (sentence pairs); roberta (packed,
            masked); t5 (span corruption); prefix-lm (encoder-decoder); glm (blank infilling).
        sequence_length: tokens of the decoder's or encoder's input.
        target_length: tokens of an encoder-decoder's target.
        padded: pad every batch to these lengths, so that all batches have the same shape.
        micro_batch_size: samples in a batch of one rank.
        mask_probability: share of tokens that is masked, corrupted or blanked.
        mean_span_length: mean length of T5's spans in tokens.
        whole_words: BERT and RoBERTa mask whole words.
        longest_ngram: BERT and RoBERTa mask up to this many words at once.
        glm_vocabulary: the base vocabulary of GLM, which determines its special tokens.
        glm_token: share of GLM's token mode.
        glm_sentence: share of GLM's sentence mode; the document mode has the rest.
        glm_single_span: share of GLM samples with a single span.
        glm_short: share of GLM samples with a shortened text.
        block_mask_probability: share of GLM's generated inputs that are hidden by [dBLOCK].
        seed: seed of the samples.
    """

    objective: str = "gpt"
    sequence_length: int = 512
    target_length: int = 128
    padded: bool = True
    micro_batch_size: int = 16
    mask_probability: float = 0.15
    mean_span_length: float = 3.0
    whole_words: bool = False
    longest_ngram: int = 1
    glm_vocabulary: GLMVocabulary = DEFAULT_VOCABULARY
    glm_token: float = 0.5
    glm_sentence: float = 0.3
    glm_single_span: float = 0.0
    glm_short: float = 0.0
    block_mask_probability: float = 0.0
    seed: int = 1234


Builder = Callable[[PretrainingData, IndexedDataset, Tokenizer], Samples]
Lengths = Callable[[PretrainingData], tuple[int, int]]


@dataclass(frozen=True)
class Objective:
    """A registered objective.

    Attributes:
        lengths: returns the maximum number of tokens of an input, and of its labels.
    """

    build: Builder
    lengths: Lengths


_OBJECTIVES: dict[str, Objective] = {}


def one_length(config: PretrainingData) -> tuple[int, int]:
    """Returns the lengths for an objective whose labels have the positions of its input."""
    return config.sequence_length, config.sequence_length


def source_and_target(config: PretrainingData) -> tuple[int, int]:
    """Returns the lengths for an encoder-decoder's objective."""
    return config.sequence_length, config.target_length


def objective(*names: str, lengths: Lengths = one_length) -> Callable[[Builder], Builder]:
    """Registers the function that builds an objective's samples, under its names."""

    def register(build: Builder) -> Builder:
        _OBJECTIVES.update(dict.fromkeys(names, Objective(build, lengths)))
        return build

    return register


def find_objective(name: str) -> Objective:
    """Returns the objective registered under a name. ValueError lists all names if there is none."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f".{module.name}", __package__)
    if name not in _OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; use one of {', '.join(sorted(_OBJECTIVES))}")
    return _OBJECTIVES[name]


def build_dataset(config: PretrainingData, indexed: IndexedDataset, tokenizer: Tokenizer) -> Samples:
    """Builds the endless dataset of a configuration; sample n is a function of (corpus, configuration, n).

    Adds the objective's sentinels and other special tokens to the tokenizer if it lacks them, so that its
    `vocab_size` afterwards is the model's.
    """
    return find_objective(config.objective).build(config, indexed, tokenizer)


def build_loader(
    config: PretrainingData,
    indexed: IndexedDataset,
    tokenizer: Tokenizer,
    *,
    rank: int = 0,
    world_size: int = 1,
    consumed: int = 0,
    num_workers: int = 0,
) -> ResumableLoader:
    """Builds a loader of batches for one data-parallel rank, from `consumed` samples (of all ranks) on."""
    dataset = build_dataset(config, indexed, tokenizer)
    pad = tokenizer.special.get("pad_token", tokenizer.special.get("eos_token", 0))
    return ResumableLoader(
        dataset,
        Share(config.micro_batch_size, rank, world_size),
        consumed=consumed,
        num_workers=num_workers,
        collate=PadBatch(pad, _fixed_lengths(config) if config.padded else {}),
    )


def _fixed_lengths(config: PretrainingData) -> dict[str, int]:
    length, labels = find_objective(config.objective).lengths(config)
    return {"input_ids": length, "position_ids": length, "token_type_ids": length, "labels": labels}
