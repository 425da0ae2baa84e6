"""Turns a prepared corpus into batches for any pretraining objective.

An objective is a file of this folder, with a dataclass of its settings that registers itself under a name.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypeVar

from ..indexed.dataset import IndexedDataset
from ..loading.loader import PadBatch, ResumableLoader, Samples, Share
from ..tokenizers.tokenizer import Tokenizer

Format = Literal["causal", "masked", "sentence-pairs", "seq2seq", "blanks"]


class PretrainingSamples(Samples, Protocol):
    """Endless samples of a corpus; sample i depends on (corpus, settings, seed, i) alone."""

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass over the corpus; not an integer if samples may extend into the next pass."""
        ...

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of the corpus."""
        ...


@dataclass(frozen=True)
class Objective(ABC):
    """The settings of an objective, which are the fields of its subclass, and how its samples are made.

    Attributes:
        name: the name it is registered under.
        format: what a model must take: causal (the labels equal the input, and the model shifts them), masked (labels
            at the input's positions), sentence-pairs (masked, with a label for the pair), seq2seq (an input and a
            target), blanks (two-dimensional positions).
        needs: special tokens that the tokenizer must have, by their Hugging Face names.
        tokenizers: where tokenizers with these tokens come from, for the message if one lacks them.
        split_sentences: whether the corpus must have one sequence per sentence.
        shortest: the least sequence length that leaves room for text.
    """

    name: ClassVar[str]
    format: ClassVar[Format]
    needs: ClassVar[tuple[str, ...]] = ()
    tokenizers: ClassVar[str] = ""
    split_sentences: ClassVar[bool] = False
    shortest: ClassVar[int] = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith("probability") and not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it must be between 0 and 1")

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        """Adds the special tokens that the objective puts into samples to a tokenizer that lacks them.

        Raises:
            ValueError: the tokenizer lacks tokens that cannot be added, because they are part of its vocabulary.
        """
        missing = [name for name in self.needs if name not in tokenizer.special]
        if missing:
            known = ", ".join(tokenizer.special) or "no special tokens"
            raise ValueError(
                f"objective {self.name!r} needs a tokenizer with {', '.join(self.needs)}; this one has no "
                f"{', '.join(missing)} (it has {known}); use {self.tokenizers}"
            )

    @abstractmethod
    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> PretrainingSamples:
        """Returns the samples of a corpus, of the lengths and the seed in `data`.

        `add_special_tokens` was called with the tokenizer.
        """

    def lengths(self, sequence_length: int, target_length: int | None = None) -> tuple[int, int]:
        """Returns the maximum number of tokens of an input, and of its labels."""
        return sequence_length, sequence_length

    def token_ids(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Returns ids that the configuration of new weights takes from the objective, such as the decoder's start."""
        return {}


@dataclass(frozen=True)
class Seq2SeqObjective(Objective):
    """The base of the objectives of encoder-decoders, whose input and target end with an end-of-sequence token."""

    format: ClassVar[Format] = "seq2seq"
    needs: ClassVar[tuple[str, ...]] = ("eos_token",)
    tokenizers: ClassVar[str] = (
        "T5's, or train one: shardzoo data train-tokenizer --kind sentencepiece"
    )

    def lengths(self, sequence_length: int, target_length: int | None = None) -> tuple[int, int]:
        return sequence_length, target_length or sequence_length


AnyObjective = TypeVar("AnyObjective", bound=Objective)
_OBJECTIVES: dict[str, type[Objective]] = {}


def objective(name: str) -> Callable[[type[AnyObjective]], type[AnyObjective]]:
    """Registers an objective's class under a name. ValueError if another class has it."""

    def register(kind: type[AnyObjective]) -> type[AnyObjective]:
        if name in _OBJECTIVES:
            raise ValueError(
                f"{_OBJECTIVES[name].__name__} is already registered as objective {name!r}"
            )
        kind.name = name
        _OBJECTIVES[name] = kind
        return kind

    return register


def objective_names() -> list[str]:
    """Returns the names of all objectives, sorted."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f".{module.name}", __package__)
    return sorted(_OBJECTIVES)


def find_objective(name: str) -> type[Objective]:
    """Returns the class that is registered under a name. ValueError lists all names if there is none."""
    names = objective_names()
    if name not in names:
        raise ValueError(f"unknown objective {name!r}; use one of {', '.join(names)}")
    return _OBJECTIVES[name]


def as_objective(objective: Objective | str) -> Objective:
    """Returns an objective's settings. A name stands for its defaults."""
    return find_objective(objective)() if isinstance(objective, str) else objective


@dataclass(frozen=True)
class PretrainingData:
    """The objective and the shape of its batches.

    Args:
        objective: an objective's settings, or its name for the default settings.
        sequence_length: tokens of a decoder's or an encoder's input.
        target_length: tokens of an encoder-decoder's target; None: as many as the input's text needs with span
            corruption, otherwise `sequence_length`.
        padded: pad every batch to the objective's `lengths`, so that all batches have the same shape.
        micro_batch_size: samples in a batch of one rank.
        seed: seed of the samples.
    """

    objective: Objective | str = "gpt"
    sequence_length: int = 512
    target_length: int | None = None
    padded: bool = True
    micro_batch_size: int = 16
    seed: int = 1234

    def __post_init__(self) -> None:
        for name in ("sequence_length", "target_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


def build_dataset(
    config: PretrainingData, indexed: IndexedDataset, tokenizer: Tokenizer
) -> PretrainingSamples:
    """Builds the endless dataset of a configuration; sample n is a function of (corpus, configuration, n).

    Adds the objective's sentinels and other special tokens to the tokenizer if it lacks them, so that its
    `vocab_size` afterwards is the model's.
    """
    settings = as_objective(config.objective)
    settings.add_special_tokens(tokenizer)
    return settings.build(indexed, tokenizer, config)


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
    loader = ResumableLoader(
        build_dataset(config, indexed, tokenizer),
        Share(config.micro_batch_size, rank, world_size),
        consumed=consumed,
        num_workers=num_workers,
        collate=pad_batch(config, tokenizer),
    )
    loader.tokenizer = tokenizer
    return loader


def pad_batch(config: PretrainingData, tokenizer: Tokenizer) -> PadBatch:
    """Returns what turns a configuration's samples into a batch."""
    pad = tokenizer.special.get("pad_token", tokenizer.special.get("eos_token", 0))
    if not config.padded:
        return PadBatch(pad)
    length, labels = as_objective(config.objective).lengths(
        config.sequence_length, config.target_length
    )
    return PadBatch(
        pad,
        {"input_ids": length, "position_ids": length, "token_type_ids": length, "labels": labels},
    )
