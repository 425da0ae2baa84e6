"""Writes quantized.safetensors: weights as other programs quantize them, and what they dequantize to.

Made with compressed-tensors 0.20.0 and bitsandbytes 0.50.2, which the tests do not need:

    pip install compressed-tensors==0.20.0 bitsandbytes==0.50.2
    python tests/golden/make_quantized.py
"""

import json
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file

ROWS, COLUMNS = 24, 64


def draw_integers(bits, *shape):
    return torch.randint(-(1 << bits - 1), 1 << bits - 1, shape, dtype=torch.int8)


def compressed(bits, strategy, symmetric, dtype, packed):
    """A weight of compressed-tensors: its parts and its settings."""
    arguments = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric}
    groups = 4 if strategy == "group" else 1
    if strategy == "group":
        arguments["group_size"] = COLUMNS // groups
    values = draw_integers(bits, ROWS, COLUMNS)
    scale = torch.rand(ROWS, groups).to(dtype)
    zero_point = None if symmetric else draw_integers(bits, ROWS, groups)
    expected = dequantize(values, scale, zero_point, QuantizationArgs(**arguments))
    parts = {"weight_scale": scale}
    if packed:
        parts["weight_packed"] = pack_to_int32(values, bits)
        parts["weight_shape"] = torch.tensor([ROWS, COLUMNS])
        if zero_point is not None:
            parts["weight_zero_point"] = pack_to_int32(zero_point, bits, packed_dim=0)
    else:
        parts["weight"] = values
        if zero_point is not None:
            parts["weight_zero_point"] = zero_point
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": {"0": {"weights": arguments}},
    }
    return parts, settings, expected


def compressed_floats(strategy, dtype):
    """A weight of compressed-tensors in fp8."""
    arguments = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    values = (torch.randn(ROWS, COLUMNS) * 50).to(torch.float8_e4m3fn)
    scale = torch.rand((ROWS, 1) if strategy == "channel" else (1,)).to(dtype)
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": {"0": {"weights": arguments}},
    }
    expected = dequantize(values, scale, None, QuantizationArgs(**arguments))
    return {"weight": values, "weight_scale": scale}, settings, expected


def four_bits(kind, nested, dtype):
    """A weight of bitsandbytes in 4 bits."""
    weight = torch.randn(ROWS, COLUMNS, dtype=dtype)
    packed, state = bnb.quantize_4bit(
        weight, blocksize=64, compress_statistics=nested, quant_type=kind
    )
    parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return {"weight": packed, **parts}, settings, bnb.dequantize_4bit(packed, state)


def eight_bits():
    """A weight of bitsandbytes in 8 bits."""
    values, scale, _ = bnb.int8_vectorwise_quant(torch.randn(ROWS, COLUMNS).half())
    parts = {"weight": values, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return parts, settings, bnb.int8_vectorwise_dequant(values, scale)


def main():
    torch.manual_seed(5)
    cases = {
        "int8 rows": compressed(8, "channel", True, torch.float32, False),
        "int8 groups": compressed(8, "group", False, torch.bfloat16, False),
        "int4 packed": compressed(4, "group", True, torch.bfloat16, True),
        "int4 packed, zero points": compressed(4, "group", False, torch.float16, True),
        "int3 packed": compressed(3, "group", False, torch.float32, True),
        "int8 packed": compressed(8, "channel", True, torch.float32, True),
        "nf4": four_bits("nf4", False, torch.bfloat16),
        "nf4 nested": four_bits("nf4", True, torch.float16),
        "fp4": four_bits("fp4", False, torch.float32),
        "bitsandbytes int8": eight_bits(),
        "fp8 rows": compressed_floats("channel", torch.bfloat16),
        "fp8 matrix": compressed_floats("tensor", torch.float32),
    }
    tensors = {}
    settings = {}
    for name, (parts, settings[name], expected) in cases.items():
        tensors[f"{name}/expected"] = expected.contiguous()
        tensors.update({f"{name}/{part}": value.contiguous() for part, value in parts.items()})
    path = Path(__file__).with_name("quantized.safetensors")
    save_file(tensors, path, {"settings": json.dumps(settings)})


if __name__ == "__main__":
    main()
