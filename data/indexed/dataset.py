"""Reads tokenized corpora: Megatron-LM's `.bin`/`.idx` pair, memory-mapped and checked when it is
opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ...files.working_copies import find_stand_in
from .format import HEADER, bin_path, find_pair, idx_path, parse_header
from .meta import CorpusMeta, read_meta
from .ranged_tokens import RangedTokens

# Index entries checked at a time, so that memory does not grow with the number of sequences.
CHECK_BLOCK = 1 << 22


class IndexedDataset:
    """Gives sequences of tokens by number.

    `len(d)` is the number of sequences; `d[i]` is a read-only array [sizes[i]].

    The files are mapped, not read, so the corpus may be larger than memory. Unpickling opens them
    again.

    Attributes:
        dtype: Numpy dtype of a token.
        sizes: int32 [sequences], tokens per sequence.
        meta: What is recorded beside the pair; None if another tool wrote it.
        document_indices: int64 [documents + 1]; document k has the sequences from
            `document_indices[k]` up to, not including, `document_indices[k + 1]`.

    Raises:
        FileNotFoundError: A file of the pair is missing.
        ValueError: The pair is damaged; the message names the file and the record.
    """

    meta: CorpusMeta | None = None

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = find_pair(prefix) or Path(prefix)
        prefix = self.prefix
        index = idx_path(prefix)
        tokens = bin_path(prefix)
        for path in (index, tokens):
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} does not exist; an indexed dataset is a .bin and an .idx file"
                )
        with index.open("rb") as file:
            self.dtype, sequences, documents = parse_header(file.read(HEADER.size), index)
        expected = HEADER.size + sequences * 12 + documents * 8
        if index.stat().st_size not in (expected, expected + sequences):
            raise ValueError(
                f"{index} has {index.stat().st_size} bytes, but {sequences} sequences and "
                f"{documents} document marks need {expected}; it is truncated or damaged"
            )
        raw = np.memmap(index, mode="r", dtype=np.uint8)
        # Megatron-LM's multimodal pairs end with a mode for each sequence; that of text is 0.
        modes = raw[expected:]
        if modes.any():
            raise ValueError(
                f"{index} has sequences of Megatron-LM's modes other than 0, which are not text"
            )
        self.meta = read_meta(prefix)
        pointers_at = HEADER.size + 4 * sequences
        documents_at = pointers_at + 8 * sequences
        self.sizes = np.frombuffer(raw, "<i4", sequences, HEADER.size)
        self._pointers = np.frombuffer(raw, "<i8", sequences, pointers_at)
        self.document_indices = np.frombuffer(raw, "<i8", documents, documents_at)
        self._check_index(index)
        self._tokens = self._map_tokens(tokens)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> np.ndarray:
        """All tokens in file order, memory-mapped: [num_tokens].

        There are no gaps between sequences.
        """
        return self._tokens

    def __getitem__(self, index: int) -> np.ndarray:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}, which has {len(self)}")
        start = int(self._pointers[index]) // self.dtype.itemsize
        return self._tokens[start : start + int(self.sizes[index])]

    def document(self, number: int) -> np.ndarray:
        """Returns document `number`, its sequences joined: a read-only view [tokens]."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.prefix}, which has {self.num_documents}")
        start, stop = self.token_range(number)
        return self._tokens[start:stop]

    def token_range(self, document: int) -> tuple[int, int]:
        """Returns the position of the document in `tokens`: (start, stop)."""
        start = self._find_token(self.document_indices[document])
        stop = self._find_token(self.document_indices[document + 1])
        return start, stop

    def last_tokens(self) -> np.ndarray:
        """Returns the last token of each document that has tokens: [documents]."""
        ends = np.cumsum(self.document_lengths())
        return self._tokens[np.unique(ends[ends > 0]) - 1]

    def document_lengths(self) -> np.ndarray:
        """Returns the tokens per document: int64 [documents]."""
        ends = np.append(self._pointers // self.dtype.itemsize, self.num_tokens)
        return np.diff(ends[self.document_indices])

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["prefix"])

    def __repr__(self) -> str:
        return (
            f"IndexedDataset({str(self.prefix)!r}, documents={self.num_documents}, "
            f"sequences={len(self)}, tokens={self.num_tokens}, dtype={self.dtype})"
        )

    def _find_token(self, sequence: int) -> int:
        """Returns the position in `tokens` at which a sequence begins, or the last one ends."""
        if sequence == len(self):
            return self.num_tokens
        return int(self._pointers[sequence]) // self.dtype.itemsize

    def _check_index(self, path: Path) -> None:
        """Checks the pointers and document marks.

        All writers store sequences without gaps, so the pointers follow from the sizes unless a bit
        flipped.
        """
        position = 0
        for first in range(0, len(self.sizes), CHECK_BLOCK):
            sizes = self.sizes[first : first + CHECK_BLOCK].astype(np.int64)
            if sizes.min() < 0:
                raise ValueError(
                    f"{path}: sequence {first + int(sizes.argmin())} has size {sizes.min()}"
                )
            ends = position + np.cumsum(sizes) * self.dtype.itemsize
            expected = np.concatenate(([position], ends[:-1]))
            wrong = np.flatnonzero(self._pointers[first : first + CHECK_BLOCK] != expected)
            if wrong.size:
                record = first + int(wrong[0])
                raise ValueError(
                    f"{path}: sequence {record} points at byte {self._pointers[record]}, but the "
                    f"sizes before it end at byte {expected[wrong[0]]}; the index is damaged"
                )
            position = int(ends[-1])
        self._bin_bytes = position
        marks = self.document_indices
        if len(marks) == 0 or marks[0] != 0 or marks[-1] != len(self.sizes):
            raise ValueError(
                f"{path}: the document marks must run from 0 to the {len(self.sizes)} sequences, "
                f"but are {marks[:1].tolist()} to {marks[-1:].tolist()} (older tools lost them "
                "when they merged pairs; merge the parts again with `shardzoo data merge`)"
            )
        for first in range(0, len(marks) - 1, CHECK_BLOCK):
            steps = np.diff(marks[first : first + CHECK_BLOCK + 1])
            if steps.min() < 0:
                raise ValueError(
                    f"{path}: document {first + int(steps.argmin())} ends before it begins"
                )

    def _map_tokens(self, path: Path) -> Any:
        actual = path.stat().st_size
        if actual != self._bin_bytes:
            raise ValueError(
                f"{path} has {actual} bytes, but the index {idx_path(self.prefix).name} describes "
                f"{self._bin_bytes}; the two files do not belong together or one is truncated"
            )
        if actual == 0:
            return np.empty(0, self.dtype)  # An empty file cannot be mapped.
        stand_in = find_stand_in(path)
        if stand_in is not None:
            return RangedTokens(stand_in, self.dtype)
        return np.asarray(np.memmap(path, mode="r", dtype=self.dtype))


class MemoryDataset(IndexedDataset):
    """A tokenized corpus in memory, for all that reads an `IndexedDataset`.

    Args:
        name: What messages call it.
        tokens: [tokens], the sequences end to end.
        sizes: Tokens per sequence.
        sequences: Sequences per document; None if each document is one sequence.
    """

    def __init__(
        self, name: str, tokens: np.ndarray, sizes: np.ndarray, sequences: np.ndarray | None = None
    ) -> None:
        self.prefix = Path(name)
        self.dtype = tokens.dtype
        self._tokens = tokens
        self.sizes = sizes.astype(np.int32)
        self._pointers = (np.cumsum(sizes, dtype=np.int64) - sizes) * tokens.dtype.itemsize
        counts = np.ones(len(sizes), np.int64) if sequences is None else sequences
        self.document_indices = np.append(0, np.cumsum(counts, dtype=np.int64))
        self._arguments = (name, tokens, sizes, sequences)

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": self._arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["arguments"])
