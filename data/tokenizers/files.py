"""Checks a tokenizer's files before a library reads them, and turns a library's failure into one
ValueError.

The libraries raise errors of many types, wait for a pipe, read an endless file, and allocate memory
for the largest id: an id of 2**32 - 1 makes the Rust library abort the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...files.safe_paths import checked_file
from ...files.strict_json import read_json_object

LARGEST_FILE = 64 << 20  # bytes; twice the largest published tokenizer.json
MOST_HOLES = 1 << 20  # ids without a token
MOST_SENTINELS = 100_000
BYTE_TOKENIZER = "ByT5Tokenizer"
JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "config.json",
)
OTHER_FILES = (
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
    "tokenizer.model",
    "chat_template.jinja",
)
# config.json is the model's.
TOKENIZER_FILES = (*(name for name in JSON_FILES if name != "config.json"), *OTHER_FILES)


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has a file with a tokenizer's vocabulary, or names ByT5's, which has
    no such file.
    """
    for name in ("tokenizer.json", "vocab.json", "vocab.txt"):
        if (folder / name).is_file():
            return True
    return any(folder.glob("*.model")) or _names_byte_tokenizer(folder)


def _names_byte_tokenizer(folder: Path) -> bool:
    for name in ("tokenizer_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            with suppress(ValueError):
                if read_json_object(path).get("tokenizer_class") == BYTE_TOKENIZER:
                    return True
    return False


def remove_tokenizer(folder: Path) -> None:
    """Removes a folder's tokenizer, whose files could be read in place of those of another
    tokenizer.
    """
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)


def check_tokenizer_folder(folder: Path) -> None:
    """Raises ValueError, naming the file and the cause, if one of the folder's tokenizer files is
    damaged.
    """
    for name in (*JSON_FILES, *OTHER_FILES):
        path = folder / name
        if path.exists() or path.is_symlink():
            check_tokenizer_file(checked_file(folder, name))


def check_tokenizer_file(path: Path) -> None:
    """Raises ValueError as `check_tokenizer_folder` does, for one file."""
    size = path.stat().st_size if path.is_file() else 0
    if size > LARGEST_FILE:
        raise ValueError(
            f"{path} has {size:,} bytes; a tokenizer's file has at most {LARGEST_FILE:,}"
        )
    if path.suffix != ".json":
        return
    values = read_json_object(path, largest=LARGEST_FILE)
    if path.name == "tokenizer.json":
        _check_ids(path, _collect_ids(path, values))
    elif path.name in ("vocab.json", "added_tokens.json"):
        _check_ids(path, values)
    elif path.name == "tokenizer_config.json":
        _check_config(path, values)


@contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Turns any error of a tokenizer library into a ValueError that names the file or folder."""
    try:
        yield
    except BaseException as error:  # A Rust panic is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{path} holds no readable tokenizer: {cause}") from None


def _collect_ids(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the ids of a `tokenizer.json`: those of its vocabulary and its added tokens."""
    model = values.get("model")
    added = values.get("added_tokens", [])
    if not isinstance(model, dict):
        raise ValueError(f"{path} has no model")
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ValueError(f"{path}: added_tokens must be a list of objects")
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict | list):
        raise ValueError(
            f"{path}: the model's vocab must be an object or a list, not {vocabulary!r:.100}"
        )
    if isinstance(vocabulary, dict):
        ids = dict(vocabulary)
    else:
        # A unigram model lists its pieces; a piece's id is its index.
        ids = {f"piece {number}": number for number in range(len(vocabulary))}
    for place, token in enumerate(added):
        ids[f"added token {place}"] = token.get("id")
    return ids


def _check_ids(path: Path, ids: Mapping[Any, Any]) -> None:
    for token, index in ids.items():
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise ValueError(
                f"{path}: the id of {token!r} must be an integer of at least 0, not {index!r:.100}"
            )
        if index >= len(ids) + MOST_HOLES:
            raise ValueError(
                f"{path}: {token!r} has the id {index:.0f}, but there are only {len(ids):,} "
                f"tokens; ids must be below {len(ids) + MOST_HOLES:,}"
            )


def _check_config(path: Path, values: dict[str, Any]) -> None:
    kind = values.get("tokenizer_class")
    if not isinstance(kind, str | None):
        raise ValueError(f"{path}: tokenizer_class must be a string, not {kind!r:.100}")
    count = values.get("extra_ids", 0)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MOST_SENTINELS:
        raise ValueError(
            f"{path}: extra_ids must be an integer from 0 to {MOST_SENTINELS:,}, not {count!r:.100}"
        )
    named = values.get("added_tokens_decoder") or {}
    if not isinstance(named, dict) or not all(
        index.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)
        for index, token in named.items()
    ):
        raise ValueError(
            f"{path}: added_tokens_decoder must map ids to objects with a content, "
            f"not {named!r:.100}"
        )
    _check_ids(path, {token["content"]: int(index) for index, token in named.items()})
