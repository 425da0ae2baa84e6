"""Plans a destination: its weight files, and where each parameter is stored in them.

A function for each format that can be written.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..checkpoint.checkpoint import EXTRAS
from ..checkpoint.dtypes import FLOATS
from ..checkpoint.formats.dcp import (
    MEGATRON_ARGUMENTS,
    MEGATRON_BACKENDS,
    MEGATRON_DESCRIPTION,
    METADATA,
    build_metadata,
    find_layer,
    plan_dcp_file,
    stack_layers,
)
from ..checkpoint.formats.megatron import RANK_FILES, TRACKER, build_rank_state
from ..checkpoint.formats.torch_file_writer import plan_torch_file
from ..checkpoint.formats.universal import FP32, UNIVERSAL
from ..checkpoint.layout import CheckpointLayout, ParameterPlacement, TensorSlice, place_by_rank
from ..checkpoint.planned_file import PlannedFile, plan_safetensors_file
from ..checkpoint.stored_tensor import StoredTensor
from ..models.huggingface import (
    LARGEST_FILE,
    divide_tensors,
    lay_out_huggingface,
    list_stored_shapes,
    plan_weight_files,
)
from ..models.mapping import MappedCheckpoint, find_megatron_map
from ..models.megatron import (
    Style,
    find_embedding,
    find_half,
    find_owner,
    join_experts,
    join_halves,
    part_experts,
)

RELEASE_FOLDER = "release"  # the folder of other programs' rank files, which a tracker file names


@dataclass(frozen=True)
class Target:
    """What a conversion will write.

    Attributes:
        kind: The format, as in `Checkpoint`; also "universal".
        size: The number of tensor-parallel ranks.
        layout: Where each tensor belongs.
        files: The weight files, named relative to the destination.
        texts: The contents of additional small files by name.
    """

    kind: str
    size: int
    layout: CheckpointLayout
    files: tuple[PlannedFile, ...]
    texts: Mapping[str, str | bytes] = field(default_factory=dict[str, str | bytes])

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def choose_dtypes(mapped: MappedCheckpoint, dtype: str | None) -> dict[str, str]:
    """Returns each parameter's type in the destination, by safetensors' names.

    It is `dtype` for floating-point parameters but those that stay in fp32, else the stored one.
    """
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"cannot convert to {dtype}; use one of {', '.join(FLOATS)}")
    dtypes: dict[str, str] = {}
    for name, placement in mapped.layout.placements.items():
        keeps_fp32 = mapped.model.parameters[name].keeps_fp32
        if dtype is not None and placement.dtype in FLOATS and not keeps_fp32:
            dtypes[name] = dtype
        else:
            dtypes[name] = placement.dtype
    return dtypes


def build_shards_target(mapped: MappedCheckpoint, size: int, dtype: str | None = None) -> Target:
    """Plans a shardzoo folder of `size` ranks.

    Raises:
        ValueError: The model cannot be split over so many; the message names the sizes that work.
    """
    parameters = mapped.model.parameters
    mapped.model.check_size(size)
    dtypes = choose_dtypes(mapped, dtype)
    files: list[PlannedFile] = []
    ranks: list[Mapping[str, StoredTensor]] = []
    for rank in range(size):
        shapes = {
            name: (dtypes[name], parameter.local_shape(rank, size))
            for name, parameter in parameters.items()
        }
        file = plan_safetensors_file(f"rank_{rank:02d}.safetensors", shapes)
        files.append(file)
        ranks.append(file.tensors)
    placements = place_by_rank(parameters, ranks)
    extras: Mapping[str, StoredTensor] = {}
    if mapped.layout.extras:
        extra_shapes = {
            name: (tensor.dtype, tensor.shape) for name, tensor in mapped.layout.extras.items()
        }
        file = plan_safetensors_file(EXTRAS, extra_shapes)
        files.append(file)
        extras = file.tensors
    return Target("shards", size, CheckpointLayout(placements, extras), tuple(files))


def build_huggingface_target(
    mapped: MappedCheckpoint, dtype: str | None = None, largest_file: int = LARGEST_FILE
) -> Target:
    """Plans a Hugging Face folder.

    The tensors have the names of the Hugging Face folder that they came from, or the current names
    if there was none.

    Args:
        mapped: The source.
        dtype: Safetensors' name of the type of floating-point parameters; by default as stored.
        largest_file: Bytes of weights in one file.
    """
    names = mapped.names
    extras = mapped.layout.extras
    shapes = list_stored_shapes(mapped.model, names, choose_dtypes(mapped, dtype), extras)
    files, texts = plan_weight_files(shapes, largest_file)
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    layout = lay_out_huggingface(mapped.model, names, tensors, extras)
    return Target("huggingface", 1, layout, files, texts)


def build_dcp_target(
    mapped: MappedCheckpoint, dtype: str | None = None, largest_file: int = LARGEST_FILE
) -> Target:
    """Plans a folder of `torch.distributed.checkpoint`, with each tensor in one chunk.

    The tensors have the names of transformers' state dictionary. Names of tied tensors are listed
    for the same bytes. Arguments are those of `build_huggingface_target`.
    """
    model = mapped.model
    names = model.list_module_names()
    extras = mapped.layout.extras
    shapes = list_stored_shapes(model, names, choose_dtypes(mapped, dtype), extras)
    groups = divide_tensors(shapes, largest_file)
    planned = [plan_dcp_file(number, group) for number, group in enumerate(groups)]
    files = tuple(file for file, _ in planned)
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}

    aliases: dict[str, str] = {}
    for native_alias, native_kept in model.name_map.aliases:
        alias = model.to_module_name(native_alias)
        kept = model.to_module_name(native_kept)
        if kept in tensors and alias not in tensors:
            aliases[alias] = kept

    texts: dict[str, str | bytes] = {METADATA: build_metadata(planned, aliases)}
    layout = lay_out_huggingface(model, names, tensors, extras)
    return Target("dcp", 1, layout, files, texts)


def build_legacy_target(mapped: MappedCheckpoint, size: int, dtype: str | None = None) -> Target:
    """Plans `size` mp_rank files.

    The tensors have their Hugging Face names, which for GLM are the original ones, and the
    vocabulary is not padded. If the family stacks or transposes tensors, they have shardzoo's
    native names, and the vocabulary is padded.

    Raises:
        ValueError: The model cannot be split so, or these files cannot store a tensor or its type.
    """
    model = mapped.model
    dtypes = choose_dtypes(mapped, dtype)
    entries = model.entries()
    has_stored_form = all(
        len(entry.stored_names()) == 1 and not entry.transpose and not entry.by_expert
        for entry in entries.values()
    )
    parameters = dict(model.parameters)
    names = {name: name for name in parameters}
    if has_stored_form:
        for name, parameter in model.parameters.items():
            parameters[name] = parameter.without_padding()
            names[name] = entries[name].stored_names()[0]
    _refuse_extras(mapped, "mp_rank files")

    shapes = {
        names[name]: (dtypes[name], parameter.even_shape(size))
        for name, parameter in parameters.items()
    }
    files: list[PlannedFile] = []
    ranks: list[dict[str, StoredTensor]] = []
    for rank in range(size):
        path = f"{RELEASE_FOLDER}/mp_rank_{rank:02d}_model_states.pt"
        file = plan_torch_file(
            path, shapes, lambda tensors: {"module": tensors, "mp_world_size": size}
        )
        files.append(file)
        ranks.append({name: file.tensors[names[name]] for name in parameters})
    layout = CheckpointLayout(place_by_rank(parameters, ranks))
    return Target("legacy", size, layout, tuple(files), {"latest": RELEASE_FOLDER + "\n"})


def _refuse_extras(mapped: MappedCheckpoint, what: str) -> None:
    for extra in mapped.layout.extras:
        raise ValueError(f"{what} can hold only parameters of the model, and {extra} is not one")


def build_megatron_target(
    mapped: MappedCheckpoint,
    size: int,
    dtype: str | None = None,
    stages: int = 1,
    style: Style | None = None,
) -> Target:
    """Plans Megatron-LM's files, version 3.0.

    Each rank's part of the vocabulary is padded to a multiple of 128.

    Args:
        mapped: The source.
        size: The number of tensor-parallel ranks.
        dtype: Safetensors' name of the type of floating-point parameters; by default as stored.
        stages: The number of pipeline stages.
        style: How the tensors are named; by default the family's first style.

    Raises:
        ValueError: Megatron-LM does not have the model, or cannot divide it so.
    """
    model = mapped.model
    dtypes = choose_dtypes(mapped, dtype)
    megatron = find_megatron_map(model.config)
    style = megatron.checked_style(style)
    _refuse_extras(mapped, "Megatron-LM's files")
    model.check_size(size)
    parameters = part_experts(model.parameters)
    dtypes = {name: dtypes[find_owner(name)] for name in parameters}
    specs = {
        name: megatron.stored_spec(parameter, "heads") for name, parameter in parameters.items()
    }
    arguments = megatron.all_arguments(model.config, specs, (size, stages), style)
    arrange = partial(build_rank_state, arguments=arguments, nested=style == "legacy")
    names_by_stage = megatron.divide(parameters, stages, style)
    embedding = find_embedding(megatron, parameters)
    zeros_by_stage = megatron.list_zeros(parameters, stages)

    files: list[PlannedFile] = []
    # Each rank's tensors of each parameter. Several stages may store the same one: the last stage
    # has a copy of a tied embedding.
    ranks: list[dict[str, list[StoredTensor]]] = []
    for rank in range(size):
        stored: dict[str, list[StoredTensor]] = {name: [] for name in parameters}
        for stage, names in enumerate(names_by_stage):
            shapes = {
                stored_name: (dtypes[name], specs[name].even_shape(size))
                for stored_name, name in names.items()
            }
            for zero_name in zeros_by_stage[stage]:
                shapes[zero_name] = (dtypes[embedding], specs[embedding].even_shape(size)[:1])
            stage_suffix = f"_{stage:03d}" if stages > 1 else ""
            folder = f"{RELEASE_FOLDER}/mp_rank_{rank:02d}{stage_suffix}"
            file = plan_torch_file(f"{folder}/{RANK_FILES[0]}", join_halves(shapes), arrange)
            files.append(file)
            for stored_name, name in names.items():
                stored[name].append(find_half(file.tensors, stored_name))
        ranks.append(stored)

    placements: dict[str, ParameterPlacement] = {}
    for name, spec in specs.items():
        copies: list[tuple[TensorSlice, ...]] = []
        for number in range(len(ranks[0][name])):
            tensors = [{name: stored[name][number]} for stored in ranks]
            copies += place_by_rank({name: spec}, tensors)[name].copies
        placements[name] = ParameterPlacement(name, spec.shape or (1,), spec.dim, tuple(copies))
    layout = CheckpointLayout(join_experts(model.parameters, placements))
    return Target("megatron", size, layout, tuple(files), {TRACKER: RELEASE_FOLDER})


def build_torch_dist_target(
    mapped: MappedCheckpoint, dtype: str | None = None, largest_file: int = LARGEST_FILE
) -> Target:
    """Plans megatron-core's `torch_dist` folder, which any number of its ranks and stages loads.

    Each tensor is one chunk, those of all layers of a stack are one tensor, and the rows of the
    vocabulary are padded to a multiple of 128. Arguments are those of `build_huggingface_target`.

    Raises:
        ValueError: megatron-core does not have the model, or its layers have different types.
    """
    model = mapped.model
    dtypes = choose_dtypes(mapped, dtype)
    megatron = find_megatron_map(model.config)
    # The keys of such folders are Transformer Engine's, whatever the layers are made of.
    style: Style = "transformer_engine"
    if style not in megatron.writable:
        raise ValueError(
            f"megatron-core has no {model.config.model_type} that equals transformers' "
            f"({megatron.lacking}), so that it has no torch_dist folder; use split --to megatron"
        )
    _refuse_extras(mapped, "megatron-core's folders")
    parameters = part_experts(model.parameters)
    dtypes = {name: dtypes[find_owner(name)] for name in parameters}
    specs = {
        name: megatron.stored_spec(parameter, "heads") for name, parameter in parameters.items()
    }
    arguments = megatron.all_arguments(model.config, specs, (1, 1), style)
    (names,) = megatron.divide(parameters, 1, style)
    (zeros,) = megatron.list_zeros(parameters, 1)
    embedding = find_embedding(megatron, parameters)

    own_shapes = {
        stored_name: (dtypes[name], specs[name].even_shape(1))
        for stored_name, name in names.items()
    }
    for zero_name in zeros:
        own_shapes[zero_name] = (dtypes[embedding], specs[embedding].even_shape(1)[:1])
    layer_shapes = join_halves(own_shapes)
    groups = divide_tensors(stack_layers(layer_shapes), largest_file)
    planned = [plan_dcp_file(number, group, RELEASE_FOLDER) for number, group in enumerate(groups)]
    files = tuple(file for file, _ in planned)
    stacked = {name: tensor for file in files for name, tensor in file.tensors.items()}
    by_layer = {name: find_layer(stacked, name) for name in layer_shapes}

    placements: dict[str, ParameterPlacement] = {}
    for stored_name, name in names.items():
        tensor = find_half(by_layer, stored_name)
        found = place_by_rank({name: specs[name]}, [{name: tensor}])[name]
        if name in placements:
            found = replace(found, copies=placements[name].copies + found.copies)
        placements[name] = found
    common = build_rank_state({}, arguments, nested=False)
    del common["model"]  # which the other files hold
    texts: dict[str, str | bytes] = {
        TRACKER: RELEASE_FOLDER,
        f"{RELEASE_FOLDER}/{METADATA}": build_metadata(planned, {}),
        f"{RELEASE_FOLDER}/{MEGATRON_DESCRIPTION}": json.dumps(MEGATRON_BACKENDS),
        f"{RELEASE_FOLDER}/{MEGATRON_ARGUMENTS}": _save_to_bytes(common),
    }
    layout = CheckpointLayout(join_experts(model.parameters, placements))
    return Target("megatron", 1, layout, files, texts)


DEEPSPEED = "0.19.0"  # the version whose format a universal checkpoint has
MOST_GROUPS = 1024  # of the optimizer that loads a universal checkpoint


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run has come.

    Attributes:
        step: Completed steps.
        samples: Samples trained on.
        rates: The learning rate of each parameter group in the next step; None where the optimizer
            finds its own, or where the run has not recorded it.
    """

    step: int
    samples: int
    rates: Sequence[float | None]


def build_universal_target(
    mapped: MappedCheckpoint,
    kinds: Sequence[str],
    step: torch.Tensor | int,
    progress: TrainingProgress,
) -> Target:
    """Plans DeepSpeed's universal checkpoint: a torch file for each parameter and kind of state.

    Parameters have the names of transformers' model, and types are fp32. The layout has placements
    of the names `KIND/PARAMETER`, where "fp32" is the kind of the weights.

    Args:
        mapped: The source.
        kinds: The kinds of the optimizer's states, such as `exp_avg`, which have the parameters'
            shapes.
        step: The optimizer's number of steps, as the optimizer that will load it keeps it.
        progress: That of the training checkpoint.
    """
    model = mapped.model
    names = model.list_first_module_names()
    if mapped.layout.extras:
        raise ValueError(
            f"a universal checkpoint holds parameters, and {next(iter(mapped.layout.extras))} "
            f"is not one"
        )
    shapes = list_stored_shapes(model, names, dict.fromkeys(model.parameters, "F32"), {})
    tag = f"global_step{progress.step}"
    placements: dict[str, ParameterPlacement] = {}
    files: list[PlannedFile] = []
    for kind in (FP32, *kinds):
        tensors: dict[str, StoredTensor] = {}
        for name, shape in shapes.items():
            file = plan_torch_file(f"{tag}/zero/{name}/{kind}.pt", {"param": shape}, dict)
            files.append(file)
            tensors[name] = file.tensors["param"]
        layout = lay_out_huggingface(model, names, tensors, {})
        for name, placement in layout.placements.items():
            placements[f"{kind}/{name}"] = placement

    texts: dict[str, str | bytes] = {}
    for name in shapes:
        texts[f"{tag}/zero/{name}/step.pt"] = _save_to_bytes(step)
    texts[f"{tag}/zero/optimizer_state.pt"] = _save_to_bytes(
        _build_optimizer_state(step, progress.rates)
    )
    for prefix in ("", "zero_pp_rank_0_"):  # ZeRO 3 reads the second.
        path = f"{tag}/{prefix}mp_rank_00_model_states.pt"
        texts[path] = _save_to_bytes(_build_engine_state(progress))
    texts[UNIVERSAL] = tag
    return Target("universal", 1, CheckpointLayout(placements), tuple(files), texts)


def _build_optimizer_state(
    step: torch.Tensor | int, rates: Sequence[float | None]
) -> dict[str, Any]:
    """Returns what ZeRO reads of the optimizer besides its tensors.

    Stages 1 and 2 walk through `param_groups` together with the optimizer's own groups and stop at
    the shorter list, so there are more groups than any optimizer has. Stage 3 reads the nested
    dictionary, and gives all its groups what the first one has.

    A group has the learning rate alone, so other hyperparameters stay as the user chose them.
    Without a rate, the first step would have the one that a new scheduler begins with, because
    schedulers set rates after a step, and not when they are loaded.
    """
    groups: list[dict[str, Any]] = [{}] * MOST_GROUPS
    if len(set(rates)) == 1 and rates[0] is not None:
        # DeepSpeed's optimizer may divide the parameters into other groups.
        groups = [{"lr": rates[0]}] * MOST_GROUPS
    nested = {"state": {0: {"step": step}}, "param_groups": groups}
    if len(set(rates)) > 1:
        own = [{} if rate is None else {"lr": rate} for rate in rates]
        groups = own + groups[len(own) :]
    return {"ds_version": DEEPSPEED, "param_groups": groups, "optimizer_state_dict": nested}


def _build_engine_state(progress: TrainingProgress) -> dict[str, Any]:
    """Returns what DeepSpeed's engine reads.

    `lr_scheduler` suits DeepSpeed's schedulers and torch's LambdaLR.
    """
    step = progress.step
    return {
        "module": {},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": step,
        "global_samples": progress.samples,
        "skipped_steps": 0,
        "lr_scheduler": {
            "last_batch_iteration": step - 1,
            "last_epoch": step,
            "_step_count": step + 1,
            "lr_lambdas": [],
        },
        "ds_version": DEEPSPEED,
    }


def _save_to_bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
