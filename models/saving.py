"""Writes models in memory as Hugging Face folders, and pushes them to the Hub.

Each rank writes the bytes of its own part, at their places in the files, so no rank ever holds the
whole model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.dtypes import from_torch_name
from ..checkpoint.file_io import OpenFiles
from ..checkpoint.folder_files import (
    CONFIG,
    GENERATION_CONFIG,
    MODEL_WEIGHTS,
    OWN_FILES,
    STATE,
    holds_training_state,
    remove_files,
)
from ..checkpoint.hub import upload_folder
from ..checkpoint.layout import ParameterSpec
from ..checkpoint.planned_file import PlannedFile
from ..checkpoint.stored_tensor import StoredTensor
from ..checkpoint.tensor_reader import tensor_bytes
from ..files.durable import sync
from ..files.working_copies import OpenFile, find_work, name_urls, pull, push
from ..mpu import ParallelMesh, tp_rank, tp_size
from ..mpu.collectives import gather_bytes, gather_rows
from ..mpu.mesh import EXPERT_REPLICA_AXES
from .config import ModelConfig
from .family_table import family
from .generation.mixin import GenerationMixin
from .huggingface import LARGEST_FILE, lay_out_huggingface, list_stored_shapes, plan_weight_files
from .lora import save_adapter
from .mapping import NativeModel, StoredNames
from .packing import find_packed_parameters
from .pipeline import find_copied_parameters

BLOCK_BYTES = 16 << 20  # that are copied to the CPU at a time
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
CARD = "README.md"


def save_pretrained(
    model: Any, save_directory: str | Path, *, max_shard_size: int | str = LARGEST_FILE
) -> None:
    """Writes a Hugging Face folder, which transformers and `from_pretrained` load. Models have it as
    a method.

    Weights that are there under Hugging Face's names are replaced; other files stay. Without
    `config.json`, which is written last, nothing loads the folder, so an interrupted call leaves no
    half model. A model with LoRA weights is written as peft's adapter. A folder without a README.md
    gets a model card. Collective over the model's mesh.

    Args:
        save_directory: A folder that all ranks see, or the URL of one in an object store.
        max_shard_size: The largest weight file: bytes, or a text such as "5GB".

    Raises:
        ValueError: The folder holds shards or a training checkpoint, cannot be written, or is not
            seen by all ranks.
    """
    folder = find_work(save_directory)
    mesh: ParallelMesh | None = model.mesh
    _run_on_first(mesh, lambda: pull(folder))
    if getattr(model, "lora", None) is not None:
        _run_on_first(mesh, lambda: _check_folder(folder))
        save_adapter(model, folder)
        _run_on_first(mesh, lambda: push(folder))
        return
    if find_packed_parameters(model):
        raise ValueError(
            "the model's weights are packed, so its files hold more than it does; call "
            "shardzoo.models.packing.unpack_parameters(model) to save the values that it computes with"
        )

    native = NativeModel.from_config(model.config)
    names = StoredNames(native.list_hf_names(), {})
    shapes = list_stored_shapes(native, names, _collect_dtypes(model), {})
    files, texts = plan_weight_files(shapes, _parse_size(max_shard_size))
    work = folder / ".weights.partial"
    try:
        _run_on_first(mesh, lambda: _create_files(folder, work, files))
        _run_together(mesh, lambda: _write_parameters(model, native, files, work))
        _run_on_first(mesh, lambda: _replace_weights(model, folder, work, files, texts))
        _run_on_first(mesh, lambda: push(folder))
    except ValueError:
        if _is_first(mesh):
            shutil.rmtree(work, ignore_errors=True)
        raise


def push_to_hub(
    model: Any,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    commit_message: str = "Upload model",
    token: str | None = None,
    tokenizer: Any = None,
    working_directory: str | Path | None = None,
) -> str | None:
    """Saves the model in a temporary folder and commits it to the Hub. Models have it as a method.

    Collective over the model's mesh.

    Args:
        repo_id: `org/name`; the repository is made if needed.
        revision: A branch, which is made if needed; by default main.
        tokenizer: Anything with `save_pretrained`, whose files are committed too.
        working_directory: Where the temporary folder is; it must be shared if the ranks are on
            several machines.

    Returns:
        The commit's address on the first rank, which uploads; the others return None as soon as the
        files are written.

    Raises:
        ValueError: What `save_pretrained` raises; on the first rank also what the Hub refuses.
    """
    mesh: ParallelMesh | None = model.mesh
    name = ""

    def make_folder() -> None:
        nonlocal name
        name = tempfile.mkdtemp(prefix="push-", dir=working_directory)

    _run_on_first(mesh, make_folder)
    if mesh is not None and mesh.world_size > 1:
        name = gather_bytes(name.encode())[0].decode()
    folder = Path(name)
    try:
        save_pretrained(model, folder)
        if not _is_first(mesh):
            return None
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return upload_folder(
            folder, repo_id, revision=revision, private=private, message=commit_message, token=token
        )
    finally:
        if _is_first(mesh):
            shutil.rmtree(folder, ignore_errors=True)


def _collect_dtypes(model: Any) -> dict[str, str]:
    """Returns the safetensors names of the parameters' types, of all pipeline stages.
    Collective.
    """
    own: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        # Under FSDP, a rank has fp32 rows in every precision.
        stored = getattr(parameter, "sharded", None)
        dtype = parameter.dtype if stored is None else stored.stored_dtype
        own[name] = from_torch_name(str(dtype))
    mesh: ParallelMesh | None = model.mesh
    if mesh is None or mesh.pp_size == 1:
        return own
    dtypes: dict[str, str] = {}
    for stage in gather_bytes(json.dumps(own).encode(), mesh.pp_group):
        dtypes.update(json.loads(stage))
    return dtypes


def _parse_size(size: int | str) -> int:
    """Returns a number of bytes, given as such or as transformers writes it: "5GB", of 10^9
    bytes.
    """
    if isinstance(size, str):
        found = re.fullmatch(r"(\d+)\s*([KMG]?I?B)", size.strip().upper())
        if found:
            size = int(found[1]) * UNITS.get(found[2], 0)
    if not isinstance(size, int) or size < 1:
        raise ValueError(
            f"max_shard_size must be a number of bytes or a text such as '5GB', not {size!r}"
        )
    return size


def _is_first(mesh: ParallelMesh | None) -> bool:
    return mesh is None or mesh.rank == 0


def _run_on_first(mesh: ParallelMesh | None, work: Callable[[], None]) -> None:
    """Runs `work` on the first rank. If it fails there, raises a ValueError on all. Collective."""

    def run() -> None:
        if _is_first(mesh):
            work()

    _run_together(mesh, run)


def _run_together(mesh: ParallelMesh | None, work: Callable[[], None]) -> None:
    """Runs `work` on every rank.

    Raises:
        ValueError: On all ranks, if `work` fails on one with a ValueError or an OSError.
    """
    problem = ""
    try:
        work()
    except OSError as error:
        problem = f"cannot write the model: {name_urls(str(error))}"
    except ValueError as error:
        problem = name_urls(str(error))
    failed = problem != ""
    if mesh is not None and mesh.world_size > 1:
        flag = torch.tensor(float(failed), device=mesh.device_type)
        cast(Any, dist).all_reduce(flag)
        failed = bool(flag.item())
    if failed:
        raise ValueError(problem or "another rank could not write its part of the model")


def _check_folder(folder: Path) -> None:
    """Raises ValueError if a model cannot be saved in a folder without harm to what is there."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder to save the model in")
    for name in sorted(OWN_FILES):
        if (folder / name).exists() and (name != STATE or holds_training_state(folder)):
            raise ValueError(
                f"{folder} holds shards or a training checkpoint ({name}); save the model in "
                "another folder"
            )


def _create_files(folder: Path, work: Path, files: tuple[PlannedFile, ...]) -> None:
    """Creates the weight files in the folder `work`, with their headers and without values."""
    _check_folder(folder)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    free = shutil.disk_usage(work).free
    needed = sum(file.size for file in files)
    if needed > free:
        shutil.rmtree(work)
        raise ValueError(f"{folder} needs {needed:,} bytes, but its disk has {free:,} free")
    for file in files:
        file.create(work / file.name)


def _write_parameters(
    model: Any, native: NativeModel, files: tuple[PlannedFile, ...], work: Path
) -> None:
    """Writes this rank's part of every parameter of its stage.

    Of several replicas of the model, the first one writes; of several ranks with the same
    replicated parameter, the first one. Along the expert axis the others write their experts. Under
    FSDP, the data-parallel ranks gather one parameter after another for the rank that writes.
    """
    mesh: ParallelMesh | None = model.mesh
    if not work.is_dir():
        raise ValueError(
            f"{work.parent} is not seen by all ranks; name a folder on a file system that they "
            "share"
        )
    writes = mesh is None or mesh.rank_in(*EXPERT_REPLICA_AXES) == 0
    is_split = any(hasattr(parameter, "sharded") for parameter in model.parameters())
    if not writes and not is_split:
        return
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors.update(file.tensors)
    names = StoredNames(native.list_hf_names(), {})
    placements = lay_out_huggingface(native, names, tensors, {}).placements
    rank = tp_rank(mesh)
    is_later_expert_rank = mesh is not None and mesh.rank_in("expert") > 0
    copied = find_copied_parameters(model)
    problem: OSError | ValueError | None = None
    with OpenFiles(lambda path: os.open(work / path, os.O_WRONLY | os.O_CLOEXEC)) as opened:
        for name, parameter in model.named_parameters():
            spec = native.parameters[name]
            if name in copied or (spec.shard is None and rank > 0):
                continue
            values = gather_rows(parameter)
            # The other ranks go on gathering, so this one does too when it cannot write.
            if not writes or problem is not None:
                continue
            if is_later_expert_rank and not getattr(parameter, "expert_parallel", False):
                continue
            try:
                _check_part(spec, values, mesh)
                if values.dim() == 0:
                    values = values.reshape(1)
                placed = placements[name].find_slices(spec.list_ranges_on(mesh))
                for part, start, stop, position in placed:
                    block = values.narrow(spec.dim, position, stop - start)
                    dim = spec.dim
                    if part.transposed:
                        block = block.t()
                        dim = 1 - dim
                    opened.open([part.tensor.file])
                    _write_block(part.tensor, opened[part.tensor.file], block, dim, start)
            except (OSError, ValueError) as error:
                problem = error
        if problem is not None:
            raise problem
        opened.sync()


def _check_part(spec: ParameterSpec, parameter: Tensor, mesh: ParallelMesh | None) -> None:
    """Raises ValueError if this rank does not have its part, as under ZeRO 3."""
    local_shape = spec.shape_on(mesh)
    shape = tuple(parameter.shape)
    is_unpadded = tp_size(mesh) == 1 and shape == spec.shape
    if shape != local_shape and not is_unpadded:
        raise ValueError(
            f"{spec.name} has shape {list(shape)} in memory instead of {list(local_shape)}; "
            "under ZeRO 3, save the model with the trainer"
        )


def _write_block(
    tensor: StoredTensor, descriptor: OpenFile, block: Tensor, dim: int, start: int
) -> None:
    """Writes a block of a stored tensor.

    Args:
        descriptor: The open file that holds the tensor.
        block: The values of the indices from `start` on along `dim`, and of all others' indices.
    """
    assert isinstance(descriptor, int), "new files have bytes of their own"
    for offset, data in _split_block(tensor, block, dim, start):
        position = tensor.offset + offset
        while len(data):
            written = os.pwrite(descriptor, data, position)
            data = data[written:]
            position += written


def _split_block(
    tensor: StoredTensor, block: Tensor, dim: int, start: int
) -> Iterator[tuple[int, memoryview]]:
    """Yields the bytes of a block that are contiguous in the tensor.

    Each comes with the place of its first byte in the tensor. Arguments are those of
    `_write_block`.
    """
    if block.numel() == 0:
        return
    item_size = block.element_size()
    index_bytes = prod(tensor.shape[dim + 1 :]) * item_size  # of one index along `dim`
    line = block.shape[dim] * index_bytes  # contiguous bytes of the block
    stride = tensor.shape[dim] * index_bytes  # from one such line to the next
    first = start * index_bytes
    row_bytes = prod(block.shape[1:]) * item_size
    rows = max(1, BLOCK_BYTES // max(1, row_bytes))
    offset = 0
    for piece in cast(tuple[Tensor, ...], cast(Any, block).split(rows)):
        data = tensor_bytes(cast(Tensor, cast(Any, piece).cpu().contiguous()))
        if dim == 0 or line == stride:  # The lines follow one another without a gap.
            yield first + offset, data
            offset += len(data)
            continue
        for position in range(0, len(data), line):
            yield first + offset, data[position : position + line]
            offset += stride


def _replace_weights(
    model: Any,
    folder: Path,
    work: Path,
    files: tuple[PlannedFile, ...],
    texts: Mapping[str, str | bytes],
) -> None:
    """Replaces the weights of the folder by those in `work`. `config.json` goes first and comes
    last.
    """
    (folder / CONFIG).unlink(missing_ok=True)
    remove_files(folder, MODEL_WEIGHTS)
    for file in files:
        (work / file.name).rename(folder / file.name)
    work.rmdir()
    for name, text in texts.items():
        (folder / name).write_text(str(text), encoding="utf-8")
        sync(folder / name)

    first: Any = next(iter(model.parameters()))
    dtype = str(model.dtype).removeprefix("torch.")
    if hasattr(first, "sharded"):
        dtype = str(first.sharded.stored_dtype).removeprefix("torch.")
    if not (folder / CARD).exists():
        specs = NativeModel.from_config(model.config).parameters.values()
        parameters = sum(prod(spec.shape) for spec in specs)
        facts = {"parameters": f"{parameters:,}", "type": dtype}
        card = model_card(model.config, model.config.architecture, facts)
        (folder / CARD).write_text(card, encoding="utf-8")

    values = {**model.config.to_dict(), "dtype": dtype}
    if isinstance(model, GenerationMixin) and model.generates != "masks":
        model.generation_config.save(folder)
        sync(folder / GENERATION_CONFIG)
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    sync(folder / CONFIG)
    sync(folder)


def model_card(
    config: ModelConfig,
    title: str,
    facts: Mapping[str, str],
    sections: Mapping[str, str] | None = None,
) -> str:
    """Returns the text of a README.md: what a model is and how it is loaded.

    Args:
        facts: Rows of a table: name -> value.
        sections: Further sections: title -> text.
    """
    import yaml

    is_known = family(config.model_type).in_transformers
    header = {
        "library_name": "transformers" if is_known else "shardzoo",
        "tags": ["shardzoo", config.model_type],
    }
    if is_known:
        load = (
            f"from transformers import AutoTokenizer, {config.architecture}\n\n"
            f'model = {config.architecture}.from_pretrained(".")\n'
            'tokenizer = AutoTokenizer.from_pretrained(".")'
        )
    else:
        load = 'import shardzoo\n\nmodel = shardzoo.from_pretrained(".")'
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    card = f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n# {title}\n\n"
    card += f"| | |\n|---|---|\n{rows}"
    parts = dict(sections or {})
    parts["How it is loaded"] = (
        f"In the Hugging Face folder:\n\n```python\n{load}\n```\n\nIn a folder of shards that "
        '`shardzoo convert` has made of it: `shardzoo.from_pretrained(".", mesh)`.'
    )
    for name, text in parts.items():
        card += f"\n## {name}\n\n{text}\n"
    return card
