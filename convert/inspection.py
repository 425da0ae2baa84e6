"""Inspects a checkpoint folder by its headers alone, and compares the tensors of two folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.dtypes import item_size
from ..checkpoint.file_io import OpenFiles, read_into
from ..checkpoint.stored_tensor import StoredTensor
from ..files.working_copies import open_for_reading


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint folder contains.

    Attributes:
        facts: Short descriptions of the folder.
        tensors: Name, type, shape and bytes of each tensor of the first rank and of each extra
            tensor.
    """

    facts: Mapping[str, Any]
    tensors: tuple[dict[str, Any], ...]


def inspect_folder(folder: Path, config_file: Path | None = None) -> Inspection:
    """Reads the headers of a checkpoint folder.

    Raises:
        ValueError: It has no weights or damaged headers.
    """
    source = open_checkpoint(folder, config_file)
    rows: list[dict[str, Any]] = []
    for name, tensor in source.ranks[0].items():
        rows.append(_describe_tensor(name, tensor, source))
    for name, tensor in source.extras.items():
        row = _describe_tensor(name, tensor, source)
        row["split"] = "kept unchanged"
        rows.append(row)
    return Inspection(_collect_facts(source), tuple(rows))


def _describe_tensor(name: str, tensor: StoredTensor, source: Checkpoint) -> dict[str, Any]:
    row = {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": tensor.nbytes}
    if source.manifest is not None and name in source.manifest.tensors:
        record = source.manifest.tensors[name]
        row["split"] = "replicated"
        if record.shard:
            row["split"] = f"dim {record.shard['dim']} of {list(record.shape)}"
    return row


def _collect_facts(source: Checkpoint) -> dict[str, Any]:
    dtypes = Counter(tensor.dtype for rank in source.ranks for tensor in rank.values())
    facts: dict[str, Any] = {
        "format": source.description,
        "family": _find_family(source),
        "files": len(source.files),
        "bytes": source.nbytes,
        "tensors": len(source.ranks[0]),
        "types": ", ".join(f"{dtype} x {count}" for dtype, count in dtypes.most_common()),
    }
    saved = source.saved
    if saved is not None:
        facts["ranks"] = len(source.ranks)
        facts["pipeline stages"] = saved.stages
        facts["version"] = (
            f"{saved.version:.1f}, rows of fused QKV in the order of {saved.row_order}"
        )
        facts["iteration"] = "unknown" if saved.iteration is None else saved.iteration
    manifest = source.manifest
    if manifest is not None:
        ties = [f"{alias} = {kept}" for alias, kept in manifest.ties.items()]
        facts["ranks"] = manifest.tensor_parallel_size
        facts["vocabulary"] = f"{manifest.vocab_size}, padded to {manifest.padded_vocab_size}"
        facts["ties"] = ", ".join(ties) or "none stored"
        facts["kept unchanged"] = len(manifest.extras)
    return facts


def _find_family(source: Checkpoint) -> str:
    """Returns the model's family, or why it is unknown.

    Only formats of torch need the families for that.
    """
    if source.config is not None or source.saved is None:
        return str((source.config or {}).get("model_type", "unknown"))
    from ..models.auto import infer_config

    try:
        return infer_config(source.ranks, source.saved).model_type
    except ValueError as error:
        return f"unknown: {error}"


CHUNK_BYTES = 8 << 20
_NUMPY_FLOATS = {"F64": "f8", "F32": "f4", "F16": "f2"}


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between two folders.

    Attributes:
        name: The tensor.
        what: A description.
        elements: How many differ; None if the shapes or types differ.
        largest: The largest absolute difference, if it is known.
    """

    name: str
    what: str
    elements: int | None = None
    largest: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The number of compared tensors, and those that differ."""

    tensors: int
    differences: tuple[Difference, ...]


def comparable(first: Checkpoint, second: Checkpoint) -> bool:
    """Returns whether both folders have the same format, number of ranks, and order of rows."""
    if first.kind != second.kind or first.kind == "dcp":
        return False
    if len(first.ranks) != len(second.ranks):
        return False
    return _find_row_order(first) == _find_row_order(second)


def _find_row_order(checkpoint: Checkpoint) -> str | None:
    if checkpoint.saved is None:
        return None
    return checkpoint.saved.row_order


def diff(first: Checkpoint, second: Checkpoint) -> Comparison:
    """Compares the tensors of equal names.

    Tensors for which both manifests record the same hash are not read.
    """
    differences: list[Difference] = []
    count = 0
    size = len(first.ranks)
    # The extra tensors are compared like those of one more rank.
    ours_by_rank = (*first.ranks, first.extras)
    theirs_by_rank = (*second.ranks, second.extras)
    for rank, (ours, theirs) in enumerate(zip(ours_by_rank, theirs_by_rank, strict=True)):
        where = f" (rank {rank})" if size > 1 and rank < size else ""
        for name in ours.keys() | theirs.keys():
            count += 1
            recorded = _find_recorded_hash(first, rank, name)
            if recorded is not None and recorded == _find_recorded_hash(second, rank, name):
                continue
            difference = _compare_tensors(name, ours, theirs)
            if difference is not None:
                differences.append(replace(difference, name=name + where))
    differences.sort(key=lambda difference: difference.name)
    return Comparison(count, tuple(differences))


def _find_recorded_hash(source: Checkpoint, rank: int, name: str) -> str | None:
    manifest = source.manifest
    if manifest is None:
        return None
    if rank == len(source.ranks):
        extra = manifest.extras.get(name)
        return None if extra is None else extra.sha256
    record = manifest.tensors.get(name)
    return None if record is None else record.sha256[rank]


def _compare_tensors(
    name: str, ours: Mapping[str, StoredTensor], theirs: Mapping[str, StoredTensor]
) -> Difference | None:
    """Compares one tensor of both folders. Returns None if it is equal."""
    if name not in theirs:
        return Difference(name, "only in the first")
    if name not in ours:
        return Difference(name, "only in the second")
    mine = ours[name]
    other = theirs[name]
    if (mine.dtype, mine.shape) != (other.dtype, other.shape):
        return Difference(
            name,
            f"{mine.dtype} {list(mine.shape)} in the first, "
            f"{other.dtype} {list(other.shape)} in the second",
        )
    elements = 0
    largest = 0.0
    for my_chunk, other_chunk in _read_chunks(mine, other):
        if np.array_equal(my_chunk, other_chunk):
            continue
        elements += int(np.count_nonzero(my_chunk != other_chunk))
        my_values = _view_as_floats(my_chunk, mine.dtype)
        other_values = _view_as_floats(other_chunk, mine.dtype)
        if my_values is not None and other_values is not None:
            # Infinities and NaN count as elements, but they have no distance.
            with np.errstate(invalid="ignore", over="ignore"):
                distance = np.nanmax(np.abs(my_values - other_values), initial=0.0)
                largest = float(np.fmax(largest, distance))
    if not elements:
        return None
    is_float = mine.dtype in (*_NUMPY_FLOATS, "BF16")
    return Difference(name, "values differ", elements, largest if is_float else None)


def _read_chunks(
    first: StoredTensor, second: StoredTensor
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the elements of two tensors of one shape and type, as unsigned integers."""
    unsigned = f"u{item_size(first.dtype)}"
    with OpenFiles(open_for_reading) as files:
        files.open([first.file, second.file])
        for start in range(0, first.nbytes, CHUNK_BYTES):
            count = min(CHUNK_BYTES, first.nbytes - start)
            first_bytes = np.empty(count, np.uint8)
            read_into(first, files[first.file], start, first_bytes)
            second_bytes = np.empty(count, np.uint8)
            read_into(second, files[second.file], start, second_bytes)
            yield first_bytes.view(unsigned), second_bytes.view(unsigned)


def _view_as_floats(chunk: np.ndarray, dtype: str) -> np.ndarray | None:
    """Returns the values of a chunk, or None if they are no floating-point numbers of numpy."""
    if dtype == "BF16":
        return (chunk.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F64":
        return chunk.view(np.float64)
    if dtype in _NUMPY_FLOATS:
        return chunk.view(_NUMPY_FLOATS[dtype]).astype(np.float32)
    return None
