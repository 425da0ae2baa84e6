"""Plans a conversion and checks the whole plan before the first byte is written."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.file_io import OpenFiles
from ..checkpoint.folder_files import CONFIG, STATE, check_file_digests, read_count, read_state_file
from ..checkpoint.formats.universal import FP32, UniversalState
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
from ..checkpoint.stored_tensor import FileState, StoredTensor, list_chunks, read_file_state
from ..checkpoint.tensor_reader import TensorReader
from ..files.strict_json import is_object
from ..files.working_copies import open_for_reading, read_at
from ..models.lora import StoredAdapter, open_adapter
from ..models.mapping import MappedCheckpoint, map_checkpoint
from .copying import TensorCopy
from .target import (
    Target,
    TrainingProgress,
    build_huggingface_target,
    build_shards_target,
    build_universal_target,
)


@dataclass(frozen=True)
class ConversionPlan:
    """A checked conversion.

    Attributes:
        mapped: The source.
        target: What will be written.
        copies: A copy for each parameter and extra tensor, in the order of the source's bytes.
        adapter: That of peft, whose weights are merged or kept.
        optimizer: The source's files of the optimizer's state.
        state: The state of a run that is moved with its optimizer.
        config_state: The state of the source's `config.json` before it was read, if there is one.
    """

    mapped: MappedCheckpoint
    target: Target
    copies: tuple[TensorCopy, ...]
    adapter: StoredAdapter | None = None
    optimizer: tuple[Path, ...] = ()
    state: Mapping[str, Any] | None = None
    config_state: FileState | None = None

    @property
    def files(self) -> list[Path]:
        """The files to read."""
        files = list(self.mapped.checkpoint.files)
        if self.adapter is not None:
            files += self.adapter.files
        files += self.optimizer
        return files

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(copy.nbytes for copy in self.copies)

    def fingerprint(self) -> str:
        """Returns a digest that is equal for equal conversions of unchanged source files."""
        digest = hashlib.sha256(repr(self.copies).encode())
        for path, state in self.planned_states().items():
            digest.update(f"{path}{state}".encode())
        return digest.hexdigest()

    def planned_states(self) -> dict[Path, FileState]:
        """Returns the state that each source file had when its header was read."""
        stored = list(self.mapped.checkpoint.tensors())
        for copy in self.copies:
            stored += [part.tensor for part in copy.source.slices()]
            for update in copy.updates:
                stored += [update.first, update.second]
        states: dict[Path, FileState] = {}
        for tensor in stored:
            for _, chunk in list_chunks(tensor):
                if chunk.file_state is not None:
                    states[chunk.file] = chunk.file_state
        for path in self.files:
            if path not in states:
                states[path] = read_file_state(path)
        return states

    def check_source(self, planned: Mapping[Path, FileState]) -> None:
        """Checks that the source files are still those that the plan was made for.

        Args:
            planned: What `planned_states` returned before the conversion began.

        Raises:
            ValueError: One was replaced or written since.
        """
        config = self.mapped.checkpoint.folder / CONFIG
        if self.config_state is not None:
            planned = {**planned, config: self.config_state}
        for path, state in planned.items():
            if not path.exists() or read_file_state(path) != state:
                raise ValueError(f"{path} changed while it was being read; convert it again")


def plan_conversion(
    source: Path,
    build_target: Callable[[MappedCheckpoint], Target],
    config_file: Path | None = None,
    adapter: Path | None = None,
    *,
    keep_adapter: bool = False,
) -> ConversionPlan:
    """Plans a conversion and makes all checks that need no tensor's bytes.

    Args:
        source: A folder of any format.
        build_target: Plans the destination.
        config_file: A `config.json`, or its folder, to use instead of the source's own.
        adapter: peft's folder of LoRA weights, which are merged.
        keep_adapter: Whether the adapter is only checked, and kept as it is.

    Raises:
        ValueError: The source is damaged or incomplete, or source and target do not hold the same
            tensors, each of them exactly once.
    """
    config_state = _read_config_state(source)
    mapped = map_checkpoint(open_checkpoint(source, config_file))
    target = build_target(mapped)
    copies = pair_tensors(mapped.layout, target.layout)
    check_no_overlap(target.layout.tensors())
    if adapter is None:
        return ConversionPlan(mapped, target, copies, config_state=config_state)

    stored_adapter = open_adapter(mapped.model, adapter)
    if not keep_adapter:
        merged: list[TensorCopy] = []
        for copy in copies:
            own_source = stored_adapter.saved.get(copy.name, copy.source)
            updates = stored_adapter.updates.get(copy.name, ())
            merged.append(replace(copy, source=own_source, updates=updates))
        copies = tuple(merged)
    return ConversionPlan(mapped, target, copies, stored_adapter, config_state=config_state)


def _read_config_state(folder: Path) -> FileState | None:
    """Returns the state of a folder's `config.json`, or None without one."""
    path = folder / CONFIG
    return read_file_state(path) if path.exists() else None


def pair_tensors(source: CheckpointLayout, target: CheckpointLayout) -> tuple[TensorCopy, ...]:
    """Returns a copy for every tensor, in the order of the source's bytes.

    Raises:
        ValueError: The layouts do not have the same tensors, each exactly once.
    """
    copies, differences = pair_common_tensors(source, target, ("the source", "the target"))
    if differences:
        raise ValueError(differences[0])
    return copies


def pair_common_tensors(
    source: CheckpointLayout, target: CheckpointLayout, names: tuple[str, str]
) -> tuple[tuple[TensorCopy, ...], list[str]]:
    """Pairs the tensors that both layouts have in the same shape, and describes all others.

    Args:
        names: Of the two layouts, for the descriptions.

    Returns:
        The pairs, in the order of the source's bytes, and the descriptions.

    Raises:
        ValueError: A layout does not have each of its own tensors exactly once.
    """
    source.check()
    target.check()
    differences = _list_unshared("parameter", source.placements, target.placements, names)
    differences += _list_unshared("tensor", source.extras, target.extras, names)
    copies: list[TensorCopy] = []
    for name, placement in source.placements.items():
        goal = target.placements.get(name)
        if goal is None:
            continue
        if (placement.shape, placement.dim) != (goal.shape, goal.dim):
            differences.append(
                f"{name} has shape {placement.shape} in {names[0]}, but {goal.shape} in {names[1]}"
            )
            continue
        copies.append(TensorCopy(name, placement, goal))
    for name, tensor in source.extras.items():
        goal_tensor = target.extras.get(name)
        if goal_tensor is None:
            continue
        if (tensor.dtype, tensor.shape) != (goal_tensor.dtype, goal_tensor.shape):
            differences.append(
                f"{tensor} is {tensor.dtype} {tensor.shape}, "
                f"but {goal_tensor} is {goal_tensor.dtype} {goal_tensor.shape}"
            )
            continue
        copies.append(TensorCopy(name, place_whole(name, tensor), place_whole(name, goal_tensor)))
    return tuple(sorted(copies, key=_find_first_byte)), differences


def _list_unshared(
    kind: str, source: Mapping[str, Any], target: Mapping[str, Any], names: tuple[str, str]
) -> list[str]:
    """Describes the tensors that only one of two layouts has."""
    differences: list[str] = []
    for name in sorted(source.keys() ^ target.keys()):
        owner = names[0] if name in source else names[1]
        differences.append(f"{kind} {name} is only in {owner}")
    return differences


def _find_first_byte(copy: TensorCopy) -> tuple[str, int]:
    tensor = copy.source.copies[0][0].tensor
    return str(tensor.file), tensor.offset


def add_optimizer(plan: ConversionPlan) -> ConversionPlan:
    """Returns a plan for shards that also moves the optimizer's state of a training checkpoint.

    Raises:
        ValueError: The source has no such state, or its files are damaged.
    """
    if plan.target.kind != "shards":
        raise ValueError(
            "an optimizer's state can be written beside shards of shardzoo only; "
            "leave out --with-optimizer"
        )
    size = plan.target.size
    if plan.mapped.checkpoint.universal is not None:
        sources = _place_universal_state(plan.mapped, plan.mapped.checkpoint.universal)
        specs: dict[str, ParameterSpec] = {}
        for name in sources:
            parameter = plan.mapped.model.parameters[name.partition("/")[2]]
            specs[name] = replace(parameter, name=name)
        states = plan.mapped.checkpoint.universal.states.values()
        state_files = _list_files(list(states))
    else:
        ranks, specs = _read_optimizer_state(plan.mapped)
        sources = _place_optimizer_state(specs, ranks)
        state_files = _list_files(ranks)
    files: list[PlannedFile] = []
    for rank in range(size):
        shapes = {
            name: (sources[name].dtype, spec.local_shape(rank, size))
            for name, spec in specs.items()
        }
        path = rank_file(Path(), OPTIMIZER, rank)
        files.append(plan_safetensors_file(path.name, shapes))

    goals = place_by_rank(specs, [file.tensors for file in files])
    copies = list(plan.copies)
    for name, placement in sources.items():
        copies.append(TensorCopy(name, placement, goals[name]))
    return replace(
        plan,
        target=replace(plan.target, files=(*plan.target.files, *files)),
        copies=tuple(copies),
        optimizer=state_files,
        state=_make_state(plan.mapped.checkpoint),
    )


def _place_universal_state(
    mapped: MappedCheckpoint, universal: UniversalState
) -> dict[str, ParameterPlacement]:
    """Returns where a universal checkpoint has the optimizer's states, by KIND/PARAMETER.

    Raises:
        ValueError: There are none, or one does not have its parameter's shape.
    """
    if not universal.states:
        raise ValueError(
            f"{mapped.checkpoint.folder} has no optimizer's state; leave out --with-optimizer"
        )
    placements: dict[str, ParameterPlacement] = {}
    for kind, tensors in universal.states.items():
        of_kind = replace(mapped.checkpoint, ranks=(tensors,))
        for name, placement in map_checkpoint(of_kind, mapped.model).layout.placements.items():
            placements[f"{kind}/{name}"] = replace(placement, name=f"{kind}/{name}")
    return placements


def _make_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the state of the training checkpoint that a moved run has.

    A run that resumes from another number of ranks makes random states of its own.
    """
    universal = checkpoint.universal
    if universal is None:
        return {**read_state_file(checkpoint.folder), "world_size": 0}
    return {
        "step": universal.step,
        "consumed_samples": universal.samples,
        "data": {"consumed_samples": universal.samples},  # the position in numbered samples
        "counters": {"applied_steps": universal.step},
        "world_size": 0,
    }


def plan_universal(
    source: Path, config_file: Path | None = None, *, step_as_tensor: bool
) -> ConversionPlan:
    """Plans the conversion of a training checkpoint to DeepSpeed's universal checkpoint.

    Args:
        source: The training checkpoint.
        config_file: A `config.json`, or its folder, to use instead of the source's own.
        step_as_tensor: Whether the step count is a tensor, as in torch's optimizers, or an int, as
            in DeepSpeed's.

    Raises:
        ValueError: The source has no optimizer's state, its files are damaged, or the state is of
            another kind than one tensor of the parameter's shape for each parameter, as Adam's
            moments are.
    """
    config_state = _read_config_state(source)
    mapped = map_checkpoint(open_checkpoint(source, config_file))
    parameters = mapped.model.parameters
    ranks, specs = _read_optimizer_state(mapped)
    state = read_state_file(source)
    progress = TrainingProgress(
        step=read_count(state, "step", source),
        samples=read_count(state, "consumed_samples", source),
        rates=_read_learning_rates(state),
    )

    # The states that have the shapes of their parameters, by KIND/PARAMETER.
    whole: dict[str, ParameterSpec] = {}
    kinds: set[str] = set()
    for name, spec in specs.items():
        kind, _, parameter = name.partition("/")
        if spec.shape == parameters[parameter].shape:
            whole[name] = spec
            if len(spec.shape) and kind != MASTER_WEIGHT:
                kinds.add(kind)
    found = _place_optimizer_state(whole, ranks)
    for kind in sorted(kinds):
        for name in parameters:
            if f"{kind}/{name}" not in found:
                raise ValueError(
                    f"a universal checkpoint needs states of all parameters in their own shapes, "
                    f"such as Adam's moments, but {source}, of "
                    f"{state.get('optimizer') or 'another optimizer'}, has no {kind}/{name}"
                )

    # The fp32 weights are the optimizer's, or else the model's own.
    for name, placement in mapped.layout.placements.items():
        found[f"{FP32}/{name}"] = found.get(f"{MASTER_WEIGHT}/{name}", placement)

    count: torch.Tensor | int = _read_step_count(ranks[0], progress.step)
    if step_as_tensor:
        count = torch.tensor(float(count))
    target = build_universal_target(mapped, sorted(kinds), count, progress)
    sources = {name: replace(found[name], name=name) for name in target.layout.placements}
    copies = pair_tensors(CheckpointLayout(sources), target.layout)
    return ConversionPlan(
        mapped, target, copies, optimizer=_list_files(ranks), config_state=config_state
    )


def _read_learning_rates(state: Mapping[str, Any]) -> list[float | None]:
    """Returns the learning rate of each parameter group in the run's next step.

    Older checkpoints have at most the rates of the last step, and only if they had changed.
    """
    rates: Any = state.get("rates")
    if not isinstance(rates, list):
        groups: Any = state.get("groups")
        rates = []
        if isinstance(groups, list):
            rates = [group.get("lr") if is_object(group) else None for group in groups]
    return [rate if isinstance(rate, float) and math.isfinite(rate) else None for rate in rates]


def _read_step_count(stored: Mapping[str, StoredTensor], steps: int) -> int:
    """Returns the steps that the optimizer counted, or those of the run.

    Raises:
        ValueError: Parameters differ in their steps.
    """
    counts: set[int] = set()
    with TensorReader() as reader:
        for name, tensor in stored.items():
            if name.startswith("step/"):
                counts.add(int(reader.whole(tensor)))
    if len(counts) > 1:
        raise ValueError(
            f"a universal checkpoint has one number of steps, "
            f"but parameters were updated {sorted(counts)[:5]} times"
        )
    if counts:
        return counts.pop()
    return steps


def _read_optimizer_state(
    mapped: MappedCheckpoint,
) -> tuple[list[dict[str, StoredTensor]], dict[str, ParameterSpec]]:
    """Returns each rank's tensors of the optimizer's state, and their specs, by KIND/PARAMETER.

    Raises:
        ValueError: The source has no such state, or its files are damaged.
    """
    checkpoint = mapped.checkpoint
    ranks = open_rank_files(checkpoint.folder, OPTIMIZER)
    size = len(ranks)
    if size != len(checkpoint.ranks) or not (checkpoint.folder / STATE).exists():
        raise ValueError(
            f"{checkpoint.folder} is a {checkpoint.description} with {size} files of an "
            f"optimizer's state, but moving it needs a training checkpoint with one for each rank"
        )
    specs: dict[str, ParameterSpec] = {}
    for name, tensor in ranks[0].items():
        specs[name] = _find_state_spec(mapped.model.parameters, tensor)
    for rank, tensors in enumerate(ranks):
        differing = sorted(tensors.keys() ^ specs.keys())
        if differing:
            raise ValueError(f"tensor {differing[0]} is not in the optimizer's files of all ranks")
        for name, spec in specs.items():
            shape = tensors[name].shape
            if shape != spec.local_shape(rank, size):
                raise ValueError(
                    f"{tensors[name]} has shape {list(shape)}, which does not fit {name}"
                )
    check_file_digests(checkpoint.folder, [path.name for path in _list_files(ranks)])
    return ranks, specs


def _find_state_spec(
    parameters: Mapping[str, ParameterSpec], tensor: StoredTensor
) -> ParameterSpec:
    """Returns the whole shape and the split of a tensor of an optimizer's state.

    A tensor with as many dimensions as its parameter is split like it; others, such as step counts,
    are the same on all ranks.
    """
    _, _, parameter_name = tensor.name.partition("/")
    parameter = parameters.get(parameter_name)
    if parameter is None:
        raise ValueError(f"{tensor} belongs to no parameter of the model")
    if len(tensor.shape) == len(parameter.shape) > 0:
        return replace(parameter, name=tensor.name)
    return ParameterSpec(tensor.name, tensor.shape, None)


def _place_optimizer_state(
    specs: Mapping[str, ParameterSpec], ranks: Sequence[Mapping[str, StoredTensor]]
) -> dict[str, ParameterPlacement]:
    """Returns the placements of an optimizer's state.

    Of copies, which may differ by rounding, the first one counts.
    """
    placements: dict[str, ParameterPlacement] = {}
    for name, placement in place_by_rank(specs, ranks).items():
        placements[name] = replace(placement, copies=placement.copies[:1])
    return placements


def _list_files(ranks: Sequence[Mapping[str, StoredTensor]]) -> tuple[Path, ...]:
    files: dict[Path, None] = {}
    for tensors in ranks:
        for tensor in tensors.values():
            files[tensor.file] = None
    return tuple(files)


SAMPLE_BYTES = 4 << 20  # that are read and hashed to measure how fast this machine is


def dry_run(source: Path, size: int | None, config_file: Path | None = None) -> dict[str, Any]:
    """Describes a conversion without writing anything.

    Args:
        source: A folder of any format.
        size: The number of ranks to split over; None for a merge.
        config_file: A `config.json`, or its folder, to use instead of the source's own.

    Returns:
        Every tensor, and totals.

    Raises:
        ValueError: The conversion would fail before it copies.
    """

    def build_target(mapped: MappedCheckpoint) -> Target:
        if size is None:
            return build_huggingface_target(mapped)
        return build_shards_target(mapped, size)

    plan = plan_conversion(source, build_target, config_file)
    model = plan.mapped.model
    entries = model.entries()
    tensors = []
    for name, parameter in model.parameters.items():
        placement = plan.target.layout.placements[name]
        first = placement.copies[0][0].tensor
        tensors.append(
            {
                "name": name,
                "stored": list(plan.mapped.names.by_parameter[name]),
                "dtype": placement.dtype,
                "shape": list(parameter.shape),
                "split": _describe_split(parameter, size or 1),
                "transposed": entries[name].transpose,
                "shape_per_rank": list(first.shape),
                "bytes_per_rank": first.nbytes,
            }
        )
    for name, tensor in plan.target.layout.extras.items():
        tensors.append(
            {
                "name": name,
                "stored": [name],
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "split": "kept unchanged",
                "transposed": False,
                "shape_per_rank": list(tensor.shape),
                "bytes_per_rank": tensor.nbytes,
            }
        )
    return {
        "tensors": tensors,
        "source": f"{plan.mapped.checkpoint.description}, {model.config.model_type}",
        "target": "Hugging Face folder" if size is None else f"shardzoo folder of {size} ranks",
        "parameters": sum(prod(parameter.shape) for parameter in model.parameters.values()),
        "vocabulary": f"{model.vocab_size}, padded to {model.padded_vocab_size(size or 1)}",
        "bytes_to_read": plan.mapped.checkpoint.nbytes,
        "bytes_to_write": plan.target.nbytes,
        "files": len(plan.target.files),
        "estimated_seconds": round(_estimate_seconds(plan), 1),
    }


def _describe_split(parameter: ParameterSpec, size: int) -> str:
    shard = parameter.shard
    if shard is None:
        return "replicated"
    text = f"dim {parameter.dim}"
    if len(shard.groups) > 1:
        text += f" in blocks {'+'.join(map(str, shard.groups))}"
    if shard.pad_multiple:
        text += ", padded"
    shapes = {parameter.local_shape(rank, size) for rank in range(size)}
    if len(shapes) > 1:
        text += ", unequal parts"
    return text


def _estimate_seconds(plan: ConversionPlan) -> float:
    """Estimates the seconds from a sample that is read and hashed.

    Writing is assumed to take as long as both.
    """
    largest = max(plan.mapped.checkpoint.files, key=lambda path: path.stat().st_size)
    with OpenFiles(open_for_reading) as files:
        files.open([largest])
        started = time.perf_counter()
        sample = read_at(files[largest], 0, SAMPLE_BYTES)
        hashlib.sha256(sample).digest()
        elapsed = time.perf_counter() - started
    threads = min(4, os.cpu_count() or 1)
    seconds_per_byte = elapsed / max(len(sample), 1)
    return 2 * seconds_per_byte * plan.target.nbytes / threads
