"""Defines Megatron-LM's `.idx` layout, which the reader and the writer share.

Little endian: 9 bytes magic, u64 version, u8 dtype code, u64 sequence count n, u64 document count
d, i32 sizes [n] (tokens), i64 pointers [n] (byte offsets into `.bin`), i64 document_indices [d] (0,
then the end of each document as a sequence number). The token stream itself is the `.bin` file,
without any header.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from ...files.object_store import find_object, find_url
from ...files.working_copies import find_source
from ..tokenizers.files import TOKENIZER_FILES

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
# Megatron-LM and LiBai write uint16 below 65500 entries, and int32 from 65500 on.
LARGEST_UINT16_VOCABULARY = 65499


def bin_path(prefix: str | Path) -> Path:
    """Returns `corpus.v1.bin` for `corpus.v1`.

    A prefix may contain dots, so `Path.with_suffix` would be wrong.
    """
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Returns the index of a prefix; see `bin_path`."""
    return Path(f"{prefix}.idx")


def find_pair(prefix: str | Path) -> Path | None:
    """Returns the prefix of the local copy of a pair in an object store, or None if the name is no
    URL, or that of something else.

    The index is fetched, and the tokenizer beside the pair; the tokens are read by ranges.
    """
    url = find_url(prefix)
    if url is None:
        return None
    for candidate in dict.fromkeys((url, url.removesuffix(".bin").removesuffix(".idx"))):
        if find_object(f"{candidate}.idx") is None:
            continue
        folder, _, stem = candidate.rpartition("/")
        files = [f"{stem}{ending}" for ending in (".bin", ".idx", ".meta.json")]
        found = find_source(folder, (*files, *TOKENIZER_FILES), ranged=(".bin",))
        return found / stem if found is not None else None
    return None


def dtype_for_vocabulary(vocab_size: int) -> np.dtype:
    """Returns the token dtype that Megatron-LM chooses for a vocabulary of `vocab_size` entries."""
    return np.dtype("<u2") if vocab_size <= LARGEST_UINT16_VOCABULARY else np.dtype("<i4")


def dtype_code(dtype: np.dtype | type) -> int:
    """Returns Megatron-LM's code of a dtype.

    ValueError for a dtype that the format does not support.
    """
    wanted = np.dtype(dtype)
    for code, known in DTYPE_CODES.items():
        if known == wanted:
            return code
    names = ", ".join(known.name for known in DTYPE_CODES.values())
    raise ValueError(f"an indexed dataset cannot hold {wanted}; use one of {names}")


def parse_header(raw: bytes, path: Path) -> tuple[np.dtype, int, int]:
    """Returns (token dtype, sequence count, document count).

    ValueError names the file and the defect.
    """
    if not raw:
        raise ValueError(f"{path} is empty; an index begins with {MAGIC!r}")
    if raw.startswith(LEGACY_MAGIC):
        raise ValueError(
            f"{path} is a legacy fairseq index (TNTIDX); only Megatron-LM's mmap format can be read"
        )
    if not raw.startswith(MAGIC):
        raise ValueError(
            f"{path} is not a Megatron-LM index: it begins with {raw[:9]!r} instead of {MAGIC!r}"
        )
    if len(raw) < HEADER.size:
        raise ValueError(
            f"{path} is truncated: {len(raw)} bytes, but the header alone has {HEADER.size}"
        )
    _, version, code, sequences, documents = HEADER.unpack(raw[: HEADER.size])
    if version == int.from_bytes(VERSION.to_bytes(8, "big"), "little"):
        raise ValueError(f"{path} was written on a big-endian machine; the format is little endian")
    if version != VERSION:
        raise ValueError(
            f"{path} has index version {version}; "
            f"only version {VERSION} exists in Megatron-LM and LiBai"
        )
    if code not in DTYPE_CODES:
        raise ValueError(
            f"{path} has token dtype code {code}; known codes are 1 to {max(DTYPE_CODES)}"
        )
    return DTYPE_CODES[code], sequences, documents
