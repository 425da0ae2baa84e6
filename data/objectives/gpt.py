"""Makes samples for causal language modeling: packed documents, each token predicted once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..indexed.dataset import IndexedDataset
from ..labels import IGNORED
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

    With `separate_documents` a document does not see the others of its sample, and its first token
    is not predicted: a sample also has `seq_idx` int64 [S], the number of each token's document in
    the sample, and `position_ids` int64 [S], which begin at 0 in each document. The label of a
    document's first token is -100.

    Raises:
        ValueError: The corpus has no tokens, or the sequence length is below 2.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_length: int,
        seed: int = 1234,
        *,
        separate_documents: bool = False,
    ) -> None:
        if sequence_length < 2:
            raise ValueError(
                f"sequence_length is {sequence_length}; predicting a next token needs at least 2"
            )
        super().__init__(indexed, sequence_length, overlap=1, seed=seed)
        self.separate_documents = separate_documents

    @property
    def sequence_length(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        from torch import from_numpy

        if not self.separate_documents:
            tokens = from_numpy(self.tokens(index))  # [S]
            return {"input_ids": tokens, "labels": tokens.clone()}
        ids, beginnings = self.tokens_and_beginnings(index)
        labels = ids.copy()
        labels[beginnings] = IGNORED
        lengths = np.diff(beginnings, append=self.length)
        sample = {
            "input_ids": ids,
            "labels": labels,
            "position_ids": np.arange(self.length) - np.repeat(beginnings, lengths),
            "seq_idx": np.repeat(np.arange(len(beginnings)), lengths),
        }
        return {name: from_numpy(values) for name, values in sample.items()}

    def __getstate__(self) -> dict[str, object]:
        return {
            "indexed": self.indexed,
            "sequence_length": self.length,
            "seed": self.seed,
            "separate_documents": self.separate_documents,
        }


@dataclass(frozen=True)
class GPTObjective(Objective):
    """Predicts each token from those before it.

    Args:
        separate_documents: Whether the documents that are packed into one sequence do not see one
            another: attention and positions begin anew with each. (Megatron-LM's
            --reset-attention-mask and --reset-position-ids.)
    """

    name: ClassVar[str] = "gpt"
    format: ClassVar[Format] = "causal"

    separate_documents: bool = False

    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> GPTDataset:
        return GPTDataset(
            indexed, data.sequence_length, data.seed, separate_documents=self.separate_documents
        )
