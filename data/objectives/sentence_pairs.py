"""BERT's second objective: two segments, and whether they belong together (NSP) or are in order (SOP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .masking import Masking


@dataclass(frozen=True)
class SentencePairs:
    """`[CLS] A [SEP] B [SEP]` with masking, at most `max_length` tokens.

    Called with sentences (a list of token arrays), a generator and, for "nsp", sentences of another document.
    Returns `input_ids`, `labels`, `token_type_ids` (0 for A, 1 for B; int64 [n]) and `next_sentence_label` []
    : 0 if B follows A, 1 if not, as in transformers' BertForPreTraining. "sop" swaps the segments with
    probability ½ (Lan et al., "ALBERT", 2020); "nsp" replaces B with probability ½ (Devlin et al., 2019).
    """

    cls_token_id: int
    sep_token_id: int
    masking: Masking
    max_length: int = 512
    kind: Literal["nsp", "sop"] = "nsp"

    def __post_init__(self) -> None:
        if self.max_length < 5:
            raise ValueError(f"max_length is {self.max_length}; [CLS] A [SEP] B [SEP] needs at least 5")

    def __call__(
        self,
        sentences: Sequence[np.ndarray],
        generator: np.random.Generator,
        others: Sequence[np.ndarray] = (),
    ) -> dict[str, np.ndarray]:
        if len(sentences) < 2:
            raise ValueError(f"a pair needs at least 2 sentences, not {len(sentences)}")
        border = int(generator.integers(1, len(sentences)))
        first, second = np.concatenate(sentences[:border]), np.concatenate(sentences[border:])
        changed = bool(generator.random() < 0.5)
        if changed and self.kind == "sop":
            first, second = second, first
        elif changed:
            if not others:
                raise ValueError("next-sentence prediction needs sentences of another document")
            second = np.concatenate(others[int(generator.integers(len(others))) :])
        first, second = truncate_pair(first, second, self.max_length - 3, generator)
        cls, sep = [self.cls_token_id], [self.sep_token_id]
        sample = self.masking(np.concatenate([cls, first, sep, second, sep]), generator)
        sample["token_type_ids"] = np.repeat(np.arange(2), [len(first) + 2, len(second) + 1])
        sample["next_sentence_label"] = np.array(int(changed), np.int64)
        return sample


def truncate_pair(
    first: np.ndarray, second: np.ndarray, length: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cut the longer segment, token by token from a random end, until both fit `length` tokens."""
    cuts = [0, 0, 0, 0]  # front and back of the first, front and back of the second
    sizes = [len(first), len(second)]
    while sum(sizes) > length:
        longer = 0 if sizes[0] > sizes[1] else 1
        cuts[2 * longer + int(generator.integers(2))] += 1
        sizes[longer] -= 1
    return first[cuts[0] : len(first) - cuts[1]], second[cuts[2] : len(second) - cuts[3]]
