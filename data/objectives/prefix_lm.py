"""Makes samples of prefix language modeling: predict the end of a text from its beginning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..indexed.dataset import IndexedDataset
from ..tokenizers.tokenizer import Tokenizer
from .denoising import PrefixLM
from .objective import PretrainingData, Seq2SeqObjective
from .packed import ObjectiveDataset


@dataclass(frozen=True)
class PrefixLMObjective(Seq2SeqObjective):
    """Predicts the end of a text from its beginning. It has no settings."""

    name: ClassVar[str] = "prefix-lm"

    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> ObjectiveDataset:
        prefix_lm = PrefixLM(tokenizer.eos_token_id)
        length = prefix_lm.raw_length(*self.lengths(data.sequence_length, data.target_length))
        return ObjectiveDataset(indexed, length, prefix_lm, seed=data.seed)
