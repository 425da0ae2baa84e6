"""Defines what a pretraining objective is: its settings, the tokens it needs, and how it makes
samples of a corpus.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from ..indexed.dataset import IndexedDataset
from ..tokenizers.tokenizer import Tokenizer

Format = Literal["causal", "masked", "sentence-pairs", "seq2seq", "blanks"]


class PretrainingSamples(Protocol):
    """Endless samples of a corpus; sample i depends on (corpus, settings, seed, i) alone."""

    def __getitem__(self, index: int, /) -> Any: ...

    @property
    def samples_per_epoch(self) -> float:
        """Samples in one pass over the corpus.

        The number is not an integer if samples may extend into the next pass.
        """
        ...

    @property
    def tokens_per_epoch(self) -> int:
        """Tokens of the corpus."""
        ...


@dataclass(frozen=True)
class Objective(ABC):
    """The settings of an objective, which are the fields of its subclass, and how its samples are
    made.

    Attributes:
        name: The name by which commands and `find_objective` select it.
        format: What a model must take: causal (the labels equal the input, and the model shifts
            them), masked (labels at the input's positions), sentence-pairs (masked, with a label
            for the pair), seq2seq (an input and a target), blanks (two-dimensional positions).
        needs: Special tokens that the tokenizer must have, by their Hugging Face names.
        tokenizers: Where tokenizers with these tokens come from, for the message if one lacks them.
        split_sentences: Whether the corpus must have one sequence per sentence.
        shortest: The least sequence length that leaves room for text.
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
        """Adds the special tokens that the objective puts into samples to a tokenizer that lacks
        them.

        Raises:
            ValueError: The tokenizer lacks tokens that cannot be added, because they are part of
                its vocabulary.
        """
        missing = [name for name in self.needs if name not in tokenizer.special]
        if missing:
            known = ", ".join(tokenizer.special) or "no special tokens"
            raise ValueError(
                f"objective {self.name!r} needs a tokenizer with {', '.join(self.needs)}; "
                f"this one has no {', '.join(missing)} (it has {known}); use {self.tokenizers}"
            )

    @abstractmethod
    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> PretrainingSamples:
        """Returns the samples of a corpus, of the lengths and the seed in `data`.

        `add_special_tokens` was called with the tokenizer before.
        """

    def lengths(self, sequence_length: int, target_length: int | None = None) -> tuple[int, int]:
        """Returns the maximum number of tokens of an input, and of its labels."""
        return sequence_length, sequence_length

    def token_ids(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Returns ids that the configuration of new weights takes from the objective, such as the
        decoder's start.
        """
        return {}


@dataclass(frozen=True)
class Seq2SeqObjective(Objective):
    """The base of the objectives of encoder-decoders, whose input and target end with an
    end-of-sequence token.
    """

    format: ClassVar[Format] = "seq2seq"
    needs: ClassVar[tuple[str, ...]] = ("eos_token",)
    tokenizers: ClassVar[str] = (
        "T5's, or train one: shardzoo data train-tokenizer --kind sentencepiece"
    )

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        if "eos_token" not in tokenizer.special and "sep_token" in tokenizer.special:
            # BERT's vocabularies end a text with [SEP].
            tokenizer.set_special_token("eos_token", tokenizer.special["sep_token"])
        super().add_special_tokens(tokenizer)

    def lengths(self, sequence_length: int, target_length: int | None = None) -> tuple[int, int]:
        return sequence_length, target_length or sequence_length


@dataclass(frozen=True)
class PretrainingData:
    """The objective and the shape of its batches.

    Args:
        objective: An objective's settings, or its name for the default settings.
        sequence_length: Tokens of a decoder's or an encoder's input.
        target_length: Tokens of an encoder-decoder's target. None: as many as the input's text
            needs with span corruption, otherwise `sequence_length`.
        padded: Whether to pad every batch to the objective's `lengths`, so that all batches have
            the same shape.
        micro_batch_size: Samples in a batch of one rank.
        seed: Seed of the samples.
    """

    objective: Objective | str = "gpt"
    sequence_length: int = 512
    target_length: int | None = None
    padded: bool = True
    micro_batch_size: int = 16
    seed: int = 1234

    def __post_init__(self) -> None:
        for name in ("sequence_length", "target_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
