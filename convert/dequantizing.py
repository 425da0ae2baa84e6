"""Writes a Hugging Face folder of full weights from a quantized one, or from a GGUF file.

The weights are computed one after another, a few megabytes at a time
(`checkpoint/formats/quantized.py`, `checkpoint/formats/gguf_file.py`); all other tensors and small files
are copied. No model is built, so folders of any architecture can be dequantized. Like every
conversion, the destination appears complete or not at all, and an interrupted one goes on with
`resume`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.checkpoint import WEIGHT_FILES, open_checkpoint
from ..checkpoint.dtypes import set_config_dtype, torch_name
from ..checkpoint.folder_files import CONFIG, list_auxiliary_files
from ..checkpoint.formats.gguf_file import find_gguf, open_gguf
from ..checkpoint.formats.quantized import QuantizedFolder, QuantizedWeight, find_quantized
from ..checkpoint.planned_file import PlannedFile
from ..checkpoint.stored_tensor import StoredTensor
from ..checkpoint.tensor_reader import TensorReader
from ..files.strict_json import read_json_object
from ..models.family_table import list_gguf
from ..models.huggingface import plan_weight_files
from .destination import Destination
from .streams import copy_pieces, encode_texts, write_folder

# The types that the weights may be dequantized to, by the name that safetensors has for them.
TYPES = ("BF16", "F16", "F32")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class _Source:
    """What is dequantized.

    Attributes:
        found: The weights to dequantize and the tensors to copy.
        config: The contents of `config.json`.
        small: The small files to copy by name.
        state: What identifies the source's contents.
    """

    found: QuantizedFolder
    config: Mapping[str, Any]
    small: Mapping[str, Path]
    state: str

    @classmethod
    def open(cls, source: Path, config_file: Path | None) -> _Source:
        """Opens a quantized Hugging Face folder, or a GGUF file or a folder that holds one.

        Raises:
            ValueError: It is neither, or it cannot be dequantized.
        """
        gguf = find_gguf(source)
        if gguf is not None and (source.is_file() or not _holds_other_weights(source)):
            return cls._open_gguf(source, gguf, config_file)
        checkpoint = open_checkpoint(source, config_file)
        if checkpoint.kind != "huggingface":
            raise ValueError(
                f"{checkpoint.folder} is a {checkpoint.description}; Hugging Face folders and GGUF "
                "files are dequantized"
            )
        config = checkpoint.config or {}
        found = find_quantized(checkpoint.ranks[0], config, str(checkpoint.folder))
        if not found.weights:
            raise ValueError(f"{source} is not quantized: leave out --dequantize")
        small = {path.name: path for path in list_auxiliary_files(source)}
        tensors = [f"{tensor!r}{tensor.file_state}" for tensor in checkpoint.tensors()]
        return cls(found, config, small, f"{dict(config)!r}{''.join(tensors)}")

    @classmethod
    def _open_gguf(cls, source: Path, gguf: Path, config_file: Path | None) -> _Source:
        file = open_gguf(gguf, list_gguf())
        config = file.config
        if config_file is not None:
            path = config_file / CONFIG if config_file.is_dir() else config_file
            config = read_json_object(path)
        small: dict[str, Path] = {}
        if source.is_dir():
            for path in list_auxiliary_files(source):
                if path != gguf:
                    small[path.name] = path
        return cls(file.found, config, small, f"{file.state}{dict(config)!r}")

    def plan(
        self, dtype: str, largest_file: int
    ) -> tuple[tuple[PlannedFile, ...], dict[str, str | bytes]]:
        """Returns the files of the destination and the texts beside them."""
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, weight in self.found.weights.items():
            shapes[name] = (dtype, weight.shape)
        for name, tensor in self.found.plain.items():
            shapes[name] = (tensor.dtype, tensor.shape)
        return plan_weight_files(dict(sorted(shapes.items())), largest_file)

    def fingerprint(self, dtype: str, targets: list[StoredTensor]) -> str:
        """Returns a digest that is equal for equal conversions of unchanged source files."""
        return hashlib.sha256(f"{dtype}{targets!r}{self.state}".encode()).hexdigest()


def _holds_other_weights(folder: Path) -> bool:
    return any((folder / name).exists() for name in WEIGHT_FILES)


def dequantize(
    source: Path,
    destination: str | Path,
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
        source: A Hugging Face folder with quantized weights, a GGUF file, or a folder with one.
        destination: The folder to write.
        dtype: Safetensors' name of the type of the dequantized weights: BF16, F16 or F32. Tensors
            of a Hugging Face folder that were not quantized stay as they are.
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
    opened = _Source.open(source, config_file)
    files, texts = opened.plan(dtype, largest_file)
    targets = [tensor for file in files for tensor in file.tensors.values()]
    total = sum(tensor.nbytes for tensor in targets)
    if resume and place.is_complete():
        place.tidy()
        return len(targets), total, total

    kept = write_folder(
        source,
        place,
        files,
        opened.fingerprint(dtype, targets),
        lambda name, reader: _read_pieces(opened.found, name, reader, dtype),
        lambda: {**opened.small, CONFIG: _write_config(opened, dtype), **encode_texts(texts)},
        report,
        overwrite=overwrite,
    )
    return len(targets), total, kept


def _read_pieces(
    found: QuantizedFolder, name: str, reader: TensorReader, dtype: str
) -> Iterator[Tensor]:
    """Yields the bytes of a tensor of the destination in their order."""
    weight = found.weights.get(name)
    if weight is not None:
        yield from _read_weight(weight, reader, dtype)
        return
    yield from copy_pieces(found.plain[name], reader)


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


def _write_config(source: _Source, dtype: str) -> bytes:
    """Returns `config.json` of a model that is not quantized."""
    config = {
        name: value for name, value in source.config.items() if name not in _QUANTIZATION_KEYS
    }
    set_config_dtype(config, dtype)
    return (json.dumps(config, indent=2) + "\n").encode()
