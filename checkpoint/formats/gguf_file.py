"""Reads GGUF files, llama.cpp's format of a model in one file.

The `gguf` package decodes the blocks of numbers. The families tell what the
names of tensors and the keys of the header mean in Hugging Face's folders. After llama.cpp's
`convert_hf_to_gguf.py` (https://github.com/ggml-org/llama.cpp) and the description of the format
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):

- Rows of some models' queries and keys are stored so that the features that rotate together are
  neighbors.
- Matrices are stored as [out, in].
- Scalings of rotary positions are keys, or tensors of factors (Llama 3.1, LongRoPE).
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (the package is an extra, and has no types)

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...files.printable import describe
from ...files.safe_paths import checked_file
from ..tensor_reader import TensorReader
from .gguf_header import GgufTensor, StoredRows, read_gguf_header
from .quantized import QuantizedFolder, QuantizedWeight, RowReader

SUFFIX = ".gguf"
_SPLIT = re.compile(r".*-\d{5}-of-\d{5}\.gguf")
_BLOCK = re.compile(r"((?:enc\.|dec\.)?blk\.)(\d+)\.(.+)")
_MOST_LAYERS = 1024


def find_gguf(source: Path) -> Path | None:
    """Returns the GGUF file that `source` names: the file itself, or the only one in a folder.

    Raises:
        ValueError: The folder holds several of them.
    """
    if source.suffix == SUFFIX and source.is_file():
        return source
    if not source.is_dir():
        return None
    names = sorted(entry.name for entry in source.iterdir() if entry.suffix == SUFFIX)
    if len(names) > 1:
        raise ValueError(f"{source} holds {len(names)} GGUF files: name one of {', '.join(names)}")
    return checked_file(source, names[0]) if names else None


@dataclass(frozen=True)
class GgufWeight(QuantizedWeight):
    """A tensor of a GGUF file.

    Attributes:
        rows: The blocks of each row, or the numbers of a floating-point tensor.
        decode: Returns the fp32 numbers of some of these rows.
        order: The row of the file for each row of the weight; None if they are the same.
        transposed: Whether the file holds the transposed matrix.
    """

    method: ClassVar[str] = "GGUF"

    rows: StoredRows
    decode: Callable[[Any], Any]
    order: Tensor | None = None
    transposed: bool = False

    def open(self, reader: TensorReader) -> RowReader:
        if self.transposed:
            whole = torch.from_numpy(self.decode(self.rows.read(0, self.rows.shape[0]))).t()

            def read_columns(start: int, stop: int) -> Tensor:
                return whole[start:stop]

            return read_columns

        def read_rows(start: int, stop: int) -> Tensor:
            if self.order is None:
                return torch.from_numpy(self.decode(self.rows.read(start, stop)))
            # The rows of a head change places, so those that are wanted are near one another.
            wanted = self.order[start:stop].numpy()
            first = int(wanted.min())
            found = self.rows.read(first, int(wanted.max()) + 1)
            return torch.from_numpy(self.decode(found[wanted - first]))

        return read_rows


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file as a Hugging Face folder would hold it.

    Attributes:
        found: Its tensors by Hugging Face's names.
        config: The contents of `config.json`.
        state: What identifies the contents, for a resumed conversion.
    """

    found: QuantizedFolder
    config: Mapping[str, Any]
    state: str


@dataclass(frozen=True)
class GgufArchitecture:
    """How GGUF spells the models of a family.

    Attributes:
        name: Its `general.architecture`.
        model_type: The family's name in `config.json`.
        class_name: The class of transformers whose weights it holds.
        names: Name of a tensor without its kind -> Hugging Face's; {i} is the number of the block.
        keys: Key of the header behind the architecture's name -> key of `config.json`.
        rotates_neighbors: Whether rows of queries and keys are permuted.
        transposed: Tensors whose matrix is stored transposed.
        is_rotary: Whether the model has rotary positions.
        constants: Keys of `config.json` that the header does not tell.
        flags: Key of `config.json` -> the tensor of Hugging Face whose presence it tells.
    """

    name: str
    model_type: str
    class_name: str
    names: Mapping[str, str]
    keys: Mapping[str, str]
    rotates_neighbors: bool = False
    transposed: tuple[str, ...] = ()
    is_rotary: bool = True
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    flags: Mapping[str, str] = field(default_factory=dict[str, str])


_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
# Tensors of factors that the rotation is scaled by; they become keys of `config.json`.
_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
# Llama 3.1's constants; the file holds only the factors that follow from them.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def open_gguf(path: Path, architectures: Mapping[str, GgufArchitecture]) -> GgufFile:
    """Reads the header of a GGUF file.

    Args:
        path: The file.
        architectures: Those that are read, by their `general.architecture`.

    Raises:
        ValueError: The file is damaged, has a part that is not known here, or the `gguf` package is
            not installed.
    """
    if _SPLIT.fullmatch(path.name):
        raise ValueError(
            f"{path} is one of several files of a model: join them by llama-gguf-split --merge"
        )
    try:
        header = read_gguf_header(path)
    except ImportError:
        raise ValueError(
            f"{path} is a GGUF file: pip install 'shardzoo[gguf]' to read it"
        ) from None
    except (ValueError, KeyError, OverflowError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"{path} is damaged, or no GGUF file: {reason}") from None

    name = header.values.get("general.architecture")
    architecture = architectures.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise ValueError(
            f"{path} has a model of the architecture {describe(name)}; those that are read are "
            f"{', '.join(architectures)}"
        )
    return _Reading(path, architecture.name, architecture, header.values, header.tensors).read()


@dataclass(frozen=True)
class _Reading:
    """The parts of one file while it is read."""

    path: Path
    prefix: str
    architecture: GgufArchitecture
    values: Mapping[str, Any]
    tensors: Sequence[GgufTensor]

    def read(self) -> GgufFile:
        weights: dict[str, QuantizedWeight] = {}
        factors: dict[str, Tensor] = {}
        described: list[str] = []
        for tensor in self.tensors:
            described.append(f"{tensor.name} {tensor.kind} {list(tensor.shape)}")
            stem, _, kind = tensor.name.rpartition(".")
            if stem in _FACTORS:
                factors[stem] = self._decode(tensor)
                continue
            weight = self._find_weight(tensor, stem, kind)
            if weight.name in weights:
                raise ValueError(f"{self.path} has the tensor {tensor.name} twice")
            weights[weight.name] = weight
        config = self._read_config(weights, factors)
        state = self.path.stat()
        identity = f"{self.path.name} {state.st_size} {state.st_mtime_ns} {described} {config}"
        return GgufFile(QuantizedFolder(weights, {}), config, identity)

    def _find_weight(self, tensor: GgufTensor, stem: str, kind: str) -> GgufWeight:
        block = _BLOCK.fullmatch(stem)
        key = stem if block is None else block[1] + block[3]
        own = self.architecture.names.get(key)
        if own is None or kind not in ("weight", "bias"):
            raise ValueError(
                f"{self.path} has the tensor {tensor.name}, which no {self.prefix} that is read has"
            )
        if block is not None:
            if int(block[2]) >= _MOST_LAYERS:
                raise ValueError(f"{self.path} has the tensor {tensor.name} of too many layers")
            own = own.replace("{i}", str(int(block[2])))
        shape = tensor.shape
        transposed = key in self.architecture.transposed and kind == "weight"
        order = None
        if self.architecture.rotates_neighbors and key in ("blk.attn_q", "blk.attn_k"):
            count = "head_count" if key.endswith("_q") else "head_count_kv"
            order = self._order_rows(shape[0], count)
        return GgufWeight(
            name=f"{own}.{kind}",
            shape=shape[::-1] if transposed else shape,
            parts={},
            settings={},
            rows=tensor.rows,
            decode=self._find_decoder(tensor),
            order=order,
            transposed=transposed,
        )

    def _find_decoder(self, tensor: GgufTensor) -> Callable[[Any], Any]:
        from gguf.quants import dequantize

        kind = tensor.kind

        def decode(data: Any) -> Any:
            try:
                return dequantize(data, kind)
            except NotImplementedError:
                raise ValueError(
                    f"{self.path}: {tensor.name} has the type {kind.name}, which the gguf package "
                    "does not decode"
                ) from None

        return decode

    def _decode(self, tensor: GgufTensor) -> Tensor:
        stored = tensor.rows.read(0, tensor.rows.shape[0])
        return torch.from_numpy(self._find_decoder(tensor)(stored)).flatten()

    def _order_rows(self, rows: int, count: str) -> Tensor:
        """Returns the file's row for each row of queries or keys.

        A head's feature t · D/2 + i is stored as 2i + t.
        """
        heads = self._read_number(f"attention.{count}") or self._read_number("attention.head_count")
        if not heads or rows % (2 * heads):
            raise ValueError(f"{self.path}: {rows} rows of queries or keys are not {heads} heads")
        numbers = torch.arange(rows).view(heads, rows // heads // 2, 2)
        return numbers.transpose(1, 2).reshape(-1)

    def _read_number(self, key: str) -> int | None:
        value = self.values.get(f"{self.prefix}.{key}")
        return value if type(value) is int else None

    def _read_config(
        self, weights: Mapping[str, QuantizedWeight], factors: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        architecture = self.architecture
        config: dict[str, Any] = {
            "architectures": [architecture.class_name],
            "model_type": architecture.model_type,
            **architecture.constants,
        }
        for key, own in architecture.keys.items():
            value = self.values.get(f"{self.prefix}.{key}")
            if value is None:
                continue
            if type(value) not in (int, float):
                raise ValueError(
                    f"{self.path}: {self.prefix}.{key}={describe(value)} must be one number"
                )
            # Numbers are stored in fp32: 1e-05 would become 9.999999747378752e-06.
            config[own] = float(f"{value:.7g}") if type(value) is float else value
        for key, own in _TOKENS.items():
            value = self.values.get(key)
            if type(value) is int:
                config[own] = value
        words = weights.get(f"{architecture.names['token_embd']}.weight")
        if words is None:
            raise ValueError(f"{self.path} has no token_embd.weight")
        config["vocab_size"] = words.shape[0]
        config["tie_word_embeddings"] = "lm_head.weight" not in weights
        for key, name in architecture.flags.items():
            config[key] = name in weights
        if architecture.is_rotary:
            self._read_rope(config, factors)
        elif factors:
            raise ValueError(f"{self.path} scales rotary positions, but {self.prefix} has none")
        return config

    def _read_rope(self, config: dict[str, Any], factors: Mapping[str, Tensor]) -> None:
        """Adds the keys of the rotation to a configuration."""
        theta = self.values.get(f"{self.prefix}.rope.freq_base", 10000.0)
        if type(theta) not in (int, float):
            raise ValueError(f"{self.path}: rope.freq_base={describe(theta)} must be a number")
        theta = float(f"{theta:.7g}")
        config["rope_theta"] = theta
        kind = self.values.get(f"{self.prefix}.rope.scaling.type", "none")
        factor = self.values.get(f"{self.prefix}.rope.scaling.factor")
        original = self._read_number("rope.scaling.original_context_length")
        if "rope_freqs" in factors:
            config["rope_scaling"] = self._find_llama3(theta, factors["rope_freqs"])
            return
        if "rope_factors_long" in factors or "rope_factors_short" in factors:
            config["rope_scaling"] = {
                "rope_type": "longrope",
                "long_factor": factors["rope_factors_long"].tolist(),
                "short_factor": factors["rope_factors_short"].tolist(),
            }
            if original is not None:
                config["original_max_position_embeddings"] = original
            head_size = config["hidden_size"] // config["num_attention_heads"]
            rotated = self._read_number("rope.dimension_count") or head_size
            config["partial_rotary_factor"] = rotated / head_size
            return
        if kind in ("none", "longrope") and factor in (None, 0.0, 1.0):
            return
        if kind not in ("linear", "yarn") or type(factor) is not float:
            raise ValueError(
                f"{self.path} scales the rotation by {describe(kind)} and {describe(factor)}; name "
                "the model's config.json by --config"
            )
        config["rope_scaling"] = {"rope_type": kind, "factor": factor}
        if kind == "yarn" and original is not None:
            config["rope_scaling"]["original_max_position_embeddings"] = original

    def _find_llama3(self, theta: float, factors: Tensor) -> dict[str, Any]:
        """Returns Llama 3.1's scaling, whose divisors of the frequencies are these factors.

        Raises:
            ValueError: They are those of another scaling.
        """
        factor = float(factors.max())
        size = 2 * len(factors)
        low = _LLAMA3["low_freq_factor"]
        high = _LLAMA3["high_freq_factor"]
        original = _LLAMA3["original_max_position_embeddings"]
        wanted: list[float] = []
        for pair in range(len(factors)):
            wavelength = 2 * math.pi * theta ** (2 * pair / size)
            smooth = (original / wavelength - low) / (high - low)
            if wavelength < original / high:
                wanted.append(1.0)
            elif wavelength > original / low:
                wanted.append(factor)
            else:
                wanted.append(1 / ((1 - smooth) / factor + smooth))
        if not torch.allclose(factors, torch.tensor(wanted), rtol=1e-4):
            raise ValueError(
                f"{self.path} scales the rotation by factors that are not Llama 3.1's; name the "
                "model's config.json by --config"
            )
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
