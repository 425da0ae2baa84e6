"""Encodes documents as token arrays, identically in the main process and in workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..tokenizers.tokenizer import Tokenizer
from .sentences import split_sentences

BATCH_CHARACTERS = 1 << 19  # characters per call of the tokenizer; larger batches only cost memory


def end_token(tokenizer: Tokenizer, *, split_sentences: bool) -> int | None:
    """Returns the id of the token that ends a document; None if nothing does.

    It is the end-of-sequence token, or in vocabularies without one the separator. The segments of sentence pairs have
    separators of their own, so nothing ends a document of sentences.
    """
    roles = () if split_sentences else ("eos_token", "sep_token")
    return next((tokenizer.special[role] for role in roles if role in tokenizer.special), None)


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns the concatenated tokens of all texts [total] and their lengths, int64 [texts]."""
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    for batch in _batches(texts):
        for ids in tokenizer.encode_batch(batch):
            parts.append(np.array(ids, dtype))
            lengths.append(len(ids))
    return np.concatenate(parts) if parts else np.empty(0, dtype), np.array(lengths, np.int64)


def encode_documents(
    tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype, end: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Encodes each document, followed by the token `end` if given; returns tokens [total] and lengths int64 [texts]."""
    tokens, lengths = encode_texts(tokenizer, texts, dtype)
    if end is None:
        return tokens, lengths
    return np.insert(tokens, np.cumsum(lengths), end), lengths + 1


def encode_sentences(
    tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype, end: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encodes one sequence per sentence; a document's last one is followed by the token `end` if given.

    Returns tokens [total], lengths, int64 [sentences], and sentences per document, int64 [texts].
    """
    sentences = [split_sentences(text) for text in texts]
    tokens, lengths = encode_texts(tokenizer, [s for document in sentences for s in document], dtype)
    counts = np.array([len(document) for document in sentences], np.int64)
    last = np.cumsum(counts) - 1
    if end is not None and len(counts):
        tokens = np.insert(tokens, np.cumsum(lengths)[last], end)
        lengths[last] += 1
    return tokens, lengths, counts


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
