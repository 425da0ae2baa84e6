"""Makes BART and mBART samples: text infilling and sentence permutation.

Lewis et al., "BART: Denoising sequence-to-sequence pre-training", 2020, section 2.2; Liu et al.,
"Multilingual denoising pre-training for neural machine translation", 2020, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..indexed.dataset import IndexedDataset
from ..text.sentences import sentence_end_ids
from ..tokenizers.tokenizer import Tokenizer
from .objective import PretrainingData, Seq2SeqObjective
from .packed import ObjectiveDataset

SENTENCE_MARKS = frozenset(".?!\n。？！…।؟")


@dataclass(frozen=True)
class TextInfilling:
    """Permutes the sentences of a text, then replaces random spans by one mask each.

    The target is the whole text.

    `infilling(tokens [n], generator)` returns `input_ids` and `labels`, int64, which both begin
    with `prefix` and end with `suffix`. The input has at most as many tokens as the labels.

    Args:
        mask_token_id: Id of the mask.
        prefix: Ids before the text.
        suffix: Ids after the text.
        probability: Share of tokens that the spans have together, which is exact except for
            rounding.
        mean_span_length: Mean of the Poisson distribution of a span's length. A span of length 0
            inserts a mask.
        ends: bool [V], the tokens that end a sentence; None leaves the sentences in their order.
    """

    mask_token_id: int
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    probability: float = 0.3
    mean_span_length: float = 3.0
    ends: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise ValueError(
                f"mask_probability is {self.probability}; it must be more than 0 and less than 1"
            )
        if self.mean_span_length < 1:
            raise ValueError(f"mean_span_length is {self.mean_span_length}; it must be at least 1")

    def __call__(self, tokens: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
        noisy = self.mask(self.permute(tokens, generator), generator)
        return {"input_ids": self._frame(noisy), "labels": self._frame(tokens)}

    def _frame(self, text: np.ndarray) -> np.ndarray:
        return np.concatenate([self.prefix, text, self.suffix]).astype(np.int64)

    def permute(self, tokens: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns the tokens with their sentences in random order.

        Several ends in a row belong to one sentence.
        """
        if self.ends is None:
            return tokens
        is_end = self.ends[tokens]
        last_ends = np.flatnonzero(is_end[:-1] & ~is_end[1:])
        sentences = np.split(tokens, last_ends + 1)
        order = generator.permutation(len(sentences))
        return np.concatenate([sentences[number] for number in order])

    def mask(self, tokens: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns the tokens with a mask in place of each span.

        The spans' places are uniform; no two spans touch.
        """
        lengths = self.draw_span_lengths(len(tokens), generator)
        kept = len(tokens) - int(lengths.sum())
        # The number of kept tokens before each span: distinct, so that no two spans touch.
        kept_before = np.sort(generator.permutation(kept + 1)[: len(lengths)])
        starts = kept_before + np.cumsum(lengths) - lengths
        # Spans of length 0 begin and end at the same token, so the borders are added up.
        border = np.zeros(len(tokens) + 1, np.int64)
        np.add.at(border, starts, 1)
        np.add.at(border, starts + lengths, -1)
        is_kept = np.cumsum(border[:-1]) == 0  # [n]
        return np.insert(tokens[is_kept], kept_before, self.mask_token_id)

    def draw_span_lengths(self, length: int, generator: np.random.Generator) -> np.ndarray:
        """Returns the lengths of the spans of a text of `length` tokens, in random order: int64
        [spans].
        """
        budget = min(max(round(length * self.probability), 1), length - 1)
        drawn = np.empty(0, np.int64)
        while drawn.sum() < budget:
            drawn = np.append(drawn, generator.poisson(self.mean_span_length, budget))
        count = int(np.searchsorted(np.cumsum(drawn), budget)) + 1
        lengths = drawn[:count]
        lengths[-1] -= lengths.sum() - budget
        spans = lengths[lengths > 0]
        empty = lengths[lengths == 0]
        # The input must fit the space of the text, and spans that do not touch need kept tokens
        # between them.
        most = min(budget, length - budget + 1)
        if len(spans) > most:
            # In a short text, or with a large share, the last span takes the tokens of the surplus.
            spans = np.append(spans[: most - 1], spans[most - 1 :].sum())
        return generator.permutation(np.append(spans, empty[: most - len(spans)]))


@dataclass(frozen=True)
class BartObjective(Seq2SeqObjective):
    """Restores a text whose sentences are permuted and whose spans are masked.

    A sample is `<s> text </s>`.

    Args:
        mask_probability: Share of tokens that is masked.
        mean_span_length: Mean length of a span in tokens.
        permute_sentences: Whether the sentences are in random order.
    """

    name: ClassVar[str] = "bart"
    needs: ClassVar[tuple[str, ...]] = ("bos_token", "eos_token", "mask_token")
    tokenizers: ClassVar[str] = (
        "BART's or RoBERTa's, or train one: shardzoo data train-tokenizer --kind roberta-bpe"
    )
    shortest: ClassVar[int] = 4  # <s>, two tokens of text, </s>

    mask_probability: float = 0.3
    mean_span_length: float = 3.0
    permute_sentences: bool = True

    def lengths(self, sequence_length: int, target_length: int | None = None) -> tuple[int, int]:
        shorter = min(sequence_length, target_length or sequence_length)
        return shorter, shorter

    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> ObjectiveDataset:
        prefix, suffix = self.frame(tokenizer)
        ends = None
        if self.permute_sentences:
            ends = sentence_end_ids(tokenizer, SENTENCE_MARKS)
            ends[tokenizer.eos_token_id] = True  # A document's end is a sentence's end too.
        mask = tokenizer.special_id("mask_token")
        infilling = TextInfilling(
            mask, prefix, suffix, self.mask_probability, self.mean_span_length, ends
        )
        input_length, _ = self.lengths(data.sequence_length, data.target_length)
        length = input_length - len(prefix) - len(suffix)
        return ObjectiveDataset(indexed, length, infilling, seed=data.seed)

    def frame(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ids before and after each text."""
        prefix = (tokenizer.special_id("bos_token"),)
        suffix = (tokenizer.eos_token_id,)
        return prefix, suffix


@dataclass(frozen=True)
class MBartObjective(BartObjective):
    """Restores a text like objective "bart", with mBART's constants.

    A sample is `text </s> language`.

    Args:
        language: Code of the text's language, which becomes a token.
    """

    name: ClassVar[str] = "mbart"

    mask_probability: float = 0.35
    mean_span_length: float = 3.5
    language: str = "en_XX"

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        super().add_special_tokens(tokenizer)
        tokenizer.add_tokens([self.language])

    def frame(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), (tokenizer.eos_token_id, *self.token_ids(tokenizer).values())

    def token_ids(self, tokenizer: Tokenizer) -> dict[str, int]:
        language = tokenizer.token_to_id(self.language)
        if language is None:
            raise ValueError(
                f"this tokenizer lacks the language {self.language}; call add_special_tokens"
            )
        return {"decoder_start_token_id": language}
