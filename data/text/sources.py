"""Finds the text in a source and divides it into chunks that workers read independently, in a fixed
order.

A chunk is a few MiB of work: a byte range of a JSON lines or text file, some small files, a parquet
row group, or a row range of a Hugging Face dataset folder. Chunks depend on the files alone, not on
the number of workers.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ...files.working_copies import find_source, locate, open_to_read
from .lines import begins_json_array

CHUNK_BYTES = 4 << 20
ROWS_PER_CHUNK = 2048
# The parsed objects of a JSON array take several times its size in memory.
LARGEST_ARRAY_BYTES = 256 << 20
JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
# A single text file is cut into documents of PIECE_BYTES, so that some can be held out. In a folder
# each file is a document; files above FILE_PIECE_BYTES are cut, which bounds the memory of a
# worker.
PIECE_BYTES = 16 << 10
LEAST_PIECE_BYTES = 512
FILE_PIECE_BYTES = 1 << 20
COMPRESSED_SUFFIXES = frozenset({".gz", ".zst", ".bz2", ".xz", ".zip"})
SNIFF_BYTES = 8192
# Files of more bytes are read from an object store as they are needed.
LARGEST_FETCHED = 1 << 20

Source = str | Path | Sequence[str | Path] | None


@dataclass(frozen=True)
class Chunk:
    """Work for one worker.

    `start:stop` counts bytes of a file, row groups (parquet) or rows (arrow).
    """

    kind: str  # "jsonl", "array", "text", "files", "parquet" or "arrow"
    paths: tuple[Path, ...]
    start: int = 0
    stop: int = 0
    piece_bytes: int = FILE_PIECE_BYTES


def plan_chunks(source: Source) -> list[Chunk]:
    """Returns the chunks of a source in reading order.

    ValueError if it does not exist or has no text.

    `source` is a file (text, JSON lines, parquet), a folder of those, a folder written by
    `datasets.Dataset.save_to_disk`, a list of those, or None for the Python standard library.
    """
    if source is None:
        return _plan_texts(python_stdlib())
    if not isinstance(source, (str, Path)):
        return _plan_list([_find_text(path) for path in source])
    path = _find_text(source)
    if not path.exists():
        raise ValueError(
            f"{path} does not exist; give a text file, JSON lines, parquet, or a folder of those"
        )
    if is_arrow_folder(path):
        return _plan_arrow(path)
    files = list_files(path) if path.is_dir() else [path]
    return _plan_files(files, str(path))


def _find_text(name: str | Path) -> Path:
    """Returns the path of a source; of a URL that of a local copy, whose large files are read from
    the store.
    """
    return find_source(name, largest=LARGEST_FETCHED) or Path(name)


def is_arrow_folder(path: Path) -> bool:
    """Returns whether a folder was written by `datasets.Dataset.save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def list_files(folder: Path) -> list[Path]:
    """Returns the regular files below a folder, sorted, without hidden ones."""
    found: list[Path] = []
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not is_hidden:
            found.append(path)
    return sorted(found)


def fingerprint(source: Source) -> str:
    """Returns a hash of the files' names, sizes and times, which detects a changed source without
    reading it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for chunk in plan_chunks(source):
        digest.update(f"{chunk.kind} {chunk.start} {chunk.stop}".encode())
        for path in chunk.paths:
            stat = path.stat()
            described = f"{locate(path)} {stat.st_size} {stat.st_mtime_ns}"
            digest.update(described.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def is_text(path: Path) -> bool:
    """Returns whether the beginning of a file has no NUL byte.

    Other defects are found when the file is read.
    """
    with open_to_read(path) as file:
        return b"\0" not in file.read(SNIFF_BYTES)


def _plan_list(paths: list[Path]) -> list[Chunk]:
    """Plans several sources in turn.

    Neighboring files and folders form one collection of documents.
    """
    chunks: list[Chunk] = []
    for is_arrow, group in groupby(paths, is_arrow_folder):
        if is_arrow:
            for folder in group:
                chunks += _plan_arrow(folder)
        else:
            files: list[Path] = []
            for path in group:
                files += list_files(path) if path.is_dir() else [path]
            chunks += _plan_files(files, "the given list")
    if not chunks:
        raise ValueError("the list of inputs is empty; give at least one file or folder")
    return chunks


def _plan_files(files: list[Path], described: str) -> list[Chunk]:
    """Plans the files of one collection.

    ValueError, naming what is `described`, if none has text.
    """
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path} does not exist or is not a file")
    chunks: list[Chunk] = []
    texts: list[Path] = []
    for path in files:
        if path.suffix in JSON_SUFFIXES and begins_json_array(path):
            chunks.append(_plan_array(path))
        elif path.suffix in JSON_SUFFIXES:
            chunks += _plan_ranges("jsonl", path, FILE_PIECE_BYTES)
        elif path.suffix == ".parquet":
            chunks += _plan_parquet(path)
        elif len(files) == 1 and path.suffix in COMPRESSED_SUFFIXES:
            raise ValueError(f"{path} is compressed; unpack it, or give a parquet file")
        elif len(files) == 1 or is_text(path):
            texts.append(path)
    if len(texts) == 1 and not chunks:
        # A small file is cut finely, so that some of its documents can be held out.
        piece_bytes = min(PIECE_BYTES, texts[0].stat().st_size // 64)
        chunks = _plan_ranges("text", texts[0], max(LEAST_PIECE_BYTES, piece_bytes))
    else:
        chunks += _plan_texts(texts)
    if not chunks:
        raise ValueError(
            f"{described} holds no text: looked for text files, .jsonl, .ndjson, .json and "
            ".parquet, none compressed"
        )
    return chunks


def _plan_array(path: Path) -> Chunk:
    """Plans a JSON array, which can be read only as a whole."""
    size = path.stat().st_size
    if size > LARGEST_ARRAY_BYTES:
        raise ValueError(
            f"{path} is a JSON array of {size:,} bytes; it may have {LARGEST_ARRAY_BYTES:,}: write "
            "its records as JSON lines"
        )
    return Chunk("array", (path,), 0, size)


def _plan_ranges(kind: str, path: Path, piece_bytes: int) -> list[Chunk]:
    """Cuts one file into byte ranges."""
    size = path.stat().st_size
    chunks: list[Chunk] = []
    for start in range(0, size, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, size)
        chunks.append(Chunk(kind, (path,), start, stop, piece_bytes))
    return chunks


def _plan_texts(paths: Sequence[Path]) -> list[Chunk]:
    """Groups small files.

    A file larger than a chunk is cut into byte ranges like a single text file.
    """
    chunks: list[Chunk] = []
    group: list[Path] = []
    group_bytes = 0
    for path in paths:
        size = path.stat().st_size
        if group and group_bytes + size > CHUNK_BYTES:
            chunks.append(Chunk("files", tuple(group)))
            group = []
            group_bytes = 0
        if size > CHUNK_BYTES:
            chunks += _plan_ranges("text", path, FILE_PIECE_BYTES)
        elif size:
            group.append(path)
            group_bytes += size
    if group:
        chunks.append(Chunk("files", tuple(group)))
    return chunks


def _plan_parquet(path: Path) -> list[Chunk]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        with open_to_read(path) as opened, ParquetFile(opened) as file:
            groups = range(file.num_row_groups)
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from None
    return [Chunk("parquet", (path,), group, group + 1) for group in groups]


def _plan_arrow(folder: Path) -> list[Chunk]:
    from datasets import Dataset, load_from_disk

    dataset = load_from_disk(str(folder))
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"{folder} holds several splits ({', '.join(map(str, dataset))}); "
            "give one of its subfolders"
        )
    rows = len(dataset)
    return [
        Chunk("arrow", (folder,), row, min(row + ROWS_PER_CHUNK, rows))
        for row in range(0, rows, ROWS_PER_CHUNK)
    ]


# Third-party packages are not the standard library; test folders hold deliberately odd files.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


def python_stdlib() -> list[Path]:
    """Returns all `.py` files of the running interpreter's standard library, sorted (about 13 MB of
    text).
    """
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
