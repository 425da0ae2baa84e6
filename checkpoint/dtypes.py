"""The element types of checkpoints by the names that safetensors headers use; their values are never looked at."""

from __future__ import annotations

# safetensors' name -> (bytes of an element, torch's name)
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

# What `--dtype` may ask for, and what it is applied to.
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3")


def item_size(dtype: str) -> int:
    """Bytes of one element."""
    return DTYPES[dtype][0]


def torch_name(dtype: str) -> str:
    """`BF16` -> `bfloat16`"""
    return DTYPES[dtype][1]


def from_torch_name(name: str) -> str:
    """`bfloat16` or `torch.bfloat16` -> `BF16`. ValueError where safetensors has no such type."""
    name = name.removeprefix("torch.")
    if name not in _BY_TORCH_NAME:
        raise ValueError(f"element type {name} is none of {', '.join(_BY_TORCH_NAME)}")
    return _BY_TORCH_NAME[name]
