"""Writes models in memory as Hugging Face folders, and pushes them to the Hub.

Each rank writes the bytes of its own part, at their places in the files, so no rank ever holds the whole model.
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
from ..checkpoint.folder_files import CONFIG, OWN_FILES, STATE, holds_training_state
from ..checkpoint.hub import upload_folder
from ..checkpoint.layout import ParameterSpec
from ..checkpoint.planned_file import PlannedFile
from ..checkpoint.stored_tensor import StoredTensor
from ..checkpoint.tensor_reader import tensor_bytes
from ..files.durable import sync
from ..mpu import ParallelMesh, tp_rank, tp_size
from ..mpu.collectives import gather_bytes
from .config import ModelConfig
from .huggingface import INDEX, LARGEST_FILE, huggingface_layout, stored_shapes, weight_files
from .language_model import Backbone
from .lora import save_adapter
from .mapping import NativeModel, StoredNames
from .pipeline import find_copied_parameters
from .registry import family

BLOCK = 16 << 20  # bytes that are copied to the CPU at a time
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
CARD = "README.md"


def save_pretrained(
    model: Any, save_directory: str | Path, *, max_shard_size: int | str = LARGEST_FILE
) -> None:
    """Writes a Hugging Face folder, which transformers and `from_pretrained` load. Collective over the model's mesh.

    Weights that are there are replaced; other files, such as the tokenizer's, stay. Without `config.json`, which is
    written last, nothing loads the folder, so an interrupted call leaves no half model. A model with LoRA weights is
    written as peft's adapter. A folder without a README.md gets a model card.

    Args:
        save_directory: A folder that all ranks see.
        max_shard_size: The largest weight file: bytes, or a text such as "5GB".

    Raises:
        ValueError: The folder holds shards or a training checkpoint, cannot be written, or is not seen by all ranks.
    """
    folder, mesh = Path(save_directory), cast("ParallelMesh | None", model.mesh)
    if getattr(model, "lora", None) is not None:
        _together(mesh, lambda: _check_folder(folder) if _is_first(mesh) else None)
        save_adapter(model, folder)
        return
    native = NativeModel.from_config(model.config)
    names = StoredNames(native.list_hf_names(), {})
    files, texts = weight_files(
        stored_shapes(native, names, _dtypes(model), {}), _bytes(max_shard_size)
    )
    work = folder / ".weights.partial"
    try:
        _together(mesh, lambda: _begin(folder, work, files) if _is_first(mesh) else None)
        _together(mesh, lambda: _write_parts(model, native, files, work))
        _together(
            mesh, lambda: _finish(model, folder, work, files, texts) if _is_first(mesh) else None
        )
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
    """Saves the model in a temporary folder and commits it to the Hub. Collective over the model's mesh.

    Returns the commit's address on the first rank, which uploads; the others return None as soon as the files are
    written.

    Args:
        repo_id: `org/name`; the repository is made if needed.
        revision: A branch, which is made if needed; by default main.
        tokenizer: Anything with `save_pretrained`, whose files are committed too.
        working_directory: Where the temporary folder is; it must be shared if the ranks are on several machines.

    Raises:
        ValueError: What `save_pretrained` raises; on the first rank also what the Hub refuses.
    """
    mesh = cast("ParallelMesh | None", model.mesh)
    made = ""

    def make() -> None:
        nonlocal made
        if _is_first(mesh):
            made = tempfile.mkdtemp(prefix="push-", dir=working_directory)

    _together(mesh, make)
    if mesh is not None and mesh.world_size > 1:
        made = gather_bytes(made.encode())[0].decode()
    folder = Path(made)
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


# The methods of every model of the zoo, as transformers' models have them.
cast(Any, Backbone).save_pretrained = save_pretrained
cast(Any, Backbone).push_to_hub = push_to_hub


def _dtypes(model: Any) -> dict[str, str]:
    """Returns native name -> safetensors name of the type, of the parameters of all pipeline stages. Collective."""
    own = {
        name: from_torch_name(str(parameter.dtype)) for name, parameter in model.named_parameters()
    }
    mesh: ParallelMesh | None = model.mesh
    if mesh is None or mesh.pp_size == 1:
        return own
    stages = gather_bytes(json.dumps(own).encode(), mesh.pp_group)
    return {name: dtype for stage in stages for name, dtype in json.loads(stage).items()}


def _bytes(size: int | str) -> int:
    """Returns a number of bytes, given as such or as transformers writes it: "5GB", of 10^9 bytes."""
    if isinstance(size, str) and (
        match := re.fullmatch(r"(\d+)\s*([KMG]?I?B)", size.strip().upper())
    ):
        size = int(match[1]) * UNITS.get(match[2], 0)
    if not isinstance(size, int) or size < 1:
        raise ValueError(
            f"max_shard_size must be a number of bytes or a text such as '5GB', not {size!r}"
        )
    return size


def _is_first(mesh: ParallelMesh | None) -> bool:
    return mesh is None or mesh.rank == 0


def _together(mesh: ParallelMesh | None, work: Callable[[], None]) -> None:
    """Runs `work` on every rank. If it fails on one with a ValueError or OSError, raises a ValueError on all."""
    problem = ""
    try:
        work()
    except (ValueError, OSError) as error:
        problem = f"cannot write the model: {error}" if isinstance(error, OSError) else str(error)
    failed = problem != ""
    if mesh is not None and mesh.world_size > 1:
        flag = torch.tensor(float(failed), device=mesh.device_type)
        cast(Any, dist).all_reduce(flag)
        failed = bool(flag.item())
    if failed:
        raise ValueError(problem or "another rank could not write its part of the model")


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder to save the model in")
    for name in sorted(OWN_FILES):
        if (folder / name).exists() and (name != STATE or holds_training_state(folder)):
            raise ValueError(
                f"{folder} holds shards or a training checkpoint ({name}); save the model in another folder"
            )


def _begin(folder: Path, work: Path, files: tuple[PlannedFile, ...]) -> None:
    _check_folder(folder)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    free = shutil.disk_usage(work).free
    if (needed := sum(file.size for file in files)) > free:
        shutil.rmtree(work)
        raise ValueError(f"{folder} needs {needed:,} bytes, but its disk has {free:,} free")
    for file in files:
        file.create(work / file.name)


def _write_parts(
    model: Any, native: NativeModel, files: tuple[PlannedFile, ...], work: Path
) -> None:
    """Writes this rank's part of every parameter of this stage, on the first replica of the model."""
    mesh: ParallelMesh | None = model.mesh
    if not work.is_dir():
        raise ValueError(
            f"{work.parent} is not seen by all ranks; name a folder on a file system that they share"
        )
    if mesh is not None and mesh.dp_rank:
        return
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    placements = huggingface_layout(
        native, StoredNames(native.list_hf_names(), {}), tensors, {}
    ).placements
    rank, size, copies = tp_rank(mesh), tp_size(mesh), find_copied_parameters(model)
    with OpenFiles(lambda path: os.open(work / path, os.O_WRONLY | os.O_CLOEXEC)) as opened:
        for name, parameter in model.named_parameters():
            spec = native.parameters[name]
            if name in copies or (spec.shard is None and rank):
                continue
            _check_part(spec, parameter, rank, size)
            values = parameter.detach() if parameter.dim() else parameter.detach().reshape(1)
            for part, start, stop, position in placements[name].find_slices(
                spec.ranges(rank, size)
            ):
                block, along = values.narrow(spec.dim, position, stop - start), spec.dim
                if part.transposed:
                    block, along = block.t(), 1 - along
                opened.open([part.tensor.file])
                _write_block(part.tensor, opened[part.tensor.file], block, along, start)
        opened.sync()


def _check_part(spec: ParameterSpec, parameter: Tensor, rank: int, size: int) -> None:
    """Raises ValueError if this rank does not have its part, as under ZeRO 3."""
    if tuple(parameter.shape) not in (
        spec.local_shape(rank, size),
        spec.shape if size == 1 else None,
    ):
        raise ValueError(
            f"{spec.name} has shape {list(parameter.shape)} in memory instead of {list(spec.local_shape(rank, size))}; "
            "under ZeRO 3, save the model with the trainer"
        )


def _write_block(
    tensor: StoredTensor, descriptor: int, block: Tensor, along: int, start: int
) -> None:
    """Writes a block of a stored tensor: its indices from `start` on along one dimension, all indices of the others."""
    for offset, data in _pieces(tensor, block, along, start):
        position = tensor.offset + offset
        while len(data):
            written = os.pwrite(descriptor, data, position)
            data, position = data[written:], position + written


def _pieces(
    tensor: StoredTensor, block: Tensor, along: int, start: int
) -> Iterator[tuple[int, memoryview]]:
    """Yields the bytes of a block that are contiguous in the tensor, with their first byte in the tensor."""
    size = block.element_size()
    line = block.shape[along] * prod(tensor.shape[along + 1 :]) * size  # contiguous bytes
    stride = prod(tensor.shape[along:]) * size  # from one such line to the next
    first = start * prod(tensor.shape[along + 1 :]) * size
    rows = max(1, BLOCK // max(1, prod(block.shape[1:]) * size))
    done = 0
    blocks = cast(tuple[Tensor, ...], cast(Any, block).split(rows)) if block.numel() else ()
    for piece in blocks:
        data = tensor_bytes(cast(Tensor, cast(Any, piece).cpu().contiguous()))
        if along == 0 or line == stride:  # nothing of others lies between the lines
            yield first + done, data
            done += len(data)
            continue
        for position in range(0, len(data), line):
            yield first + done, data[position : position + line]
            done += stride


def _finish(
    model: Any,
    folder: Path,
    work: Path,
    files: tuple[PlannedFile, ...],
    texts: Mapping[str, str | bytes],
) -> None:
    """Replaces the weights of the folder by those in `work`. `config.json` goes first and comes last."""
    for name in (CONFIG, INDEX, "pytorch_model.bin.index.json"):
        (folder / name).unlink(missing_ok=True)
    for pattern in ("model*.safetensors", "pytorch_model*.bin"):
        for path in folder.glob(pattern):
            path.unlink()
    for file in files:
        (work / file.name).rename(folder / file.name)
    work.rmdir()
    for name, text in texts.items():
        (folder / name).write_text(str(text), encoding="utf-8")
        sync(folder / name)
    if not (folder / CARD).exists():
        parameters = sum(
            prod(spec.shape) for spec in NativeModel.from_config(model.config).parameters.values()
        )
        facts = {"parameters": f"{parameters:,}", "type": str(model.dtype).removeprefix("torch.")}
        (folder / CARD).write_text(
            model_card(model.config, model.config.architecture, facts), encoding="utf-8"
        )
    values = {**model.config.to_dict(), "dtype": str(model.dtype).removeprefix("torch.")}
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    sync(folder / CONFIG)
    sync(folder)


def model_card(
    config: ModelConfig,
    title: str,
    facts: Mapping[str, str],
    sections: Mapping[str, str] | None = None,
) -> str:
    """Returns the text of a README.md: what the model is, how it is loaded, and other sections by their titles."""
    import yaml

    known = family(config.model_type).in_transformers
    header = {
        "library_name": "transformers" if known else "shardzoo",
        "tags": ["shardzoo", config.model_type],
    }
    load = (
        f"from transformers import AutoTokenizer, {config.architecture}\n\n"
        f'model = {config.architecture}.from_pretrained(".")\ntokenizer = AutoTokenizer.from_pretrained(".")'
        if known
        else 'import shardzoo\n\nmodel = shardzoo.from_pretrained(".")'
    )
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    parts = {**(sections or {}), "How it is loaded": f"In this folder:\n\n```python\n{load}\n```"}
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n# {title}\n\n| | |\n|---|---|\n{rows}"
        + "".join(f"\n## {name}\n\n{text}\n" for name, text in parts.items())
    )
