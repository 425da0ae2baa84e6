"""Loads pairs of source and target text for fine-tuning from common file formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..text.records import check_text

Pair = tuple[str, str]


def load_pairs(
    path: str | Path, *, source_id: str = "s", target_id: str = "t", prefix: str = "", labels: bool = False
) -> Sequence[Pair]:
    """Loads (source, target) texts.

    The formats are:

    - JSON lines `{"translation": {"s": …, "t": …}}` (t2t and Hugging Face's translation format), or with the two keys
      at the top level;
    - a pair of files `NAME.source` and `NAME.target`, line by line (`path` is either of them, or NAME);
    - parquet files and folders of `datasets.Dataset.save_to_disk` with a `translation` column, or with two columns of
      those names.

    Args:
        source_id: key of the source texts.
        target_id: key of the target texts.
        prefix: text to put before every source.
        labels: whether a target may also be an integer, which becomes its digits.

    Raises:
        ValueError: the file does not exist or holds no pairs, the files have different numbers of lines, or a record
            lacks a key; the message names file and record.
    """
    path = Path(path)
    sides = _side_files(path)
    if sides is not None:
        pairs: Sequence[Pair] = _from_sides(*sides)
    elif path.is_dir() or path.suffix == ".parquet":
        pairs = ColumnPairs(path, source_id, target_id, labels)
    elif path.is_file():
        pairs = _from_json_lines(path, source_id, target_id, labels)
    else:
        raise ValueError(f"{path} does not exist; give JSON lines, NAME.source with NAME.target, or a folder")
    if len(pairs) == 0:
        raise ValueError(f"{path} holds no pairs")
    return _Prefixed(pairs, prefix) if prefix else pairs


def pair_of(record: Any, source_id: str, target_id: str, labels: bool = False) -> Pair:
    """Returns the two texts of a record. ValueError names a missing key."""
    values = record.get("translation", record) if isinstance(record, dict) else record
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__} instead of an object with {source_id!r} and {target_id!r}")
    for key in (source_id, target_id):
        if key not in values:
            named = ", ".join(map(repr, list(values)[:8])) or "none"
            raise ValueError(f"no key {key!r}; the keys are {named}")
    target = values[target_id]
    target = str(target) if labels and isinstance(target, int) and not isinstance(target, bool) else target
    return (
        check_text(values[source_id], f"the value of {source_id!r}"),
        check_text(target, f"the value of {target_id!r}"),
    )


class ColumnPairs(Sequence[Pair]):
    """Pairs of a parquet file or a Hugging Face dataset folder, read from disk at each access."""

    def __init__(self, path: Path, source_id: str, target_id: str, labels: bool = False) -> None:
        from datasets import Dataset, load_from_disk

        if path.is_dir():
            loaded = load_from_disk(str(path))
            if not isinstance(loaded, Dataset):
                raise ValueError(f"{path} holds several splits ({', '.join(map(str, loaded))}); give one of them")
            self.rows: Dataset = loaded
        else:
            self.rows = Dataset.from_parquet(str(path))  # type: ignore[assignment]
        self.path, self.source_id, self.target_id, self.labels = path, source_id, target_id, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Pair:  # type: ignore[override]
        try:
            return pair_of(self.rows[index], self.source_id, self.target_id, self.labels)
        except ValueError as error:
            raise ValueError(f"bad record in {self.path}, record {index + 1}: {error}") from None


class _Prefixed(Sequence[Pair]):
    def __init__(self, pairs: Sequence[Pair], prefix: str) -> None:
        self.pairs, self.prefix = pairs, prefix

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:  # type: ignore[override]
        source, target = self.pairs[index]
        return self.prefix + source, target


def _side_files(path: Path) -> tuple[Path, Path] | None:
    stem = path.with_suffix("") if path.suffix in (".source", ".target") else path
    source, target = Path(f"{stem}.source"), Path(f"{stem}.target")
    if path.is_file() and path.suffix not in (".source", ".target"):
        return None
    if source.is_file() and target.is_file():
        return source, target
    if source.is_file() or target.is_file():
        raise ValueError(f"{source} and {target} belong together, but one of them does not exist")
    return None


def _from_sides(source: Path, target: Path) -> list[Pair]:
    sources, targets = _lines(source, _plain), _lines(target, _plain)
    if len(sources) != len(targets):
        raise ValueError(f"{source} has {len(sources)} lines, but {target} has {len(targets)}")
    return list(zip(sources, targets, strict=True))


def _from_json_lines(path: Path, source_id: str, target_id: str, labels: bool) -> list[Pair]:
    def parse(raw: bytes) -> Pair:
        return pair_of(json.loads(raw.decode("utf-8-sig")), source_id, target_id, labels)

    return _lines(path, parse, skip_blank=True)


def _plain(raw: bytes) -> str:
    return raw.decode("utf-8").rstrip("\r\n")


def _lines(path: Path, parse: Callable[[bytes], Any], *, skip_blank: bool = False) -> list[Any]:
    """Returns every line parsed; errors of `parse` are raised with file and record."""
    values = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if skip_blank and raw.isspace():
                continue
            try:
                values.append(parse(raw))
            except RecursionError:
                raise ValueError(f"bad record in {path}, record {number}: nested too deeply") from None
            except ValueError as error:  # also invalid UTF-8 and JSON
                raise ValueError(f"bad record in {path}, record {number}: {error}") from None
    return values
