"""Lays out a Hugging Face folder: the names and shapes of its tensors, its weight files, and where parameters are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod

from ..checkpoint.dtypes import item_size
from ..checkpoint.layout import CheckpointLayout, ParameterPlacement, TensorSlice
from ..checkpoint.planned_file import PlannedFile, plan_safetensors_file
from ..checkpoint.stored_tensor import StoredTensor
from .mapping import NativeModel, StoredNames, compute_stacked_ranges, compute_stored_shape

LARGEST_FILE = 5 * 10**9  # bytes of one file
INDEX = "model.safetensors.index.json"
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # name of a tensor -> type, shape


def stored_shapes(
    model: NativeModel,
    names: StoredNames,
    dtypes: Mapping[str, str],
    extras: Mapping[str, StoredTensor],
) -> Shapes:
    """Returns the type and shape of each tensor. ValueError if two tensors would have the same name.

    Args:
        dtypes: Native name of a parameter -> safetensors name of its type.
        extras: Tensors that are no parameters, and are stored as they are.
    """
    known = model.entries()
    shapes: Shapes = {}
    for name, parameter in model.parameters.items():
        spans = compute_stacked_ranges(parameter, known[name])
        copies = names.list_copies(name)
        for stored in {stored for copy in copies for stored in copy}:
            if stored in shapes:
                raise ValueError(f"two tensors would have the name {stored}")
        for copy in copies:
            for stored, span in zip(copy, spans, strict=True):
                shapes[stored] = (dtypes[name], compute_stored_shape(parameter, span, known[name]))
    for name, tensor in extras.items():
        if name in shapes:
            raise ValueError(f"{tensor} is not a parameter, but has the name of one")
        shapes[name] = (tensor.dtype, tensor.shape)
    return shapes


def weight_files(
    shapes: Shapes, largest_file: int
) -> tuple[tuple[PlannedFile, ...], dict[str, str | bytes]]:
    """Returns the weight files of at most `largest_file` bytes, and the index by its name if there are several."""
    groups = divide(shapes, largest_file)
    count = len(groups)
    files = tuple(
        plan_safetensors_file(
            "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors",
            group,
        )
        for number, group in enumerate(groups, 1)
    )
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: str(tensors[name].file) for name in sorted(tensors)},
    }
    return files, {INDEX: json.dumps(index, indent=2) + "\n"} if count > 1 else {}


def huggingface_layout(
    model: NativeModel,
    names: StoredNames,
    tensors: Mapping[str, StoredTensor],
    extras: Mapping[str, StoredTensor],
) -> CheckpointLayout:
    """Returns where the tensors of a Hugging Face folder hold the parameters."""
    known = model.entries()
    placements: dict[str, ParameterPlacement] = {}
    for name, parameter in model.parameters.items():
        spans, transpose = compute_stacked_ranges(parameter, known[name]), known[name].transpose
        parts = (
            tuple(
                TensorSlice(tensors[stored].at_least_1d(), (span,), transpose)
                for stored, span in zip(copy, spans, strict=True)
            )
            for copy in names.list_copies(name)
        )
        placements[name] = ParameterPlacement(
            name, parameter.shape or (1,), parameter.dim, tuple(parts)
        )
    return CheckpointLayout(placements, {name: tensors[name] for name in extras})


def divide(shapes: Shapes, largest_file: int) -> list[Shapes]:
    """Divides tensors among files of at most `largest_file` bytes."""
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
