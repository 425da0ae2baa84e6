"""Lays out a destination: its weight files, and where each parameter is stored in them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..checkpoint.checkpoint import EXTRAS, UNIVERSAL
from ..checkpoint.dtypes import FLOATS
from ..checkpoint.formats.dcp import METADATA, SUFFIX
from ..checkpoint.formats.megatron import RANK_FILES, TRACKER, megatron_state
from ..checkpoint.layout import CheckpointLayout, ParameterPlacement, place_by_rank
from ..checkpoint.new_file import (
    NewFile,
    dcp_metadata,
    new_chunk_file,
    new_safetensors_file,
    new_torch_file,
)
from ..checkpoint.stored_tensor import StoredTensor
from ..models.huggingface import (
    LARGEST_FILE,
    divide,
    huggingface_layout,
    stored_shapes,
    weight_files,
)
from ..models.mapping import MappedCheckpoint, megatron_map
from ..models.megatron import Style

LEGACY_FOLDER = "release"  # the file `latest` names this folder


@dataclass(frozen=True)
class Target:
    """The layout of a destination.

    `kind` is that of `Checkpoint`, `size` the number of ranks. Files are named relative to the destination; `texts` has
    the contents of additional small files.
    """

    kind: str
    size: int
    layout: CheckpointLayout
    files: tuple[NewFile, ...]
    texts: Mapping[str, str | bytes] = field(default_factory=dict[str, str | bytes])

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def shards_target(mapped: MappedCheckpoint, size: int, dtype: str | None = None) -> Target:
    """Lays out a shardzoo folder of `size` ranks. ValueError, naming the sizes that work, if it is not one of them."""
    mapped.model.check_size(size)
    dtypes = new_dtypes(mapped, dtype)
    files, ranks = [], []
    for rank in range(size):
        shapes = {
            name: (dtypes[name], p.local_shape(rank, size))
            for name, p in mapped.model.parameters.items()
        }
        file = new_safetensors_file(f"rank_{rank:02d}.safetensors", shapes)
        files.append(file)
        ranks.append(file.tensors)
    placements = place_by_rank(mapped.model.parameters, ranks)
    extras: Mapping[str, StoredTensor] = {}
    if mapped.layout.extras:
        extra_shapes = {
            name: (tensor.dtype, tensor.shape) for name, tensor in mapped.layout.extras.items()
        }
        file = new_safetensors_file(EXTRAS, extra_shapes)
        files.append(file)
        extras = file.tensors
    return Target("shards", size, CheckpointLayout(placements, extras), tuple(files))


def huggingface_target(
    mapped: MappedCheckpoint, dtype: str | None = None, largest_file: int = LARGEST_FILE
) -> Target:
    """Lays out a Hugging Face folder.

    The tensors have the names of the Hugging Face folder that they came from, or the current names if there was none.
    """
    shapes = stored_shapes(
        mapped.model, mapped.names, new_dtypes(mapped, dtype), mapped.layout.extras
    )
    files, texts = weight_files(shapes, largest_file)
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    layout = huggingface_layout(mapped.model, mapped.names, tensors, mapped.layout.extras)
    return Target("huggingface", 1, layout, files, texts)


def dcp_target(
    mapped: MappedCheckpoint, dtype: str | None = None, largest_file: int = LARGEST_FILE
) -> Target:
    """Lays out a folder of `torch.distributed.checkpoint`, with each tensor in one chunk.

    The tensors have the names of transformers' state dictionary. Names of tied tensors are listed for the same bytes.
    """
    model = mapped.model
    names, extras = model.module_names(), mapped.layout.extras
    groups = divide(stored_shapes(model, names, new_dtypes(mapped, dtype), extras), largest_file)
    made = [new_chunk_file(f"__{number}_0{SUFFIX}", group) for number, group in enumerate(groups)]
    tensors = {name: tensor for file, _ in made for name, tensor in file.tensors.items()}
    pairs = [
        (model.module_name(alias), model.module_name(kept))
        for alias, kept in model.name_map.aliases
    ]
    aliases = {alias: kept for alias, kept in pairs if kept in tensors and alias not in tensors}
    files = tuple(file for file, _ in made)
    texts: dict[str, str | bytes] = {METADATA: dcp_metadata(made, aliases)}
    return Target("dcp", 1, huggingface_layout(model, names, tensors, extras), files, texts)


FP32 = "fp32"  # DeepSpeed's name of a parameter's weights
DEEPSPEED = "0.19.0"  # the version whose format a universal checkpoint has
MOST_GROUPS = 1024  # of the optimizer that loads a universal checkpoint


def universal_target(
    mapped: MappedCheckpoint,
    kinds: Sequence[str],
    step: torch.Tensor | int,
    state: Mapping[str, Any],
) -> Target:
    """Lays out DeepSpeed's universal checkpoint: one torch file for each parameter and each kind of state.

    Parameters have the names of transformers' model, and types are fp32. The layout has placements of the names
    `KIND/PARAMETER`, where "fp32" is the kind of the weights.

    Args:
        kinds: The kinds of the optimizer's states, such as `exp_avg`, which have the parameters' shapes.
        step: The optimizer's number of steps, as the optimizer that will load it keeps it.
        state: That of the training checkpoint.
    """
    model = mapped.model
    names = model.first_names()
    if mapped.layout.extras:
        raise ValueError(
            f"a universal checkpoint holds parameters, and {next(iter(mapped.layout.extras))} is not one"
        )
    shapes = stored_shapes(model, names, dict.fromkeys(model.parameters, "F32"), {})
    tag = f"global_step{state['step']}"
    placements: dict[str, ParameterPlacement] = {}
    files: list[NewFile] = []
    for kind in (FP32, *kinds):
        made = {
            name: new_torch_file(f"{tag}/zero/{name}/{kind}.pt", {"param": shape}, dict)
            for name, shape in shapes.items()
        }
        files += made.values()
        layout = huggingface_layout(
            model, names, {name: file.tensors["param"] for name, file in made.items()}, {}
        )
        placements |= {f"{kind}/{name}": placement for name, placement in layout.placements.items()}
    texts: dict[str, str | bytes] = {f"{tag}/zero/{name}/step.pt": _saved(step) for name in shapes}
    texts[f"{tag}/zero/optimizer_state.pt"] = _saved(_optimizer_state(step))
    for prefix in ("", "zero_pp_rank_0_"):  # ZeRO 3 reads the second
        texts[f"{tag}/{prefix}mp_rank_00_model_states.pt"] = _saved(_engine_state(state))
    texts[UNIVERSAL] = tag
    return Target("universal", 1, CheckpointLayout(placements), tuple(files), texts)


def _optimizer_state(step: torch.Tensor | int) -> dict[str, Any]:
    """Returns what ZeRO reads of the optimizer besides its tensors.

    Stages 1 and 2 walk through `param_groups` together with the optimizer's own groups and stop at the shorter list, so
    there are more groups than any optimizer has. They are empty, so hyperparameters stay as the user chose them.
    Stage 3 reads the nested dictionary.
    """
    groups: list[dict[str, Any]] = [{}] * MOST_GROUPS
    nested = {"state": {0: {"step": step}}, "param_groups": groups}
    return {"ds_version": DEEPSPEED, "param_groups": groups, "optimizer_state_dict": nested}


def _engine_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what DeepSpeed's engine reads. `lr_scheduler` suits DeepSpeed's schedulers and torch's LambdaLR."""
    step = state["step"]
    return {
        "module": {},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": step,
        "global_samples": state["consumed_samples"],
        "skipped_steps": 0,
        "lr_scheduler": {
            "last_batch_iteration": step - 1,
            "last_epoch": step,
            "_step_count": step + 1,
            "lr_lambdas": [],
        },
        "ds_version": DEEPSPEED,
    }


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def legacy_target(mapped: MappedCheckpoint, size: int, dtype: str | None = None) -> Target:
    """Lays out `size` mp_rank files.

    The tensors have their Hugging Face names, which for GLM are the original ones, and the vocabulary is not padded. If
    the family stacks or transposes tensors, they have shardzoo's native names, and the vocabulary is padded. Raises
    ValueError if the model cannot be split so, or if these files cannot store a tensor or its type.
    """
    model, dtypes = mapped.model, new_dtypes(mapped, dtype)
    known = model.entries()
    original = all(
        len(entry.stored_names()) == 1 and not entry.transpose for entry in known.values()
    )
    parameters = {
        name: p.without_padding() if original else p for name, p in model.parameters.items()
    }
    names = {name: known[name].stored_names()[0] if original else name for name in parameters}
    _refuse_extras(mapped, "mp_rank files")
    shapes = {names[name]: (dtypes[name], p.even_shape(size)) for name, p in parameters.items()}
    files, ranks = [], []
    for rank in range(size):
        path = f"{LEGACY_FOLDER}/mp_rank_{rank:02d}_model_states.pt"
        file = new_torch_file(
            path, shapes, lambda tensors: {"module": tensors, "mp_world_size": size}
        )
        files.append(file)
        ranks.append({name: file.tensors[names[name]] for name in parameters})
    return Target(
        "legacy",
        size,
        CheckpointLayout(place_by_rank(parameters, ranks)),
        tuple(files),
        {"latest": LEGACY_FOLDER + "\n"},
    )


def _refuse_extras(mapped: MappedCheckpoint, what: str) -> None:
    for extra in mapped.layout.extras:
        raise ValueError(f"{what} can hold only parameters of the model, and {extra} is not one")


def megatron_target(
    mapped: MappedCheckpoint,
    size: int,
    dtype: str | None = None,
    stages: int = 1,
    style: Style | None = None,
) -> Target:
    """Lays out Megatron-LM's files of `size` tensor-parallel ranks and `stages` pipeline stages, version 3.0.

    Each rank's part of the vocabulary is padded to a multiple of 128. The style names the tensors; by default it is the
    family's first. Raises ValueError if Megatron-LM does not have the model, or cannot divide it so.
    """
    model, dtypes = mapped.model, new_dtypes(mapped, dtype)
    found = megatron_map(model.config)
    style = found.checked_style(style)
    _refuse_extras(mapped, "Megatron-LM's files")
    model.check_size(size)
    specs = {
        name: found.stored_spec(parameter, "heads") for name, parameter in model.parameters.items()
    }
    arguments = found.all_arguments(model.config, specs, (size, stages), style)
    arrange = partial(megatron_state, arguments=arguments, nested=style == "legacy")
    plan = found.divide(model.parameters, stages, style)
    files: list[NewFile] = []
    ranks: list[dict[str, StoredTensor]] = []
    tied: list[dict[str, StoredTensor]] = []
    for rank in range(size):
        ranks.append({})
        tied.append({})
        for stage, names in enumerate(plan):
            shapes = {
                stored: (dtypes[name], specs[name].even_shape(size))
                for stored, name in names.items()
            }
            folder = f"{LEGACY_FOLDER}/mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            files.append(new_torch_file(f"{folder}/{RANK_FILES[0]}", shapes, arrange))
            for stored, name in names.items():
                (tied if name in ranks[-1] else ranks)[-1][name] = files[-1].tensors[stored]
    placements = place_by_rank(specs, ranks)
    for name, again in place_by_rank({name: specs[name] for name in tied[0]}, tied).items():
        placements[name] = replace(placements[name], copies=placements[name].copies + again.copies)
    return Target(
        "megatron", size, CheckpointLayout(placements), tuple(files), {TRACKER: LEGACY_FOLDER}
    )


def new_dtypes(mapped: MappedCheckpoint, dtype: str | None) -> dict[str, str]:
    """Returns each parameter's type in the destination: `dtype` for floating-point parameters, else the stored one."""
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"cannot convert to {dtype}; use one of {', '.join(FLOATS)}")
    own = {name: placement.dtype for name, placement in mapped.layout.placements.items()}
    return {name: dtype if dtype and kind in FLOATS else kind for name, kind in own.items()}
