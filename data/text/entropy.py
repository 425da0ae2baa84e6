"""Computes the unigram entropy of a corpus and of an objective's targets, the baselines for a
model's loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..indexed.dataset import IndexedDataset
from ..labels import IGNORED

BLOCK_TOKENS = 1 << 22


def token_counts(indexed: IndexedDataset) -> tuple[np.ndarray, np.ndarray]:
    """Returns the token ids that occur, in ascending order, and how often each does: int64
    [distinct tokens] each.

    Memory grows with the number of distinct tokens, not with the largest id. ValueError for values
    that are no ids.
    """
    if indexed.dtype.kind not in "iu":
        raise ValueError(f"{indexed.prefix} holds {indexed.dtype} values, which are not token ids")
    ids = np.empty(0, np.int64)
    counts = np.empty(0, np.int64)
    for start in range(0, indexed.num_tokens, BLOCK_TOKENS):
        found, found_counts = _count_block(indexed.tokens[start : start + BLOCK_TOKENS])
        if found[0] < 0:
            raise ValueError(f"{indexed.prefix} holds {found[0]}; a token id is at least 0")
        ids, places = np.unique(np.concatenate([ids, found]), return_inverse=True)
        total = np.zeros(len(ids), np.int64)
        np.add.at(total, places, np.concatenate([counts, found_counts]))
        counts = total
    return ids, counts


def _count_block(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids in a block of tokens, in ascending order, and how often each occurs."""
    if block.min() < 0 or block.max() >= BLOCK_TOKENS:
        return np.unique(block, return_counts=True)
    # Counting is faster than sorting, and its memory is bounded by the largest id.
    counts = np.bincount(block)
    ids = np.flatnonzero(counts)
    return ids, counts[ids]


def unigram_entropy(indexed: IndexedDataset) -> float:
    """Returns the entropy of the corpus' token distribution, -Σ p log p, in nats per token.

    No model that ignores context can have a lower mean loss on this text.
    """
    counts = token_counts(indexed)[1]
    if len(counts) == 0:
        raise ValueError(f"{indexed.prefix} holds no tokens, so its entropy is undefined")
    return _compute_entropy(counts)


def target_entropy(samples: Iterable[Mapping[str, Any]]) -> float:
    """Returns the entropy of the distribution of the samples' targets, in nats per target token.

    A target is a label that is not −100; if the labels equal the input, the model shifts them, so
    the first is none. The entropy of `next_sentence_label` is added if the samples have it, as its
    mean loss is added to that of the tokens. No model that ignores its input can have a lower mean
    loss on these samples.
    """
    token_targets: list[np.ndarray] = []
    pair_targets: list[np.ndarray] = []
    for sample in samples:
        labels = np.asarray(sample["labels"])
        is_shifted_by_model = np.array_equal(labels, np.asarray(sample["input_ids"]))
        if is_shifted_by_model:
            token_targets.append(labels[1:])
        else:
            token_targets.append(labels[labels != IGNORED])
        if "next_sentence_label" in sample:
            pair_targets.append(np.atleast_1d(sample["next_sentence_label"]))
    if not any(map(len, token_targets)):
        raise ValueError("the samples have no target tokens, so the entropy is undefined")
    total = 0.0
    for targets in (token_targets, pair_targets):
        if targets:
            _, counts = np.unique(np.concatenate(targets), return_counts=True)
            total += _compute_entropy(counts)
    return total


def _compute_entropy(counts: np.ndarray) -> float:
    """Returns the entropy of a distribution that is given by counts, -Σ p log p."""
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())
