"""Makes BERT samples: masked words in two segments that may be consecutive or not (NSP), or swapped (SOP)."""

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

    Call it with sentences (a list of token arrays), a generator and, for "nsp", sentences of another document.
    It returns `input_ids`, `labels` and `token_type_ids` (0 for A, 1 for B), int64 [n], and `next_sentence_label`
    []: 0 if B follows A, 1 if not, as in transformers' BertForPreTraining. "sop" swaps the segments with
    probability ½ (Lan et al., "ALBERT", 2020); "nsp" replaces B with probability ½ (Devlin et al., 2019).
    """

    cls_token_id: int
    sep_token_id: int
    masking: Masking
    max_length: int = 512
    kind: Literal["nsp", "sop"] = "nsp"

    def __post_init__(self) -> None:
        if self.max_length < SHORTEST_PAIR:
            raise ValueError(
                f"max_length is {self.max_length}; [CLS] A [SEP] B [SEP] needs at least {SHORTEST_PAIR}"
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
    """Removes tokens from a random end of the longer segment, one by one, until both fit `length` tokens."""
    cuts = [
        0,
        0,
        0,
        0,
    ]  # tokens to remove: front and back of the first, front and back of the second
    sizes = [len(first), len(second)]
    while sum(sizes) > length:
        longer = 0 if sizes[0] > sizes[1] else 1
        cuts[2 * longer + int(generator.integers(2))] += 1
        sizes[longer] -= 1
    return first[cuts[0] : len(first) - cuts[1]], second[cuts[2] : len(second) - cuts[3]]


class SentencePairDataset:
    """Endless BERT samples of a corpus with one sequence per sentence (`prepare --split-sentences`).

    The documents are cut into runs of sentences once. Every epoch shuffles the runs and divides each into two segments
    again.

    Args:
        short_probability: share of samples with a random, shorter length.
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
        self._marks = np.require(
            indexed.document_indices, requirements=["C", "A"]
        )  # the file's arrays are unaligned
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
                f"{indexed.prefix} has no document of two sentences; prepare it with --split-sentences"
            )
        if pairs.kind == "nsp" and self._runs_of_document(self._runs[0, 0])[1] == len(self._runs):
            raise ValueError(
                f"{indexed.prefix} has only one document of two or more sentences; next-sentence prediction needs two, "
                "so use a larger corpus, a larger held_out_fraction, or objective bert-sop"
            )
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

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
        if self._order[0] != epoch:
            self._order = (
                epoch,
                np.random.default_rng([self.seed, 3, epoch]).permutation(len(self._runs)),
            )
        first, last, target = self._runs[self._order[1][place]]
        generator = np.random.default_rng([self.seed, 4, index])
        pairs = replace(self.pairs, max_length=int(max(target, 2)) + 3)
        others = self._other_document(first, generator) if pairs.kind == "nsp" else []
        return pairs(self._sentences(first, last), generator, others)

    def _other_document(self, sentence: int, generator: np.random.Generator) -> list[np.ndarray]:
        """Returns a random run of a document other than the sentence's, each equally likely."""
        low, high = self._runs_of_document(sentence)
        number = int(generator.integers(len(self._runs) - (high - low)))
        first, last, _ = self._runs[number if number < low else number + high - low]
        return self._sentences(first, last)

    def _runs_of_document(self, sentence: int) -> tuple[int, int]:
        document = int(np.searchsorted(self._marks, sentence, side="right"))
        low, high = np.searchsorted(self._runs[:, 0], self._marks[document - 1 : document + 1])
        return int(low), int(high)

    def _sentences(self, first: int, last: int) -> list[np.ndarray]:
        return [self.indexed[number].astype(np.int64) for number in range(int(first), int(last))]


@dataclass(frozen=True)
class SentencePairsObjective(MaskedObjective):
    """Predicts masked tokens of two segments, and the relation of the segments.

    Args:
        short_probability: share of samples with a random, shorter length.
    """

    format: ClassVar[Format] = "sentence-pairs"
    split_sentences: ClassVar[bool] = True
    shortest: ClassVar[int] = SHORTEST_PAIR
    kind: ClassVar[Literal["nsp", "sop"]]

    short_probability: float = 0.1

    def build(
        self, indexed: IndexedDataset, tokenizer: Tokenizer, data: PretrainingData
    ) -> SentencePairDataset:
        cls, sep = tokenizer.special_id("cls_token"), tokenizer.special_id("sep_token")
        pairs = SentencePairs(cls, sep, self.masking(tokenizer), data.sequence_length, self.kind)
        return SentencePairDataset(
            indexed, pairs, seed=data.seed, short_probability=self.short_probability
        )


@dataclass(frozen=True)
class NextSentenceObjective(SentencePairsObjective):
    """Predicts masked tokens, and whether the second segment follows the first (Devlin et al., "BERT", 2019)."""

    name: ClassVar[str] = "bert-nsp"
    kind: ClassVar[Literal["nsp", "sop"]] = "nsp"


@dataclass(frozen=True)
class SentenceOrderObjective(SentencePairsObjective):
    """Predicts masked tokens, and whether the segments are swapped (Lan et al., "ALBERT", 2020)."""

    name: ClassVar[str] = "bert-sop"
    kind: ClassVar[Literal["nsp", "sop"]] = "sop"
