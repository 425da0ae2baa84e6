"""Refuses quantized checkpoints, and says how they are quantized.

Their weights are numbers of a few bits that mean nothing without their scales, so they must not be
read as they are.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any, cast

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.stored_tensor import StoredTensor
from .config import shown

# The ends of the names of tensors that belong to quantized weights, and the methods that write them.
_MARKS = (
    (r"weight_scale_inv", "fp8 in blocks"),
    (r"(weight|input)_scale(_2)?|weight_zero_point", "compressed-tensors, fp8 or ModelOpt"),
    (r"weight_packed|weight_shape", "compressed-tensors"),
    (r"qweight|qzeros|g_idx", "GPTQ or AWQ"),
    (r"SCB|weight_format", "bitsandbytes in 8 bits"),
    (r"weight\.(absmax|quant_map|nested_absmax|nested_quant_map)", "bitsandbytes in 4 bits"),
    (r"weight\.quant_state\.bitsandbytes__\w+", "bitsandbytes in 4 bits"),
    (r"(gate_up|down)_proj_(blocks|scales)", "MXFP4"),
    (r"codes|codebooks", "AQLM"),
    (r"weight\._(data|scale|shift)", "quanto"),
)
_FULL_TYPES = ("F64", "F32", "F16", "BF16")
# Settings of `quantization_config` that a message repeats.
_SHOWN = (
    "bits",
    "load_in_8bit",
    "load_in_4bit",
    "fmt",
    "format",
    "weight_block_size",
    "quant_algo",
)


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Raises ValueError if the weights of a Hugging Face folder are quantized.

    Warns if `config.json` says that they are, but they have 16 bits or more: such folders are those
    of models that were dequantized, or trained with a quantized base.
    """
    if checkpoint.kind != "huggingface":
        return
    tensors = checkpoint.ranks[0]
    method = _find_method(checkpoint.config or {})
    marked = _find_marked_tensor(tensors)
    small = next((tensor for name, tensor in tensors.items() if _is_small(name, tensor)), None)
    if marked is not None:
        mark, found = marked
        raise ValueError(
            f"{checkpoint.folder} is quantized: {method or mark}; it has the tensor {found}. "
            "Quantized models are not loaded: `shardzoo convert merge FOLDER NEW --dequantize "
            "bf16` writes a folder of full weights, or take the model that was quantized"
        )
    if not method:
        return
    if small is not None:
        raise ValueError(
            f"{checkpoint.folder} is quantized: {method}; {small} has type {small.dtype}, and the "
            "scales of the weights are missing, so that they cannot be dequantized"
        )
    warnings.warn(
        f"{checkpoint.folder}: config.json says that the model is quantized ({method}), but its "
        "weights are not; they are loaded as they are",
        stacklevel=2,
    )


def _find_method(config: Mapping[str, Any]) -> str:
    """Returns how a model is quantized according to its `config.json`; "" if it is not."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return ""
    if not isinstance(settings, Mapping):
        return shown(settings)
    known = cast(Mapping[str, Any], settings)
    details = [f"{name}={shown(known[name])}" for name in _SHOWN if known.get(name)]
    method = str(known.get("quant_method") or "by an unnamed method")[:40]
    return ", ".join([method, *details])


def _find_marked_tensor(tensors: Mapping[str, StoredTensor]) -> tuple[str, str] | None:
    """Returns a method, and the name of a tensor that only its files have; None without one."""
    patterns = [(re.compile(rf".*\.({ends})"), method) for ends, method in _MARKS]
    for name in tensors:
        for pattern, method in patterns:
            if pattern.fullmatch(name):
                return method, name
    return None


def _is_small(name: str, tensor: StoredTensor) -> bool:
    """Returns whether a tensor is a weight of less than 16 bits, or of integers."""
    return name.endswith("weight") and tensor.dtype not in _FULL_TYPES
