"""Lays out a Hugging Face folder: its tensors, its weight files, and where parameters are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod

from ..checkpoint.dtypes import item_size
from ..checkpoint.layout import CheckpointLayout, ParameterPlacement, TensorSlice
from ..checkpoint.planned_file import PlannedFile, plan_safetensors_file
from ..checkpoint.stored_tensor import StoredTensor
from .mapping import (
    NativeModel,
    StoredNames,
    compute_stacked_ranges,
    compute_stored_shape,
    slice_stored,
)

LARGEST_FILE = 5 * 10**9  # bytes of one file
INDEX = "model.safetensors.index.json"
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # name of a tensor -> type, shape
CRF_NOTE = (
    "the files keep the conditional random field (crf_layer.*), which transformers ignores: there "
    "each label is the most probable one by itself"
)


def list_stored_shapes(
    model: NativeModel,
    names: StoredNames,
    dtypes: Mapping[str, str],
    extras: Mapping[str, StoredTensor],
) -> Shapes:
    """Returns the type and shape of each tensor of a Hugging Face folder.

    Args:
        names: The names of the parameters' tensors.
        dtypes: Native name of a parameter -> safetensors name of its type.
        extras: Tensors that are no parameters, and are stored as they are.

    Raises:
        ValueError: Two tensors would have the same name.
    """
    entries = model.entries()
    shapes: Shapes = {}
    for name, parameter in model.parameters.items():
        entry = entries[name]
        spans = compute_stacked_ranges(parameter, entry)
        copies = names.list_copies(name)
        for stored in {stored for copy in copies for stored in copy}:
            if stored in shapes:
                raise ValueError(f"two tensors would have the name {stored}")
        for copy in copies:
            for stored, span in zip(copy, spans, strict=True):
                shapes[stored] = (dtypes[name], compute_stored_shape(parameter, span, entry))
    for name, tensor in extras.items():
        if name in shapes:
            raise ValueError(f"{tensor} is not a parameter, but has the name of one")
        shapes[name] = (tensor.dtype, tensor.shape)
    return shapes


def plan_weight_files(
    shapes: Shapes, largest_file: int
) -> tuple[tuple[PlannedFile, ...], dict[str, str | bytes]]:
    """Plans the weight files of a Hugging Face folder.

    Returns:
        The files of at most `largest_file` bytes, and the texts beside them: the index by its name
        if there are several files.
    """
    groups = divide_tensors(shapes, largest_file)
    if len(groups) == 1:
        return (plan_safetensors_file("model.safetensors", groups[0]),), {}
    files: list[PlannedFile] = []
    tensors: dict[str, StoredTensor] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        file = plan_safetensors_file(name, group)
        files.append(file)
        tensors.update(file.tensors)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: str(tensors[name].file) for name in sorted(tensors)},
    }
    return tuple(files), {INDEX: json.dumps(index, indent=2) + "\n"}


def lay_out_huggingface(
    model: NativeModel,
    names: StoredNames,
    tensors: Mapping[str, StoredTensor],
    extras: Mapping[str, StoredTensor],
) -> CheckpointLayout:
    """Returns where the tensors of a Hugging Face folder hold the parameters."""
    entries = model.entries()
    placements: dict[str, ParameterPlacement] = {}
    for name, parameter in model.parameters.items():
        entry = entries[name]
        spans = compute_stacked_ranges(parameter, entry)
        copies: list[tuple[TensorSlice, ...]] = []
        for copy in names.list_copies(name):
            parts: list[TensorSlice] = []
            for stored, span in zip(copy, spans, strict=True):
                parts += slice_stored(tensors[stored], span, parameter, entry)
            copies.append(tuple(parts))
        shape = parameter.shape or (1,)
        placements[name] = ParameterPlacement(name, shape, parameter.dim, tuple(copies))
    return CheckpointLayout(placements, {name: tensors[name] for name in extras})


def divide_tensors(shapes: Shapes, largest_file: int) -> list[Shapes]:
    """Divides tensors among files of at most `largest_file` bytes, in their order."""
    groups: list[Shapes] = [{}]
    filled = 0
    for name, (dtype, shape) in shapes.items():
        nbytes = prod(shape) * item_size(dtype)
        if groups[-1] and filled + nbytes > largest_file:
            groups.append({})
            filled = 0
        groups[-1][name] = (dtype, shape)
        filled += nbytes
    return groups
