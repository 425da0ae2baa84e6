"""Finds the text in a source and divides it into chunks that workers read independently, in a fixed order.

A chunk is a few MiB of work: a byte range of a JSON lines or text file, some small files, a parquet row
group, or a row range of a Hugging Face dataset folder. Chunks depend on the files alone, not on the number
of workers.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

CHUNK_BYTES = 4 << 20
ROWS_PER_CHUNK = 2048
JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
# A single text file is cut into documents of PIECE_BYTES, so that some can be held out. In a folder each file is a
# document; files above FILE_PIECE_BYTES are cut, which bounds the memory of a worker.
PIECE_BYTES = 16 << 10
LEAST_PIECE_BYTES = 512
FILE_PIECE_BYTES = 1 << 20
COMPRESSED_SUFFIXES = frozenset({".gz", ".zst", ".bz2", ".xz", ".zip"})
SNIFF_BYTES = 8192

Source = str | Path | Sequence[str | Path] | None


@dataclass(frozen=True)
class Chunk:
    """Work for one worker. `start:stop` counts bytes of a file, row groups (parquet) or rows (arrow)."""

    kind: str  # "jsonl", "text", "files", "parquet" or "arrow"
    paths: tuple[Path, ...]
    start: int = 0
    stop: int = 0
    piece_bytes: int = FILE_PIECE_BYTES


def plan_chunks(source: Source) -> list[Chunk]:
    """Returns the chunks of a source in reading order. ValueError if it does not exist or has no text.

    `source` is a file (text, JSON lines, parquet), a folder of those, a folder written by
    `datasets.Dataset.save_to_disk`, a list of those, or None for the Python standard library.
    """
    if source is None:
        return _files_chunks(python_stdlib())
    if not isinstance(source, (str, Path)):
        return _plan_list([Path(path) for path in source])
    path = Path(source)
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; give a text file, JSON lines, parquet, or a folder of those"
        )
    if is_arrow_folder(path):
        return _arrow_chunks(path)
    files = list_files(path) if path.is_dir() else [path]
    return _plan_files(files, str(path))


def is_arrow_folder(path: Path) -> bool:
    """Returns whether a folder was written by `datasets.Dataset.save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def list_files(folder: Path) -> list[Path]:
    """Returns the regular files below a folder, sorted, without hidden ones."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(
        path for path in found if not any(p.startswith(".") for p in path.relative_to(folder).parts)
    )


def fingerprint(source: Source) -> str:
    """Returns a hash of the files' names, sizes and times, which detects a changed source without reading it."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in plan_chunks(source):
        digest.update(f"{chunk.kind} {chunk.start} {chunk.stop}".encode())
        for path in chunk.paths:
            stat = path.stat()
            digest.update(
                f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode(
                    "utf-8", "surrogateescape"
                )
            )
    return digest.hexdigest()


def is_text(path: Path) -> bool:
    """Returns whether the beginning of a file has no NUL byte. Other defects are found when the file is read."""
    with path.open("rb") as file:
        return b"\0" not in file.read(SNIFF_BYTES)


def _plan_list(paths: list[Path]) -> list[Chunk]:
    """Plans several sources in turn; neighboring files and folders form one collection of documents."""
    chunks: list[Chunk] = []
    for arrow, group in groupby(paths, is_arrow_folder):
        if arrow:
            chunks += [chunk for folder in group for chunk in _arrow_chunks(folder)]
        else:
            files = [
                file for path in group for file in (list_files(path) if path.is_dir() else [path])
            ]
            chunks += _plan_files(files, "the given list")
    if not chunks:
        raise ValueError("the list of inputs is empty; give at least one file or folder")
    return chunks


def _plan_files(files: list[Path], described: str) -> list[Chunk]:
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path} does not exist or is not a file")
    chunks: list[Chunk] = []
    texts: list[Path] = []
    for path in files:
        if path.suffix in JSON_SUFFIXES:
            chunks += _range_chunks("jsonl", path, FILE_PIECE_BYTES)
        elif path.suffix == ".parquet":
            chunks += _parquet_chunks(path)
        elif len(files) == 1 and path.suffix in COMPRESSED_SUFFIXES:
            raise ValueError(f"{path} is compressed; unpack it, or give a parquet file")
        elif len(files) == 1 or is_text(path):
            texts.append(path)
    if len(texts) == 1 and not chunks:
        size = texts[0].stat().st_size
        chunks = _range_chunks(
            "text", texts[0], max(LEAST_PIECE_BYTES, min(PIECE_BYTES, size // 64))
        )
    else:
        chunks += _files_chunks(texts)
    if not chunks:
        raise ValueError(
            f"{described} holds no text: looked for text files, .jsonl, .ndjson, .json and .parquet, none compressed"
        )
    return chunks


def _range_chunks(kind: str, path: Path, piece_bytes: int) -> list[Chunk]:
    size = path.stat().st_size
    starts = range(0, size, CHUNK_BYTES)
    return [
        Chunk(kind, (path,), start, min(start + CHUNK_BYTES, size), piece_bytes) for start in starts
    ]


def _files_chunks(paths: Sequence[Path]) -> list[Chunk]:
    """Groups small files; a file larger than a chunk is cut into byte ranges like a single text file."""
    chunks: list[Chunk] = []
    group: list[Path] = []
    weight = 0
    for path in paths:
        size = path.stat().st_size
        if group and weight + size > CHUNK_BYTES:
            chunks.append(Chunk("files", tuple(group)))
            group, weight = [], 0
        if size > CHUNK_BYTES:
            chunks += _range_chunks("text", path, FILE_PIECE_BYTES)
        elif size:
            group.append(path)
            weight += size
    if group:
        chunks.append(Chunk("files", tuple(group)))
    return chunks


def _parquet_chunks(path: Path) -> list[Chunk]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            return [
                Chunk("parquet", (path,), group, group + 1) for group in range(file.num_row_groups)
            ]
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from None


def _arrow_chunks(folder: Path) -> list[Chunk]:
    from datasets import Dataset, load_from_disk

    dataset = load_from_disk(str(folder))
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"{folder} holds several splits ({', '.join(map(str, dataset))}); give one of its subfolders"
        )
    starts = range(0, len(dataset), ROWS_PER_CHUNK)
    return [
        Chunk("arrow", (folder,), row, min(row + ROWS_PER_CHUNK, len(dataset))) for row in starts
    ]


# Third-party packages are not the standard library; test folders hold deliberately odd files.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


def python_stdlib() -> list[Path]:
    """Returns all `.py` files of the running interpreter's standard library, sorted (about 13 MB of text)."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise ValueError(
            f"this interpreter has no standard library source under {root}; name a corpus"
        )
    return sorted(found)
