"""Writes a Hugging Face folder of full weights from a quantized one.

The weights are computed one after another, a few megabytes at a time
(`checkpoint/formats/quantized.py`); all other tensors and small files are copied. No model is
built, so folders of any architecture can be dequantized. Like every conversion, the destination
appears complete or not at all, and an interrupted one goes on with `resume`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.dtypes import torch_name
from ..checkpoint.file_io import HashingWriter, OpenFiles, hash_stored
from ..checkpoint.folder_files import CONFIG, list_auxiliary_files
from ..checkpoint.formats.quantized import QuantizedFolder, QuantizedWeight, find_quantized
from ..checkpoint.stored_tensor import StoredTensor
from ..checkpoint.tensor_reader import CHUNK_BYTES, TensorReader
from ..models.huggingface import plan_weight_files
from .destination import Destination
from .journal import open_partial

# The types that the weights may be dequantized to, by the name that safetensors has for them.
TYPES = ("BF16", "F16", "F32")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def dequantize(
    source: Path,
    destination: Path,
    dtype: str,
    largest_file: int,
    report: Callable[[int, int], None] | None = None,
    *,
    config_file: Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> tuple[int, int, int]:
    """Writes a folder with full weights.

    Args:
        source: A Hugging Face folder with quantized weights.
        destination: The folder to write.
        dtype: Safetensors' name of the type of the dequantized weights: BF16, F16 or F32. Tensors
            that were not quantized stay as they are.
        largest_file: Bytes of weights in one file.
        report: Called with the bytes done and the bytes in all.
        config_file: A `config.json`, or its folder, to use instead of the source's own.
        overwrite: Whether to replace a destination that exists.
        resume: Whether to go on with an interrupted conversion.

    Returns:
        The number of tensors, their bytes, and the bytes that were kept of an interrupted run.

    Raises:
        ValueError: The source is not quantized, or by a method that is not known; parts are missing
            or do not fit; the destination exists, or its disk is too full.
    """
    if dtype not in TYPES:
        names = ", ".join(torch_name(name) for name in TYPES)
        raise ValueError(f"weights are dequantized to one of {names}, not to {torch_name(dtype)}")
    place = Destination(destination)
    place.check(source, overwrite=overwrite, resume=resume)
    checkpoint = open_checkpoint(source, config_file)
    found = _find(checkpoint)
    if not found.weights:
        raise ValueError(f"{source} is not quantized: leave out --dequantize")

    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, weight in found.weights.items():
        shapes[name] = (dtype, weight.shape)
    for name, tensor in found.plain.items():
        shapes[name] = (tensor.dtype, tensor.shape)
    files, texts = plan_weight_files(dict(sorted(shapes.items())), largest_file)
    targets = [tensor for file in files for tensor in file.tensors.values()]
    total = sum(tensor.nbytes for tensor in targets)
    if resume and place.is_complete():
        return len(targets), total, total

    report = report or (lambda done, total: None)
    journal = place.begin(files, _fingerprint(checkpoint, dtype, targets), overwrite=overwrite)
    kept = 0
    done = 0
    try:
        open_output = partial(open_partial, place.work)
        with TensorReader() as reader, OpenFiles(open_output) as outputs:
            outputs.open([Path(file.name) for file in files])
            for index, target in enumerate(targets):
                key = (target.file, target.name)
                recorded = journal.finished.get(index, {}).get(key)
                descriptor = outputs[target.file]
                if recorded is not None and recorded == hash_stored(target, descriptor, 1 << 20):
                    kept += target.nbytes
                else:
                    writer = HashingWriter([target], outputs)
                    position = 0
                    for piece in _read_pieces(found, target.name, reader, dtype):
                        data = piece.reshape(-1).view(torch.uint8).numpy()
                        writer.write(position, data)
                        position += data.nbytes
                    journal.record(index, {key: writer.finish()})
                done += target.nbytes
                report(done, total)
        small = {path.name: path for path in list_auxiliary_files(source)}
        contents: dict[str, bytes | Path] = {**small, CONFIG: _write_config(checkpoint, dtype)}
        contents.update({name: _encode(text) for name, text in texts.items()})
        place.finish(files, contents, None)
    except (ValueError, MemoryError):
        place.abandon()
        raise
    except OSError as error:
        place.abandon()
        raise ValueError(f"cannot convert {source} to {destination}: {error}") from None
    finally:
        journal.close()
    return len(targets), total, kept


def _find(checkpoint: Checkpoint) -> QuantizedFolder:
    if checkpoint.kind != "huggingface":
        raise ValueError(
            f"{checkpoint.folder} is a {checkpoint.description}; Hugging Face folders are "
            "dequantized"
        )
    return find_quantized(checkpoint.ranks[0], checkpoint.config or {}, str(checkpoint.folder))


def _read_pieces(
    found: QuantizedFolder, name: str, reader: TensorReader, dtype: str
) -> Iterator[Tensor]:
    """Yields the bytes of a tensor of the destination in their order."""
    weight = found.weights.get(name)
    if weight is not None:
        yield from _read_weight(weight, reader, dtype)
        return
    tensor = found.plain[name]
    step = max(1, CHUNK_BYTES * tensor.numel // max(tensor.nbytes, 1))
    for start in range(0, tensor.numel, step):
        yield reader.flat(tensor, start, min(start + step, tensor.numel))


def _read_weight(weight: QuantizedWeight, reader: TensorReader, dtype: str) -> Iterator[Tensor]:
    """Yields a dequantized weight.

    Raises:
        ValueError: Its parts do not fit one another, or the pieces are not as large as the weight.
    """
    elements = 0
    try:
        for piece in weight.pieces(reader, getattr(torch, torch_name(dtype))):
            elements += piece.numel()
            yield piece
    except (RuntimeError, IndexError, KeyError, TypeError) as error:
        reason = str(error).splitlines()[0][:200]
        raise weight.refuse(f"its tensors do not fit one another: {reason}") from None
    if elements != math.prod(weight.shape):
        raise weight.refuse(f"{elements} elements for a weight of shape {weight.shape}")


def _fingerprint(checkpoint: Checkpoint, dtype: str, targets: list[StoredTensor]) -> str:
    """Returns a digest that is equal for equal conversions of unchanged source files."""
    digest = hashlib.sha256(f"{dtype}{targets!r}{dict(checkpoint.config or {})!r}".encode())
    for tensor in checkpoint.tensors():
        digest.update(f"{tensor!r}{tensor.file_state}".encode())
    return digest.hexdigest()


def _write_config(checkpoint: Checkpoint, dtype: str) -> bytes:
    """Returns `config.json` of a model that is not quantized."""
    source: Mapping[str, Any] = checkpoint.config or {}
    config = {name: value for name, value in source.items() if name not in _QUANTIZATION_KEYS}
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    for key in keys:
        config[key] = torch_name(dtype)
    return (json.dumps(config, indent=2) + "\n").encode()


def _encode(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
