"""Merges indexed datasets and splits them by document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from .dataset import IndexedDataset
from .meta import CorpusMeta
from .writer import IndexedDatasetWriter

DOCUMENTS_AT_ONCE = 1024


def merge_datasets(prefixes: Sequence[str | Path], output: str | Path) -> None:
    """Writes the documents of several datasets, one dataset after the other.

    Raises:
        ValueError: The token types differ, or what is recorded of the datasets does (vocabularies,
            end tokens).
    """
    if not prefixes:
        raise ValueError("nothing to merge: give at least one prefix")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    dtypes = {str(dataset.dtype) for dataset in datasets}
    if len(dtypes) > 1:
        described = ", ".join(f"{dataset.prefix}: {dataset.dtype}" for dataset in datasets)
        raise ValueError(f"datasets of different token dtypes cannot be merged ({described})")
    with IndexedDatasetWriter(
        output, datasets[0].dtype, meta=_find_common_meta(datasets)
    ) as writer:
        for dataset in datasets:
            writer.add_dataset(dataset)


def _find_common_meta(datasets: Sequence[IndexedDataset]) -> CorpusMeta | None:
    """Returns what is recorded of all datasets; None if another tool wrote one of them."""
    known = [(dataset.prefix, dataset.meta) for dataset in datasets if dataset.meta is not None]
    for prefix, meta in known[1:]:
        first, expected = known[0]
        for name, mine, theirs in (
            ("vocabularies", expected.vocabulary, meta.vocabulary),
            ("end tokens", expected.end_token, meta.end_token),
            ("values of split_sentences", expected.split_sentences, meta.split_sentences),
        ):
            if mine != theirs:
                raise ValueError(f"{first} and {prefix} have different {name}: {mine} and {theirs}")
    if len(known) < len(datasets):
        return None
    return replace(known[0][1], made_from=None)


def split_dataset(
    dataset: IndexedDataset, shares: Mapping[Path, float], *, seed: int
) -> dict[Path, int]:
    """Assigns every document to one of the outputs at random, in proportion to the shares.

    Documents keep their order within an output. An output with a positive share gets at least one
    document. Returns the number of documents of each output.

    Raises:
        ValueError: The shares do not sum to 1, or there are fewer documents than outputs.
    """
    names = list(shares)
    weights = np.array([shares[name] for name in names], np.float64)
    if not (weights >= 0).all() or abs(weights.sum() - 1) > 1e-6:  # NaN is neither
        raise ValueError(
            f"the shares {weights.tolist()} must be positive and sum to 1, such as 0.9 0.05 0.05"
        )
    if seed < 0:
        raise ValueError(f"the seed is {seed}; it must not be negative")
    counts = _count_documents(weights, dataset.num_documents, dataset.prefix)
    order = np.random.default_rng([seed, dataset.num_documents]).permutation(dataset.num_documents)
    owner = np.empty(dataset.num_documents, np.int8)
    owner[order] = np.repeat(np.arange(len(names)), counts)
    meta = None if dataset.meta is None else replace(dataset.meta, made_from=None)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedDatasetWriter(name, dataset.dtype, meta=meta))
            for name in names
        ]
        for start, stop in _iter_runs(owner):
            marks = dataset.document_indices[start : stop + 1]
            first_token, _ = dataset.token_range(start)
            _, end_token = dataset.token_range(stop - 1)
            writer = writers[owner[start]]
            writer.add_sequences(
                dataset.tokens[first_token:end_token], dataset.sizes[marks[0] : marks[-1]]
            )
            writer.end_documents(np.diff(marks))
    return dict(zip(names, counts.tolist(), strict=True))


def _iter_runs(owner: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields runs [start, stop) of neighboring documents with one owner, at most DOCUMENTS_AT_ONCE
    together.
    """
    changes = np.flatnonzero(np.diff(owner, prepend=-1, append=-1))
    for first, last in pairwise(changes.tolist()):
        for start in range(first, last, DOCUMENTS_AT_ONCE):
            yield start, min(start + DOCUMENTS_AT_ONCE, last)


def _count_documents(weights: np.ndarray, documents: int, prefix: Path) -> np.ndarray:
    """Returns the number of documents of each output: int64 [outputs], with the sum `documents`."""
    needed = int((weights > 0).sum())
    if documents < needed:
        raise ValueError(
            f"{prefix} holds {documents} document(s), fewer than the {needed} parts to split into"
        )
    counts = np.maximum(np.round(weights * documents).astype(np.int64), weights > 0)
    counts[counts.argmax()] += documents - counts.sum()
    return counts
