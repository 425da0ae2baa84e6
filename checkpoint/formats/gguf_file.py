"""Reads GGUF files, llama.cpp's format of a model in one file.

The `gguf` package decodes the blocks of numbers. The families tell what the
names of tensors and the keys of the header mean in Hugging Face's folders. After llama.cpp's
`convert_hf_to_gguf.py` (https://github.com/ggml-org/llama.cpp) and the description of the format
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md):

- Rows of some models' queries and keys are stored so that the features that rotate together are
  neighbors.
- Matrices are stored as [out, in], those of all experts of a layer as one tensor.
- The weights of Gemma's norms are stored plus one.
- Scalings of rotary positions are keys, or tensors of factors (Llama 3.1, LongRoPE).
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (the package is an extra, and has no types)

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ...files.printable import describe
from ...files.safe_paths import checked_file
from ..tensor_reader import TensorReader
from .gguf_header import GgufTensor, StoredRows, read_gguf_header
from .quantized import PIECE_ELEMENTS, QuantizedFolder, QuantizedWeight, RowReader

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
        offset: What was added to the numbers of the file.
    """

    method: ClassVar[str] = "GGUF"

    rows: StoredRows
    decode: Callable[[Any], Any]
    order: Tensor | None = None
    transposed: bool = False
    offset: float = 0.0

    def open(self, reader: TensorReader) -> RowReader:
        if self.transposed:
            whole = torch.from_numpy(self.decode(self.rows.read(0, self.rows.shape[0]))).t()

            def read_columns(start: int, stop: int) -> Tensor:
                return whole[start:stop]

            return read_columns

        def read_rows(start: int, stop: int) -> Tensor:
            if self.order is None:
                found = torch.from_numpy(self.decode(self.rows.read(start, stop)))
                return found - self.offset if self.offset else found
            # The rows of a head change places, so those that are wanted are near one another.
            wanted = self.order[start:stop].numpy()
            first = int(wanted.min())
            found = self.rows.read(first, int(wanted.max()) + 1)
            return torch.from_numpy(self.decode(found[wanted - first]))

        return read_rows


@dataclass(frozen=True)
class StoredMatrices:
    """The matrices of a layer's experts in the file, [experts, out, in], or their biases, [experts, out].

    Attributes:
        rows: The blocks of each row.
        decode: Returns the fp32 numbers of blocks.
        block: How many numbers a block has.
        size: How many entries of the rows a block has.
    """

    rows: StoredRows
    decode: Callable[[Any], Any]
    block: int
    size: int

    def read(self, number: int) -> Tensor:
        """Returns the numbers of one of them in fp32."""
        return torch.from_numpy(self.decode(self.rows.read(number, number + 1)[0]))


@dataclass(frozen=True)
class GgufExperts(QuantizedWeight):
    """The matrices of a layer's experts as one tensor, [experts, in, out], or biases, [experts, out].

    Attributes:
        stored: The tensor of the file; or two, whose features alternate.
    """

    method: ClassVar[str] = "GGUF"

    stored: tuple[StoredMatrices, ...]

    def open(self, reader: TensorReader) -> RowReader:
        def read_experts(start: int, stop: int) -> Tensor:
            return torch.stack([torch.cat(list(self._expert(e))) for e in range(start, stop)])

        return read_experts

    def pieces(self, reader: TensorReader, dtype: torch.dtype) -> Iterator[Tensor]:
        for expert in range(self.shape[0]):
            for piece in self._expert(expert):
                yield piece.to(dtype).contiguous()

    def _expert(self, expert: int) -> Iterator[Tensor]:
        """Yields consecutive parts of an expert in fp32.

        What is stored of the expert is in memory, since each row of a matrix is a stored column.
        """
        if len(self.shape) == 2:
            biases = [one.read(expert) for one in self.stored]
            yield torch.stack(biases, -1).flatten()
            return
        packed = [one.rows.read(expert, expert + 1)[0] for one in self.stored]
        columns, features = self.shape[1:]
        block = math.lcm(*(one.block for one in self.stored))
        step = max(1, PIECE_ELEMENTS // (block * features)) * block
        for start in range(0, columns, step):
            stop = min(start + step, columns)
            some: list[Tensor] = []
            for one, data in zip(self.stored, packed, strict=True):
                entries = slice(start // one.block * one.size, stop // one.block * one.size)
                some.append(torch.from_numpy(one.decode(data[:, entries])))
            yield torch.stack(some, 1).flatten(0, 1).t()


@dataclass(frozen=True)
class GgufLatent(QuantizedWeight):
    """The matrix that makes keys and values of a latent vector, [heads · (keys + values), latent].

    Attributes:
        keys: Its rows for each head's keys, stored as [heads, latent, keys].
        values: Those for each head's values, stored as [heads, values, latent].
    """

    method: ClassVar[str] = "GGUF"

    keys: StoredMatrices
    values: StoredMatrices

    def open(self, reader: TensorReader) -> RowReader:
        def read_rows(start: int, stop: int) -> Tensor:
            return torch.cat([self._head(head) for head in range(self.keys.rows.shape[0])])[
                start:stop
            ]

        return read_rows

    def pieces(self, reader: TensorReader, dtype: torch.dtype) -> Iterator[Tensor]:
        for head in range(self.keys.rows.shape[0]):
            yield self._head(head).to(dtype)

    def _head(self, head: int) -> Tensor:
        return torch.cat([self.keys.read(head).t(), self.values.read(head)])


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
class GgufContents:
    """What the facts about an architecture are read from.

    Attributes:
        values: The keys of the header, those of the architecture without its name.
        tensors: The names of the tensors.
    """

    values: Mapping[str, Any]
    tensors: frozenset[str]

    def find_number(self, key: str) -> int | None:
        value = self.values.get(key)
        return value if type(value) is int else None

    def number(self, key: str, default: int = 0) -> int:
        found = self.find_number(key)
        return default if found is None else found

    def array(self, key: str) -> tuple[Any, ...]:
        """Returns an array of a few numbers; an empty one if there is none."""
        value = self.values.get(key)
        return cast(tuple[Any, ...], value) if isinstance(value, tuple) else ()


@dataclass(frozen=True)
class GgufArchitecture:
    """How GGUF spells the models of a family.

    Attributes:
        name: Its `general.architecture`.
        model_type: The family's name in `config.json`.
        class_name: The class of transformers whose weights it holds.
        names: Name of a tensor, with or without its kind -> Hugging Face's; {i} is the number of
            the block. If there is an {e}, the tensor holds the matrices of all experts, and {e} is
            the number of one.
        keys: Key of the header behind the architecture's name -> key of `config.json`.
        rotates_neighbors: Whether rows of queries and keys are permuted.
        transposed: Tensors whose matrix is stored transposed.
        single_rows: Tensors of one row that are stored without this dimension.
        alternating: Hugging Face's name of a tensor of all experts -> the one or two tensors whose
            features it has in turn, and whose matrices are stored transposed.
        latent: Hugging Face's name of the matrix that makes keys and values of a latent vector, if
            it may be stored as two tensors, `blk.attn_k_b` and `blk.attn_v_b`.
        norm_offset: What is added to the weights of norms.
        is_rotary: Whether the model has rotary positions.
        rope_constants: Keys of a scaled rotation that the header does not tell.
        constants: Keys of `config.json` that the header does not tell.
        flags: Key of `config.json` -> the tensor of Hugging Face whose presence it tells.
        find_keys: Returns further keys of `config.json`.
        is_meant: Whether a file of this name has this family; where several families have one name,
            the first that says so is taken.
    """

    name: str
    model_type: str
    class_name: str
    names: Mapping[str, str]
    keys: Mapping[str, str]
    rotates_neighbors: bool = False
    transposed: tuple[str, ...] = ()
    single_rows: tuple[str, ...] = ()
    alternating: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])
    latent: str | None = None
    norm_offset: float = 0.0
    is_rotary: bool = True
    rope_constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    find_keys: Callable[[GgufContents], Mapping[str, Any]] | None = None
    is_meant: Callable[[GgufContents], bool] | None = None


_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
_LATENT = frozenset({"blk.attn_k_b.weight", "blk.attn_v_b.weight"})
# Tensors of factors that the rotation is scaled by; they become keys of `config.json`.
_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
# Llama 3.1's constants; the file holds only the factors that follow from them.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def open_gguf(path: Path, architectures: Sequence[GgufArchitecture]) -> GgufFile:
    """Reads the header of a GGUF file.

    Args:
        path: The file.
        architectures: Those that are read.

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
    contents = GgufContents(
        {key.removeprefix(f"{name}."): value for key, value in header.values.items()},
        frozenset(tensor.name for tensor in header.tensors),
    )
    # Those that must be meant come first.
    for architecture in sorted(architectures, key=lambda one: one.is_meant is None):
        if architecture.name == name and (
            architecture.is_meant is None or architecture.is_meant(contents)
        ):
            return _Reading(path, architecture, contents, header.tensors).read()
    known = ", ".join(sorted({architecture.name for architecture in architectures}))
    raise ValueError(
        f"{path} has a model of the architecture {describe(name)}; those that are read are {known}"
    )


@dataclass(frozen=True)
class _Reading:
    """The parts of one file while it is read."""

    path: Path
    architecture: GgufArchitecture
    contents: GgufContents
    tensors: Sequence[GgufTensor]

    @property
    def values(self) -> Mapping[str, Any]:
        return self.contents.values

    def read(self) -> GgufFile:
        weights: dict[str, QuantizedWeight] = {}
        # Hugging Face's name of a joined tensor, and the number of its block -> its parts.
        joined: dict[tuple[str, str], dict[str, GgufTensor]] = {}
        factors: dict[str, Tensor] = {}
        described: list[str] = []
        for tensor in self.tensors:
            described.append(f"{tensor.name} {tensor.kind} {list(tensor.shape)}")
            stem, _, kind = tensor.name.rpartition(".")
            if stem in _FACTORS:
                factors[stem] = self._decode(tensor)
                continue
            key, block = self._find_key(tensor, stem)
            if block and int(block) >= self.layers:
                continue  # a layer that predicts further tokens
            whole = self._find_joined(f"{key}.{kind}")
            if whole is not None:
                joined.setdefault((whole, block), {})[f"{key}.{kind}"] = tensor
                continue
            for weight in self._find_weights(tensor, key, block, kind):
                if weight.name in weights:
                    raise ValueError(f"{self.path} has the tensor {tensor.name} twice")
                weights[weight.name] = weight
        for (whole, block), parts in joined.items():
            name = whole.replace("{i}", block)
            if whole == self.architecture.latent:
                weights[name] = self._join_latent(name, parts)
            else:
                weights[name] = self._join_experts(
                    name, parts, self.architecture.alternating[whole]
                )
        config = self._read_config(weights, factors)
        state = self.path.stat()
        identity = f"{self.path.name} {state.st_size} {state.st_mtime_ns} {described} {config}"
        return GgufFile(QuantizedFolder(weights, {}), config, identity)

    def _find_key(self, tensor: GgufTensor, stem: str) -> tuple[str, str]:
        """Returns a tensor's name without its block and kind, and the number of the block."""
        block = _BLOCK.fullmatch(stem)
        if block is None:
            return stem, ""
        if int(block[2]) >= _MOST_LAYERS:
            raise ValueError(f"{self.path} has the tensor {tensor.name} of too many layers")
        return block[1] + block[3], str(int(block[2]))

    @property
    def layers(self) -> int:
        """The number of layers, without those behind them that predict further tokens."""
        layers = max(self.contents.number(key) for key in ("block_count", "decoder_block_count"))
        return (layers or _MOST_LAYERS) - self.contents.number("nextn_predict_layers")

    def _find_joined(self, key: str) -> str | None:
        """Returns Hugging Face's name of the tensor that a tensor is a part of."""
        if self.architecture.latent is not None and key in _LATENT:
            return self.architecture.latent
        for whole, parts in self.architecture.alternating.items():
            if key in parts:
                return whole
        return None

    def _find_weights(
        self, tensor: GgufTensor, key: str, block: str, kind: str
    ) -> Iterator[GgufWeight]:
        """Yields what a tensor is in Hugging Face's folders: one weight, or one of each expert."""
        names = self.architecture.names
        own = names.get(f"{key}.{kind}") or (f"{names[key]}.{kind}" if key in names else None)
        if own is None or kind not in ("weight", "bias"):
            raise ValueError(
                f"{self.path} has the tensor {tensor.name}, which no {self.architecture.name} that is read has"
            )
        own = own.replace("{i}", block)
        if "{e}" not in own:
            yield self._find_weight(tensor, own, key, kind)
            return
        if len(tensor.shape) != 3:
            raise ValueError(f"{self.path}: {tensor.name} must have the matrices of all experts")
        for expert in range(tensor.shape[0]):
            part = replace(tensor, shape=tensor.shape[1:], rows=tensor.rows.part(expert))
            yield self._find_weight(part, own.replace("{e}", str(expert)), key, kind)

    def _find_weight(self, tensor: GgufTensor, own: str, key: str, kind: str) -> GgufWeight:
        architecture = self.architecture
        shape = tensor.shape
        rows = tensor.rows
        if key in architecture.single_rows and len(shape) == 1:
            shape = (1, *shape)
            rows = replace(rows, shape=(1, *rows.shape))
        transposed = key in architecture.transposed and kind == "weight"
        order = None
        if architecture.rotates_neighbors and key in ("blk.attn_q", "blk.attn_k"):
            count = "head_count" if key.endswith("_q") else "head_count_kv"
            order = self._order_rows(shape[0], count)
        return GgufWeight(
            name=own,
            shape=shape[::-1] if transposed else shape,
            parts={},
            settings={},
            rows=rows,
            decode=self._find_decoder(tensor),
            order=order,
            transposed=transposed,
            offset=architecture.norm_offset if own.endswith("norm.weight") else 0.0,
        )

    def _join_experts(
        self, name: str, found: Mapping[str, GgufTensor], wanted: Sequence[str]
    ) -> GgufExperts:
        """Returns the tensor of all experts of a layer, whose features are those of one or two in turn."""
        parts: list[GgufTensor] = []
        for key in wanted:
            if key not in found:
                raise ValueError(f"{self.path} has no tensor for {key} of {name}")
            parts.append(found[key])
        shape = parts[0].shape
        if len(shape) not in (2, 3) or any(part.shape != shape for part in parts):
            raise ValueError(f"{self.path}: the tensors of {name} have different shapes")
        features = len(parts) * shape[1]
        return GgufExperts(
            name=name,
            shape=(shape[0], features) if len(shape) == 2 else (shape[0], shape[2], features),
            parts={},
            settings={},
            stored=tuple(self._find_matrices(part) for part in parts),
        )

    def _join_latent(self, name: str, found: Mapping[str, GgufTensor]) -> GgufLatent:
        """Returns the matrix that makes keys and values of a latent vector."""
        keys, values = (found.get(f"blk.attn_{part}_b.weight") for part in "kv")
        if keys is None or values is None:
            raise ValueError(f"{self.path} has only one of the two parts of {name}")
        if (
            len(keys.shape) != 3
            or len(values.shape) != 3
            or ((keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]))
        ):
            raise ValueError(f"{self.path}: the two parts of {name} do not fit one another")
        heads, latent, rows = keys.shape
        return GgufLatent(
            name=name,
            shape=(heads * (rows + values.shape[1]), latent),
            parts={},
            settings={},
            keys=self._find_matrices(keys),
            values=self._find_matrices(values),
        )

    def _find_matrices(self, tensor: GgufTensor) -> StoredMatrices:
        block, size = 1, 1
        if tensor.rows.shape[-1] != tensor.shape[-1]:
            from gguf import GGML_QUANT_SIZES

            block, size = GGML_QUANT_SIZES[tensor.kind]
        return StoredMatrices(tensor.rows, self._find_decoder(tensor), block, size)

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
        heads = self.contents.find_number(f"attention.{count}") or self.contents.find_number(
            "attention.head_count"
        )
        if not heads or rows % (2 * heads):
            raise ValueError(f"{self.path}: {rows} rows of queries or keys are not {heads} heads")
        numbers = torch.arange(rows).view(heads, rows // heads // 2, 2)
        return numbers.transpose(1, 2).reshape(-1)

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
            value = self.values.get(key)
            if value is None:
                continue
            if type(value) not in (int, float, bool):
                raise ValueError(
                    f"{self.path}: {self.architecture.name}.{key}={describe(value)} must be one number"
                )
            # Numbers are stored in fp32: 1e-05 would become 9.999999747378752e-06.
            config[own] = float(f"{value:.7g}") if type(value) is float else value
        if self.contents.number("nextn_predict_layers"):
            config.update(num_hidden_layers=self.layers, num_nextn_predict_layers=0)
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
            raise ValueError(
                f"{self.path} scales rotary positions, but {self.architecture.name} has none"
            )
        if architecture.find_keys is not None:
            config.update(architecture.find_keys(self.contents))
        return config

    def _read_rope(self, config: dict[str, Any], factors: Mapping[str, Tensor]) -> None:
        """Adds the keys of the rotation to a configuration."""
        theta = self.values.get("rope.freq_base", 10000.0)
        if type(theta) not in (int, float):
            raise ValueError(f"{self.path}: rope.freq_base={describe(theta)} must be a number")
        theta = float(f"{theta:.7g}")
        config["rope_theta"] = theta
        kind = self.values.get("rope.scaling.type", "none")
        factor = self.values.get("rope.scaling.factor")
        original = self.contents.find_number("rope.scaling.original_context_length")
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
            rotated = self.contents.find_number("rope.dimension_count") or head_size
            config["partial_rotary_factor"] = rotated / head_size
            return
        if kind in ("none", "longrope") and factor in (None, 0.0, 1.0):
            return
        if kind not in ("linear", "yarn") or type(factor) is not float:
            raise ValueError(
                f"{self.path} scales the rotation by {describe(kind)} and {describe(factor)}; name "
                "the model's config.json by --config"
            )
        config["rope_scaling"] = {
            "rope_type": kind,
            "factor": factor,
            **self.architecture.rope_constants,
        }
        if kind == "yarn" and original is not None:
            config["rope_scaling"]["original_max_position_embeddings"] = original
        growth = self.values.get("rope.scaling.yarn_log_multiplier")
        if kind == "yarn" and type(growth) is float:
            # llama.cpp stores a tenth of it.
            scale = float(f"{10 * growth:.6g}")
            config["rope_scaling"].update(mscale=scale, mscale_all_dim=scale)

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
