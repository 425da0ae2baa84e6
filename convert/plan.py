"""Plans a conversion and checks the whole plan before the first byte is written."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.checkpoint import open_checkpoint
from ..checkpoint.file_io import OpenFiles, open_for_reading
from ..checkpoint.folder_files import STATE, check_file_digests, read_state_file
from ..checkpoint.layout import (
    CheckpointLayout,
    ParameterPlacement,
    ParameterSpec,
    check_no_overlap,
    place_by_rank,
    place_whole,
)
from ..checkpoint.planned_file import PlannedFile, plan_safetensors_file
from ..checkpoint.rank_files import MASTER_WEIGHT, OPTIMIZER, open_rank_files, rank_file
from ..checkpoint.stored_tensor import StoredTensor
from ..checkpoint.tensor_reader import TensorReader
from ..models.lora import StoredAdapter, open_adapter
from ..models.mapping import MappedCheckpoint, map_checkpoint
from .copying import Copy
from .target import (
    FP32,
    Target,
    build_huggingface_target,
    build_shards_target,
    build_universal_target,
)


@dataclass(frozen=True)
class ConversionPlan:
    """A checked conversion, with a copy for each parameter and extra tensor, in the order of the source's bytes.

    `adapter` is peft's, whose weights are merged or kept; `optimizer` has the files of the optimizer's state.
    """

    mapped: MappedCheckpoint
    target: Target
    copies: tuple[Copy, ...]
    adapter: StoredAdapter | None = None
    optimizer: tuple[Path, ...] = ()

    @property
    def files(self) -> list[Path]:
        """The files to read."""
        return [
            *self.mapped.checkpoint.files,
            *(self.adapter.files if self.adapter else ()),
            *self.optimizer,
        ]

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(copy.nbytes for copy in self.copies)

    def fingerprint(self) -> str:
        """Returns a digest that is equal for equal conversions of unchanged source files."""
        digest = hashlib.sha256(repr(self.copies).encode())
        for path, state in source_state(self.files).items():
            digest.update(f"{path}{state}".encode())
        return digest.hexdigest()


def plan_conversion(
    source: Path,
    make_target: Callable[[MappedCheckpoint], Target],
    config_file: Path | None = None,
    adapter: Path | None = None,
    *,
    keep_adapter: bool = False,
) -> ConversionPlan:
    """Plans a conversion and makes all checks that need no tensor's bytes.

    The weights of peft's folder `adapter` are merged, unless it is only checked, to be kept.

    Raises ValueError if the source is damaged or incomplete, or if source and target do not hold the same tensors, each
    of them exactly once.
    """
    mapped = map_checkpoint(open_checkpoint(source, config_file))
    target = make_target(mapped)
    copies = compose(mapped.layout, target.layout)
    check_no_overlap(target.layout.tensors())
    opened = None if adapter is None else open_adapter(mapped.model, adapter)
    if opened is not None and not keep_adapter:
        copies = tuple(
            replace(
                copy,
                source=opened.saved.get(copy.name, copy.source),
                updates=opened.updates.get(copy.name, ()),
            )
            for copy in copies
        )
    return ConversionPlan(mapped, target, copies, opened)


def add_optimizer(plan: ConversionPlan) -> ConversionPlan:
    """Returns a plan for shards that also moves the optimizer's state of a training checkpoint.

    Raises ValueError if the source has no such state, or its files are damaged.
    """
    size = plan.target.size
    if plan.target.kind != "shards":
        raise ValueError(
            "an optimizer's state can be written beside shards of shardzoo only; leave out --with-optimizer"
        )
    stored, specs = _optimizer_state(plan.mapped)
    files: dict[str, PlannedFile] = {}
    for rank in range(size):
        shapes = {
            name: (stored[0][name].dtype, spec.local_shape(rank, size))
            for name, spec in specs.items()
        }
        path = rank_file(Path(), OPTIMIZER, rank).name
        files[path] = plan_safetensors_file(path, shapes)
    goals = place_by_rank(specs, [file.tensors for file in files.values()])
    copies = tuple(
        Copy(name, place, goals[name]) for name, place in _place_state(specs, stored).items()
    )
    target = replace(plan.target, files=(*plan.target.files, *files.values()))
    return replace(plan, target=target, copies=(*plan.copies, *copies), optimizer=_files_of(stored))


def plan_universal(
    source: Path, config_file: Path | None = None, *, step_as_tensor: bool
) -> ConversionPlan:
    """Plans the conversion of a training checkpoint to DeepSpeed's universal checkpoint.

    Raises ValueError if the source has no optimizer's state, if its files are damaged, or if the state is of another
    kind than one tensor of the parameter's shape for each parameter, as Adam's moments are.
    """
    mapped = map_checkpoint(open_checkpoint(source, config_file))
    stored, specs = _optimizer_state(mapped)
    state, shapes = (
        read_state_file(source),
        {name: spec.shape for name, spec in mapped.model.parameters.items()},
    )
    whole = [name for name, spec in specs.items() if spec.shape == shapes[name.partition("/")[2]]]
    kinds = sorted(
        {name.partition("/")[0] for name in whole if len(specs[name].shape)} - {MASTER_WEIGHT}
    )
    found = _place_state({name: specs[name] for name in whole}, stored)
    for lacking in (
        f"{kind}/{name}" for kind in kinds for name in shapes if f"{kind}/{name}" not in found
    ):
        raise ValueError(
            f"a universal checkpoint needs states of all parameters in their own shapes, such as Adam's moments, but "
            f"{source}, of {state['optimizer'] or 'another optimizer'}, has no {lacking}"
        )
    for name, placement in mapped.layout.placements.items():
        found[f"{FP32}/{name}"] = found.get(f"{MASTER_WEIGHT}/{name}", placement)
    step = _step_count(stored[0], state)
    target = build_universal_target(
        mapped, kinds, torch.tensor(float(step)) if step_as_tensor else step, state
    )
    wanted = {name: replace(found[name], name=name) for name in target.layout.placements}
    copies = compose(CheckpointLayout(wanted), target.layout)
    return ConversionPlan(mapped, target, copies, optimizer=_files_of(stored))


def _step_count(stored: Mapping[str, StoredTensor], state: Mapping[str, Any]) -> int:
    """Returns the steps that the optimizer counted, or those of the run. ValueError if parameters differ in them."""
    with TensorReader() as reader:
        counts = {
            int(reader.whole(tensor)) for name, tensor in stored.items() if name.startswith("step/")
        }
    if len(counts) > 1:
        raise ValueError(
            f"a universal checkpoint has one number of steps, but parameters were updated {sorted(counts)[:5]} times"
        )
    return counts.pop() if counts else int(state["step"])


def _optimizer_state(
    mapped: MappedCheckpoint,
) -> tuple[list[dict[str, StoredTensor]], dict[str, ParameterSpec]]:
    """Returns each rank's stored tensors of the optimizer, and their whole shapes and splits, by KIND/PARAMETER.

    A tensor with as many dimensions as its parameter is split like it; others, such as step counts, are the same on all
    ranks. Raises ValueError if the source has no such state, or its files are damaged.
    """
    checkpoint = mapped.checkpoint
    stored = open_rank_files(checkpoint.folder, OPTIMIZER)
    if len(stored) != len(checkpoint.ranks) or not (checkpoint.folder / STATE).exists():
        raise ValueError(
            f"{checkpoint.folder} is a {checkpoint.description} with {len(stored)} files of an optimizer's state, but "
            "moving it needs a training checkpoint with one for each rank"
        )
    specs = {
        name: _state_spec(mapped.model.parameters, tensor) for name, tensor in stored[0].items()
    }
    for rank, tensors in enumerate(stored):
        if differing := sorted(tensors.keys() ^ specs.keys()):
            raise ValueError(f"tensor {differing[0]} is not in the optimizer's files of all ranks")
        for name, spec in specs.items():
            if tensors[name].shape != spec.local_shape(rank, len(stored)):
                raise ValueError(
                    f"{tensors[name]} has shape {list(tensors[name].shape)}, which does not fit {name}"
                )
    check_file_digests(checkpoint.folder, [path.name for path in _files_of(stored)])
    return stored, specs


def _place_state(
    specs: Mapping[str, ParameterSpec], stored: Sequence[Mapping[str, StoredTensor]]
) -> dict[str, ParameterPlacement]:
    """Returns the placements of an optimizer's state. Of copies, which may differ by rounding, the first one counts."""
    return {
        name: replace(p, copies=p.copies[:1]) for name, p in place_by_rank(specs, stored).items()
    }


def _files_of(stored: Sequence[Mapping[str, StoredTensor]]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(tensor.file for tensors in stored for tensor in tensors.values()))


def _state_spec(parameters: Mapping[str, ParameterSpec], tensor: StoredTensor) -> ParameterSpec:
    """Returns the whole shape and the split of a tensor of an optimizer's state."""
    parameter = parameters.get(tensor.name.partition("/")[2])
    if parameter is None:
        raise ValueError(f"{tensor} belongs to no parameter of the model")
    if len(tensor.shape) == len(parameter.shape) > 0:
        return replace(parameter, name=tensor.name)
    return ParameterSpec(tensor.name, tensor.shape, None)


def compose(source: CheckpointLayout, target: CheckpointLayout) -> tuple[Copy, ...]:
    """Returns a copy for every tensor. Raises ValueError unless both layouts have the same tensors."""
    source.check()
    target.check()
    for kind, ours, theirs in (
        ("parameter", source.placements, target.placements),
        ("tensor", source.extras, target.extras),
    ):
        if differing := sorted(ours.keys() ^ theirs.keys()):
            raise ValueError(f"{kind} {differing[0]} is in only one of source and target")
    copies = []
    for name, placement in source.placements.items():
        goal = target.placements[name]
        if (placement.shape, placement.dim) != (goal.shape, goal.dim):
            raise ValueError(
                f"{name} has shape {placement.shape} in the source, but {goal.shape} in the target"
            )
        copies.append(Copy(name, placement, goal))
    for name, tensor in source.extras.items():
        goal_tensor = target.extras[name]
        if (tensor.dtype, tensor.shape) != (goal_tensor.dtype, goal_tensor.shape):
            mine, other = (
                f"{tensor.dtype} {tensor.shape}",
                f"{goal_tensor.dtype} {goal_tensor.shape}",
            )
            raise ValueError(f"{tensor} is {mine}, but {goal_tensor} is {other}")
        copies.append(Copy(name, place_whole(name, tensor), place_whole(name, goal_tensor)))
    return tuple(sorted(copies, key=_first_byte))


def _first_byte(copy: Copy) -> tuple[str, int]:
    tensor = copy.source.copies[0][0].tensor
    return str(tensor.file), tensor.offset


def source_state(files: list[Path]) -> Mapping[Path, tuple[int, int]]:
    """Returns the size and the modification time in nanoseconds of each file, to detect changes."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


SAMPLE = 4 << 20  # bytes that are read and hashed to measure how fast this machine is


def dry_run(source: Path, size: int | None, config_file: Path | None = None) -> dict[str, Any]:
    """Describes a split over `size` ranks, or a merge if it is None: every tensor, and totals. Writes nothing.

    Raises ValueError if the conversion would fail before it copies.
    """
    todo = plan_conversion(
        source,
        lambda m: build_huggingface_target(m) if size is None else build_shards_target(m, size),
        config_file,
    )
    known = todo.mapped.model.entries()
    tensors = []
    for name, parameter in todo.mapped.model.parameters.items():
        placement = todo.target.layout.placements[name]
        part = placement.copies[0][0]
        tensors.append(
            {
                "name": name,
                "stored": list(todo.mapped.names.by_parameter[name]),
                "dtype": placement.dtype,
                "shape": list(parameter.shape),
                "split": _describe(parameter, size or 1),
                "transposed": known[name].transpose,
                "shape_per_rank": list(part.tensor.shape),
                "bytes_per_rank": part.tensor.nbytes,
            }
        )
    for name, tensor in todo.target.layout.extras.items():
        shape = list(tensor.shape)
        row = {
            "name": name,
            "stored": [name],
            "dtype": tensor.dtype,
            "shape": shape,
            "split": "kept unchanged",
        }
        tensors.append(
            {**row, "transposed": False, "shape_per_rank": shape, "bytes_per_rank": tensor.nbytes}
        )
    model = todo.mapped.model
    return {
        "tensors": tensors,
        "source": f"{todo.mapped.checkpoint.description}, {model.config.model_type}",
        "target": "Hugging Face folder" if size is None else f"shardzoo folder of {size} ranks",
        "parameters": sum(prod(parameter.shape) for parameter in model.parameters.values()),
        "vocabulary": f"{model.vocab_size}, padded to {model.padded_vocab_size(size or 1)}",
        "bytes_to_read": todo.mapped.checkpoint.nbytes,
        "bytes_to_write": todo.target.nbytes,
        "files": len(todo.target.files),
        "estimated_seconds": round(_seconds(todo), 1),
    }


def _describe(parameter: ParameterSpec, size: int) -> str:
    if parameter.shard is None:
        return "replicated"
    blocks = (
        f" in blocks {'+'.join(map(str, parameter.shard.groups))}"
        if len(parameter.shard.groups) > 1
        else ""
    )
    unequal = len({parameter.local_shape(rank, size) for rank in range(size)}) > 1
    return f"dim {parameter.dim}{blocks}{', padded' * bool(parameter.shard.pad_multiple)}{', unequal parts' * unequal}"


def _seconds(todo: ConversionPlan) -> float:
    """Estimates the seconds from a sample that is read and hashed; writing is assumed to take as long as both."""
    with OpenFiles(open_for_reading) as files:
        largest = max(todo.mapped.checkpoint.files, key=lambda path: path.stat().st_size)
        files.open([largest])
        started = time.perf_counter()
        sample = os.pread(files[largest], SAMPLE, 0)
        hashlib.sha256(sample).digest()
        elapsed = time.perf_counter() - started
    threads = min(4, os.cpu_count() or 1)
    return 2 * elapsed / max(len(sample), 1) * todo.target.nbytes / threads
