"""Finds the quantized weights of a Hugging Face folder, and computes what they stand for.

A quantized weight is stored as several tensors: numbers of a few bits, and scales. `find_quantized`
recognizes them by their names, for each of the methods below; nothing is read for it.
`QuantizedWeight.open` then reads the scales, and gives the weight's rows in any order, a few
megabytes at a time. The formulas and their types are those of the programs that wrote the files:

- fp8 in blocks (DeepSeek-V3, Qwen3 FP8): W = q · s, a scale for each block of 128 x 128.
- fp8 and int8 of compressed-tensors, fbgemm and ModelOpt: W = (q - z) · s, a scale for the tensor,
  a row, or a group of columns.
- packed integers of compressed-tensors: the same, with 1 to 8 bits in words of 32.
- MXFP4 (gpt-oss): values of 4 bits, an exponent for each 32 of them
  (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
- GPTQ and AWQ: W = (q - z) · s, stored transposed, a scale for each group of input features.
- bitsandbytes: int8 with a scale for each row, and 4 bits as numbers of a table (NF4, FP4) with a
  scale for each block of 64, whose scales may be quantized as well.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ..stored_tensor import StoredTensor
from ..tensor_reader import TensorReader

Tensors = Mapping[str, StoredTensor]
# Returns the rows [start, stop) of a weight in fp32 or the type of its scales.
RowReader = Callable[[int, int], Tensor]

PIECE_ELEMENTS = 1 << 18  # of the dequantized weight that are in memory at a time
KEPT_WORDS = 1 << 21  # of a matrix of which columns are read
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
# The values of a number of 4 bits with 2 bits of exponent and one of mantissa (OCP MX, table 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# AWQ stores the eight numbers of a word in this order.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Tensors of layers whose activations or caches are quantized as well; the weights do not need them.
_OF_ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "activation_scale",
    "k_scale",
    "v_scale",
    "input_scale_ub",
)


@dataclass(frozen=True)
class QuantizedWeight(ABC):
    """A weight that is stored as several tensors.

    Attributes:
        name: The name of the weight once it is dequantized.
        shape: Its shape then.
        parts: The tensors that it is stored as, by their part in the formula.
        settings: `quantization_config` of the folder's `config.json`.
    """

    method: ClassVar[str]

    name: str
    shape: tuple[int, ...]
    parts: Tensors
    settings: Mapping[str, Any]

    @abstractmethod
    def open(self, reader: TensorReader) -> RowReader:
        """Reads the scales and returns what gives the rows of the weight.

        Raises:
            ValueError: The scales do not fit the weight.
        """

    def pieces(self, reader: TensorReader, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yields the weight in the order of its elements, in contiguous pieces of this type."""
        rows = self.open(reader)
        columns = math.prod(self.shape[1:])
        # Numbers are packed by eight at most, so that pieces end between two words.
        step = max(8, PIECE_ELEMENTS // max(columns, 1) // 8 * 8)
        for start in range(0, self.shape[0], step):
            piece = rows(start, min(start + step, self.shape[0]))
            yield piece.to(dtype).contiguous()

    def matrix(self) -> tuple[int, int]:
        """Returns the rows and columns of a weight that must be a matrix."""
        if len(self.shape) != 2:
            raise self.refuse(f"its shape {self.shape} is not that of a matrix")
        return self.shape

    def refuse(self, reason: str) -> ValueError:
        """Returns the error for scales that do not fit."""
        return ValueError(f"{self.name} cannot be dequantized ({self.method}): {reason}")


@dataclass(frozen=True)
class BlockScaled(QuantizedWeight):
    """A matrix of fp8 with a scale for each block of rows and columns."""

    method: ClassVar[str] = "fp8 in blocks"

    def open(self, reader: TensorReader) -> RowReader:
        rows, columns = self.matrix()
        scales = _read_scales(reader, self.parts["scale"])
        if scales.dim() < 2:
            scales = scales.reshape(1, 1) if scales.numel() == 1 else scales.reshape(-1, 1)
        block_rows = self._find_block(rows, scales.shape[0], 0)
        block_columns = self._find_block(columns, scales.shape[1], 1)
        across = torch.arange(columns) // block_columns

        def read_rows(start: int, stop: int) -> Tensor:
            down = torch.arange(start, stop) // block_rows
            values = _read_rows(reader, self.parts["weight"], start, stop).float()
            return values.mul_(scales[down][:, across])

        return read_rows

    def _find_block(self, length: int, blocks: int, dim: int) -> int:
        """Returns the length of a block along a dimension; the last one may be shorter."""
        declared = self.settings.get("weight_block_size")
        if isinstance(declared, list | tuple):
            sizes = cast(list[Any], declared)
            size = sizes[dim] if len(sizes) == 2 else None
            if isinstance(size, int) and size > 0 and math.ceil(length / size) == blocks:
                return size
        if blocks == 0 or length % blocks:
            raise self.refuse(f"{blocks} scales do not divide a dimension of {length}")
        return length // blocks


@dataclass(frozen=True)
class Scaled(QuantizedWeight):
    """A matrix of fp8 or int8 with a scale for the tensor, each row, or each group of columns."""

    method: ClassVar[str] = "scaled fp8 or int8"

    def open(self, reader: TensorReader) -> RowReader:
        rows, columns = self.matrix()
        scales = _as_groups(self, _read_scales(reader, self.parts["scale"]), rows)
        zeros = None
        if "zero_point" in self.parts:
            zeros = _as_groups(self, reader.whole(self.parts["zero_point"]), rows)
        groups = _find_groups(self, reader, columns, scales.shape[1])

        def read_rows(start: int, stop: int) -> Tensor:
            values = _read_rows(reader, self.parts["weight"], start, stop)
            return _scale(values, scales, zeros, groups, start, stop)

        return read_rows


@dataclass(frozen=True)
class Packed(QuantizedWeight):
    """A matrix of signed integers of 1 to 8 bits, packed into words of 32 along its rows."""

    method: ClassVar[str] = "packed integers of compressed-tensors"

    def open(self, reader: TensorReader) -> RowReader:
        rows, columns = self.matrix()
        words = self.parts["weight"].shape[-1]
        bits = self._find_bits(columns, words)
        scales = _as_groups(self, _read_scales(reader, self.parts["scale"]), rows)
        zeros = None
        if "zero_point" in self.parts:
            zeros = reader.whole(self.parts["zero_point"])
            if zeros.dtype == torch.int32:  # packed down the rows
                zeros = _unpack(zeros.t(), bits, rows).t() - (1 << (bits - 1))
            zeros = _as_groups(self, zeros, rows)
        groups = _find_groups(self, reader, columns, scales.shape[1])

        def read_rows(start: int, stop: int) -> Tensor:
            packed = _read_rows(reader, self.parts["weight"], start, stop)
            values = _unpack(packed, bits, columns) - (1 << (bits - 1))
            return _scale(values, scales, zeros, groups, start, stop)

        return read_rows

    def _find_bits(self, columns: int, words: int) -> int:
        """Returns the bits of a number: those that `config.json` names, if they fit the words."""
        fitting = [bits for bits in range(1, 9) if math.ceil(columns * bits / 32) == words]
        named: set[int] = set()
        groups = self.settings.get("config_groups")
        if isinstance(groups, Mapping):
            for group in cast(Mapping[str, Any], groups).values():
                described = cast(Any, group).get("weights") if isinstance(group, Mapping) else None
                if isinstance(described, Mapping):
                    named.add(cast(Mapping[str, Any], described).get("num_bits", 0))
        chosen = [bits for bits in fitting if bits in named] or fitting
        if len(chosen) != 1:
            raise self.refuse(f"{words} words do not tell the bits of {columns} columns")
        return chosen[0]


@dataclass(frozen=True)
class Microscaled(QuantizedWeight):
    """The matrices of experts in MXFP4: [experts, rows, groups, 16 bytes], stored transposed."""

    method: ClassVar[str] = "MXFP4"

    def open(self, reader: TensorReader) -> RowReader:
        def read_experts(start: int, stop: int) -> Tensor:
            found = [torch.cat(list(self._expert(reader, e))) for e in range(start, stop)]
            return torch.stack(found)

        return read_experts

    def pieces(self, reader: TensorReader, dtype: torch.dtype) -> Iterator[Tensor]:
        for expert in range(self.shape[0]):
            for piece in self._expert(reader, expert):
                yield piece.to(dtype)

    def _expert(self, reader: TensorReader, expert: int) -> Iterator[Tensor]:
        """Yields consecutive rows of an expert's matrix in bf16.

        The packed expert, which is a quarter of them, is in memory, since each row is a stored
        column.
        """
        rows = self.shape[2]  # of what is stored
        blocks = self.parts["weight"]
        groups = blocks.shape[2]
        table = torch.tensor(E2M1)
        first = expert * rows * groups
        last = first + rows * groups
        stored = reader.flat(self.parts["scale"], first, last)
        exponents = stored.view(rows, groups, 1).int() - 127
        packed = reader.flat(blocks, first * 16, last * 16).view(rows, groups, 16)
        step = max(1, PIECE_ELEMENTS // (32 * rows))
        for group in range(0, groups, step):
            some = slice(group, group + step)
            numbers = _split_bytes(packed[:, some], low_first=True)
            values = torch.ldexp(table[numbers.int()], exponents[:, some])
            yield values.reshape(rows, -1).t().to(torch.bfloat16).contiguous()


@dataclass(frozen=True)
class Transposed(QuantizedWeight):
    """A matrix of GPTQ or AWQ: [input, output], packed along one of the two."""

    def _scale_features(
        self, values: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor
    ) -> Tensor:
        """Returns (q - z) · s as [output, input], in the type of the scales.

        Args:
            values: q, [input, output].
            zeros: z, [groups, output].
            scales: s, [groups, output].
            group_of: The group of each input feature.
        """
        centered = values - zeros[group_of]
        return (centered.to(scales.dtype) * scales[group_of]).t()


@dataclass(frozen=True)
class Gptq(Transposed):
    """Packed along the input; the files keep z - 1, but for the format `gptq_v2`."""

    method: ClassVar[str] = "GPTQ"

    def open(self, reader: TensorReader) -> RowReader:
        outputs, inputs = self.shape
        bits = self.parts["weight"].shape[0] * 32 // inputs
        scales = reader.whole(self.parts["scale"])
        stored_zeros = _unpack(reader.whole(self.parts["zero_point"]), bits, outputs)
        is_less_one = self.settings.get("checkpoint_format") != "gptq_v2"
        zeros = stored_zeros + int(is_less_one)
        if "group" in self.parts:
            group_of = reader.whole(self.parts["group"]).long()
        else:
            group_of = torch.arange(inputs) // math.ceil(inputs / scales.shape[0])
        if scales.shape != zeros.shape or int(group_of.max()) >= scales.shape[0]:
            raise self.refuse(f"scales {tuple(scales.shape)} and zeros {tuple(zeros.shape)}")

        words = ColumnReader(reader, self.parts["weight"])

        def read_rows(start: int, stop: int) -> Tensor:
            packed = words.read(start, stop)
            values = _unpack(packed.t(), bits, inputs).t()
            return self._scale_features(
                values, zeros[:, start:stop], scales[:, start:stop], group_of
            )

        return read_rows


@dataclass(frozen=True)
class Awq(Transposed):
    """Eight outputs of 4 bits in a word, in the order of `AWQ_ORDER`."""

    method: ClassVar[str] = "AWQ"

    def open(self, reader: TensorReader) -> RowReader:
        _, inputs = self.shape
        scales = reader.whole(self.parts["scale"])
        zeros = self._unpack_words(reader.whole(self.parts["zero_point"]))
        if scales.shape != zeros.shape or inputs % scales.shape[0]:
            raise self.refuse(f"scales {tuple(scales.shape)} and zeros {tuple(zeros.shape)}")
        group_of = torch.arange(inputs) // (inputs // scales.shape[0])

        words = ColumnReader(reader, self.parts["weight"])

        def read_rows(start: int, stop: int) -> Tensor:
            packed = words.read(start // 8, stop // 8)
            values = self._unpack_words(packed)
            return self._scale_features(
                values, zeros[:, start:stop], scales[:, start:stop], group_of
            )

        return read_rows

    def _unpack_words(self, words: Tensor) -> Tensor:
        shifts = torch.tensor(AWQ_ORDER, dtype=torch.int32) * 4
        numbers = (words.unsqueeze(-1) >> shifts) & 15
        return numbers.flatten(-2)


@dataclass(frozen=True)
class RowScaledInt8(QuantizedWeight):
    """bitsandbytes in 8 bits: each row has its largest absolute value, which is 127."""

    method: ClassVar[str] = "bitsandbytes in 8 bits"

    def open(self, reader: TensorReader) -> RowReader:
        largest = reader.whole(self.parts["scale"]).float().reshape(-1, 1)
        if largest.shape[0] != self.shape[0]:
            raise self.refuse(f"{largest.shape[0]} scales for {self.shape[0]} rows")

        def read_rows(start: int, stop: int) -> Tensor:
            values = _read_rows(reader, self.parts["weight"], start, stop)
            return values.float() * largest[start:stop] * (1 / 127)

        return read_rows


@dataclass(frozen=True)
class TableOf4Bits(QuantizedWeight):
    """bitsandbytes in 4 bits: numbers of a table of 16 values, a scale for each block of elements.

    The scales themselves may be 8 bits of another table, with scales and an offset.
    """

    method: ClassVar[str] = "bitsandbytes in 4 bits"

    def open(self, reader: TensorReader) -> RowReader:
        state = _read_json(reader, self.parts["state"])
        table = reader.whole(self.parts["table"]).float()
        block = int(state["blocksize"])
        scales = reader.whole(self.parts["scale"])
        if "nested_scale" in self.parts:
            nested = reader.whole(self.parts["nested_scale"]).float()
            values = reader.whole(self.parts["nested_table"]).float()[scales.int()]
            blocks = torch.arange(len(scales)) // int(state["nested_blocksize"])
            scales = values * nested[blocks] + float(state["nested_offset"])
        columns = math.prod(self.shape[1:])
        packed = self.parts["weight"]
        if len(scales) * block < math.prod(self.shape):
            raise self.refuse(f"{len(scales)} blocks of {block} for {self.shape}")

        def read_rows(start: int, stop: int) -> Tensor:
            first = start * columns
            end = stop * columns
            values = reader.flat(packed, first // 2, math.ceil(end / 2))
            numbers = _split_bytes(values, low_first=False).reshape(-1)
            numbers = numbers[first % 2 :][: end - first].int()
            scale = scales[torch.arange(first, end) // block]
            return (table[numbers] * scale).view(stop - start, *self.shape[1:])

        return read_rows


@dataclass(frozen=True)
class QuantizedFolder:
    """What a folder holds in place of full weights.

    Attributes:
        weights: The quantized weights by the name that they have once they are dequantized.
        plain: The tensors that are stored as they are.
    """

    weights: Mapping[str, QuantizedWeight]
    plain: Tensors


def find_quantized(tensors: Tensors, config: Mapping[str, Any], folder: str) -> QuantizedFolder:
    """Finds the quantized weights of a Hugging Face folder by the names of its tensors.

    Args:
        tensors: All tensors of the folder.
        config: The contents of `config.json`.
        folder: The folder, for messages.

    Raises:
        ValueError: They are quantized by a method that is not known here, or parts are missing.
    """
    given: Any = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{folder}: quantization_config must be an object, not {given!r}")
    settings = cast(Mapping[str, Any], given)
    weights: dict[str, QuantizedWeight] = {}
    used: set[str] = set()
    for name in tensors:
        found = _find_weight(name, tensors, settings)
        if found is not None:
            weights[found.name] = found
            used.update(part.name for part in found.parts.values())
    plain: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        end = name.rpartition(".")[2]
        if name in used or end in _OF_ACTIVATIONS or end in ("weight_format", "weight_shape"):
            continue
        if tensor.dtype in FP8 or end in ("weight_scale", "weight_packed", "codes", "codebooks"):
            method = str(settings.get("quant_method") or "a method without a name")[:40]
            detail = str(settings.get("format") or settings.get("quant_algo") or "")[:40]
            raise ValueError(
                f"{folder} is quantized by {' '.join(filter(None, (method, detail)))}, which is "
                f"not known here ({name}, {tensor.dtype}); fp8, int8 and packed integers of "
                "compressed-tensors, MXFP4, GPTQ, AWQ and bitsandbytes are"
            )
        plain[name] = tensor
    return QuantizedFolder(weights, plain)


def _find_weight(
    name: str, tensors: Tensors, settings: Mapping[str, Any]
) -> QuantizedWeight | None:
    """Returns the weight that begins with this tensor, or None."""
    stored = tensors[name]
    base = name.removesuffix(".weight")
    is_weight = base != name

    def take(**names: str) -> dict[str, StoredTensor]:
        parts = {part: tensors[other] for part, other in names.items() if other in tensors}
        return {"weight": stored, **parts}

    if f"{name}_scale_inv" in tensors:
        parts = take(scale=f"{name}_scale_inv")
        return BlockScaled(name, stored.shape, parts, settings)
    if is_weight and f"{name}_scale" in tensors and stored.dtype in (*FP8, "I8"):
        parts = take(scale=f"{name}_scale", zero_point=f"{name}_zero_point", group=f"{name}_g_idx")
        return Scaled(name, stored.shape, parts, settings)
    if name.endswith(".weight_packed") and stored.dtype == "I32":
        whole = name.removesuffix("_packed")
        shape = tensors.get(f"{whole}_shape")
        scale = f"{whole}_scale"
        if shape is None or scale not in tensors:
            raise ValueError(f"{stored} needs {whole}_shape and {scale} to be dequantized")
        parts = take(scale=scale, zero_point=f"{whole}_zero_point", group=f"{whole}_g_idx")
        parts["shape"] = shape
        return Packed(whole, _read_shape(shape), parts, settings)
    if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in tensors:
        whole = name.removesuffix("_blocks")
        experts, rows, groups, _ = stored.shape
        parts = take(scale=f"{whole}_scales")
        return Microscaled(whole, (experts, groups * 32, rows), parts, settings)
    if name.endswith(".qweight"):
        return _find_transposed(name, tensors, settings)
    if is_weight and f"{base}.SCB" in tensors:
        return RowScaledInt8(name, stored.shape, take(scale=f"{base}.SCB"), settings)
    if is_weight and f"{name}.absmax" in tensors:
        prefix = f"{name}.quant_state.bitsandbytes__"
        state = next((other for other in tensors if other.startswith(prefix)), None)
        if state is None:
            raise ValueError(f"{stored} needs {prefix}nf4 or …fp4 to be dequantized")
        parts = take(
            state=state,
            scale=f"{name}.absmax",
            table=f"{name}.quant_map",
            nested_scale=f"{name}.nested_absmax",
            nested_table=f"{name}.nested_quant_map",
        )
        with TensorReader() as reader:
            shape = tuple(_read_json(reader, tensors[state])["shape"])
        return TableOf4Bits(name, shape, parts, settings)
    return None


def _find_transposed(name: str, tensors: Tensors, settings: Mapping[str, Any]) -> QuantizedWeight:
    """Returns the weight of GPTQ or AWQ whose numbers are in this tensor."""
    base = name.removesuffix(".qweight")
    scales = tensors.get(f"{base}.scales")
    zeros = tensors.get(f"{base}.qzeros")
    packed = tensors[name]
    if scales is None or zeros is None:
        raise ValueError(f"{packed} needs {base}.scales and {base}.qzeros to be dequantized")
    parts = {"weight": packed, "scale": scales, "zero_point": zeros}
    outputs = scales.shape[-1]
    whole = f"{base}.weight"
    if settings.get("quant_method") == "awq":
        version = settings.get("version", "gemm")
        if version != "gemm" or settings.get("bits", 4) != 4:
            raise ValueError(
                f"{packed} is AWQ's in the layout {version!r} with {settings.get('bits', 4)} bits; "
                "'gemm' with 4 bits can be dequantized"
            )
        return Awq(whole, (outputs, packed.shape[0]), parts, settings)
    bits = settings.get("bits", 4)
    if bits not in (2, 4, 8):
        raise ValueError(f"{packed} is GPTQ's with {bits!r} bits; 2, 4 and 8 can be dequantized")
    if f"{base}.g_idx" in tensors:
        parts["group"] = tensors[f"{base}.g_idx"]
    return Gptq(whole, (outputs, packed.shape[0] * 32 // bits), parts, settings)


def _read_scales(reader: TensorReader, tensor: StoredTensor) -> Tensor:
    """Returns scales; those that are stored as exponents alone become fp32."""
    scales = reader.whole(tensor)
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.float() - 127)
    if scales.dtype == torch.float8_e8m0fnu:
        return scales.float()
    return scales


def _read_rows(reader: TensorReader, tensor: StoredTensor, start: int, stop: int) -> Tensor:
    """Returns rows [start, stop) of a stored matrix, valid until the next read."""
    columns = math.prod(tensor.shape[1:])
    rows = reader.flat(tensor, start * columns, stop * columns)
    return rows.view(stop - start, *tensor.shape[1:])


class ColumnReader:
    """Reads columns of a stored matrix of words, in any order.

    It reads and keeps some megabytes of neighboring columns at a time: each row of a few columns
    would be a read of its own.
    """

    def __init__(self, reader: TensorReader, tensor: StoredTensor) -> None:
        self.reader = reader
        self.tensor = tensor
        self.first = 0
        self.kept = torch.empty(tensor.shape[0], 0, dtype=torch.int32)

    def read(self, start: int, stop: int) -> Tensor:
        """Returns columns [start, stop), valid until the next call."""
        if start < self.first or stop > self.first + self.kept.shape[1]:
            rows, columns = self.tensor.shape
            count = max(stop - start, KEPT_WORDS // rows)
            self.first = start
            self.kept = torch.empty(0)  # before the next ones are in memory
            self.kept = torch.empty(rows, min(count, columns - start), dtype=torch.int32)
            last = start + self.kept.shape[1]
            for part, chunk in self.reader.chunks(self.tensor, 1, start, last):
                self.kept[part] = chunk
        return self.kept[:, start - self.first : stop - self.first]


def _read_json(reader: TensorReader, tensor: StoredTensor) -> dict[str, Any]:
    """Returns the JSON object whose text is stored as a tensor of bytes."""
    text = reader.whole(tensor).numpy().tobytes()
    return json.loads(text)


def _read_shape(tensor: StoredTensor) -> tuple[int, ...]:
    with TensorReader() as reader:
        sizes = cast(list[int], cast(Any, reader.whole(tensor)).tolist())
    return tuple(sizes)


def _as_groups(weight: QuantizedWeight, values: Tensor, rows: int) -> Tensor:
    """Returns scales or zero points as [rows or 1, groups]."""
    if values.numel() == 1:
        return values.reshape(1, 1)
    if values.dim() < 2:
        values = values.reshape(-1, 1)
    if values.shape[0] not in (1, rows):
        raise weight.refuse(f"scales {tuple(values.shape)} for {rows} rows")
    return values


def _find_groups(
    weight: QuantizedWeight, reader: TensorReader, columns: int, groups: int
) -> Tensor | None:
    """Returns the group of each column; None if there is one group."""
    if "group" in weight.parts:
        return reader.whole(weight.parts["group"]).long()
    if groups == 1:
        return None
    if columns % groups:
        raise weight.refuse(f"{groups} groups do not divide {columns} columns")
    return torch.arange(columns) // (columns // groups)


def _scale(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor | None,
    start: int,
    stop: int,
) -> Tensor:
    """Returns (q - z) · s for the rows [start, stop), in the type of the scales."""
    rows = slice(start, stop) if scales.shape[0] > 1 else slice(None)
    result = values.to(scales.dtype)
    if zeros is not None:
        zero = zeros[rows] if groups is None else zeros[rows][:, groups]
        result = result - zero.to(scales.dtype)
    scale = scales[rows] if groups is None else scales[rows][:, groups]
    return result * scale


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Returns the first `count` numbers of each row of words: number i has the bits from i · bits.

    Args:
        words: [rows, words], int32.
        bits: The bits of a number, 1 to 8.
        count: The numbers of a row.
    """
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        return numbers.flatten(-2)[:, :count]
    first = torch.arange(count) * bits
    position = first // 32
    unsigned = words.long() & 0xFFFFFFFF
    padded = torch.nn.functional.pad(unsigned, (0, 1))
    pairs = padded[:, position] | (padded[:, position + 1] << 32)
    return ((pairs >> (first % 32)) & ((1 << bits) - 1)).int()


def _split_bytes(values: Tensor, *, low_first: bool) -> Tensor:
    """Returns the two numbers of 4 bits of each byte, in a last dimension that is twice as long."""
    low = values & 15
    high = values >> 4
    pair = (low, high) if low_first else (high, low)
    return torch.stack(pair, dim=-1).flatten(-2)
