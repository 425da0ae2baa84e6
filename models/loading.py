"""Builds models from checkpoints: Hugging Face folders and shardzoo's own, for any tensor-parallel size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..mpu import ParallelMesh, gather_from_tp, initialize, materialize, tp_rank, tp_size
from .auto import as_config, build_on_meta, config_from_dict, read_config
from .common.config import ModelConfig
from .common.name_map import NameMap
from .common.parallel_config import ParallelConfig
from .files import MANIFEST, StoredTensor, huggingface_tensors, native_tensors
from .glm.legacy import legacy_config, legacy_files, place_legacy, read_ranks
from .placement import Placement, place_huggingface, place_native
from .reading import TensorReader
from .registry import family


def from_pretrained(
    path: str | Path,
    mesh: ParallelMesh | None = None,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | str = "cpu",
    config: ModelConfig | dict[str, Any] | str | None = None,
    parallel_config: ParallelConfig | None = None,
    new: Sequence[str] = (),
    seed: int = 1234,
) -> nn.Module:
    """The model of a folder, this rank's part of it under a mesh, in evaluation mode as transformers returns it.

    path: a Hugging Face folder (`model.safetensors`, `pytorch_model.bin`, or several files with their index) or a
        shardzoo folder (`manifest.json`), written by any number of ranks, or a checkpoint of the original GLM by its
        authors or FlagAI (`glm.legacy`). Nothing is downloaded.
    dtype: of the parameters; by default the stored one.
    config: instead of the folder's `config.json`, e.g. to choose another head.
    new: modules whose parameters are drawn from `seed`, whatever the folder has of them: `("classifier",)`, with a
        `config` of that architecture, puts a classifier on a language model.

    A rank reads its own part of each tensor, and an equal share of the replicated ones, which the ranks exchange. So
    each replica reads each byte once, and memory holds the rank's parameters and little more. Raises `ValueError`
    naming the tensors that are missing, that the model does not have, or whose shapes or values do not fit.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{path} is no folder; download the checkpoint first, models are only read from disk")
    repeats: list[Placement] = []
    if not (folder / MANIFEST).exists() and (files := legacy_files(folder)):
        if new:
            raise ValueError(f"{path} is a checkpoint of the original GLM, which has no other heads; leave new out")
        model, placements = _legacy(files, None if config is None else as_config(config), mesh, parallel_config)
    else:
        values = read_config(folder / "config.json") if config is None else {}
        settings = config_from_dict(values) if config is None else as_config(config)
        if (folder / MANIFEST).exists():
            model, placements = _native(folder, settings, mesh, parallel_config, new)
        else:
            model, placements, repeats = _huggingface(folder, values, settings, mesh, parallel_config, new)
    stored = [part.tensor.dtype for placement in placements for part in placement.parts if part.tensor.dtype]
    if dtype is None:
        dtype = stored[0]
        for other in stored:
            dtype = torch.promote_types(dtype, other)
    materialize(model, device, dtype)
    _load(model, placements, repeats, mesh)
    _tie_equal(model, mesh)
    for name in new:
        initialize(model.get_submodule(name), cast(Any, model).init_weights, seed, mesh, prefix=name)
    return model.eval()


def _names_of(model: nn.Module, new: Sequence[str]) -> set[str]:
    """The parameters of the modules that are drawn anew. ValueError for a module that the model does not have."""
    modules = dict(model.named_modules())
    for name in new:
        if name not in modules:
            children = ", ".join(child for child, _ in model.named_children())
            raise ValueError(f"new names the module {name!r}, which the model does not have; it has {children}")
    return {f"{module}.{name}" for module in new for name, _ in modules[module].named_parameters()}


def _native(folder: Path, config: ModelConfig, mesh, parallel_config, new) -> tuple[nn.Module, list[Placement]]:
    ranks = [{tensor.name: tensor for tensor in tensors} for tensors in native_tensors(folder)]
    own = {entry.native for entry in _untied_entries(config)}
    if own:
        config = config.with_changes(tie_word_embeddings=not own & ranks[0].keys())
    model = build_on_meta(config, mesh, parallel_config)
    absent = _names_of(model, new)
    if new:
        name_map: NameMap = family(config.model_type).name_map
        heads = {entry.native for entry in name_map.entries if "{i}" not in entry.native}
        absent |= heads - {name for name, _ in model.named_parameters()}
    return model, place_native(model, ranks, absent)


def _legacy(files: list[Path], config: ModelConfig | None, mesh, parallel_config) -> tuple[nn.Module, list[Placement]]:
    ranks = read_ranks(files)
    model = build_on_meta(config or legacy_config(files, ranks), mesh, parallel_config)
    return model, place_legacy(model, ranks)


def _huggingface(
    folder: Path, values: Mapping[str, Any], config: ModelConfig, mesh, parallel_config, new
) -> tuple[nn.Module, list[Placement], list[Placement]]:
    """The model on meta, its placements, and those of tensors that must repeat parameters."""
    tensors = {}
    for tensor in huggingface_tensors(folder):
        if tensor.name in tensors:
            raise ValueError(f"{tensor} is also in {tensors[tensor.name].path}")
        tensors[tensor.name] = tensor
    name_map: NameMap = family(config.model_type).name_map
    untied = {name for entry in _untied_entries(config) for name in entry.stored_names()}
    if untied:
        # The files know better than the flag, which some writers always set; see `T5Config.from_dict`.
        is_stored = any(name_map.todays_name(name, untied) in untied for name in tensors)
        says_untied = values.get("tie_word_embeddings") is False
        config = config.with_changes(tie_word_embeddings=not (is_stored or says_untied))
    model = build_on_meta(config, mesh, parallel_config)
    absent = _names_of(model, new)
    match = name_map.match((name for name, _ in model.named_parameters() if name not in absent), tensors)
    placements = place_huggingface(model, match, tensors)
    return model, placements, _repeats(match.aliases, match.entries, tensors, placements)


def _repeats(aliases, entries, tensors: Mapping[str, StoredTensor], placements: list[Placement]) -> list[Placement]:
    """Placements by which the stored copies of tied tensors are compared with the parameters."""
    by_stored = {entry.stored_names(): placement for placement in placements for entry in [entries[placement.name]]}
    repeats = []
    for alias, kept in aliases.items():
        placement, tensor = by_stored.get((kept,)), tensors[alias]
        if placement is None:
            continue
        (part,) = placement.parts
        if tensor.shape != part.tensor.shape or tensor.dtype is None:
            raise ValueError(f"{tensor} has shape {list(tensor.shape)}, but must repeat {part.tensor}")
        repeats.append(replace(placement, parts=(replace(part, tensor=tensor),)))
    return repeats


def _untied_entries(config: ModelConfig):
    """Entries of the family for parameters that only an untied model has."""
    name_map: NameMap = family(config.model_type).name_map
    names = set(name_map.untied_names())
    return [entry for entry in name_map.entries if names & set(entry.stored_names())]


@torch.no_grad()
def _load(model: nn.Module, placements: list[Placement], repeats: list[Placement], mesh: ParallelMesh | None) -> None:
    parameters = dict(model.named_parameters())
    rank, size = tp_rank(mesh), tp_size(mesh)
    shares: dict[str, Tensor] = {}
    problem = ""
    try:
        with TensorReader() as reader:
            for placement in placements:
                if placement.shard is None:
                    shares[placement.name] = _read_share(reader, placement, parameters[placement.name], rank, size)
                else:
                    _read_split(reader, placement, parameters[placement.name], rank, size)
            for repeat in repeats:
                _check_repeat(reader, repeat, parameters[repeat.name], rank, size)
    except (OSError, ValueError) as error:
        problem = str(error)
    if any_rank(problem != "", mesh):  # before the exchange, in which a rank that stopped would be waited for
        raise ValueError(problem or "another rank could not read its part of the checkpoint")
    for name, share in shares.items():
        parameter = parameters[name]
        whole = gather_from_tp(share.to(exchange_device(mesh)), mesh, dim=0)
        parameter.copy_(whole[: parameter.numel()].view(parameter.shape))


def any_rank(condition: bool, mesh: ParallelMesh | None) -> bool:
    """Whether it holds on any tensor-parallel rank; the same answer on all."""
    return bool(gather_from_tp(torch.tensor([float(condition)], device=exchange_device(mesh)), mesh).any())


def exchange_device(mesh: ParallelMesh | None) -> str:
    """Where tensors must be for the ranks to exchange them, wherever the parameters are."""
    return "cpu" if mesh is None else mesh.device_mesh.device_type


def _read_share(reader: TensorReader, placement: Placement, parameter: Tensor, rank: int, size: int) -> Tensor:
    """An equal share of a replicated parameter's elements, the last one filled up, in the parameter's type."""
    (part,) = placement.parts
    if part.transposed:
        raise ValueError(f"{placement.name} is replicated and stored transposed, which no family does")
    total = parameter.numel()
    length = -(-total // size)
    share = torch.zeros(length, dtype=parameter.dtype)
    start, stop = min(rank * length, total), min((rank + 1) * length, total)
    share[: stop - start] = reader.flat(part.tensor, start, stop)
    return share


def _read_split(reader: TensorReader, placement: Placement, parameter: Tensor, rank: int, size: int) -> None:
    filled = 0
    for part, start, stop, local in placement.wanted(rank, size):
        width = stop - start
        own = parameter.narrow(placement.dim, local, width)
        own, dim = (own.t(), 1 - placement.dim) if part.transposed else (own, placement.dim)
        for rows, chunk in reader.chunks(part.tensor, dim, start, stop):
            own[rows].copy_(chunk)
        filled += width
    length = parameter.shape[placement.dim]
    if filled < length:  # padding of the vocabulary
        parameter.narrow(placement.dim, filled, length - filled).zero_()


def _check_repeat(reader: TensorReader, placement: Placement, parameter: Tensor, rank: int, size: int) -> None:
    """ValueError unless the stored copy of a tied parameter has this rank's values."""
    for part, start, stop, local in placement.wanted(rank, size):
        own = parameter.narrow(placement.dim, local, stop - start)
        for rows, chunk in reader.chunks(part.tensor, placement.dim, start, stop):
            if not torch.equal(own[rows], chunk.to(own.device, own.dtype)):
                raise ValueError(
                    f"{part.tensor} must repeat {placement.name}, with which the model ties it, but differs"
                )


def _tie_equal(model: Any, mesh: ParallelMesh | None) -> None:
    """Shares the output head's parameter with the embedding where a file stores equal tensors for both."""
    name_map: NameMap = family(model.config.model_type).name_map
    kept_as = dict(name_map.aliases)
    natives = {entry.stored_names(): entry.native for entry in name_map.entries}
    parameters = dict(model.named_parameters())
    for entry in _untied_entries(model.config):
        own = parameters.get(entry.native)
        if own is None:
            continue
        (stored,) = entry.stored_names()
        shared = parameters[natives[(kept_as[stored],)]]
        if any_rank(not torch.equal(own, shared), mesh):
            continue
        owner, _, attribute = entry.native.rpartition(".")
        setattr(model.get_submodule(owner), attribute, shared)
        model.config = model.config.with_changes(tie_word_embeddings=True)
