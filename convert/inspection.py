"""Inspects a checkpoint folder by its headers alone, and compares the tensors of two folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.dtypes import item_size
from ..checkpoint.file_io import open_for_reading, read_into
from ..checkpoint.stored_tensor import StoredTensor


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint folder contains.

    `facts` are short descriptions of the folder. `tensors` has name, type, shape and bytes of each tensor of the first
    rank and of each extra tensor.
    """

    facts: Mapping[str, Any]
    tensors: tuple[dict[str, Any], ...]


def inspect_folder(folder: Path, config_file: Path | None = None) -> Inspection:
    """Reads the headers of a checkpoint folder. Raises ValueError if it has no weights or damaged headers."""
    source = open_checkpoint(folder, config_file)
    rows = [_row(name, tensor, source) for name, tensor in source.ranks[0].items()]
    rows += [
        {**_row(name, tensor, source), "split": "kept unchanged"}
        for name, tensor in source.extras.items()
    ]
    return Inspection(_facts(source), tuple(rows))


def _family(source: Checkpoint) -> str:
    """Returns the model's family, or why it is unknown. Only formats of torch need the families for that."""
    if source.config is not None or source.saved is None:
        return str((source.config or {}).get("model_type", "unknown"))
    from ..models.auto import infer_config

    try:
        return infer_config(source.ranks, source.saved).model_type
    except ValueError as error:
        return f"unknown: {error}"


def _row(name: str, tensor: StoredTensor, source: Checkpoint) -> dict[str, Any]:
    row = {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": tensor.nbytes}
    if source.manifest is not None and name in source.manifest.tensors:
        record = source.manifest.tensors[name]
        row["split"] = (
            f"dim {record.shard['dim']} of {list(record.shape)}" if record.shard else "replicated"
        )
    return row


def _facts(source: Checkpoint) -> dict[str, Any]:
    dtypes = Counter(tensor.dtype for rank in source.ranks for tensor in rank.values())
    facts = {
        "format": source.description,
        "family": _family(source),
        "files": len(source.files),
        "bytes": source.nbytes,
        "tensors": len(source.ranks[0]),
        "types": ", ".join(f"{dtype} x {count}" for dtype, count in dtypes.most_common()),
    }
    if (saved := source.saved) is not None:
        facts["ranks"], facts["pipeline stages"] = len(source.ranks), saved.stages
        facts["version"] = (
            f"{saved.version:.1f}, rows of fused QKV in the order of {saved.row_order}"
        )
        facts["iteration"] = "unknown" if saved.iteration is None else saved.iteration
    if (manifest := source.manifest) is not None:
        facts["ranks"] = manifest.tensor_parallel_size
        facts["vocabulary"] = f"{manifest.vocab_size}, padded to {manifest.padded_vocab_size}"
        facts["ties"] = (
            ", ".join(f"{alias} = {kept}" for alias, kept in manifest.ties.items()) or "none stored"
        )
        facts["kept unchanged"] = len(manifest.extras)
    return facts


CHUNK = 8 << 20
_NUMPY_FLOATS = {"F64": "f8", "F32": "f4", "F16": "f2"}


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between two folders."""

    name: str
    what: str
    elements: int | None = None  # how many differ; None if the shapes or types differ
    largest: float | None = None  # absolute difference, if it is known


@dataclass(frozen=True)
class Comparison:
    """The number of compared tensors, and those that differ."""

    tensors: int
    differences: tuple[Difference, ...]


def comparable(first: Checkpoint, second: Checkpoint) -> bool:
    """Returns whether both folders have the same format, the same number of ranks, and the same order of rows."""
    orders = [checkpoint.saved and checkpoint.saved.row_order for checkpoint in (first, second)]
    return (
        first.kind == second.kind != "dcp"
        and len(first.ranks) == len(second.ranks)
        and orders[0] == orders[1]
    )


def diff(first: Checkpoint, second: Checkpoint) -> Comparison:
    """Compares the tensors of equal names. Tensors for which both manifests record the same hash are not read."""
    differences, count = [], 0
    for rank, (ours, theirs) in enumerate(
        zip((*first.ranks, first.extras), (*second.ranks, second.extras), strict=True)
    ):
        where = f" (rank {rank})" if len(first.ranks) > 1 and rank < len(first.ranks) else ""
        for name in ours.keys() | theirs.keys():
            count += 1
            recorded = _recorded(first, rank, name)
            if recorded is not None and recorded == _recorded(second, rank, name):
                continue
            difference = _difference(name, ours, theirs)
            if difference is not None:
                differences.append(
                    Difference(
                        name + where, difference.what, difference.elements, difference.largest
                    )
                )
    return Comparison(count, tuple(sorted(differences, key=lambda difference: difference.name)))


def _recorded(source: Checkpoint, rank: int, name: str) -> str | None:
    if source.manifest is None:
        return None
    if rank == len(source.ranks):
        return source.manifest.extras[name].sha256 if name in source.manifest.extras else None
    return source.manifest.tensors[name].sha256[rank] if name in source.manifest.tensors else None


def _difference(
    name: str, ours: Mapping[str, StoredTensor], theirs: Mapping[str, StoredTensor]
) -> Difference | None:
    if name not in theirs:
        return Difference(name, "only in the first")
    if name not in ours:
        return Difference(name, "only in the second")
    mine, other = ours[name], theirs[name]
    if (mine.dtype, mine.shape) != (other.dtype, other.shape):
        return Difference(
            name,
            f"{mine.dtype} {list(mine.shape)} in the first, {other.dtype} {list(other.shape)} in the second",
        )
    elements, largest = 0, 0.0
    for first, second in _chunks(mine, other):
        if np.array_equal(first, second):
            continue
        elements += int(np.count_nonzero(first != second))
        floats = [_as_floats(chunk, mine.dtype) for chunk in (first, second)]
        if floats[0] is not None and floats[1] is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                largest = float(
                    np.fmax(largest, np.nanmax(np.abs(floats[0] - floats[1]), initial=0.0))
                )
    if not elements:
        return None
    known = mine.dtype in (*_NUMPY_FLOATS, "BF16")
    return Difference(name, "values differ", elements, largest if known else None)


def _chunks(first: StoredTensor, second: StoredTensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    descriptors = [open_for_reading(first.file), open_for_reading(second.file)]
    try:
        for start in range(0, first.nbytes, CHUNK):
            pair = []
            for tensor, descriptor in zip((first, second), descriptors, strict=True):
                chunk = np.empty(min(CHUNK, first.nbytes - start), np.uint8)
                read_into(tensor, descriptor, start, chunk)
                pair.append(chunk.view(f"u{item_size(tensor.dtype)}"))
            yield pair[0], pair[1]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _as_floats(chunk: np.ndarray, dtype: str) -> np.ndarray | None:
    if dtype == "BF16":
        return (chunk.astype(np.uint32) << 16).view(np.float32)
    if dtype in _NUMPY_FLOATS:
        return chunk.view(_NUMPY_FLOATS[dtype]).astype(np.float64 if dtype == "F64" else np.float32)
    return None
