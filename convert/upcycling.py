"""Makes a mixture of experts of a dense model (Komatsuzaki et al. 2023, "Sparse Upcycling",
arXiv:2212.05055).

Every expert begins as a copy of the dense MLP, and the router is new. The weights of a token's
experts add up to 1, so the mixture's first forward pass computes what the dense model does. Tensors
are copied a few megabytes at a time, from file to file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.checkpoint import open_checkpoint
from ..checkpoint.dtypes import torch_name
from ..checkpoint.folder_files import CONFIG, list_auxiliary_files
from ..checkpoint.stored_tensor import StoredTensor
from ..checkpoint.tensor_reader import TensorReader
from ..files.working_copies import find_source, naming_urls
from ..models.auto import build_on_meta, config_from_dict
from ..models.config import ModelConfig
from ..models.huggingface import LARGEST_FILE, plan_weight_files
from ..models.name_map import NameEntry
from ..models.registry import FAMILIES, family
from ..mpu.initialization import parameter_seed
from .destination import Destination
from .streams import copy_pieces, encode_texts, write_folder

# The experts' parameter -> the dense MLP's.
_COPIED = {".mlp.experts.gate_up": ".mlp.gate_up.weight", ".mlp.experts.down": ".mlp.down.weight"}
_ROUTER = ".mlp.router.weight"


@dataclass(frozen=True)
class Upcycling:
    """What becomes of which tensor.

    Attributes:
        config: The mixture's configuration.
        copied: Name of a tensor of the mixture -> the dense tensor that it is a copy of.
        routers: Name of a tensor of the mixture -> its parameter's name and its type.
    """

    config: ModelConfig
    copied: Mapping[str, StoredTensor]
    routers: Mapping[str, tuple[str, str]]

    def list_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the types and shapes of the mixture's tensors, by name."""
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, tensor in self.copied.items():
            shapes[name] = (tensor.dtype, tensor.shape)
        for name, (_, dtype) in self.routers.items():
            shapes[name] = (dtype, self.router_shape)
        return dict(sorted(shapes.items()))

    @property
    def router_shape(self) -> tuple[int, int]:
        config: Any = self.config
        return (config.expert_count, config.hidden_size)

    def read_pieces(self, name: str, reader: TensorReader, seed: int) -> Iterator[Tensor]:
        """Yields the values of a tensor of the mixture."""
        if name in self.copied:
            yield from copy_pieces(self.copied[name], reader)
            return
        parameter, dtype = self.routers[name]
        generator = torch.Generator().manual_seed(parameter_seed(seed, parameter))
        config: Any = self.config
        values = torch.randn(self.router_shape, generator=generator) * config.initializer_range
        yield values.to(getattr(torch, torch_name(dtype)))


def make_config(dense: ModelConfig, experts: int, top_k: int) -> ModelConfig:
    """Returns the configuration of the mixture that a dense model becomes.

    Raises:
        ValueError: There is no family of mixtures with this model's blocks, or the numbers do not
            fit one another.
    """
    found = {
        original: (name, describe)
        for name in FAMILIES
        for original, describe in family(name).upcycled.items()
    }
    if dense.model_type not in found:
        raise ValueError(
            f"{dense.model_type} has no family of mixtures whose first forward pass would equal "
            f"its own; upcycle one of {', '.join(found)}"
        )
    target, describe = found[dense.model_type]
    values = describe(dense, experts, top_k)
    architecture = str(values["architectures"][0])
    head = architecture[len(_find_stem(dense.model_type)) :]
    values["model_type"] = target
    values["architectures"] = [_find_stem(target) + head]
    return config_from_dict(values)


def _find_stem(model_type: str) -> str:
    """Returns what the names of a family's architectures begin with."""
    for name in family(model_type).architectures:
        if name.endswith("ForCausalLM"):
            return name.removesuffix("ForCausalLM")
    raise ValueError(f"{model_type} has no causal language model")


def plan_upcycling(folder: Path, experts: int, top_k: int) -> Upcycling:
    """Finds what becomes of each tensor of a dense Hugging Face folder."""
    checkpoint = open_checkpoint(folder)
    if checkpoint.kind != "huggingface":
        raise ValueError(
            f"{folder} is a {checkpoint.description}; Hugging Face folders are upcycled, so merge "
            "it first"
        )
    dense = config_from_dict(dict(checkpoint.config or {}))
    mixture = make_config(dense, experts, top_k)
    stored = checkpoint.ranks[0]
    entries = _resolve(dense)
    match = family(dense.model_type).find_names(dense).match(entries, stored)
    copied: dict[str, StoredTensor] = {}
    routers: dict[str, tuple[str, str]] = {}
    for native, entry in _resolve(mixture).items():
        if native.endswith(_ROUTER):
            dense_name = native.replace(_ROUTER, _COPIED[".mlp.experts.down"])
            [source] = entries[dense_name].stored_names()
            routers[entry.stored_names()[0]] = (native, stored[match.sources[source]].dtype)
            continue
        dense_name = native
        for ending, original in _COPIED.items():
            if native.endswith(ending):
                dense_name = native.removesuffix(ending) + original
        sources = entries[dense_name].stored_names()
        # The names of all experts follow one another.
        for number, name in enumerate(entry.stored_names()):
            source = sources[number % len(sources)]
            copied[name] = stored[match.sources[source]]
    return Upcycling(mixture, copied, routers)


def _resolve(config: ModelConfig) -> dict[str, NameEntry]:
    """Returns the entry of each parameter of a configuration's model."""
    names = [name for name, _ in build_on_meta(config, None).named_parameters()]
    entries = family(config.model_type).find_names(config).resolve(names)
    return dict(zip(names, entries, strict=True))


@naming_urls()
def upcycle(
    source: str | Path,
    destination: str | Path,
    experts: int,
    top_k: int,
    *,
    seed: int = 0,
    largest_file: int = LARGEST_FILE,
    report: Callable[[int, int], None] | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> tuple[int, int, int]:
    """Writes a folder with a mixture of experts from a dense one's.

    Args:
        source: A Hugging Face folder.
        destination: The folder to write.
        experts: The number of experts of each layer.
        top_k: The number of experts of a token.
        seed: Of the routers' weights, which are drawn as those of a new model.
        largest_file: Bytes of weights in one file.
        report: Called with the bytes done and the bytes in all.
        overwrite: Whether to replace a destination that exists.
        resume: Whether to go on with an interrupted conversion.

    Returns:
        The number of tensors, their bytes, and the bytes that were kept of an interrupted run.

    Raises:
        ValueError: The source is damaged or no dense model with a family of mixtures, the
            destination exists, or its disk is too full.
    """
    source = find_source(source) or Path(source)
    place = Destination(destination)
    place.check(source, overwrite=overwrite, resume=resume)
    plan = plan_upcycling(source, experts, top_k)
    files, texts = plan_weight_files(plan.list_shapes(), largest_file)
    targets = [tensor for file in files for tensor in file.tensors.values()]
    total = sum(tensor.nbytes for tensor in targets)
    if resume and place.is_complete():
        place.tidy()
        return len(targets), total, total
    origins = [f"{tensor!r}{tensor.file_state}" for tensor in plan.copied.values()]
    state = f"{plan.config.to_dict()!r}{seed}{targets!r}{''.join(origins)}"
    fingerprint = hashlib.sha256(state.encode()).hexdigest()

    def list_contents() -> dict[str, bytes | Path]:
        contents: dict[str, bytes | Path] = {
            path.name: path for path in list_auxiliary_files(source)
        }
        contents[CONFIG] = (json.dumps(plan.config.to_dict(), indent=2) + "\n").encode()
        contents.update(encode_texts(texts))
        return contents

    kept = write_folder(
        source,
        place,
        files,
        fingerprint,
        lambda name, reader: plan.read_pieces(name, reader, seed),
        list_contents,
        report,
        overwrite=overwrite,
    )
    return len(targets), total, kept
