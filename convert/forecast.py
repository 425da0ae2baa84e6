"""What a conversion would do and take, without doing it."""

from __future__ import annotations

import hashlib
import os
import time
from math import prod
from pathlib import Path
from typing import Any

from ..checkpoint.file_io import Files, open_for_reading
from .native import Parameter
from .operations import plan
from .plan import Plan
from .source_layout import entries
from .target import huggingface_target, shards_target

SAMPLE = 4 << 20  # bytes that are read and hashed to learn how fast this machine is


def forecast(source: Path, size: int | None, config_file: Path | None = None) -> dict[str, Any]:
    """A split over `size` ranks, or a merge for None: every tensor, and totals. Writes nothing.

    ValueError for everything that would stop the conversion before it copies.
    """
    todo = plan(source, lambda m: huggingface_target(m) if size is None else shards_target(m, size), config_file)
    known = entries(todo.mapped.model)
    tensors = []
    for name, parameter in todo.mapped.model.parameters.items():
        placement = todo.target.layout.placements[name]
        part = placement.copies[0][0]
        tensors.append(
            {
                "name": name,
                "stored": list(todo.mapped.names.by_parameter[name]),
                "dtype": placement.dtype,
                "shape": list(parameter.shape),
                "split": _describe(parameter),
                "transposed": known[name].transpose,
                "shape_per_rank": list(part.tensor.shape),
                "bytes_per_rank": part.tensor.nbytes,
            }
        )
    for name, tensor in todo.target.layout.extras.items():
        shape = list(tensor.shape)
        row = {"name": name, "stored": [name], "dtype": tensor.dtype, "shape": shape, "split": "kept as it is"}
        tensors.append({**row, "transposed": False, "shape_per_rank": shape, "bytes_per_rank": tensor.nbytes})
    model = todo.mapped.model
    return {
        "tensors": tensors,
        "source": f"{todo.mapped.source.description}, {model.config.model_type}",
        "target": "Hugging Face folder" if size is None else f"shardzoo folder of {size} ranks",
        "parameters": sum(prod(parameter.shape) for parameter in model.parameters.values()),
        "vocabulary": f"{model.vocab_size}, padded to {model.padded_vocab_size(size or 1)}",
        "bytes_to_read": todo.mapped.source.nbytes,
        "bytes_to_write": todo.target.nbytes,
        "files": len(todo.target.files),
        "estimated_seconds": round(_seconds(todo), 1),
    }


def _describe(parameter: Parameter) -> str:
    if parameter.shard is None:
        return "replicated"
    blocks = f" in blocks {'+'.join(map(str, parameter.shard.groups))}" if len(parameter.shard.groups) > 1 else ""
    return f"dim {parameter.dim}{blocks}{', padded' if parameter.shard.pad_multiple else ''}"


def _seconds(todo: Plan) -> float:
    """By the time that reading and hashing a little takes; writing is taken to be as fast as reading and hashing."""
    with Files(open_for_reading) as files:
        largest = max(todo.mapped.source.files, key=lambda path: path.stat().st_size)
        files.open([largest])
        started = time.perf_counter()
        sample = os.pread(files[largest], SAMPLE, 0)
        hashlib.sha256(sample).digest()
        elapsed = time.perf_counter() - started
    threads = min(4, os.cpu_count() or 1)
    return 2 * elapsed / max(len(sample), 1) * todo.target.nbytes / threads
