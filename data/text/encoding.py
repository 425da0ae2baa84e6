"""Encodes documents as token arrays, identically in the main process and in workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..tokenizers.tokenizer import Tokenizer
from .sentences import split_sentences as sentences_of

BATCH_CHARACTERS = 1 << 19  # characters per call of the tokenizer; larger batches only cost memory


class Encoded(NamedTuple):
    """Documents as tokens [tokens], sizes of their sequences, and sequences per document (None: one)."""

    tokens: np.ndarray
    sizes: np.ndarray
    sequences: np.ndarray | None


def end_token(tokenizer: Tokenizer, *, split_sentences: bool) -> int | None:
    """Returns the id of the token that ends a document; None if nothing does.

    It is the end-of-sequence token, or in vocabularies without one the separator. The segments of sentence pairs have
    separators of their own, so nothing ends a document of sentences.
    """
    roles = () if split_sentences else ("eos_token", "sep_token")
    return next((tokenizer.special[role] for role in roles if role in tokenizer.special), None)


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the concatenated tokens of all texts [total] and their lengths, int64 [texts]."""
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    for batch in _batches(texts):
        for ids in tokenizer.encode_batch(batch):
            parts.append(np.array(ids, dtype))
            lengths.append(len(ids))
    return np.concatenate(parts) if parts else np.empty(0, dtype), np.array(lengths, np.int64)


def encode_documents(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    dtype: np.dtype,
    end: int | None,
    *,
    split_sentences: bool = False,
) -> Encoded:
    """Encodes documents, each followed by the token `end` if given, as one sequence each or one per sentence."""
    documents = [sentences_of(text) if split_sentences else [text] for text in texts]
    tokens, lengths = encode_texts(
        tokenizer, [part for document in documents for part in document], dtype
    )
    counts = np.array([len(document) for document in documents], np.int64)
    if end is not None and len(counts):
        last = np.cumsum(counts) - 1
        tokens = np.insert(tokens, np.cumsum(lengths)[last], end)
        lengths[last] += 1
    return Encoded(tokens, lengths, counts if split_sentences else None)


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    weight = 0
    for text in texts:
        batch.append(text)
        weight += len(text)
        if weight >= BATCH_CHARACTERS:
            yield batch
            batch, weight = [], 0
    if batch:
        yield batch
