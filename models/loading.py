"""Loads models from checkpoint folders of any supported format, for any tensor-parallel size."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.hub import find_model
from ..checkpoint.layout import ParameterPlacement, ParameterSpec
from ..checkpoint.stored_tensor import StoredTensor
from ..checkpoint.tensor_reader import TensorReader, check_digests
from ..checkpoint.tensor_reader import torch_dtype as stored_dtype
from ..files.working_copies import find_stand_in, keeping_bytes, naming_urls
from ..mpu import (
    ParallelMesh,
    VocabParallelHead,
    any_rank,
    assign_dropout_sites,
    draw_model_seed,
    gather_from_tp,
    initialize,
    materialize,
    tp_rank,
    tp_size,
)
from ..mpu.initialization import Receive
from ..mpu.process_group import join_process_group
from ..ops.packing import BITS, PackedFormat
from .auto import as_config, build_on_meta, from_config
from .config import ModelConfig
from .family_table import family, find_architecture
from .generation.generation_config import GenerationConfig
from .generation.mixin import GenerationMixin
from .loading_options import (
    LoadingOptions,
    change_config,
    check_default_device,
    name_source,
    note_attention,
    read_device,
    read_dtype,
)
from .lora import load_adapter
from .mapping import (
    MappedCheckpoint,
    NativeModel,
    config_errors,
    find_mismatched,
    find_unstored,
    have_same_bytes,
    map_checkpoint,
    read_architecture,
    read_model_config,
)
from .name_map import NameMap
from .packing import fill_packed
from .parallel_config import ParallelConfig
from .pipeline import slice_pipeline_stage


@naming_urls()
def from_pretrained(
    path: str | Path | None,
    mesh: ParallelMesh | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    device: torch.device | str = "cpu",
    config: ModelConfig | dict[str, Any] | str | Any = None,
    parallel_config: ParallelConfig | None = None,
    new: Sequence[str] = (),
    seed: int | None = None,
    adapter: str | Path | None = None,
    architecture: type[nn.Module] | None = None,
    torch_dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    base_precision: PackedFormat | None = None,
    **options: Any,
) -> Any:
    """Loads the model of a checkpoint folder; under a mesh, this rank's part of it.

    On `device="meta"` nothing is read yet: `Trainer` with env_type="fsdp" reads the weights when it
    has split the model, so that no rank ever has the whole of it.

    The model is in evaluation mode, as transformers returns it. A rank reads its part of each split
    tensor and an equal share of each replicated tensor; the ranks then exchange their shares. So
    each replica reads each byte once, and a rank needs little more memory than its parameters. If
    the folder records sha256 digests, the ranks check all of them first, each rank an equal share.

    Args:
        path: A Hugging Face folder (`model.safetensors`, `pytorch_model.bin`, or several files with
            their index), a shardzoo folder (`manifest.json`) written by any number of ranks, or a
            folder of rank files of the original GLM, DeepSpeed or FlagAI; or `org/name[@revision]`
            on the Hugging Face Hub, of which it reads safetensors; or such a folder's URL in an
            object store, of which it reads the ranges that it needs. None, with `config` and
            `state_dict`, reads no folder.
        mesh: The mesh over whose tensor-parallel ranks the model is split.
        dtype: The type of the parameters; by default, and with "auto", the stored one.
        torch_dtype: The older name of `dtype`.
        device: Where the parameters are.
        config: Used instead of the folder's `config.json`, for example to choose another head.
        parallel_config: How the model runs.
        new: Modules whose parameters are initialized from `seed`, even if the folder has values for
            them. For example, `("classifier",)` with a `config` of that architecture adds a
            classifier to a language model.
        seed: Determines the parameters of the new modules, 1234 by default. Those of a head that
            the folder lacks follow from PyTorch's generator by default.
        adapter: peft's LoRA weights, a folder or a name on the Hub; `models.lora.merge_lora` merges
            them.
        architecture: The class of the model, whatever the folder's configuration names. What the
            folder lacks of its head is initialized, with a warning. A class's own `from_pretrained`
            and the Auto classes pass it.
        device_map: The device, as transformers takes it: "cpu", "cuda:0", "auto" for the rank's.
        base_precision: "nf4", "int8" or "fp8" packs the weights of linear layers, which then cannot
            be trained, while they are read. LoRA weights can be added to them (`adapter`,
            `models.lora.add_lora`).
        options: The other arguments of transformers' `from_pretrained`; see
            docs/transformers-compatibility.md. `tp_plan="auto"` splits the model over all
            processes, and its outputs have the logits of the whole vocabulary. What is none of them is a setting of the
            configuration, such as `num_labels=3`.

    Returns:
        The model; with `output_loading_info=True` also which tensors were missing, unexpected, or
        of another shape, as transformers reports it.

    Raises:
        ValueError: A file is damaged, or a tensor is missing, is unknown to the model, or has a
            wrong shape or digest; the message names the file and the tensor. Or an argument is
            refused.
    """
    check_default_device()
    taken = LoadingOptions.from_arguments(options)
    if taken.tensor_ranks is not None:
        mesh = _make_mesh(mesh, taken.tensor_ranks)
    wanted_dtype = read_dtype(dtype, torch_dtype)
    place = read_device(device, device_map, mesh)
    if base_precision is not None:
        if base_precision not in BITS:
            raise ValueError(f"base_precision must be nf4, int8 or fp8, not {base_precision!r}")
        if path is None or place.type == "meta":
            raise ValueError(
                "base_precision packs weights as they are read from a folder; name one, and another "
                "device than meta"
            )
    if path is None:
        return _build_from_state(
            config, mesh, taken, architecture, device=place, dtype=wanted_dtype
        )
    folder = find_model(name_source(path, taken), "path", options=taken.hub) / taken.subfolder
    if not folder.is_dir():
        raise ValueError(
            f"{path} is not a folder, nor a name on the Hugging Face Hub: org/name[@revision]"
        )
    checkpoint = open_checkpoint(folder)
    _check_formats(checkpoint, taken.use_safetensors)
    given = None if config is None else as_config(config)

    chosen = ""
    if architecture is not None:
        facts, chosen = find_architecture(architecture)
        if facts is None:
            raise ValueError(f"{architecture.__name__} is no architecture of the zoo's families")
        if "architecture" not in {setting.name for setting in fields(facts.config)}:
            chosen = ""  # The family has one head.

    def change(read: ModelConfig) -> ModelConfig:
        return change_config(read, taken.changes, "from_pretrained") if taken.changes else read

    # A stored head is first loaded into a parameter of its own; _tie_equal ties it when both are in
    # memory. No stage of a pipeline may have both, so there the stored bytes decide.
    # Nor is there a whole head to compare on the meta device.
    holds_all = (mesh is None or mesh.pp_size == 1) and place.type != "meta"
    compare = _keep_apart if holds_all else None
    settings = read_model_config(checkpoint, given, compare, chosen, change)
    with config_errors():
        model: Any = build_on_meta(settings, mesh, parallel_config, architecture)
    native = NativeModel.from_config(settings, model)

    # What is initialized and not read: the modules that the caller names, what the files lack of
    # the head of a chosen class, and what they store in another shape.
    absent = _find_absent_names(model, new)
    missing: set[str] = set()
    if chosen and chosen != read_architecture(checkpoint.config or {}):
        missing = _find_missing_parts(checkpoint, native, model.head_modules) - absent
    mismatched: dict[str, Any] = {}
    if taken.ignore_mismatched_sizes:
        mismatched = find_mismatched(checkpoint, native)
    fresh = missing | mismatched.keys()
    if fresh:
        absent |= fresh | _find_other_heads(model)
    mapped = map_checkpoint(checkpoint, native, absent)

    slice_pipeline_stage(model, mesh, parallel_config)
    if wanted_dtype is None:
        wanted_dtype = _promote(
            {
                stored_dtype(part.tensor)
                for name, placement in mapped.layout.placements.items()
                for part in placement.slices()
                if not native.parameters[name].keeps_fp32
            }
        )

    def fill(receive: Receive | None = None) -> None:
        _load(model, mapped, mesh, receive)
        if holds_all:
            _tie_equal(model, mapped, mesh)
        fill_from_seed = partial(
            initialize, fill=model.initialize_parameter, mesh=mesh, receive=receive
        )
        for name in new:
            module_seed = 1234 if seed is None else seed
            fill_from_seed(model.get_submodule(name), seed=module_seed, prefix=name)
        if fresh:
            head_seed = draw_model_seed(mesh) if seed is None else seed
            fill_from_seed(model, seed=head_seed, only=fresh)
            _warn_of_fresh(native, folder, missing, mismatched, mesh)

    if base_precision is not None:
        fill_packed(model, fill, base_precision, mesh, place, wanted_dtype)
    elif place.type == "meta":
        model.to(wanted_dtype)
        assign_dropout_sites(model)
        model.fill_parameters = fill
    else:
        materialize(model, place, wanted_dtype)
        fill()

    # transformers has these names too. The trainer finds the tokenizer in that folder.
    model.name_or_path = str(folder)
    model.config.name_or_path = str(path)
    model.config.dtype = wanted_dtype
    note_attention(model.config, taken.attention)
    if issubclass(type(model), GenerationMixin):
        model.generation_config = GenerationConfig.from_folder(folder, settings)
    if taken.tensor_ranks is not None:
        model.returns_whole_logits = True
    if adapter is not None:
        load_adapter(model, find_model(adapter, "adapter"))
    if taken.state_dict is not None:
        model.load_state_dict(taken.state_dict)
    model.eval()
    if not taken.output_loading_info:
        return model
    return model, _describe_loading(native, mapped, missing, mismatched)


def _make_mesh(mesh: ParallelMesh | None, tensor_ranks: int) -> ParallelMesh:
    """Returns the mesh that transformers' `tp_plan` and `tp_size` mean.

    Args:
        mesh: What the caller passes beside them, which must be None.
        tensor_ranks: The number of tensor-parallel ranks, 0 for all processes.
    """
    if mesh is not None:
        raise ValueError("mesh= says how the model is split; leave tp_plan and tp_size out")
    if tensor_ranks == 0:
        tensor_ranks = dist.get_world_size() if join_process_group() else 1
    return ParallelMesh(tensor_parallel_size=tensor_ranks)


def _build_from_state(
    config: Any,
    mesh: ParallelMesh | None,
    taken: LoadingOptions,
    architecture: type[nn.Module] | None,
    **options: Any,
) -> Any:
    """Returns a model of a configuration with the tensors of a state dict, without a folder."""
    if config is None or taken.state_dict is None:
        raise ValueError("without a path, config= and state_dict= are needed")
    read = as_config(config)
    if taken.changes:
        read = change_config(read, taken.changes, "from_pretrained")
    seed = draw_model_seed(mesh)
    if architecture is not None:
        read = cast(Any, architecture).take_config(read)
    model: Any = from_config(read, mesh, seed=seed, architecture=architecture, **options)
    result = model.load_state_dict(taken.state_dict, strict=False)
    if result.missing_keys:
        verb = "is" if len(result.missing_keys) == 1 else "are"
        warnings.warn(
            f"{', '.join(result.missing_keys)} of {type(model).__name__} {verb} newly initialized; "
            "train the model before you use it",
            stacklevel=3,
        )
    return model.eval()


def _keep_apart(head: StoredTensor, embedding: StoredTensor) -> bool:
    """Says that a stored head does not repeat the embedding."""
    return False


def _check_formats(checkpoint: Checkpoint, use_safetensors: bool | None) -> None:
    """Raises ValueError if the files are not of the kind that `use_safetensors` asks for."""
    if use_safetensors is None:
        return
    files = {tensor.file for tensor in checkpoint.tensors()}
    others = sorted(file.name for file in files if file.suffix != ".safetensors")
    if use_safetensors and others:
        raise ValueError(
            f"use_safetensors=True, but {checkpoint.folder} has its weights in {others[0]}"
        )
    if not use_safetensors and len(others) < len(files):
        raise ValueError(
            f"use_safetensors=False, but {checkpoint.folder} has safetensors, which are read first"
        )


def _find_missing_parts(
    checkpoint: Checkpoint, native: NativeModel, head_modules: Sequence[str]
) -> set[str]:
    """Returns the names of a head's parameters of which the files store nothing."""
    unstored = find_unstored(checkpoint, native)
    return {name for name in unstored if name.partition(".")[0] in head_modules}


def _warn_of_fresh(
    native: NativeModel,
    folder: Path,
    missing: Collection[str],
    mismatched: Collection[str],
    mesh: ParallelMesh | None,
) -> None:
    """Warns, on the first rank, that parameters were initialized."""
    if mesh is not None and mesh.rank > 0:
        return
    for names, reason in ((missing, "lacks them"), (mismatched, "has them in other shapes")):
        if names:
            modules = sorted({name.rpartition(".")[0] for name in names})
            verb = "is" if len(modules) == 1 else "are"
            warnings.warn(
                f"{', '.join(modules)} of {native.config.architecture} {verb} newly initialized, "
                f"because {folder} {reason}; train the model before you use it",
                stacklevel=3,
            )


def _describe_loading(
    native: NativeModel,
    mapped: MappedCheckpoint,
    missing: Collection[str],
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> dict[str, Any]:
    """Returns what transformers' `output_loading_info` returns, in its names of tensors."""
    names = native.list_module_names().by_parameter
    missing_keys = {stored for name in missing for stored in names[name]}
    for alias, kept in native.name_map.aliases:
        if kept in missing_keys:
            missing_keys.add(alias)
    return {
        "missing_keys": missing_keys,
        "unexpected_keys": set(mapped.layout.extras),
        "mismatched_keys": {(names[name][0], *shapes) for name, shapes in mismatched.items()},
        "error_msgs": [],
    }


def check_pretrained(folder: Path) -> None:
    """Raises ValueError, as `from_pretrained` does, if tensors are damaged or do not fit. Keeps
    none in memory.
    """
    mapped = map_checkpoint(open_checkpoint(folder))
    _check_digests(mapped, mapped.layout.placements.values(), 0, 1)


def missing_modules(folder: Path, config: ModelConfig) -> list[str]:
    """Returns the modules of a model's head that a checkpoint does not store.

    The head of the vocabulary does not count: a tied one is never stored.
    """
    name_map = family(config.model_type).name_map
    stored = open_checkpoint(folder).ranks[0]
    model: Any = build_on_meta(config, None)
    missing: list[str] = []
    for module in getattr(model, "head_modules", ()):
        parts = model.get_submodule(module).modules()
        if any(isinstance(part, VocabParallelHead) for part in parts):
            continue
        names: set[str] = set()
        for entry in name_map.entries:
            if entry.native.startswith(f"{module}."):
                names.update((entry.native, *entry.stored_names()))
        if not any(name_map.to_current_name(name, names) in names for name in stored):
            missing.append(module)
    return missing


def check_stored_model(folder: Path, config: ModelConfig, new: Iterable[str] = ()) -> None:
    """Compares the tensors of a folder with those of a model; reads the headers of its files alone.

    Commands that start processes call this first, so that a user gets one message.

    Args:
        config: The model's. What the folder lacks of its head may be new.
        new: More modules that need not be as the folder has them.

    Raises:
        ValueError: A tensor is missing, is unknown to the model, or has a wrong shape, or a file is
            cut off.
    """
    absent = sorted({*missing_modules(folder, config), *new})
    from_pretrained(folder, config=config, new=absent, device="meta")


def _find_absent_names(model: nn.Module, new: Sequence[str]) -> set[str]:
    """Returns the names of parameters that are not read: of `new` modules, and of other heads.

    Raises ValueError if `new` names a module that the model does not have.
    """
    if not new:
        return set()
    modules: dict[str, nn.Module] = dict(cast(Any, model).named_modules())
    absent: set[str] = set()
    for module in new:
        if module not in modules:
            children = ", ".join(child for child, _ in model.named_children())
            raise ValueError(
                f"new names the module {module!r}, which the model does not have; it has {children}"
            )
        absent.update(f"{module}.{name}" for name, _ in modules[module].named_parameters())
    return absent | _find_other_heads(model)


def _find_other_heads(model: nn.Module) -> set[str]:
    """Returns the names of parameters of heads that the model does not have.

    The folder may hold the head of another architecture, which new modules replace.
    """
    name_map: NameMap = family(cast(Any, model).config.model_type).name_map
    heads = {entry.native for entry in name_map.entries if "{i}" not in entry.native}
    return heads - {name for name, _ in model.named_parameters()}


def _promote(dtypes: set[torch.dtype]) -> torch.dtype:
    """Returns a type that can represent the values of all these types."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    # torch does not promote 8-bit types, but any larger type can represent their values.
    larger = sorted((dtype for dtype in dtypes if dtype.itemsize > 1), key=str)
    if not larger:
        return torch.bfloat16
    result = larger[0]
    for dtype in larger[1:]:
        result = torch.promote_types(result, dtype)
    return result


@torch.no_grad()
def _load(
    model: nn.Module,
    mapped: MappedCheckpoint,
    mesh: ParallelMesh | None,
    receive: Receive | None = None,
) -> None:
    """Reads this rank's parameters. Collective over a replica of the model.

    Args:
        receive: Gets the values, one parameter after another; by default they are read into the
            parameters.

    Raises ValueError on every rank if one of them cannot read its part.
    """
    parameters = dict(model.named_parameters())
    specs = mapped.model.parameters
    rank = tp_rank(mesh)
    size = tp_size(mesh)
    placements = {
        name: placement
        for name, placement in mapped.layout.placements.items()
        if name in parameters
    }
    shares: dict[str, Tensor] = {}
    bands: dict[str, dict[StoredTensor, Tensor]] = {}
    problem = ""
    try:
        with keeping_bytes(), TensorReader() as reader, TensorReader() as other_reader:
            _check_digests(mapped, placements.values(), rank, size)
            _check_zeros(reader, mapped)
            for name, placement in placements.items():
                spec = specs[name]
                if spec.shard is None:
                    shares[name] = _read_share(reader, placement, parameters[name], rank, size)
                elif mesh is not None and _is_cut_by_columns(placement, spec, size):
                    bands[name] = _read_band(reader, placement, rank, size)
                elif receive is None:
                    reader.fill(placement, spec.list_ranges_on(mesh), parameters[name])
                else:
                    part = torch.zeros(parameters[name].shape, dtype=parameters[name].dtype)
                    reader.fill(placement, spec.list_ranges_on(mesh), part)
                    receive(name, part)
                if not mapped.digests:
                    _check_copies(reader, other_reader, placement, spec, rank, size)
    except (OSError, ValueError) as error:
        problem = str(error)

    # Ask before the exchange of shares, in which the other ranks would wait for a failed one.
    if any_rank(problem != "", mesh):
        raise ValueError(problem or "another rank could not read its part of the checkpoint")
    # The ranks exchange tensors on the mesh's device, which may differ from the parameters'.
    exchange_device = "cpu" if mesh is None else mesh.device_type
    with TensorReader() as reader:
        for name, band in bands.items():
            wholes: dict[StoredTensor, Tensor] = {}
            for tensor, share in band.items():
                values = gather_from_tp(share.to(exchange_device), mesh, dim=0)
                wholes[tensor] = values[: tensor.numel].view(tensor.shape).to("cpu")
            reader.hold(wholes)
            part = parameters[name]
            if receive is not None:
                part = torch.zeros(part.shape, dtype=part.dtype)
            reader.fill(placements[name], specs[name].list_ranges_on(mesh), part)
            if receive is not None:
                receive(name, part)
    for name, share in shares.items():
        parameter = parameters[name]
        whole = gather_from_tp(share.to(exchange_device), mesh, dim=0)
        value = whole[: parameter.numel()].view(parameter.shape)
        if receive is None:
            parameter.copy_(value)
        else:
            receive(name, value)


def _check_digests(
    mapped: MappedCheckpoint, placements: Iterable[ParameterPlacement], rank: int, size: int
) -> None:
    """Raises ValueError if a digest of this rank's share of the tensors is not the recorded one."""
    tensors = {part.tensor for placement in placements for part in placement.slices()}
    # Tensors that are no parameters belong to no stage of a pipeline, so every stage checks them.
    tensors.update(mapped.layout.extras.values())
    in_order = sorted(tensors, key=lambda tensor: (tensor.file, tensor.offset))
    check_digests(in_order, mapped.digests, rank, size)


def _check_zeros(reader: TensorReader, mapped: MappedCheckpoint) -> None:
    """Raises ValueError if a stored tensor that the model does not add is not zero."""
    if mapped.checkpoint.kind != "shards":
        return
    for name, tensor in mapped.layout.extras.items():
        if name in mapped.model.name_map.zeros and reader.flat(tensor, 0, prod(tensor.shape)).any():
            raise ValueError(
                f"{tensor} must be zero, because an old version kept it beside the parameters; "
                "merge the folder and split it again"
            )


def _is_cut_by_columns(placement: ParameterPlacement, spec: ParameterSpec, size: int) -> bool:
    """Returns whether each rank needs a piece of every row of a tensor in an object store.

    Every rank gets the same answer. To ask for so many small pieces would take long, so the ranks
    read equal shares of the whole tensor instead, and exchange them.
    """
    assert spec.shard is not None
    if size == 1 or spec.shard.is_nested:
        return False
    longest = spec.shard.local_shape(0, size)[placement.dim]
    for part in placement.copies[0]:
        stored_dim = 1 - placement.dim if part.transposed else placement.dim
        is_wider = len(part.tensor.shape) == 2 and part.tensor.shape[1] > longest
        if stored_dim == 1 and is_wider and find_stand_in(part.tensor.file) is not None:
            return True
    return False


def _read_band(
    reader: TensorReader, placement: ParameterPlacement, rank: int, size: int
) -> dict[StoredTensor, Tensor]:
    """Reads this rank's share of each tensor that stores a parameter, in one dimension.

    A share is as long on every rank: the last one is padded.
    """
    band: dict[StoredTensor, Tensor] = {}
    for part in placement.copies[0]:
        tensor = part.tensor
        if tensor not in band:
            start, stop = _find_share(tensor.numel, rank, size)
            share = torch.zeros(-(-tensor.numel // size), dtype=stored_dtype(tensor))
            share[: stop - start] = reader.flat(tensor, start, stop)
            band[tensor] = share
    return band


def _read_share(
    reader: TensorReader, placement: ParameterPlacement, parameter: Tensor, rank: int, size: int
) -> Tensor:
    """Reads this rank's share of a replicated parameter, in the parameter's type.

    Returns:
        A tensor of one dimension, as long on every rank: the last share is padded.
    """
    start, stop = _find_share(parameter.numel(), rank, size)
    longest = -(-parameter.numel() // size)
    share = torch.zeros(longest, dtype=parameter.dtype)
    share[: stop - start] = _read_flat(reader, placement, 0, start, stop)
    return share


def _read_flat(
    reader: TensorReader, placement: ParameterPlacement, copy: int, start: int, stop: int
) -> Tensor:
    """Reads elements [start, stop) of a flattened parameter from one of its copies."""
    parts = placement.copies[copy]
    if len(parts) == 1 and not parts[0].transposed:
        return reader.flat(parts[0].tensor, start, stop)
    whole = torch.empty(placement.shape, dtype=stored_dtype(parts[0].tensor))
    every_row = [(0, placement.shape[placement.dim])]
    reader.fill(replace(placement, copies=(parts,)), every_row, whole)
    return whole.view(-1)[start:stop]


def _find_share(total: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the equal share [start, stop) of `rank` among `total` elements; the last is
    shorter.
    """
    length = -(-total // size)
    return min(rank * length, total), min((rank + 1) * length, total)


def _check_copies(
    reader: TensorReader,
    other_reader: TensorReader,
    placement: ParameterPlacement,
    spec: ParameterSpec,
    rank: int,
    size: int,
) -> None:
    """Raises ValueError unless this rank's part of a parameter has the same bytes in every copy."""
    first = placement.copies[0]
    for number, copy in enumerate(placement.copies[1:], 1):
        if spec.shard is None:
            start, stop = _find_share(prod(placement.shape), rank, size)
            mine = _read_flat(reader, placement, 0, start, stop)
            repeat = _read_flat(other_reader, placement, number, start, stop)
            if not _same_bytes(mine, repeat):
                raise _make_copy_error(placement, copy[0].tensor)
            continue
        places = [(part.ranges, part.across) for part in copy]
        if places != [(part.ranges, part.across) for part in first]:
            raise ValueError(
                f"{placement.name} is stored twice in different chunks; merge the folder first"
            )
        ranges = spec.ranges(rank, size)
        pairs = zip(
            placement.find_slices(ranges), placement.find_slices(ranges, number), strict=True
        )
        for (part, start, stop, _), (other_part, other_start, other_stop, _) in pairs:
            dim = 1 - placement.dim if part.transposed else placement.dim
            chunks = reader.chunks(part.tensor, dim, start, stop)
            other_chunks = other_reader.chunks(other_part.tensor, dim, other_start, other_stop)
            for (_, mine), (_, repeat) in zip(chunks, other_chunks, strict=True):
                if not _same_bytes(mine, repeat):
                    raise _make_copy_error(placement, other_part.tensor)


def _make_copy_error(placement: ParameterPlacement, repeat: StoredTensor) -> ValueError:
    first = placement.copies[0][0].tensor
    return ValueError(
        f"{repeat} differs from {first}; both must be equal, because both are {placement.name}"
    )


def _same_bytes(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors are equal bit for bit, NaN and the sign of zero included."""
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def _tie_equal(model: Any, mapped: MappedCheckpoint, mesh: ParallelMesh | None) -> None:
    """Ties the output head to the embedding if the checkpoint stores equal tensors for both."""
    if model.config.has_own_embeddings:
        return
    name_map = mapped.model.name_map
    kept_names = dict(name_map.aliases)
    natives = {entry.stored_names(): entry.native for entry in name_map.entries}
    parameters = dict(model.named_parameters())
    for entry in name_map.untied_entries():
        head = parameters.get(entry.native)
        if head is None:
            continue
        (stored,) = entry.stored_names()
        embedding = natives[(kept_names[stored],)]
        if any_rank(not _same_bytes(head, parameters[embedding]), mesh):
            _warn_of_head(model.config, mapped, stored)
            continue

        # They may be equal only after rounding. The stored values decide, as in the converter.
        head_copy = mapped.layout.placements[entry.native].copies[0]
        embedding_copy = mapped.layout.placements[embedding].copies[0]
        stored_dtypes = {stored_dtype(copy[0].tensor) for copy in (head_copy, embedding_copy)}
        if stored_dtypes != {head.dtype}:
            pairs = zip(head_copy, embedding_copy, strict=True)
            if not all(have_same_bytes(mine.tensor, other.tensor) for mine, other in pairs):
                _warn_of_head(model.config, mapped, stored)
                continue
        owner, _, attribute = entry.native.rpartition(".")
        setattr(model.get_submodule(owner), attribute, parameters[embedding])
        model.config.change_built(tie_word_embeddings=True)


def _warn_of_head(config: ModelConfig, mapped: MappedCheckpoint, head: str) -> None:
    """Warns, as transformers does, of a stored head that `config.json` says is tied."""
    values = mapped.checkpoint.config or {}
    if config.ties_without_head or mapped.checkpoint.kind not in ("huggingface", "dcp"):
        return
    if values.get("tie_word_embeddings", getattr(type(config), "tie_word_embeddings", True)):
        warnings.warn(
            f"{head} differs from the word embedding, although config.json says that both are "
            "tied; as in transformers, they are not",
            stacklevel=2,
        )
