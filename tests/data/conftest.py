"""Fixtures of the data tests: a small tokenizer, a small corpus, and the compiled index builders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardzoo.data import IndexedDataset, IndexedDatasetWriter, train_byte_level_bpe

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "that",
    "was",
    "with",
    "not",
    "his",
    "but",
    "at",
    "this",
    "have",
    "from",
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """200 documents of several sentences, all different."""
    generator = np.random.default_rng(0)
    documents = []
    for number in range(200):
        sentences = [
            " ".join(generator.choice(WORDS, generator.integers(3, 12))).capitalize() + "."
            for _ in range(generator.integers(2, 15))
        ]
        documents.append(f"Document {number}. " + " ".join(sentences))
    return documents


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_byte_level_bpe(texts, 400, folder)
    return folder


@pytest.fixture(scope="session")
def jsonl(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def write_dataset(tmp_path: Path) -> Callable[..., IndexedDataset]:
    """Write documents (lists of sequences, or one sequence) and open them."""
    count = 0

    def write(documents: list, dtype: type = np.int32) -> IndexedDataset:
        nonlocal count
        count += 1
        with IndexedDatasetWriter(tmp_path / f"data{count}", dtype) as writer:
            for document in documents:
                sequences = document if len(document) and np.ndim(document[0]) else [document]
                for sequence in sequences:
                    writer.add_sequence(sequence)
                writer.end_document()
        return IndexedDataset(tmp_path / f"data{count}")

    return write
