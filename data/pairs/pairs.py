"""Loads records for fine-tuning from common file formats, such as pairs of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..text.lines import iter_json_records, read_text_lines
from ..text.records import check_text

Pair = tuple[str, str]
Record = TypeVar("Record")
DEFAULT_KEYS = ("s", "t")
"""Keys of the source and the target, unless others are named."""


def load_pairs(
    path: str | Path, *, source_id: str = "s", target_id: str = "t", prefix: str = ""
) -> Sequence[Pair]:
    """Loads (source, target) texts.

    The formats are:

    - JSON lines `{"translation": {"s": …, "t": …}}` (t2t and Hugging Face's translation format), or
      with the two keys at the top level, or one JSON array of such objects;
    - a pair of files `NAME.source` and `NAME.target`, line by line (`path` is either of them, or
      NAME);
    - parquet files and folders of `datasets.Dataset.save_to_disk` with a `translation` column, or
      with two columns of those names.

    Args:
        source_id: Key of the source texts.
        target_id: Key of the target texts.
        prefix: Text to put before every source.

    Raises:
        ValueError: The file does not exist or holds no pairs, the files have different numbers of
            lines, or a record lacks a key; the message names file and record.
    """

    def parse(record: Any) -> Pair:
        source, target = read_fields(record, source_id, target_id)
        check_text(source, f"the value of {source_id!r}")
        check_text(target, f"the value of {target_id!r}")
        return prefix + source, target

    sides = find_side_files(Path(path))
    if sides is None:
        return load_records(path, parse)
    return [(prefix + source, target) for source, target in read_sides(*sides)]


def load_records(path: str | Path, parse: Callable[[Any], Record]) -> Sequence[Record]:
    """Loads the records of JSON lines, a JSON array, a parquet file or a folder of
    `datasets.Dataset.save_to_disk`.

    Args:
        parse: Returns the record of a JSON object or a row. Its ValueError is raised with file and
            number.
    """
    path = Path(path)
    if path.is_dir() or path.suffix == ".parquet":
        records: Sequence[Record] = RowRecords(path, parse)
    elif path.is_file():
        records = _parse_records(path, parse)
    else:
        raise ValueError(
            f"{path} does not exist; give JSON lines, NAME.source with NAME.target, or a folder"
        )
    if len(records) == 0:
        raise ValueError(f"{path} holds no records")
    return records


def read_fields(record: Any, *keys: str) -> list[Any]:
    """Returns the values of a record, or of the object in its `translation`.

    ValueError names a missing key.
    """
    values = record.get("translation", record) if isinstance(record, dict) else record
    if not isinstance(values, dict):
        raise ValueError(
            f"a {type(values).__name__} instead of an object with {' and '.join(map(repr, keys))}"
        )
    for key in keys:
        if key not in values:
            named = ", ".join(map(repr, list(values)[:8])) or "none"
            message = f"no key {key!r}; the keys are {named}"
            if key in DEFAULT_KEYS:
                message += "; source_id and target_id name those of the source and the target"
            raise ValueError(message)
    return [values[key] for key in keys]


class RowRecords(Sequence[Record], Generic[Record]):
    """Records of a parquet file or a Hugging Face dataset folder, read from disk at each access."""

    def __init__(self, path: Path, parse: Callable[[Any], Record]) -> None:
        from datasets import Dataset, load_from_disk

        if path.is_dir():
            loaded = load_from_disk(str(path))
            if not isinstance(loaded, Dataset):
                raise ValueError(
                    f"{path} holds several splits ({', '.join(map(str, loaded))}); give one of them"
                )
            self.rows: Dataset = loaded
        else:
            self.rows = Dataset.from_parquet(str(path))  # type: ignore[assignment]
        self.path = path
        self.parse = parse

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:  # type: ignore[override]
        try:
            return self.parse(self.rows[index])
        except ValueError as error:
            raise ValueError(f"bad record in {self.path}, record {index + 1}: {error}") from None


def find_side_files(path: Path) -> tuple[Path, Path] | None:
    """Returns NAME.source and NAME.target for one of them or NAME; None if there are no such files.

    Raises:
        ValueError: One of the two does not exist.
    """
    names_a_side = path.suffix in (".source", ".target")
    if path.is_file() and not names_a_side:
        return None
    stem = path.with_suffix("") if names_a_side else path
    source = Path(f"{stem}.source")
    target = Path(f"{stem}.target")
    if source.is_file() and target.is_file():
        return source, target
    if source.is_file() or target.is_file():
        raise ValueError(f"{source} and {target} belong together, but one of them does not exist")
    return None


def read_sides(source: Path, target: Path) -> list[Pair]:
    """Returns the pairs of two files, line by line.

    Raises:
        ValueError: Their numbers of lines differ, or there are none.
    """
    sources = read_text_lines(source)
    targets = read_text_lines(target)
    if len(sources) != len(targets):
        raise ValueError(f"{source} has {len(sources)} lines, but {target} has {len(targets)}")
    if not sources:
        raise ValueError(f"{source} holds no records")
    return list(zip(sources, targets, strict=True))


def _parse_records(path: Path, parse: Callable[[Any], Record]) -> list[Record]:
    """Returns the records of a JSON file. Errors of `parse` are raised with file and number."""
    records: list[Record] = []
    for number, value in iter_json_records(path):
        try:
            records.append(parse(value))
        except ValueError as error:
            raise ValueError(f"bad record in {path}, record {number}: {error}") from None
    return records
