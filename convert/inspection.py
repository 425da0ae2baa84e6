"""What a folder of weights holds, from its headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.source import Source, open_source
from ..checkpoint.stored_tensor import StoredTensor


@dataclass(frozen=True)
class Inspection:
    """facts: short descriptions by what they describe. tensors: by name, one entry for each shape and type.

    parameters: stored elements; on shards, of one rank times the number of ranks.
    """

    facts: Mapping[str, Any]
    tensors: tuple[dict[str, Any], ...]


def inspect_folder(folder: Path, config_file: Path | None = None) -> Inspection:
    """ValueError for a folder that holds no weights, or damaged ones."""
    source = open_source(folder, config_file)
    rows = [_row(name, tensor, source) for name, tensor in source.ranks[0].items()]
    rows += [{**_row(name, tensor, source), "split": "kept as it is"} for name, tensor in source.extras.items()]
    return Inspection(_facts(source), tuple(rows))


def _row(name: str, tensor: StoredTensor, source: Source) -> dict[str, Any]:
    row = {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": tensor.nbytes}
    if source.manifest is not None and name in source.manifest.tensors:
        record = source.manifest.tensors[name]
        row["split"] = f"dim {record.shard['dim']} of {list(record.shape)}" if record.shard else "replicated"
    return row


def _facts(source: Source) -> dict[str, Any]:
    dtypes = Counter(tensor.dtype for rank in source.ranks for tensor in rank.values())
    facts = {
        "format": source.description,
        "family": str(source.config.get("model_type", "unknown")),
        "files": len(source.files),
        "bytes": source.nbytes,
        "tensors": len(source.ranks[0]),
        "types": ", ".join(f"{dtype} x {count}" for dtype, count in dtypes.most_common()),
    }
    if (manifest := source.manifest) is not None:
        facts["ranks"] = manifest.tensor_parallel_size
        facts["vocabulary"] = f"{manifest.vocab_size}, padded to {manifest.padded_vocab_size}"
        facts["ties"] = ", ".join(f"{alias} = {kept}" for alias, kept in manifest.ties.items()) or "none stored"
        facts["kept as they are"] = len(manifest.extras)
    return facts
