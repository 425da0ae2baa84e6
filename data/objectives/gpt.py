"""Makes samples for causal language modeling: packed documents, each token predicted once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..indexed.dataset import IndexedDataset
from ..tokenizers.tokenizer import Tokenizer
from .objective import Format, Objective, PretrainingData
from .packed import PackedTokens

if TYPE_CHECKING:
    import torch


class GPTDataset(PackedTokens):
    """Endless samples of `sequence_length` tokens.

    Sample i depends on (corpus, sequence length, seed, i) alone.

    Consecutive samples share one token, so that every token is predicted exactly once per epoch.
    `d[i]` is `{"input_ids": int64 [S], "labels": int64 [S]}`; the labels equal the input because
    models shift them.

    Raises:
        ValueError: The corpus has no tokens, or the sequence length is below 2.
    """

    def __init__(self, indexed: IndexedDataset, sequence_length: int, seed: int = 1234) -> None:
        if sequence_length < 2:
            raise ValueError(
                f"sequence_length is {sequence_length}; predicting a next token needs at least 2"
            )
        super().__init__(indexed, sequence_length, overlap=1, seed=seed)

    @property
    def sequence_length(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        from torch import from_numpy

        tokens = from_numpy(self.tokens(index))  # [S]
        return {"input_ids": tokens, "labels": tokens.clone()}

    def __getstate__(self) -> dict[str, object]:
        return {"indexed": self.indexed, "sequence_length": self.length, "seed": self.seed}


@dataclass(frozen=True)
class GPTObjective(Objective):
    """Predicts each token from those before it. It has no settings."""

    name: ClassVar[str] = "gpt"
    format: ClassVar[Format] = "causal"

    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> GPTDataset:
        return GPTDataset(indexed, data.sequence_length, data.seed)
