"""Loads models from checkpoint folders of any supported format, for any tensor-parallel size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..checkpoint.checkpoint import open_checkpoint
from ..checkpoint.hub import find_model
from ..checkpoint.layout import ParameterPlacement, ParameterSpec
from ..checkpoint.stored_tensor import StoredTensor
from ..checkpoint.tensor_reader import TensorReader, check_digests, torch_dtype
from ..mpu import (
    ParallelMesh,
    VocabParallelHead,
    any_rank,
    gather_from_tp,
    initialize,
    materialize,
    tp_rank,
    tp_size,
)
from .auto import as_config, build_on_meta
from .config import ModelConfig
from .lora import load_adapter
from .mapping import (
    MappedCheckpoint,
    NativeModel,
    config_errors,
    have_same_bytes,
    map_checkpoint,
    read_model_config,
)
from .name_map import NameMap
from .parallel_config import ParallelConfig
from .pipeline import slice_pipeline_stage
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
    adapter: str | Path | None = None,
) -> nn.Module:
    """Loads the model of a checkpoint folder; under a mesh, this rank's part of it.

    The model is in evaluation mode, as transformers returns it. A rank reads its part of each split tensor and an equal
    share of each replicated tensor; the ranks then exchange their shares. So each replica reads each byte once, and a
    rank needs little more memory than its parameters. If the folder records sha256 digests, the ranks check all of
    them first, each rank an equal share.

    Args:
        path: A Hugging Face folder (`model.safetensors`, `pytorch_model.bin`, or several files with their index), a
            shardzoo folder (`manifest.json`) written by any number of ranks, or a folder of rank files of the original
            GLM, DeepSpeed or FlagAI; or `org/name[@revision]` on the Hugging Face Hub, of which it reads safetensors.
        mesh: The mesh over whose tensor-parallel ranks the model is split.
        dtype: The type of the parameters; by default the stored one.
        device: Where the parameters are.
        config: Used instead of the folder's `config.json`, for example to choose another head.
        parallel_config: How the model runs.
        new: Modules whose parameters are initialized from `seed`, even if the folder has values for them. For example,
            `("classifier",)` with a `config` of that architecture adds a classifier to a language model.
        seed: Determines the parameters of the new modules.
        adapter: peft's LoRA weights, a folder or a name on the Hub; `models.lora.merge_lora` merges them.

    Raises:
        ValueError: A file is damaged, or a tensor is missing, is unknown to the model, or has a wrong shape or digest.
            The message names the file and the tensor.
    """
    folder = find_model(path, "path")
    if not folder.is_dir():
        raise ValueError(
            f"{path} is not a folder, nor a name on the Hugging Face Hub: org/name[@revision]"
        )
    checkpoint = open_checkpoint(folder)
    given = None if config is None else as_config(config)
    # A stored head is first loaded into a separate parameter; _tie_equal ties it when both are in memory.
    # Of a pipeline, no stage may have both, so the stored bytes decide.
    in_memory = mesh is None or mesh.pp_size == 1
    settings = read_model_config(
        checkpoint, given, is_same=(lambda head, embedding: False) if in_memory else None
    )
    with config_errors():
        model: Any = build_on_meta(settings, mesh, parallel_config)
    absent = _absent_names(model, new)
    mapped = map_checkpoint(checkpoint, NativeModel.from_config(settings, model), absent)
    slice_pipeline_stage(model, mesh, parallel_config)
    dtypes = {
        torch_dtype(part.tensor)
        for place in mapped.layout.placements.values()
        for part in place.slices()
    }
    materialize(model, device, _promoted(dtypes) if dtype is None else dtype)
    _load(model, mapped, mesh)
    if in_memory:
        _tie_equal(model, mapped, mesh)
    for name in new:
        initialize(model.get_submodule(name), model.init_weights, seed, mesh, prefix=name)
    model.name_or_path = str(folder)  # transformers' name; the trainer finds the tokenizer there
    return _adapted(model, adapter).eval()


def check_pretrained(folder: Path) -> None:
    """Raises ValueError, as `from_pretrained` does, if tensors are damaged or do not fit. Keeps none in memory."""
    mapped = map_checkpoint(open_checkpoint(folder))
    _check_digests(mapped, mapped.layout.placements.values(), 0, 1)


def _adapted(model: nn.Module, adapter: str | Path | None) -> nn.Module:
    if adapter is not None:
        load_adapter(model, find_model(adapter, "adapter"))
    return model


def missing_modules(folder: Path, config: ModelConfig) -> list[str]:
    """Returns the modules of a model's head, other than that of the vocabulary, which a checkpoint does not store."""
    stored, name_map = open_checkpoint(folder).ranks[0], family(config.model_type).name_map
    model: Any = build_on_meta(config, None)

    def is_stored(module: str) -> bool:
        entries = [entry for entry in name_map.entries if entry.native.startswith(f"{module}.")]
        names = {name for entry in entries for name in (entry.native, *entry.stored_names())}
        return any(name_map.to_current_name(name, names) in names for name in stored)

    def predicts_words(module: str) -> bool:
        return any(
            isinstance(part, VocabParallelHead) for part in model.get_submodule(module).modules()
        )

    return [
        name
        for name in getattr(model, "head_modules", ())
        if not predicts_words(name) and not is_stored(name)
    ]


def _absent_names(model: nn.Module, new: Sequence[str]) -> set[str]:
    """Returns the names of parameters that are not read: those of `new` modules, and of heads that the model lacks.

    Raises ValueError if `new` names a module that the model does not have.
    """
    modules: dict[str, nn.Module] = dict(cast(Any, model).named_modules())
    for name in new:
        if name not in modules:
            children = ", ".join(child for child, _ in model.named_children())
            raise ValueError(
                f"new names the module {name!r}, which the model does not have; it has {children}"
            )
    absent = {
        f"{module}.{name}" for module in new for name, _ in modules[module].named_parameters()
    }
    if new:
        name_map: NameMap = family(cast(Any, model).config.model_type).name_map
        heads = {entry.native for entry in name_map.entries if "{i}" not in entry.native}
        absent |= heads - {name for name, _ in model.named_parameters()}
    return absent


def _promoted(dtypes: set[torch.dtype]) -> torch.dtype:
    """Returns a type that can represent the values of all these types."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    result = torch.bfloat16 if all(dtype.itemsize == 1 for dtype in dtypes) else None
    for dtype in sorted(dtypes, key=str):
        if (
            dtype.itemsize > 1
        ):  # torch does not promote 8-bit types, but any other type can represent their values
            result = dtype if result is None else torch.promote_types(result, dtype)
    assert result is not None
    return result


@torch.no_grad()
def _load(model: nn.Module, mapped: MappedCheckpoint, mesh: ParallelMesh | None) -> None:
    parameters = dict(model.named_parameters())
    specs = mapped.model.parameters
    rank, size = tp_rank(mesh), tp_size(mesh)
    shares: dict[str, Tensor] = {}
    problem = ""
    try:
        placements = {
            name: place for name, place in mapped.layout.placements.items() if name in parameters
        }
        _check_digests(mapped, placements.values(), rank, size)
        with TensorReader() as reader, TensorReader() as other:
            _check_zeros(reader, mapped)
            for name, placement in placements.items():
                if specs[name].shard is None:
                    shares[name] = _read_share(reader, placement, parameters[name], rank, size)
                else:
                    reader.fill(placement, specs[name].ranges(rank, size), parameters[name])
                if not mapped.digests:
                    _check_copies(reader, other, placement, specs[name], rank, size)
    except (OSError, ValueError) as error:
        problem = str(error)
    if any_rank(
        problem != "", mesh
    ):  # before the exchange, where the other ranks would wait for a failed one
        raise ValueError(problem or "another rank could not read its part of the checkpoint")
    for name, share in shares.items():
        parameter = parameters[name]
        whole = gather_from_tp(share.to(_exchange_device(mesh)), mesh, dim=0)
        parameter.copy_(whole[: parameter.numel()].view(parameter.shape))


def _check_digests(
    mapped: MappedCheckpoint, placements: Iterable[ParameterPlacement], rank: int, size: int
) -> None:
    """Raises ValueError if the digest of one of this rank's share of the tensors is not the recorded one."""
    tensors = {part.tensor for place in placements for part in place.slices()}
    tensors |= set(
        mapped.layout.extras.values()
    )  # every stage of a pipeline checks those of no parameter
    check_digests(sorted(tensors, key=lambda t: (t.file, t.offset)), mapped.digests, rank, size)


def _check_zeros(reader: TensorReader, mapped: MappedCheckpoint) -> None:
    """Raises ValueError if a stored tensor that the model does not add is not zero."""
    for name, tensor in mapped.layout.extras.items():
        if name in mapped.model.name_map.zeros and reader.flat(tensor, 0, prod(tensor.shape)).any():
            raise ValueError(
                f"{tensor} must be zero, because the zoo's models do not add it; such a checkpoint can be converted, "
                "but not loaded"
            )


def _exchange_device(mesh: ParallelMesh | None) -> str:
    """Returns the device on which the ranks exchange tensors; it may differ from that of the parameters."""
    return "cpu" if mesh is None else mesh.device_type


def _read_share(
    reader: TensorReader, placement: ParameterPlacement, parameter: Tensor, rank: int, size: int
) -> Tensor:
    """Reads this rank's share of a replicated parameter, in the parameter's type; the last share is padded."""
    start, stop, length = _share(parameter.numel(), rank, size)
    share = torch.zeros(length, dtype=parameter.dtype)
    share[: stop - start] = _flat(reader, placement, 0, start, stop)
    return share


def _flat(
    reader: TensorReader, placement: ParameterPlacement, copy: int, start: int, stop: int
) -> Tensor:
    """Returns elements [start, stop) of a flattened parameter, of which one copy is read."""
    parts = placement.copies[copy]
    if len(parts) == 1 and not parts[0].transposed:
        return reader.flat(parts[0].tensor, start, stop)
    whole = torch.empty(placement.shape, dtype=torch_dtype(parts[0].tensor))
    reader.fill(replace(placement, copies=(parts,)), [(0, placement.shape[placement.dim])], whole)
    return whole.view(-1)[start:stop]


def _share(total: int, rank: int, size: int) -> tuple[int, int, int]:
    """Returns the share [start, stop) of `rank` among `total` elements, and the length that shares are padded to."""
    length = -(-total // size)
    return min(rank * length, total), min((rank + 1) * length, total), length


def _check_copies(
    reader: TensorReader,
    other: TensorReader,
    placement: ParameterPlacement,
    spec: ParameterSpec,
    rank: int,
    size: int,
) -> None:
    """Raises ValueError unless this rank's part of a parameter has the same bytes in every stored copy."""
    for number, copy in enumerate(placement.copies[1:], 1):
        if spec.shard is None:
            start, stop, _ = _share(prod(placement.shape), rank, size)
            if not _same_bytes(
                _flat(reader, placement, 0, start, stop),
                _flat(other, placement, number, start, stop),
            ):
                raise _differs(placement, copy[0].tensor)
            continue
        ranges = spec.ranges(rank, size)
        if [(part.ranges, part.across) for part in copy] != [
            (p.ranges, p.across) for p in placement.copies[0]
        ]:
            raise ValueError(
                f"{placement.name} is stored twice in different chunks; merge the folder first"
            )
        for mine, repeat in zip(
            placement.find_slices(ranges), placement.find_slices(ranges, number), strict=True
        ):
            dim = 1 - placement.dim if mine[0].transposed else placement.dim
            chunks = (
                reader.chunks(mine[0].tensor, dim, *mine[1:3]),
                other.chunks(repeat[0].tensor, dim, *repeat[1:3]),
            )
            if not all(_same_bytes(a, b) for (_, a), (_, b) in zip(*chunks, strict=True)):
                raise _differs(placement, repeat[0].tensor)


def _differs(placement: ParameterPlacement, repeat: StoredTensor) -> ValueError:
    first = placement.copies[0][0].tensor
    return ValueError(
        f"{repeat} differs from {first}; both must be equal, because both are {placement.name}"
    )


def _same_bytes(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def _tie_equal(model: Any, mapped: MappedCheckpoint, mesh: ParallelMesh | None) -> None:
    """Ties the output head to the embedding if the checkpoint stores equal tensors for both."""
    name_map = mapped.model.name_map
    kept_as = dict(name_map.aliases)
    natives = {entry.stored_names(): entry.native for entry in name_map.entries}
    parameters = dict(model.named_parameters())
    for entry in name_map.untied_entries():
        own = parameters.get(entry.native)
        if own is None:
            continue
        (stored,) = entry.stored_names()
        embedding = natives[(kept_as[stored],)]
        if any_rank(not _same_bytes(own, parameters[embedding]), mesh):
            continue
        placements = [mapped.layout.placements[name] for name in (entry.native, embedding)]
        if any(torch_dtype(placement.copies[0][0].tensor) != own.dtype for placement in placements):
            # They are equal after rounding, but only the stored values decide, as in the converter.
            pairs = zip(*(placement.copies[0] for placement in placements), strict=True)
            if not all(have_same_bytes(first.tensor, second.tensor) for first, second in pairs):
                continue
        owner, _, attribute = entry.native.rpartition(".")
        setattr(model.get_submodule(owner), attribute, parameters[embedding])
        model.config = model.config.with_changes(tie_word_embeddings=True)
