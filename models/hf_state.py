"""Converts between a model's parameters and the state dict of transformers' class of that name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.layout import ParameterSpec
from ..mpu import ParallelMesh, Shard, gather_from_tp, tp_size
from ..mpu.collectives import start_all_gather
from ..mpu.mesh import MIXTURE_AXES, Axis, axis_ranks, axis_sizes
from .mapping import NativeModel, compute_stacked_ranges, compute_stored_shape, count_expert_rows
from .name_map import NameEntry


@torch.no_grad()
def hf_state_dict(model: Any, *, gather: bool = True) -> dict[str, Tensor]:
    """Returns the parameters under the names that they have in transformers' module.

    Tied tensors are there under each of their names, and share their memory.

    Args:
        model: A model of the zoo; of a pipeline stage, the result has the stage's parameters.
        gather: Return whole tensors on every rank, which is collective over the tensor-parallel
            ranks and needs the memory. Otherwise each tensor is this rank's part.
    """
    native = NativeModel.from_config(model.config)
    mesh: ParallelMesh | None = model.mesh
    entries = native.entries()
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        spec = native.parameters[name]
        if gather:
            values = gather_parameter(parameter.detach(), spec, mesh)
            spans = compute_stacked_ranges(spec, entries[name])
        else:
            values = parameter.detach()
            spans = _find_local_spans(spec, entries[name], mesh)
        for stored, (start, stop) in zip(entries[name].stored_names(), spans, strict=True):
            part = values.narrow(spec.dim, start, stop - start) if values.dim() else values
            if entries[name].by_expert:
                part = torch.unflatten(part, 0, (-1, _count_own_rows(spec, mesh, gather)))
            if entries[name].transpose:
                part = part.transpose(-2, -1)
            state[native.to_module_name(stored)] = part.contiguous()
    for alias, kept in list_tied_names(model, native):
        if kept in state:
            state[alias] = state[kept]
    return state


def list_tied_names(model: Any, native: NativeModel) -> Iterator[tuple[str, str]]:
    """Yields the further names of tied tensors in transformers' module: (name, the first name)."""
    own: set[str] = set()
    for entry in native.entries().values():
        own.update(entry.stored_names())
    modules = {name.partition(".")[0] for name in own}
    has_head = model.get_output_embeddings() is not None
    for alias, kept in native.name_map.aliases:
        if alias in own or kept not in own:
            continue
        is_stack = "embed" in alias  # a second look-up of the embedding, by a stack
        exists = alias.partition(".")[0] in modules if is_stack else has_head
        if exists:
            yield native.to_module_name(alias), native.to_module_name(kept)


def gather_parameter(part: Tensor, spec: ParameterSpec, mesh: ParallelMesh | None) -> Tensor:
    """Returns the whole of a parameter without padding, from each rank's part.

    Collective over the tensor-parallel ranks, for a parameter that they split, and over the
    expert-parallel ranks for experts that are dealt over them.
    """
    size = tp_size(mesh)
    if spec.shard is None:
        return part
    if mesh is not None and spec.shard.is_nested and mesh.size(*MIXTURE_AXES) > 1:
        return gather_experts(part, spec.shard, mesh)
    if size == 1:
        return part.narrow(spec.dim, 0, spec.shape[spec.dim])
    shapes = [spec.local_shape(rank, size) for rank in range(size)]
    longest = max(shape[spec.dim] for shape in shapes)
    first = part.transpose(0, spec.dim)
    padded = first.new_zeros((longest, *first.shape[1:]))
    padded[: len(first)] = first
    exchange = padded if mesh is None else padded.to(mesh.device_type)
    everyone = gather_from_tp(exchange, mesh, dim=0).to(part.device)
    parts: list[Tensor] = []
    for rank, shape in enumerate(shapes):
        own = everyone[rank * longest : rank * longest + shape[spec.dim]]
        parts.append(own.transpose(0, spec.dim))
    return spec.shard.merge(parts)


def gather_experts(part: Tensor, shard: Shard, mesh: ParallelMesh | None) -> Tensor:
    """Returns the whole of what a mixture's ranks have of a tensor that the expert axis splits.
    Collective over the ranks that hold it.
    """
    axes: tuple[Axis, ...] = MIXTURE_AXES if shard.is_nested else ("expert",)
    if mesh is None or mesh.size(*axes) == 1:
        return part.clone()
    shapes: list[tuple[int, ...]] = []
    for expert, tensor in product(range(mesh.size("expert")), range(mesh.tp_size)):
        ranks: dict[Axis, int] = {"expert": expert, "tensor": tensor}
        if shard.is_nested or tensor == 0:
            shapes.append(shard.local_shape(ranks, mesh.sizes))
    longest = max(shape[0] for shape in shapes)
    padded = part.new_zeros((longest, *part.shape[1:]))
    padded[: len(part)] = part
    exchange = padded.to(mesh.device_type)
    everyone = start_all_gather(exchange, 0, mesh.group(*axes))().to(part.device)
    parts: list[Tensor] = []
    for number, shape in enumerate(shapes):
        parts.append(everyone[number * longest : number * longest + shape[0]])
    return shard.merge(parts, mesh.sizes)


def _count_own_rows(spec: ParameterSpec, mesh: ParallelMesh | None, gather: bool) -> int:
    """Returns the number of rows of an expert in all of a parameter, or in this rank's part."""
    if gather:
        return count_expert_rows(spec)
    start, stop = spec.list_ranges_on(mesh)[0]
    return stop - start


def _find_local_spans(
    spec: ParameterSpec, entry: NameEntry, mesh: ParallelMesh | None
) -> list[tuple[int, int]]:
    """Returns where the stored tensors of an entry lie in this rank's part, along its `dim`."""
    ranges = spec.list_ranges_on(mesh)
    spans: list[tuple[int, int]] = []
    for low, high in compute_stacked_ranges(spec, entry):
        start = sum(max(0, min(stop, low) - first) for first, stop in ranges)
        length = sum(max(0, min(stop, high) - max(first, low)) for first, stop in ranges)
        spans.append((start, start + length))
    return spans


def is_hf_state(model: Any, state: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Returns whether a state dict has transformers' names rather than the model's own.

    Args:
        own: The model's own state dict.
    """
    foreign = [name for name in state if name not in own]
    if not foreign:
        return False
    native = NativeModel.from_config(model.config)
    found = native.name_map.find_current_names(state, native.entries().values())
    wanted: set[str] = set()
    for entry in native.entries().values():
        wanted.update(entry.stored_names())
    return len(wanted & found.keys()) > len(state) - len(foreign)


@torch.no_grad()
def load_hf_state_dict(
    model: Any, state: Mapping[str, Tensor], strict: bool = True
) -> tuple[list[str], list[str]]:
    """Loads whole tensors with transformers' names; each rank takes its part.

    Args:
        strict: Refuse a state that lacks parameters, or has tensors of no parameter.

    Returns:
        The names of missing and of unexpected tensors.

    Raises:
        ValueError: A tensor has another shape; or, if `strict`, the names do not fit.
    """
    native = NativeModel.from_config(model.config)
    found = native.name_map.find_current_names(state, native.entries().values())
    entries = native.entries()
    mesh: ParallelMesh | None = model.mesh
    used: set[str] = set()
    missing: list[str] = []
    values: dict[str, Tensor] = {}
    for name, _ in model.named_parameters():
        entry = entries[name]
        spec = native.parameters[name]
        parts: list[Tensor] = []
        spans = compute_stacked_ranges(spec, entry)
        for stored, span in zip(entry.stored_names(), spans, strict=True):
            if stored not in found:
                missing.append(native.to_module_name(stored))
                continue
            tensor = state[found[stored]]
            wanted = compute_stored_shape(spec, span, entry)
            if tuple(tensor.shape) != wanted:
                raise ValueError(
                    f"{found[stored]} has shape {list(tensor.shape)}, but the model needs "
                    f"{list(wanted)}"
                )
            used.add(found[stored])
            part = tensor.transpose(-2, -1) if entry.transpose else tensor
            parts.append(part.flatten(0, 1) if entry.by_expert else part)
        if len(parts) == len(spans):
            values[name] = torch.cat(parts, spec.dim) if len(parts) > 1 else parts[0]
    aliases = dict(native.name_map.aliases)
    unexpected: list[str] = []
    for current, name in found.items():
        is_zero = current in native.name_map.zeros and not bool(state[name].any())
        is_known = name in used or current in aliases or native.name_map.is_ignored(name)
        if not is_known and not is_zero:
            unexpected.append(name)
    if strict and (missing or unexpected):
        raise ValueError(
            f"the state dict of a {native.config.architecture} lacks {missing[:20]}, and has "
            f"{unexpected[:20]}, which the model does not have"
        )
    for name, parameter in model.named_parameters():
        if name not in values:
            continue
        shard = native.parameters[name].shard
        whole = values[name]
        if shard is not None:
            whole = shard.slice(whole, axis_ranks(mesh), axis_sizes(mesh))
        parameter.copy_(whole)
    return missing, unexpected
