"""Makes T5 samples by span corruption, with exact lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..indexed.dataset import IndexedDataset
from ..tokenizers.sentinels import add_sentinels, sentinel_ids
from ..tokenizers.tokenizer import T5_SENTINELS, Tokenizer
from .denoising import SpanCorruption
from .objective import PretrainingData, Seq2SeqObjective
from .packed import ObjectiveDataset


def span_corruption_dataset(
    indexed: IndexedDataset,
    corruption: SpanCorruption,
    input_length: int,
    target_length: int | None = None,
    *,
    seed: int = 1234,
) -> ObjectiveDataset:
    """Returns T5 samples, all with the same input and target length.

    As in the published T5 code, the raw text is as long as possible for inputs up to `input_length`
    and targets up to `target_length`.
    """
    raw = corruption.raw_length(input_length, target_length)
    return ObjectiveDataset(indexed, raw, corruption, seed=seed)


@dataclass(frozen=True)
class T5Objective(Seq2SeqObjective):
    """Predicts the spans of a text that are replaced by sentinels.

    Args:
        mask_probability: Share of tokens that is corrupted.
        mean_span_length: Mean length of a span in tokens.
    """

    name: ClassVar[str] = "t5"
    shortest: ClassVar[int] = 3  # a token, a sentinel, the end

    mask_probability: float = 0.15
    mean_span_length: float = 3.0

    def add_special_tokens(self, tokenizer: Tokenizer) -> None:
        super().add_special_tokens(tokenizer)
        add_sentinels(tokenizer)

    def lengths(self, sequence_length: int, target_length: int | None = None) -> tuple[int, int]:
        if target_length is None:
            corruption = self._build_corruption(tuple(range(T5_SENTINELS)), 0)
            raw_length = corruption.raw_length(sequence_length)
            _, target_length = corruption.lengths(raw_length)
        return sequence_length, target_length

    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> ObjectiveDataset:
        corruption = self._build_corruption(sentinel_ids(tokenizer), tokenizer.eos_token_id)
        input_length, target_length = self.lengths(data.sequence_length, data.target_length)
        return span_corruption_dataset(
            indexed, corruption, input_length, target_length, seed=data.seed
        )

    def _build_corruption(self, sentinels: tuple[int, ...], eos_token_id: int) -> SpanCorruption:
        return SpanCorruption(sentinels, eos_token_id, self.mask_probability, self.mean_span_length)
