"""Reads, arranges and names the folders of Megatron-LM and of two of its descendants.

Megatron-LM: `latest_checkpointed_iteration.txt` names the folder `iter_0001000` or `release`. In
it, `mp_rank_01_002` has the file of tensor-parallel rank 1 and pipeline stage 2, and `mp_rank_01`
that of rank 1 without pipeline stages. After Megatron-LM's `training/checkpointing.py`.

Megatron-DeepSpeed and GPT-NeoX write `layer_05-model_01-model_states.pt` for tensor-parallel rank 1
and the module at position 5 of the pipeline: the embedding, a block, the final norm or the output
head. Beside them, `mp_rank_00_model_states.pt` has the arguments. After DeepSpeed's
`PipelineModule.save_state_dict`, and for GPT-NeoX's own names after `megatron/model` and
`tools/ckpts` of its source. Their arguments and tensors are told by Megatron-LM's names.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...files.printable import describe
from ...files.safe_paths import checked_file
from ..stored_tensor import (
    Chunk,
    ChunkedTensor,
    FileState,
    StoredTensor,
    cut_rows,
    list_chunks,
    read_file_state,
)

if TYPE_CHECKING:
    from ..layout import RowOrder

TRACKER = "latest_checkpointed_iteration.txt"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3}))?(_\d{3})?")
LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
# The file in a rank's folder; the second name is that of older releases' distributed optimizer.
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
# checkpoint_version -> the order of the rows of fused QKV weights.
# After Megatron-LM's fix_query_key_value_ordering.
ROW_ORDERS: Mapping[float, RowOrder] = {0: "blocks", 1: "interleaved", 2: "heads", 3: "heads"}
VERSION = 3.0  # the checkpoint_version that is written
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
# What the file of an RMSNorm at the end holds, under the names of both.
_LAST_RMS_NORMS = {"weight", "norm.weight", "norm.scale"}
# Beginning of a name in GPT-NeoX's file of a block -> that of Megatron-LM.
_BLOCK_OF_NEOX = (
    ("input_layernorm.scale", "input_layernorm.weight"),
    ("post_attention_layernorm.scale", "post_attention_layernorm.weight"),
    ("mlp.linear1.", "mlp.dense_h_to_4h."),
    ("mlp.linear2.", "mlp.dense_4h_to_h."),
    ("mlp.w2.", "mlp.dense_4h_to_h."),
)
_FREQUENCIES = ".rotary_emb.inv_freq"  # a buffer of some releases, which follows from the arguments
_QKV_OF_LAYER = "attention.query_key_value.weight"
_FIRST_OF_MLP = "mlp.dense_h_to_4h.weight"
# GPT-NeoX's matrices of a gated MLP before `linear1`: of the gate, and of what it multiplies.
_GATE_AND_UP = ("mlp.w1.weight", "mlp.w3.weight")
_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")
_HEAD_OF_TWO_STACKS = re.compile(r"(lm_head\.)?output_layer\.")
_REPEATED = "repeated."  # first part of the names of what several stages have
_MODEL = re.compile(r"model(\d*)")


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint records about the program that wrote it.

    Attributes:
        tool: The name of the program.
        version: Megatron-LM's `checkpoint_version`.
        stages: The number of pipeline stages.
        arguments: The plain values of the command line's arguments; empty if none are stored.
        iteration: The number of steps taken, or None if it is not stored.
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
        """Compares the arguments' numbers of ranks and stages with those of the files.

        Raises:
            ValueError: They differ.
        """
        self._check_size(folder, ("tensor_model_parallel_size", "model_parallel_size"), ranks)
        stages = self.stages
        # Older releases count the stages of an encoder apart from those of the decoder.
        encoder_stages = self.arguments.get("encoder_pipeline_model_parallel_size")
        if type(encoder_stages) is int and 0 < encoder_stages < stages:
            stages -= encoder_stages
        self._check_size(folder, ("pipeline_model_parallel_size", "pipe_parallel_size"), stages)

    def _check_size(self, folder: Path, names: tuple[str, ...], found: int) -> None:
        for name in names:
            claimed = self.arguments.get(name, found)
            if type(claimed) is int and claimed not in (found, 0):
                raise ValueError(
                    f"{folder} has files of {found}, but its arguments say {name}={claimed}"
                )


Ranks = tuple[Mapping[str, StoredTensor], ...]


def find_reader(folder: Path) -> Callable[[Path], tuple[SavedRun, Ranks]] | None:
    """Returns the function that reads the files in `folder`, or None if they have other formats."""
    if any(LAYER_FILE.fullmatch(entry.name) for entry in folder.iterdir()):
        return open_layer_files
    if list_rank_folders(folder):
        return open_megatron
    return None


def list_rank_folders(folder: Path) -> list[re.Match[str]]:
    """Returns the matches of the names of Megatron-LM's rank folders in `folder`."""
    found: list[re.Match[str]] = []
    for entry in folder.iterdir():
        match = RANK_FOLDER.fullmatch(entry.name)
        if match and entry.is_dir() and any((entry / name).exists() for name in RANK_FILES):
            found.append(match)
    return found


def open_megatron(folder: Path) -> tuple[SavedRun, Ranks]:
    """Reads the headers of all rank files of Megatron-LM.

    Returns:
        What the files record about the run; and each tensor-parallel rank's tensors by name, with
        the layers numbered over the whole model.

    Raises:
        ValueError: A file is missing or damaged, or the files do not belong together.
    """
    grid = [[_RankFile.read(path) for path in row] for row in _list_rank_files(folder)]
    first = grid[0][0]
    for row in grid:
        for file in row:
            if file.version != first.version:
                raise ValueError(
                    f"{file.path} has checkpoint_version {file.version}, "
                    f"but {first.path} {first.version}"
                )
    run = SavedRun(
        tool="Megatron-LM",
        version=first.version,
        stages=len(grid[0]),
        arguments=first.arguments,
        iteration=first.iteration,
    )
    run.check_sizes(folder, len(grid))
    return run, check_same_names([_join_stages(row) for row in grid])


def _list_rank_files(folder: Path) -> list[list[Path]]:
    """Returns the files by tensor-parallel rank and pipeline stage.

    Raises:
        ValueError: One is missing or not in `folder`.
    """
    grid: dict[tuple[int, int], Path] = {}
    for match in list_rank_folders(folder):
        place = folder / match.string
        if match[3]:
            raise ValueError(
                f"{place} is of an expert-parallel rank; models with experts are not read"
            )
        if place.resolve().parent != folder.resolve():
            raise ValueError(f"{place} is a link out of its folder; copy the folder first")
        name = next(name for name in RANK_FILES if (place / name).exists())
        grid[int(match[1]), int(match[2] or 0)] = checked_file(place, name)
    size = len({rank for rank, _ in grid})
    stages = len({stage for _, stage in grid})
    for rank in range(size):
        for stage in range(stages):
            if (rank, stage) not in grid:
                raise ValueError(
                    f"{folder} has no file of tensor-parallel rank {rank}, pipeline stage {stage}"
                )
    return [[grid[rank, stage] for stage in range(stages)] for rank in range(size)]


@dataclass(frozen=True)
class _RankFile:
    """The contents of one file of Megatron-LM.

    Attributes:
        chunks: The tensors by name of each part of the model that the stage holds: more than one
            with interleaved pipeline stages.
    """

    path: Path
    version: float
    arguments: Mapping[str, Any]
    iteration: int | None
    chunks: tuple[Mapping[str, StoredTensor], ...]

    @classmethod
    def read(cls, path: Path) -> _RankFile:
        file_state = read_file_state(path)
        state = read_state(path)
        version = check_version(path, state, 0)
        models: list[tuple[int, str]] = []
        for name in state:
            match = _MODEL.fullmatch(name) if isinstance(name, str) else None
            if match:
                models.append((int(match[1] or 0), name))
        if not models:
            names = [name if isinstance(name, str) else describe(name) for name in state]
            entries = ", ".join(sorted(names))
            raise ValueError(f"{path} has no model; its entries are {entries[:200]}")
        chunks: list[Mapping[str, StoredTensor]] = []
        for _, name in sorted(models):
            chunks.append(locate_nested(path, state[name], f"{name}.", file_state))
        iteration = state.get("iteration")
        return cls(
            path=path,
            version=version,
            arguments=read_arguments(state),
            iteration=iteration if type(iteration) is int else None,
            chunks=tuple(chunks),
        )


def _join_stages(stages: Sequence[_RankFile]) -> dict[str, StoredTensor]:
    """Returns the tensors of one tensor-parallel rank. Each chunk numbers its layers from 0.

    The first chunks of all stages hold the first layers, in order, then come the second chunks of
    all stages. The stages of an encoder come before those of its decoder. What several of these
    stages have, such as the word embeddings, is found under its own name, and again under the names
    that `name_repeated` gives.
    """
    counts = {len(file.chunks) for file in stages}
    if len(counts) > 1:
        raise ValueError(
            f"{stages[0].path.parent.parent} has stages of {sorted(counts)} chunks; "
            f"all must have as many"
        )
    (count,) = counts
    has_two_stacks = {"encoder", "decoder"} <= {
        name.partition(".layers.")[0] for file in stages for chunk in file.chunks for name in chunk
    }
    tensors: dict[str, StoredTensor] = {}
    layers_before: dict[str, int] = {}  # by stack
    repeats: dict[str, int] = {}
    for chunk in range(count):
        for file in stages:
            found = file.chunks[chunk]
            numbers: dict[str, set[int]] = {}
            for match in filter(None, map(_LAYER.fullmatch, found)):
                numbers.setdefault(match[1], set()).add(int(match[2]))
            for own in numbers.values():
                if own != set(range(len(own))):
                    raise ValueError(
                        f"{file.path} has the layers {sorted(own)[:20]}; "
                        f"they must be numbered from 0 on"
                    )
            # Megatron-LM gives the last stage of an encoder a head that nothing uses.
            is_encoder = has_two_stacks and not any(
                stack.startswith("decoder.") for stack in numbers
            )
            for name, tensor in found.items():
                match = _LAYER.fullmatch(name)
                if match:
                    name = f"{match[1]}{int(match[2]) + layers_before.get(match[1], 0)}{match[3]}"
                elif is_encoder and _HEAD_OF_TWO_STACKS.match(name):
                    continue
                elif has_two_stacks and name in tensors:
                    repeats[name] = repeats.get(name, 0) + 1
                    name = name_repeated(name, repeats[name])
                if name in tensors:
                    raise ValueError(f"{tensor} is also in another pipeline stage")
                tensors[name] = tensor
            for stack, own in numbers.items():
                layers_before[stack] = layers_before.get(stack, 0) + len(own)
    return tensors


def name_repeated(name: str, number: int) -> str:
    """Returns the name under which a tensor is found again that another stage has, too."""
    return f"{_REPEATED}{number}.{name}"


def find_repeated(name: str) -> str | None:
    """Returns the name of the tensor that one of such a name repeats, or None if it does not."""
    if not name.startswith(_REPEATED):
        return None
    return name.removeprefix(_REPEATED).partition(".")[2]


def open_layer_files(folder: Path) -> tuple[SavedRun, Ranks]:
    """Does what `open_megatron` does for Megatron-DeepSpeed's and GPT-NeoX's files of layers.

    Their rows of fused QKV are in the order of heads, unless a `checkpoint_version` says otherwise.
    """
    grid: dict[tuple[int, int], Path] = {}
    for entry in folder.iterdir():
        match = LAYER_FILE.fullmatch(entry.name)
        if match:
            grid[int(match[2]), int(match[1])] = checked_file(folder, match.string)
    size = len({rank for rank, _ in grid})
    numbers = sorted({number for _, number in grid})
    for rank in range(size):
        for number in numbers:
            if (rank, number) not in grid:
                raise ValueError(
                    f"{folder} has no file of tensor-parallel rank {rank}, layer {number}"
                )

    main = folder / "mp_rank_00_model_states.pt"
    state = read_state(checked_file(folder, main.name)) if main.exists() else {}
    arguments = read_arguments(state)
    is_neox = "no_weight_tying" in arguments
    arguments = _rename_neox(arguments) if is_neox else _rename_megatron_deepspeed(arguments)
    iteration = state.get("iteration")
    stages = arguments.get("pipe_parallel_size", arguments.get("pipeline_model_parallel_size"))
    run = SavedRun(
        tool="GPT-NeoX" if is_neox else "Megatron-DeepSpeed",
        version=check_version(main, state, VERSION),
        stages=stages if type(stages) is int and stages > 0 else 1,
        arguments=arguments,
        iteration=iteration if type(iteration) is int else None,
    )
    run.check_sizes(folder, size)
    ranks: list[dict[str, StoredTensor]] = []
    for rank in range(size):
        paths = [grid[rank, number] for number in numbers]
        ranks.append(_join_layers(paths, arguments if is_neox else None, size))
    return run, check_same_names(ranks)


def _rename_megatron_deepspeed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Megatron-DeepSpeed's arguments with those of Megatron-LM that mean the same."""
    found = dict(arguments)
    rotates = arguments.get("use_rotary_position_embeddings")
    if rotates is not None:
        has_table = arguments.get("add_position_embedding", True)
        plain = "learned_absolute" if has_table else "none"
        found["position_embedding_type"] = "rope" if rotates else plain
    norms = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    if "normalization" in arguments:
        name = arguments["normalization"]
        found["normalization"] = norms.get(name, name)
    if "rope_theta" in arguments:
        found["rotary_base"] = arguments["rope_theta"]
    return found | _find_groups(arguments, "num_key_value_heads")


def _rename_neox(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns GPT-NeoX's arguments with those of Megatron-LM that mean the same.

    A window of FlashAttention counts the positions before the query's own, as Megatron-LM's does.
    """
    found = dict(arguments)
    positions = {"learned": "learned_absolute", "rotary": "rope"}
    norms = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
    if "pos_emb" in arguments:
        kind = arguments["pos_emb"]
        found["position_embedding_type"] = positions.get(kind, kind)
    if "norm" in arguments:
        kind = arguments["norm"]
        name = kind.removeprefix("te_") if isinstance(kind, str) else kind
        found["normalization"] = norms.get(name, kind)
        if name == "rmsnorm" and "rms_norm_epsilon" in arguments:
            found["norm_epsilon"] = arguments["rms_norm_epsilon"]
    for own, name in (("rotary_pct", "rotary_percent"), ("rotary_emb_base", "rotary_base")):
        if own in arguments:
            found[name] = arguments[own]
    if isinstance(arguments.get("no_weight_tying"), bool):
        found["untie_embeddings_and_output_weights"] = arguments["no_weight_tying"]
    if arguments.get("sliding_window_width") is not None:
        found["window_size"] = (arguments["sliding_window_width"], 0)

    # Older releases have a second type of MLP, with a gate whose function the activation names.
    activation = arguments.get("activation")
    is_older_gate = arguments.get("mlp_type", "regular") != "regular" and activation in (
        "silu",
        "swish",
    )
    if activation == "swiglu" or is_older_gate:
        found["swiglu"] = True
        del found["activation"]
    elif "activation" in arguments:
        found["swiglu"] = False
    kinds = arguments.get("attention_config")
    if isinstance(kinds, tuple) and set(cast("tuple[Any, ...]", kinds)) <= {"global", "flash"}:
        del found["attention_config"]
    return found | _find_groups(arguments, "num_kv_heads")


def _find_groups(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns Megatron-LM's arguments for the number of key-value heads that another one gives."""
    groups = arguments.get(name)
    if groups is None:
        return {}
    is_grouped = groups != arguments.get("num_attention_heads")
    return {"group_query_attention": is_grouped, "num_query_groups": groups}


def _join_layers(
    paths: Sequence[Path], neox: Mapping[str, Any] | None, ranks: int
) -> dict[str, StoredTensor]:
    """Returns the tensors of one rank's files by Megatron-LM's names, in the pipeline's order.

    What a file holds is told by its tensors, because the programs number the modules in different
    ways.

    Args:
        paths: The rank's files.
        neox: The arguments, if GPT-NeoX wrote the files.
        ranks: The number of tensor-parallel ranks.
    """
    tensors: dict[str, StoredTensor] = {}
    blocks = 0
    for path in paths:
        file_state = read_file_state(path)
        found = locate_nested(path, read_state(path), "", file_state)
        last_names = {name.rpartition(".")[2] for name in found}
        named: dict[str, StoredTensor] = {}
        if "word_embeddings.weight" in found:
            for name, tensor in found.items():
                named[f"language_model.embedding.{name}"] = tensor
        elif any(name.startswith(("attention.", "self_attention.")) for name in found):
            if neox is not None:
                found = _arrange_block_of_neox(path, found, neox, ranks)
            for name, tensor in found.items():
                named[f"language_model.encoder.layers.{blocks}.{name}"] = tensor
            blocks += 1
        elif len(found) == 1 and found.keys() <= _HEADS:
            (named["language_model.output_layer.weight"],) = found.values()
        elif len(found) == 1 and found.keys() <= _LAST_RMS_NORMS:
            (named["language_model.encoder.final_layernorm.weight"],) = found.values()
        elif len(found) == 2 and last_names == {"weight", "bias"}:
            for name, tensor in found.items():
                named[f"language_model.encoder.final_layernorm.{name.rpartition('.')[2]}"] = tensor
        else:
            raise ValueError(
                f"{path} holds {', '.join(sorted(found))[:200]}, which no part of a GPT has"
            )
        repeated = sorted(named.keys() & tensors.keys())
        if repeated:
            raise ValueError(
                f"{path} has {named[repeated[0]].name} again, "
                f"which is also in {tensors[repeated[0]].file}"
            )
        tensors |= named
    return tensors


def _arrange_block_of_neox(
    path: Path, block: Mapping[str, StoredTensor], arguments: Mapping[str, Any], ranks: int
) -> dict[str, StoredTensor]:
    """Returns the tensors of a block by Megatron-LM's names and in its order of rows.

    With grouped queries, GPT-NeoX's rank has all its queries, then its keys, then its values, and
    Megatron-LM's has them group by group. Of a gated MLP, the rows that the gate multiplies come
    before those of the gate.
    """
    found: dict[str, StoredTensor] = {}
    for name, tensor in block.items():
        if name.endswith(_FREQUENCIES):
            continue
        for own, other in _BLOCK_OF_NEOX:
            if name.startswith(own):
                name = other + name.removeprefix(own)
        if name in found:
            raise ValueError(f"{path} has {name} twice, as {found[name].name} and as {tensor.name}")
        found[name] = tensor

    if arguments.get("swiglu"):
        first = found.get(_FIRST_OF_MLP)
        if first is not None and "mlp.linear1.weight" in block:
            rows = _count_rows(first, 2)
            halves = ((rows // 2, rows), (0, rows // 2))
            found[_FIRST_OF_MLP] = _stack_rows([(first, *half) for half in halves], first.name)
        elif all(name in found for name in _GATE_AND_UP):
            parts = [found.pop(name) for name in _GATE_AND_UP]
            wholes = [(part, 0, _count_rows(part, 1)) for part in parts]
            found[_FIRST_OF_MLP] = _stack_rows(wholes, _FIRST_OF_MLP)

    fused = found.get(_QKV_OF_LAYER)
    if fused is not None and arguments.get("group_query_attention"):
        heads = arguments.get("num_attention_heads")
        groups = arguments["num_query_groups"]
        if (
            type(heads) is not int
            or type(groups) is not int
            or groups < 1
            or heads % groups
            or groups % ranks
        ):
            raise ValueError(
                f"{path} is of {ranks} ranks with num_attention_heads={heads!r} and "
                f"num_kv_heads={groups!r}; the ranks must divide the second, and it the first"
            )
        own_groups = groups // ranks
        queries = heads // groups
        size = _count_rows(fused, own_groups * (queries + 2)) // (own_groups * (queries + 2))
        keys = own_groups * queries * size
        values = keys + own_groups * size
        pieces: list[tuple[StoredTensor, int, int]] = []
        for group in range(own_groups):
            query = group * queries * size
            pieces.append((fused, query, query + queries * size))
            for start in (keys + group * size, values + group * size):
                pieces.append((fused, start, start + size))
        found[_QKV_OF_LAYER] = _stack_rows(pieces, fused.name)
    return found


def _count_rows(tensor: StoredTensor, parts: int) -> int:
    """Returns the number of rows. Raises ValueError if it is no matrix of so many equal parts."""
    if len(tensor.shape) != 2 or not tensor.shape[0] or tensor.shape[0] % parts:
        raise ValueError(
            f"{tensor} has the shape {list(tensor.shape)}, but must be a matrix whose rows are "
            f"{parts} equal parts"
        )
    return tensor.shape[0]


def _stack_rows(pieces: Sequence[tuple[StoredTensor, int, int]], name: str) -> StoredTensor:
    """Returns the tensor that has these rows of these matrices, one piece after another.

    Args:
        pieces: Matrices, each with its first row and that behind the last one.
        name: The name of the result.

    Raises:
        ValueError: The matrices have several widths or types, or are views of other tensors.
    """
    chunks: list[Chunk] = []
    rows = 0
    first = pieces[0][0]
    for tensor, start, stop in pieces:
        if (tensor.dtype, tensor.shape[1]) != (first.dtype, first.shape[1]):
            raise ValueError(
                f"{tensor} is {tensor.dtype} {list(tensor.shape)}, which does not fit "
                f"{first.name} of {first.dtype} {list(first.shape)}"
            )
        for origin, chunk in list_chunks(cut_rows(tensor, start, stop, name)):
            chunks.append(((origin[0] + rows, *origin[1:]), chunk))
        rows += stop - start
    begin = chunks[0][1]
    shape = (rows, *first.shape[1:])
    return ChunkedTensor(
        name,
        begin.file,
        begin.dtype,
        shape,
        begin.offset,
        tuple(chunks),
        file_state=begin.file_state,
    )


def check_same_names(ranks: Sequence[Mapping[str, StoredTensor]]) -> Ranks:
    """Returns the ranks after checking that all have tensors of the same names."""
    first = ranks[0]
    for rank in ranks[1:]:
        differing = sorted(rank.keys() ^ first.keys())
        if differing:
            holder = rank if differing[0] in rank else first
            raise ValueError(
                f"{holder[differing[0]]} is not in the files of all tensor-parallel ranks"
            )
    return tuple(ranks)


def read_state(path: Path) -> dict[Any, Any]:
    """Returns the dictionary in a torch file, whose tensors have no storage.

    Raises:
        ValueError: The file holds something else.
    """
    from .torch_file import load_without_storage

    state = load_without_storage(path)
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not named entries")
    return cast(dict[Any, Any], state)


def check_version(path: Path, state: Mapping[Any, Any], default: float) -> float:
    """Returns the `checkpoint_version` of a file.

    Raises:
        ValueError: It is none that can be read.
    """
    version = state.get("checkpoint_version", default)
    if type(version) not in (int, float) or version not in ROW_ORDERS:
        known = ", ".join(f"{number:.1f}" for number in ROW_ORDERS)
        raise ValueError(
            f"{path} has checkpoint_version {describe(version)}; those that can be read are {known}"
        )
    return version


def read_arguments(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Returns the plain values of the arguments that a file holds, or none.

    GPT-NeoX stores them in a dictionary, the others in an `argparse.Namespace`.
    """
    from .torch_file import SavedArguments

    found = state.get("args")
    if isinstance(found, dict):
        return SavedArguments.select_plain(cast(dict[Any, Any], found))
    if isinstance(found, SavedArguments):
        return found.values
    return {}


def locate_nested(
    path: Path, tree: Any, what: str, file_state: FileState
) -> dict[str, StoredTensor]:
    """Returns the tensors in nested dictionaries, by their keys joined with dots.

    Transformer Engine's extra states are left out.

    Args:
        path: The file that the dictionaries were read from.
        tree: The dictionaries.
        what: What a message puts before the names.
        file_state: The state of the file before it was read.
    """
    from .torch_file import locate_tensors

    flat: dict[str, Any] = {}
    seen = set[int]()  # A pickle may nest a dictionary in itself.

    def flatten(prefix: str, value: Any, depth: int) -> None:
        if not isinstance(value, dict):
            if prefix in flat:
                raise ValueError(f"{path} has the tensor {what}{prefix} twice")
            flat[prefix] = value
            return
        if depth > DEEPEST or id(cast(Any, value)) in seen:
            raise ValueError(
                f"{path} has the dictionary {what}{prefix} twice, "
                f"or more than {DEEPEST} in one another"
            )
        seen.add(id(cast(Any, value)))
        for name, entry in cast(dict[Any, Any], value).items():
            if not isinstance(name, (str, int)):
                raise ValueError(f"{path} has {describe(name)} as the name of a tensor")
            if not str(name).endswith("_extra_state"):
                flatten(f"{prefix}.{name}" if prefix else str(name), entry, depth + 1)

    if not isinstance(tree, dict):
        raise ValueError(
            f"{path}: {what[:-1] or 'its content'} is a {type(tree).__name__}, not named tensors"
        )
    flatten("", cast(Any, tree), 0)
    return locate_tensors(path, flat, file_state)


def build_rank_state(
    tensors: Mapping[str, Any], arguments: Mapping[str, Any], nested: bool
) -> dict[str, Any]:
    """Returns the contents of a rank's file.

    Args:
        tensors: The rank's tensors by their names in Megatron-LM.
        arguments: The command line's arguments.
        nested: Whether the modules are dictionaries, as before megatron-core.
    """
    model: dict[str, Any] = {}
    for name, tensor in tensors.items():
        module = model
        if nested:
            stem = next((prefix for prefix in _NESTED if name.startswith(f"{prefix}.")), "")
            for key in filter(None, stem.split(".")):
                module = module.setdefault(key, {})
            if stem:
                name = name.removeprefix(f"{stem}.")
        module[name] = tensor
    return {
        "checkpoint_version": VERSION,
        "iteration": 0,
        "args": Namespace(**arguments),
        "model": model,
    }
