"""Reads queries with documents and their relevance, and makes samples of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...data.pairs.pairs import load_records
from ...data.text.records import check_text
from ..embedding.data import SCORE_KEYS
from ..preference.data import PreferenceCollate


@dataclass(frozen=True)
class RankedDocuments:
    """A query, documents, and the relevance of each."""

    query: str
    documents: tuple[str, ...]
    relevance: tuple[float, ...]


@dataclass(frozen=True)
class RankingKeys:
    """The keys of the query, of the document or the list of documents, and of the relevance."""

    query: str
    documents: str
    relevance: str

    @classmethod
    def from_record(cls, record: Mapping[str, Any], columns: Sequence[str]) -> RankingKeys:
        """Finds the keys in the first record of a file.

        Args:
            columns: The keys of query and documents that the user names; by default the first two
                that hold texts.

        Raises:
            ValueError: The record lacks one.
        """
        score = next((key for key in SCORE_KEYS if key in record), None)
        texts = tuple(columns)
        if not texts:
            texts = tuple(
                key
                for key, value in record.items()
                if key != score and (isinstance(value, (str, list)))
            )[:2]
        if len(texts) != 2 or score is None:
            found = ", ".join(map(repr, record)) or "none"
            raise ValueError(
                "a record to rank needs a query, a document or a list of documents, and a label or "
                f"a list of labels; the keys of the first record are {found}"
            )
        return cls(texts[0], texts[1], score)

    def read(self, record: Any) -> RankedDocuments:
        """Returns a record. ValueError if a value is missing or of another type."""
        if not isinstance(record, Mapping):
            raise ValueError(f"a {type(record).__name__} instead of an object with a query")
        for key in (self.query, self.documents, self.relevance):
            if key not in record:
                raise ValueError(f"no key {key!r}; the first record of the training file has it")
        check_text(record[self.query], f"the value of {self.query!r}")
        documents = record[self.documents]
        relevance = record[self.relevance]
        if not isinstance(documents, (list, tuple)):
            documents = [documents]
        if not isinstance(relevance, (list, tuple)):
            relevance = [relevance]
        for document in documents:
            check_text(document, f"a document of {self.documents!r}")
        if len(documents) != len(relevance) or not documents:
            raise ValueError(
                f"{self.documents!r} has {len(documents)} documents, but {self.relevance!r} has "
                f"{len(relevance)} labels"
            )
        for label in relevance:
            if not isinstance(label, (int, float)) or not math.isfinite(label):
                raise ValueError(f"a label of {self.relevance!r} must be a number, not {label!r}")
        return RankedDocuments(
            record[self.query], tuple(documents), tuple(float(label) for label in relevance)
        )


def load_rankings(path: str | Path, keys: RankingKeys) -> Sequence[RankedDocuments]:
    """Loads queries with documents from JSON lines, parquet or a `datasets` folder."""
    return load_records(path, keys.read)


class RankingSamples:
    """Makes `{"columns": [ids of query and document], "segments": …, "relevance": …}` of records.

    Args:
        tokenizer: transformers' tokenizer.
        max_length: Longer pairs are cut, the longer text first.
    """

    def __init__(self, records: Sequence[RankedDocuments], tokenizer: Any, max_length: int) -> None:
        self.records = records
        self.tokenizer = tokenizer
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records[index]
        options = {"truncation": True, "max_length": self.max_length, "verbose": False}
        queries = [record.query] * len(record.documents)
        encoded = self.tokenizer(queries, list(record.documents), **options)
        sample: dict[str, Any] = {
            "columns": encoded["input_ids"],
            "relevance": np.array(record.relevance, np.float32),
        }
        if "token_type_ids" in encoded:
            sample["segments"] = encoded["token_type_ids"]
        return sample


class RankingCollate(PreferenceCollate):
    """Makes a batch of queries, whose documents stand side by side.

    A query with fewer documents than others has copies of its first one, with a relevance of -inf.
    Beside what `PreferenceCollate` makes there is `token_type_ids`, if the samples have segments.

    Args:
        documents: The least number of documents of a query in a batch. If it is the largest of the
            file, the rows of a query do not depend on those of others, and so its dropout masks do
            not depend on the layout.
    """

    def __init__(self, pad_token_id: int, multiple_of: int = 1, documents: int = 1) -> None:
        super().__init__(pad_token_id, multiple_of)
        self.documents = documents

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        most = max(self.documents, *(len(sample["columns"]) for sample in samples))
        filled: list[dict[str, Any]] = []
        for sample in samples:
            missing = most - len(sample["columns"])
            copies = dict(sample)
            for name in ("columns", "segments"):
                if name in sample:
                    copies[name] = [*sample[name], *[sample[name][0]] * missing]
            filled.append(copies)
        for copies in filled:
            missing = most - len(copies["relevance"])
            copies["relevance"] = np.pad(copies["relevance"], (0, missing), constant_values=-np.inf)
        batch = super().__call__(filled)
        if "segments" in filled[0]:
            batch["token_type_ids"] = self._pad([sample["segments"] for sample in filled], 0)
        return batch


def count_documents(records: Sequence[RankedDocuments]) -> int:
    """Returns the largest number of documents of a record."""
    return max(len(records[number].documents) for number in range(len(records)))
