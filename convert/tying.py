"""Whether a checkpoint's output head is its word embedding: the files decide, not the flag in config.json."""

from __future__ import annotations

import os

import numpy as np

from ..checkpoint.file_io import open_for_reading, read_into
from ..checkpoint.source import Source
from ..checkpoint.stored_tensor import StoredTensor
from ..models.common.name_map import NameMap

COMPARED = 1 << 20  # bytes; equal beginnings are taken for equal tensors, and compared in full while copying


def is_tied(source: Source, name_map: NameMap) -> bool | None:
    """None for families whose models are always tied, or never.

    A head of its own that is stored next to the embedding is a tied one's copy if both hold the same bytes.
    """
    untied = set(name_map.untied_names())
    if not untied:
        return None
    if source.kind != "huggingface":
        own = {entry.native for entry in name_map.entries if untied & set(entry.stored_names())}
        return not own & source.ranks[0].keys()
    tensors = {name_map.todays_name(name, _known(name_map)): tensor for name, tensor in source.ranks[0].items()}
    stored = [(name, kept) for name, kept in name_map.aliases if name in untied and name in tensors]
    if not stored:
        return source.config.get("tie_word_embeddings") is not False
    return all(kept not in tensors or _begin_equal(tensors[name], tensors[kept]) for name, kept in stored)


def _known(name_map: NameMap) -> set[str]:
    return {name for entry in name_map.entries for name in entry.stored_names()}


def _begin_equal(first: StoredTensor, second: StoredTensor) -> bool:
    return (first.shape, first.dtype) == (second.shape, second.dtype) and beginning(first) == beginning(second)


def beginning(tensor: StoredTensor, most: int = COMPARED) -> bytes:
    """The tensor's first bytes."""
    descriptor = open_for_reading(tensor.file)
    try:
        content = np.empty(min(tensor.nbytes, most), np.uint8)
        read_into(tensor, descriptor, 0, content)
    finally:
        os.close(descriptor)
    return content.tobytes()
