"""Datasets that apply an objective to a corpus; sample i depends on (corpus, settings, seed, i) alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..indexed.dataset import IndexedDataset
from ..indexed.index_building import sentence_index
from .masking import Masking
from .packed import PackedTokens
from .sentence_pairs import SentencePairs
from .span_corruption import SpanCorruption

Objective = Callable[[np.ndarray, np.random.Generator], dict[str, np.ndarray]]


class ObjectiveDataset:
    """Endless samples `objective(tokens, generator)` over packed runs of `length` tokens.

    `prefix` and `suffix` are put around the run before the objective sees it ([CLS] and [SEP], say).
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        length: int,
        objective: Objective,
        *,
        seed: int = 1234,
        prefix: tuple[int, ...] = (),
        suffix: tuple[int, ...] = (),
    ) -> None:
        inner = length - len(prefix) - len(suffix)
        if inner < 2:
            raise ValueError(f"{length} tokens leave {inner} for text; use at least {length + 2 - inner}")
        self.packed = PackedTokens(indexed, inner, seed=seed)
        self.objective = objective
        self.seed = seed
        self.prefix, self.suffix = prefix, suffix

    @property
    def samples_per_epoch(self) -> float:
        return self.packed.samples_per_epoch

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = np.concatenate([self.prefix, self.packed.tokens(index), self.suffix]).astype(np.int64)
        return self.objective(tokens, np.random.default_rng([self.seed, 2, index]))


def span_corruption_dataset(
    indexed: IndexedDataset,
    corruption: SpanCorruption,
    input_length: int,
    target_length: int | None = None,
    *,
    seed: int = 1234,
) -> ObjectiveDataset:
    """T5 samples whose inputs have exactly the longest possible length up to `input_length` (and the targets
    theirs).

    The raw length is chosen so, as in the published T5 code; every sample has the same lengths.
    """
    raw = corruption.raw_length(input_length, target_length)
    return ObjectiveDataset(indexed, raw, corruption, seed=seed)


def masked_dataset(
    indexed: IndexedDataset,
    masking: Masking,
    length: int,
    *,
    cls_token_id: int,
    sep_token_id: int,
    seed: int = 1234,
) -> ObjectiveDataset:
    """RoBERTa's FULL-SENTENCES form: `[CLS] packed text [SEP]`, masked, every sample `length` long."""
    special = (*masking.special_ids, cls_token_id, sep_token_id)
    masking = replace(masking, special_ids=tuple(dict.fromkeys(special)))
    return ObjectiveDataset(indexed, length, masking, seed=seed, prefix=(cls_token_id,), suffix=(sep_token_id,))


class SentencePairDataset:
    """Endless BERT samples over a corpus with one sequence per sentence (`prepare --split-sentences`).

    The documents are cut into runs of sentences once; every epoch gives the runs out in an order of its own
    and cuts them into two segments anew.
    """

    def __init__(
        self, indexed: IndexedDataset, pairs: SentencePairs, *, seed: int = 1234, short_probability: float = 0.1
    ) -> None:
        self.indexed = indexed
        self.pairs = pairs
        self.seed = seed
        self.short_probability = short_probability
        self._marks = np.require(indexed.document_indices, requirements=["C", "A"])  # the file's arrays are unaligned
        self._runs = sentence_index(
            np.require(indexed.sizes, requirements=["C", "A"]),
            self._marks,
            pairs.max_length - 3,
            short_probability,
            2,
            seed,
        )
        if len(self._runs) == 0:
            raise ValueError(f"{indexed.prefix} has no document of two sentences; prepare it with --split-sentences")
        if pairs.kind == "nsp" and self._runs_of_document(self._runs[0, 0])[1] == len(self._runs):
            raise ValueError(
                f"{indexed.prefix} has one document of two sentences; next-sentence prediction needs "
                "another, "
                'or use kind="sop"'
            )
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    @property
    def samples_per_epoch(self) -> int:
        return len(self._runs)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index < 0:
            raise IndexError(f"sample {index}: samples count from 0 and have no end")
        epoch, place = divmod(index, len(self._runs))
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, 3, epoch]).permutation(len(self._runs))
        first, last, wished = self._runs[self._order[1][place]]
        generator = np.random.default_rng([self.seed, 4, index])
        pairs = replace(self.pairs, max_length=int(max(wished, 2)) + 3)
        others = self._other_document(first, generator) if pairs.kind == "nsp" else []
        return pairs(self._sentences(first, last), generator, others)

    def _other_document(self, sentence: int, generator: np.random.Generator) -> list[np.ndarray]:
        """A run of a document other than the sentence's, every one equally likely."""
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
