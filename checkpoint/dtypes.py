"""Lists the element types of checkpoints, under the names that safetensors headers use."""

from __future__ import annotations

from typing import Any

# Name in safetensors -> (bytes of an element, name in PyTorch).
DTYPES: dict[str, tuple[int, str]] = {
    "BOOL": (1, "bool"),
    "U8": (1, "uint8"),
    "I8": (1, "int8"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "U16": (2, "uint16"),
    "I16": (2, "int16"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "U32": (4, "uint32"),
    "I32": (4, "int32"),
    "F32": (4, "float32"),
    "U64": (8, "uint64"),
    "I64": (8, "int64"),
    "F64": (8, "float64"),
    "C64": (8, "complex64"),
}

_BY_TORCH_NAME = {torch_name: name for name, (_, torch_name) in DTYPES.items()}

# The types that `--dtype` accepts, and that it converts from.
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3")


def set_config_dtype(config: dict[str, Any], dtype: str) -> None:
    """Makes the contents of a `config.json` name a type, under the keys that it has for it.

    Args:
        config: The contents, which change in place.
        dtype: The safetensors name of the type.
    """
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    for key in keys:
        config[key] = torch_name(dtype)


def item_size(dtype: str) -> int:
    """Returns the bytes of one element."""
    return DTYPES[dtype][0]


def torch_name(dtype: str) -> str:
    """Returns PyTorch's name of a safetensors type: `BF16` -> `bfloat16`."""
    return DTYPES[dtype][1]


def from_torch_name(name: str) -> str:
    """Returns safetensors' name of a PyTorch type: `bfloat16` or `torch.bfloat16` -> `BF16`.

    Raises:
        ValueError: There is no such type.
    """
    name = name.removeprefix("torch.")
    if name not in _BY_TORCH_NAME:
        raise ValueError(
            f"element type {name} cannot be stored; use one of {', '.join(_BY_TORCH_NAME)}"
        )
    return _BY_TORCH_NAME[name]
