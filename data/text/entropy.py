"""Computes the unigram entropy of a corpus, the baseline for a language model's loss."""

from __future__ import annotations

import numpy as np

from ..indexed.dataset import IndexedDataset

BLOCK_TOKENS = 1 << 22


def token_counts(indexed: IndexedDataset) -> np.ndarray:
    """Returns how often each token id occurs: int64 [largest id + 1]."""
    if indexed.dtype.kind not in "iu":
        raise ValueError(f"{indexed.prefix} holds {indexed.dtype} values, which are not token ids")
    counts = np.zeros(1, np.int64)
    for start in range(0, indexed.num_tokens, BLOCK_TOKENS):
        block = np.bincount(indexed.tokens[start : start + BLOCK_TOKENS])
        if len(block) > len(counts):
            counts = np.pad(counts, (0, len(block) - len(counts)))
        counts[: len(block)] += block
    return counts


def unigram_entropy(indexed: IndexedDataset) -> float:
    """Returns the entropy of the corpus' token distribution, -Σ p log p, in nats per token.

    No model that ignores context can have a lower mean loss on this text.
    """
    counts = token_counts(indexed)
    total = counts.sum()
    if total == 0:
        raise ValueError(f"{indexed.prefix} holds no tokens, so its entropy is undefined")
    p = counts[counts > 0] / total
    return float(-(p * np.log(p)).sum())
