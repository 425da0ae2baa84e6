"""Reads the folders of Megatron-LM, and those of Megatron-DeepSpeed and GPT-NeoX, which have a file for each layer.

`latest_checkpointed_iteration.txt` names the folder `iter_0001000` or `release`. In it, `mp_rank_01_002` has the file
of tensor-parallel rank 1 and pipeline stage 2, and `mp_rank_01` that of rank 1 without pipeline stages. After
Megatron-LM's `training/checkpointing.py`.

The other two write `layer_05-model_01-model_states.pt` for tensor-parallel rank 1 and the module at position 5 of the
pipeline: the embedding, a block, the final norm or the output head. Beside them, `mp_rank_00_model_states.pt` has the
arguments. After DeepSpeed's `PipelineModule.save_state_dict`.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...files.safe_paths import checked_file
from ..stored_tensor import StoredTensor

if TYPE_CHECKING:
    from ..layout import RowOrder  # it imports torch, which takes seconds

TRACKER = "latest_checkpointed_iteration.txt"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(_\d{3})?")
LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FILES = (
    "model_optim_rng.pt",
    "model_rng.pt",
)  # the second one with the distributed optimizer of older releases
# checkpoint_version -> order of the rows of fused QKV weights; Megatron-LM's fix_query_key_value_ordering
ROW_ORDERS: Mapping[float, RowOrder] = {0: "blocks", 1: "interleaved", 2: "heads", 3: "heads"}
VERSION = 3.0  # that is written
DEEPEST = 8  # dictionaries within one another

# Modules whose parameters have a dictionary of their own before megatron-core.
_NESTED = (
    "language_model.embedding.word_embeddings",
    "language_model.embedding.position_embeddings",
    "language_model.embedding.tokentype_embeddings",
    "language_model.encoder",
    "language_model.pooler",
    "language_model.output_layer",
    "word_embeddings_for_head",
    "lm_head",
    "binary_head",
)
_HEADS = {"final_linear.weight", "lm_head.weight"}  # GPT-NeoX's and Megatron-DeepSpeed's name
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
_MODEL = re.compile(r"model(\d*)")


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint records about the program that wrote it.

    Attributes:
        tool: Name of the program.
        version: Megatron-LM's `checkpoint_version`.
        stages: Number of pipeline stages.
        arguments: The plain values of the command line's arguments; empty if none are stored.
        iteration: Number of steps taken, or None if it is not stored.
    """

    tool: str
    version: float
    stages: int
    arguments: Mapping[str, Any]
    iteration: int | None

    @property
    def row_order(self) -> RowOrder:
        return ROW_ORDERS[self.version]

    def check_sizes(self, folder: Path, ranks: int) -> None:
        """Raises ValueError if the arguments claim other numbers of ranks or stages than there are files."""
        for names, found in (
            (("tensor_model_parallel_size", "model_parallel_size"), ranks),
            (("pipeline_model_parallel_size", "pipe_parallel_size"), self.stages),
        ):
            for name in names:
                claimed = self.arguments.get(name, found)
                if type(claimed) is int and claimed not in (found, 0):
                    raise ValueError(
                        f"{folder} has files of {found}, but its arguments say {name}={claimed}"
                    )


Ranks = tuple[Mapping[str, StoredTensor], ...]


def reader_of(folder: Path) -> Callable[[Path], tuple[SavedRun, Ranks]] | None:
    """Returns the function that reads the files in `folder`, or None if it has none of these formats."""
    if any(LAYER_FILE.fullmatch(entry.name) for entry in folder.iterdir()):
        return open_layer_files
    return open_megatron if rank_folders(folder) else None


def rank_folders(folder: Path) -> list[re.Match[str]]:
    """Returns the matches of the names of Megatron-LM's rank folders in `folder`."""
    found = (RANK_FOLDER.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir())
    return [
        match
        for match in found
        if match and any((folder / match.string / name).exists() for name in RANK_FILES)
    ]


def open_megatron(folder: Path) -> tuple[SavedRun, Ranks]:
    """Reads the headers of all files. Returns each tensor-parallel rank's tensors by name, with the whole model's layer
    numbers.

    Raises ValueError if a file is missing or damaged, or if the files do not belong together.
    """
    files = [[_RankFile.read(path) for path in row] for row in _rank_files(folder)]
    first = files[0][0]
    for other in (file for row in files for file in row):
        if other.version != first.version:
            raise ValueError(
                f"{other.path} has checkpoint_version {other.version}, but {first.path} {first.version}"
            )
    run = SavedRun("Megatron-LM", first.version, len(files[0]), first.arguments, first.iteration)
    run.check_sizes(folder, len(files))
    return run, same_names([dict(_with_whole_numbers(row)) for row in files])


def open_layer_files(folder: Path) -> tuple[SavedRun, Ranks]:
    """Does what `open_megatron` does for Megatron-DeepSpeed's and GPT-NeoX's files of layers.

    Their rows of fused QKV are in the order of heads, unless a `checkpoint_version` says otherwise.
    """
    grid = {
        (int(match[2]), int(match[1])): checked_file(folder, match.string)
        for match in (LAYER_FILE.fullmatch(entry.name) for entry in folder.iterdir())
        if match
    }
    size, numbers = len({rank for rank, _ in grid}), sorted({number for _, number in grid})
    if missing := sorted(
        {(rank, number) for rank in range(size) for number in numbers} - grid.keys()
    ):
        raise ValueError(
            f"{folder} has no file of tensor-parallel rank {missing[0][0]}, layer {missing[0][1]}"
        )
    main = folder / "mp_rank_00_model_states.pt"
    state = read_state(checked_file(folder, main.name)) if main.exists() else {}
    arguments, iteration = arguments_of(state), state.get("iteration")
    stages = arguments.get("pipe_parallel_size", arguments.get("pipeline_model_parallel_size"))
    run = SavedRun(
        "GPT-NeoX" if "no_weight_tying" in arguments else "Megatron-DeepSpeed",
        checked_version(main, state, VERSION),
        stages if type(stages) is int and stages > 0 else 1,
        arguments,
        iteration if type(iteration) is int else None,
    )
    run.check_sizes(folder, size)
    return run, same_names(
        [_join_layers([grid[rank, number] for number in numbers]) for rank in range(size)]
    )


def _join_layers(paths: Sequence[Path]) -> dict[str, StoredTensor]:
    """Returns the tensors of one rank's files, in the order of the pipeline, by Megatron-LM's names.

    What a file holds is told by its tensors, because the three programs number the modules in different ways.
    """
    tensors: dict[str, StoredTensor] = {}
    blocks = 0
    for path in paths:
        found = locate_nested(path, read_state(path), "")
        if "word_embeddings.weight" in found:
            named = {f"language_model.embedding.{name}": tensor for name, tensor in found.items()}
        elif any(name.startswith(("attention.", "self_attention.")) for name in found):
            named = {
                f"language_model.encoder.layers.{blocks}.{name}": tensor
                for name, tensor in found.items()
            }
            blocks += 1
        elif len(found) == 1 and found.keys() <= _HEADS:
            named = {"language_model.output_layer.weight": next(iter(found.values()))}
        elif {name.rpartition(".")[2] for name in found} == {"weight", "bias"} and len(found) == 2:
            named = {
                f"language_model.encoder.final_layernorm.{name.rpartition('.')[2]}": found[name]
                for name in found
            }
        else:
            raise ValueError(
                f"{path} holds {', '.join(sorted(found))[:200]}, which no part of a GPT has"
            )
        if repeated := sorted(named.keys() & tensors.keys()):
            raise ValueError(
                f"{path} has {named[repeated[0]].name} again, which is also in {tensors[repeated[0]].file}"
            )
        tensors |= named
    return tensors


def _rank_files(folder: Path) -> list[list[Path]]:
    """Returns the files by tensor-parallel rank and pipeline stage. ValueError if one is missing or not in `folder`."""
    grid: dict[tuple[int, int], Path] = {}
    for match in rank_folders(folder):
        place = folder / match.string
        if match[3]:
            raise ValueError(
                f"{place} is of an expert-parallel rank; models with experts are not read"
            )
        if place.resolve().parent != folder.resolve():
            raise ValueError(f"{place} is a link out of its folder; copy the folder first")
        name = next(name for name in RANK_FILES if (place / name).exists())
        grid[int(match[1]), int(match[2] or 0)] = checked_file(place, name)
    size, stages = (len({position[axis] for position in grid}) for axis in (0, 1))
    if missing := sorted(
        {(rank, stage) for rank in range(size) for stage in range(stages)} - grid.keys()
    ):
        rank, stage = missing[0]
        raise ValueError(
            f"{folder} has no file of tensor-parallel rank {rank}, pipeline stage {stage}"
        )
    return [[grid[rank, stage] for stage in range(stages)] for rank in range(size)]


def same_names(ranks: Sequence[Mapping[str, StoredTensor]]) -> Ranks:
    """Returns the ranks after checking that all have tensors of the same names."""
    for rank in ranks[1:]:
        if differing := sorted(rank.keys() ^ ranks[0].keys()):
            (tensor,) = (
                tensors[differing[0]] for tensors in (rank, ranks[0]) if differing[0] in tensors
            )
            raise ValueError(f"{tensor} is not in the files of all tensor-parallel ranks")
    return tuple(ranks)


@dataclass(frozen=True)
class _RankFile:
    """The contents of one file. `chunks` are the tensors by name of each part of the model that the stage holds: more
    than one with interleaved pipeline stages."""

    path: Path
    version: float
    arguments: Mapping[str, Any]
    iteration: int | None
    chunks: tuple[Mapping[str, StoredTensor], ...]

    @classmethod
    def read(cls, path: Path) -> _RankFile:
        state = read_state(path)
        version = checked_version(path, state, 0)
        names = sorted(
            (int(match[1] or 0), name) for name in state if (match := _MODEL.fullmatch(str(name)))
        )
        if not names:
            raise ValueError(
                f"{path} has no model; its entries are {', '.join(sorted(map(str, state)))[:200]}"
            )
        chunks = tuple(locate_nested(path, state[name], f"{name}.") for _, name in names)
        iteration = state.get("iteration")
        return cls(
            path,
            version,
            arguments_of(state),
            iteration if type(iteration) is int else None,
            chunks,
        )


def read_state(path: Path) -> dict[Any, Any]:
    """Returns the dictionary in a torch file, whose tensors have no storage. ValueError if it holds something else."""
    from .torch_file import load_without_storage

    state = load_without_storage(path)
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not named entries")
    return cast(dict[Any, Any], state)


def checked_version(path: Path, state: Mapping[Any, Any], default: float) -> float:
    """Returns the `checkpoint_version` of a file. ValueError if it is none that can be read."""
    version = state.get("checkpoint_version", default)
    if type(version) not in (int, float) or version not in ROW_ORDERS:
        known = ", ".join(f"{number:.1f}" for number in ROW_ORDERS)
        raise ValueError(
            f"{path} has checkpoint_version {version!r}; those that can be read are {known}"
        )
    return version


def arguments_of(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Returns the plain values of the arguments that a file holds, or none. GPT-NeoX stores them in a dictionary."""
    from .torch_file import SavedArguments

    found = state.get("args")
    if isinstance(found, dict):
        return SavedArguments.plain(cast(dict[Any, Any], found))
    return found.values if isinstance(found, SavedArguments) else {}


def locate_nested(path: Path, tree: Any, what: str) -> dict[str, StoredTensor]:
    """Returns the tensors in nested dictionaries, by their keys joined with dots; Transformer Engine's extra states are
    left out."""
    from .torch_file import locate_tensors

    flat: dict[str, Any] = {}
    seen = set[int]()  # a pickle may nest a dictionary in itself

    def add(prefix: str, value: Any, depth: int) -> None:
        if not isinstance(value, dict):
            if prefix in flat:
                raise ValueError(f"{path} has the tensor {what}{prefix} twice")
            flat[prefix] = value
        elif depth > DEEPEST or id(cast(Any, value)) in seen:
            raise ValueError(
                f"{path} has the dictionary {what}{prefix} twice, or more than {DEEPEST} in one another"
            )
        else:
            seen.add(id(cast(Any, value)))
            for name, entry in cast(dict[Any, Any], value).items():
                if not str(name).endswith("_extra_state"):
                    add(f"{prefix}.{name}" if prefix else str(name), entry, depth + 1)

    if not isinstance(tree, dict):
        raise ValueError(
            f"{path}: {what[:-1] or 'its content'} is a {type(tree).__name__}, not named tensors"
        )
    add("", cast(Any, tree), 0)
    return locate_tensors(path, flat)


def megatron_state(
    tensors: Mapping[str, Any], arguments: Mapping[str, Any], nested: bool
) -> dict[str, Any]:
    """Returns the contents of a rank's file. `nested`: the modules are dictionaries, as before megatron-core."""
    model: dict[str, Any] = {}
    for name, tensor in tensors.items():
        place = model
        if nested:
            stem = next((prefix for prefix in _NESTED if name.startswith(f"{prefix}.")), "")
            for key in filter(None, stem.split(".")):
                place = place.setdefault(key, {})
            name = name.removeprefix(f"{stem}.") if stem else name
        place[name] = tensor
    return {
        "checkpoint_version": VERSION,
        "iteration": 0,
        "args": Namespace(**arguments),
        "model": model,
    }


def _with_whole_numbers(stages: Sequence[_RankFile]) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the tensors of one tensor-parallel rank. Their files number the layers of each chunk from 0.

    The first chunks of all stages hold the first layers, in order, then come the second chunks of all stages.
    """
    counts = {len(file.chunks) for file in stages}
    if len(counts) > 1:
        raise ValueError(
            f"{stages[0].path.parent.parent} has stages of {sorted(counts)} chunks; all must have as many"
        )
    offset, seen = 0, set[str]()
    for number in range(counts.pop()):
        for file in stages:
            numbers = {
                int(match[2]) for match in map(_LAYER.fullmatch, file.chunks[number]) if match
            }
            if numbers != set(range(len(numbers))):
                raise ValueError(
                    f"{file.path} has the layers {sorted(numbers)[:20]}; they must be numbered from 0 on"
                )
            for name, tensor in file.chunks[number].items():
                local = _LAYER.fullmatch(name)
                whole = f"{local[1]}{int(local[2]) + offset}{local[3]}" if local else name
                if whole in seen:
                    raise ValueError(f"{tensor} is also in another pipeline stage")
                seen.add(whole)
                yield whole, tensor
            offset += len(numbers)
