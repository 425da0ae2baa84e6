"""Reads records with columns of texts, as sentence-transformers' datasets have, and makes samples
and batches of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.pairs.pairs import load_records
from ...data.text.records import check_text

SCORE_KEYS = ("score", "scores", "label", "labels")  # sentence-transformers' names


@dataclass(frozen=True)
class TextColumns:
    """The texts of a record, by column, and its score or scores, if it has any."""

    texts: tuple[str, ...]
    scores: tuple[float, ...] = ()


@dataclass(frozen=True)
class ColumnKeys:
    """The keys of a record's columns.

    Attributes:
        texts: The columns of texts, in their order: such as anchor, positive and negatives.
        score: The key of the scores; None without.
    """

    texts: tuple[str, ...]
    score: str | None

    @classmethod
    def from_record(cls, record: Mapping[str, Any], columns: Sequence[str]) -> ColumnKeys:
        """Finds the keys in the first record of a file.

        Args:
            columns: The columns that the user names; by default all texts, in the record's order.

        Raises:
            ValueError: The record has fewer than two columns of texts.
        """
        score = next((key for key in SCORE_KEYS if key in record), None)
        texts = tuple(columns)
        if not texts:
            texts = tuple(
                key for key, value in record.items() if isinstance(value, str) and key != score
            )
        if len(texts) < 2:
            found = ", ".join(map(repr, record)) or "none"
            raise ValueError(
                "a record to embed needs at least two texts, such as anchor and positive; the keys "
                f"of the first record are {found}"
            )
        return cls(texts, score)

    def read(self, record: Any) -> TextColumns:
        """Returns the columns of a record. ValueError if one is missing or is of another type."""
        if not isinstance(record, Mapping):
            raise ValueError(f"a {type(record).__name__} instead of an object with texts")
        for key in (*self.texts, *([self.score] if self.score else [])):
            if key not in record:
                raise ValueError(f"no key {key!r}; the first record of the training file has it")
        for key in self.texts:
            check_text(record[key], f"the value of {key!r}")
        if self.score is None:
            return TextColumns(tuple(record[key] for key in self.texts))
        value = record[self.score]
        scores = value if isinstance(value, (list, tuple)) else [value]
        for score in scores:
            if not isinstance(score, (int, float)) or not math.isfinite(score):
                raise ValueError(
                    f"the value of {self.score!r} must be a number or a list of them, not {value!r}"
                )
        return TextColumns(tuple(record[key] for key in self.texts), tuple(map(float, scores)))


def load_columns(path: str | Path, keys: ColumnKeys) -> Sequence[TextColumns]:
    """Loads records with columns of texts from JSON lines, parquet or a `datasets` folder."""
    return load_records(path, keys.read)


class ColumnSamples:
    """Makes `{"columns": [ids of each text], "scores": …}` of records.

    Args:
        tokenizer: transformers' tokenizer.
        max_length: Longer texts are cut, and keep the special tokens at their ends.
        prompts: The texts that are put before the first column and before the others.
    """

    def __init__(
        self,
        records: Sequence[TextColumns],
        tokenizer: Any,
        max_length: int,
        prompts: tuple[str, str] = ("", ""),
    ) -> None:
        self.records = records
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self.records[index]
        query, document = self.prompts
        texts = [query + record.texts[0], *(document + text for text in record.texts[1:])]
        options = {"truncation": True, "max_length": self.max_length, "verbose": False}
        sample: dict[str, Any] = {"columns": self.tokenizer(texts, **options)["input_ids"]}
        if record.scores:
            sample["scores"] = np.array(record.scores, np.float32)
        return sample


class ColumnCollate:
    """Makes a batch of `ColumnSamples`, with all columns of a record side by side.

    The batch has `input_ids` and `attention_mask`, int64 [B, C, S] for C columns, and `scores`,
    float32 [B] or [B, n].
    """

    def __init__(self, pad_token_id: int, multiple_of: int = 1) -> None:
        self.pad_token_id = pad_token_id
        self.multiple_of = multiple_of

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(1, *(len(ids) for sample in samples for ids in sample["columns"]))
        length = -(-longest // self.multiple_of) * self.multiple_of
        shape = (len(samples), len(samples[0]["columns"]), length)
        input_ids = np.full(shape, self.pad_token_id, np.int64)
        attention_mask = np.zeros(shape, np.int64)
        for row, sample in enumerate(samples):
            for column, ids in enumerate(sample["columns"]):
                input_ids[row, column, : len(ids)] = ids
                attention_mask[row, column, : len(ids)] = 1
        batch = {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(attention_mask),
        }
        if "scores" in samples[0]:
            sizes = {len(sample["scores"]) for sample in samples}
            if len(sizes) > 1:
                raise ValueError(f"the records of a batch have unequal numbers of scores: {sizes}")
            scores = torch.from_numpy(np.stack([sample["scores"] for sample in samples]))
            batch["scores"] = scores[:, 0] if scores.shape[1] == 1 else scores
        return batch
