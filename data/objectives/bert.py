"""Makes BERT samples: masked words in two segments that may be consecutive or not (NSP), or swapped
(SOP).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from ..indexed.dataset import IndexedDataset
from ..indexed.index_building import sentence_index
from ..tokenizers.tokenizer import Tokenizer
from .masking import MaskedObjective, Masking
from .objective import Format, PretrainingData

SHORTEST_PAIR = 5  # [CLS] A [SEP] B [SEP]


@dataclass(frozen=True)
class SentencePairs:
    """Makes `[CLS] A [SEP] B [SEP]` with masking, at most `max_length` tokens.

    Call it with sentences (a list of token arrays), a generator and, for "nsp", sentences of
    another document. It returns `input_ids`, `labels` and `token_type_ids` (0 for A, 1 for B),
    int64 [n], and `next_sentence_label` []: 0 if B follows A, 1 if not, as in transformers'
    BertForPreTraining. "sop" swaps the segments with probability ½ (Lan et al., "ALBERT", 2020);
    "nsp" replaces B with probability ½ (Devlin et al., 2019).
    """

    cls_token_id: int
    sep_token_id: int
    masking: Masking
    max_length: int = 512
    kind: Literal["nsp", "sop"] = "nsp"

    def __post_init__(self) -> None:
        if self.max_length < SHORTEST_PAIR:
            raise ValueError(
                f"max_length is {self.max_length}; "
                f"[CLS] A [SEP] B [SEP] needs at least {SHORTEST_PAIR}"
            )

    def __call__(
        self,
        sentences: Sequence[np.ndarray],
        generator: np.random.Generator,
        others: Sequence[np.ndarray] = (),
    ) -> dict[str, np.ndarray]:
        if len(sentences) < 2:
            raise ValueError(f"a pair needs at least 2 sentences, not {len(sentences)}")
        border = int(generator.integers(1, len(sentences)))
        first = np.concatenate(sentences[:border])
        second = np.concatenate(sentences[border:])
        changed = bool(generator.random() < 0.5)
        if changed and self.kind == "sop":
            first, second = second, first
        elif changed:
            if not others:
                raise ValueError("next-sentence prediction needs sentences of another document")
            begin = int(generator.integers(len(others)))
            second = np.concatenate(others[begin:])
        first, second = truncate_pair(first, second, self.max_length - 3, generator)
        cls = [self.cls_token_id]
        sep = [self.sep_token_id]
        sample = self.masking(np.concatenate([cls, first, sep, second, sep]), generator)
        sample["token_type_ids"] = np.repeat(np.arange(2), [len(first) + 2, len(second) + 1])
        sample["next_sentence_label"] = np.array(int(changed), np.int64)
        return sample


def truncate_pair(
    first: np.ndarray, second: np.ndarray, length: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Removes tokens from a random end of the longer segment, one by one, until both fit `length`
    tokens.
    """
    sizes = [len(first), len(second)]
    front_cuts = [0, 0]  # tokens to remove from the front of each segment
    while sum(sizes) > length:
        longer = 0 if sizes[0] > sizes[1] else 1
        is_at_back = int(generator.integers(2))
        front_cuts[longer] += 1 - is_at_back
        sizes[longer] -= 1
    first = first[front_cuts[0] : front_cuts[0] + sizes[0]]
    second = second[front_cuts[1] : front_cuts[1] + sizes[1]]
    return first, second


class SentencePairDataset:
    """Endless BERT samples of a corpus with one sequence per sentence (`prepare
    --split-sentences`).

    The documents are cut into runs of sentences once. Every epoch shuffles the runs and divides
    each into two segments again.

    Args:
        short_probability: Share of samples with a random, shorter length.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        pairs: SentencePairs,
        *,
        seed: int = 1234,
        short_probability: float = 0.1,
    ) -> None:
        self.indexed = indexed
        self.pairs = pairs
        self.seed = seed
        self.short_probability = short_probability
        # The arrays of the mapped file are unaligned, and the index builder needs aligned ones.
        self._marks = np.require(indexed.document_indices, requirements=["C", "A"])
        # int64 [runs, 3]: first sentence, the one after the last, and the target length.
        self._runs = sentence_index(
            np.require(indexed.sizes, requirements=["C", "A"]),
            self._marks,
            pairs.max_length - 3,
            short_probability,
            2,
            seed,
        )
        if len(self._runs) == 0:
            raise ValueError(
                f"{indexed.prefix} has no document of two sentences; "
                "prepare it with --split-sentences"
            )
        if pairs.kind == "nsp" and self._find_runs_of_document(self._runs[0, 0])[1] == len(
            self._runs
        ):
            raise ValueError(
                f"{indexed.prefix} has only one document of two or more sentences; next-sentence "
                "prediction needs two, so use a larger corpus, a larger held_out_fraction, or "
                "objective bert-sop"
            )
        # The order of the latest epoch.
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    @property
    def samples_per_epoch(self) -> int:
        return len(self._runs)

    @property
    def tokens_per_epoch(self) -> int:
        return self.indexed.num_tokens

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index < 0:
            raise IndexError(f"sample {index}: samples count from 0 and have no end")
        epoch, place = divmod(index, len(self._runs))
        if self._epoch != epoch:
            shuffle = np.random.default_rng([self.seed, 3, epoch])
            self._order = shuffle.permutation(len(self._runs))
            self._epoch = epoch
        first, last, target = self._runs[self._order[place]]
        generator = np.random.default_rng([self.seed, 4, index])
        pairs = replace(self.pairs, max_length=int(max(target, 2)) + 3)
        others: list[np.ndarray] = []
        if pairs.kind == "nsp":
            others = self._draw_other_document(first, generator)
        return pairs(self._read_sentences(first, last), generator, others)

    def _draw_other_document(
        self, sentence: int, generator: np.random.Generator
    ) -> list[np.ndarray]:
        """Returns a random run of a document other than the sentence's, each equally likely."""
        low, high = self._find_runs_of_document(sentence)
        number = int(generator.integers(len(self._runs) - (high - low)))
        if number >= low:
            number += high - low
        first, last, _ = self._runs[number]
        return self._read_sentences(first, last)

    def _find_runs_of_document(self, sentence: int) -> tuple[int, int]:
        """Returns the runs [low, high) of the document that a sentence belongs to."""
        document = int(np.searchsorted(self._marks, sentence, side="right"))
        low, high = np.searchsorted(self._runs[:, 0], self._marks[document - 1 : document + 1])
        return int(low), int(high)

    def _read_sentences(self, first: int, last: int) -> list[np.ndarray]:
        return [self.indexed[number].astype(np.int64) for number in range(int(first), int(last))]


@dataclass(frozen=True)
class SentencePairsObjective(MaskedObjective):
    """Predicts masked tokens of two segments, and the relation of the segments.

    Args:
        short_probability: Share of samples with a random, shorter length.
    """

    format: ClassVar[Format] = "sentence-pairs"
    split_sentences: ClassVar[bool] = True
    shortest: ClassVar[int] = SHORTEST_PAIR
    kind: ClassVar[Literal["nsp", "sop"]]

    short_probability: float = 0.1

    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> SentencePairDataset:
        cls = tokenizer.special_id("cls_token")
        sep = tokenizer.special_id("sep_token")
        pairs = SentencePairs(cls, sep, self.masking(tokenizer), data.sequence_length, self.kind)
        return SentencePairDataset(
            indexed, pairs, seed=data.seed, short_probability=self.short_probability
        )


@dataclass(frozen=True)
class NextSentenceObjective(SentencePairsObjective):
    """Predicts masked tokens, and whether the second segment follows the first (Devlin et al.,
    "BERT", 2019).
    """

    name: ClassVar[str] = "bert-nsp"
    kind: ClassVar[Literal["nsp", "sop"]] = "nsp"


@dataclass(frozen=True)
class SentenceOrderObjective(SentencePairsObjective):
    """Predicts masked tokens, and whether the segments are swapped (Lan et al., "ALBERT", 2020)."""

    name: ClassVar[str] = "bert-sop"
    kind: ClassVar[Literal["nsp", "sop"]] = "sop"
