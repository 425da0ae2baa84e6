"""Encodes documents as token arrays, identically in the main process and in workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..tokenizers.tokenizer import Tokenizer
from . import sentences

BATCH_CHARACTERS = 1 << 19  # characters per call of the tokenizer; larger batches only cost memory


class Encoded(NamedTuple):
    """Tokenized documents, end to end.

    Attributes:
        tokens: Token ids [tokens], in the corpus' dtype.
        sizes: Tokens per sequence: int64 [sequences].
        sequences: Sequences per document: int64 [documents]; None if each document is one sequence.
    """

    tokens: np.ndarray
    sizes: np.ndarray
    sequences: np.ndarray | None


def find_end_token(tokenizer: Tokenizer, *, split_sentences: bool) -> int | None:
    """Returns the id of the token that ends a document; None if nothing does.

    It is the end-of-sequence token, or in vocabularies without one the separator. The segments of
    sentence pairs have separators of their own, so nothing ends a document of sentences.
    """
    if split_sentences:
        return None
    for role in ("eos_token", "sep_token"):
        if role in tokenizer.special:
            return tokenizer.special[role]
    return None


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the concatenated tokens of all texts [total] and their lengths, int64 [texts]."""
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    for batch in _iter_batches(texts):
        for ids in tokenizer.encode_batch(batch):
            parts.append(np.array(ids, dtype))
            lengths.append(len(ids))
    tokens = np.concatenate(parts) if parts else np.empty(0, dtype)
    return tokens, np.array(lengths, np.int64)


def encode_documents(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    dtype: np.dtype,
    end: int | None,
    *,
    split_sentences: bool = False,
) -> Encoded:
    """Encodes documents as one sequence each, or one per sentence.

    Args:
        tokenizer: Encodes the texts.
        texts: The documents.
        dtype: Token dtype of the corpus.
        end: Id of the token that follows each document; None for no token.
        split_sentences: Whether a sequence is a sentence instead of a document.
    """
    documents = [[text] for text in texts]
    if split_sentences:
        documents = [sentences.split_sentences(text) for text in texts]
    sequences = [sequence for document in documents for sequence in document]
    tokens, lengths = encode_texts(tokenizer, sequences, dtype)
    counts = np.array([len(document) for document in documents], np.int64)
    if end is not None and len(counts):
        last = np.cumsum(counts) - 1  # the last sequence of each document
        tokens = np.insert(tokens, np.cumsum(lengths)[last], end)
        lengths[last] += 1
    return Encoded(tokens, lengths, counts if split_sentences else None)


def _iter_batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields the texts in groups of at least BATCH_CHARACTERS."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch
