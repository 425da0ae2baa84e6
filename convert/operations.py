"""Splits and merges checkpoint folders: Hugging Face to shards, shards to other shards, shards to Hugging Face."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ..checkpoint.checkpoint import EXTRAS, open_checkpoint
from ..checkpoint.dtypes import torch_name
from ..checkpoint.file_io import HashingWriter, OpenFiles, hash_stored, open_for_reading
from ..checkpoint.folder_files import list_auxiliary_files, read_state_file
from ..checkpoint.manifest import ExtraRecord, Manifest, TensorRecord
from ..checkpoint.stored_tensor import StoredTensor
from ..models.mapping import MappedCheckpoint
from ..models.megatron import Style
from .copying import Digests
from .destination import Destination
from .journal import Journal, open_partial
from .plan import ConversionPlan, add_optimizer, plan_conversion, plan_universal, source_state
from .target import (
    LARGEST_FILE,
    Target,
    build_dcp_target,
    build_huggingface_target,
    build_legacy_target,
    build_megatron_target,
    build_shards_target,
)
from .workers import Worker, block_size, run_copies, run_copies_in_processes

ADAPTER_FOLDER = "adapter"
MOST_WORKERS = 64  # threads or processes
ProgressReport = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Options:
    """Options of a conversion.

    Attributes:
        overwrite: Whether to replace a destination that exists.
        resume: Whether to continue an interrupted conversion.
        jobs: The number of threads; by default one for each core, at most four.
        dtype: The safetensors name of a type that floating-point tensors are converted to.
        config_file: A `config.json`, or its folder, to use instead of the source's own.
        largest_file: Bytes of weights in one file of a Hugging Face folder.
        workers: The number of processes that convert, each with one thread; 1 means the threads of this process.
        adapter: A folder of peft with LoRA weights for the model, which are merged.
        with_optimizer: Also move the optimizer's state of a training checkpoint, so that a run resumes from the result.
        keep_adapter: Keep the adapter beside the weights, in the folder `adapter`, instead of merging it.
        step_as_tensor: Whether a universal checkpoint has the step count as torch's optimizers keep it, a tensor, or as
            DeepSpeed's, an int.
    """

    overwrite: bool = False
    resume: bool = False
    jobs: int | None = None
    dtype: str | None = None
    config_file: Path | None = None
    largest_file: int = LARGEST_FILE
    workers: int = 1
    adapter: Path | None = None
    keep_adapter: bool = False
    with_optimizer: bool = False
    step_as_tensor: bool = False

    def check(self) -> None:
        """Raises ValueError for wrong numbers of threads or processes, or options that exclude one another."""
        if self.keep_adapter and self.adapter is None:
            raise ValueError("keep_adapter needs an adapter")
        if self.with_optimizer and (self.adapter is not None or self.dtype is not None):
            raise ValueError(
                "with_optimizer moves a run as it is, so it allows neither an adapter nor a dtype"
            )
        for name, count in (("jobs", self.jobs), ("workers", self.workers)):
            if count is not None and not 1 <= count <= MOST_WORKERS:
                raise ValueError(f"{name} must be from 1 to {MOST_WORKERS}, not {count}")
        if self.workers > 1 and self.jobs is not None:
            raise ValueError(
                "jobs are threads of one process, and workers are processes of one thread: use one of them"
            )

    @property
    def threads(self) -> int:
        self.check()
        return self.jobs or min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Outcome:
    """What a conversion did; `kept` are bytes that an interrupted run had written and that were still intact."""

    tensors: int
    nbytes: int
    kept: int


def split(
    source: Path,
    destination: Path,
    size: int,
    options: Options | None = None,
    report: ProgressReport | None = None,
    style: Literal["shardzoo", "legacy", "megatron"] = "shardzoo",
    *,
    stages: int = 1,
    names: Style | None = None,
) -> Outcome:
    """Writes a folder of `size` tensor-parallel ranks from a folder of any format.

    The style is "shardzoo" for `rank_XX.safetensors` files, "legacy" for `mp_rank_XX_model_states.pt` files, or
    "megatron" for Megatron-LM's folders. Only those have pipeline stages, and several kinds of names for the tensors.

    Raises ValueError if the source is damaged or incomplete, the model cannot be split over `size` ranks, the
    destination exists, or its disk is too full. Nothing is left of the failed conversion.
    """
    if style == "megatron":
        make_target = partial(build_megatron_target, stages=stages, style=names)
    elif stages != 1 or names is not None:
        raise ValueError(
            f"pipeline stages and names of tensors can be chosen for Megatron-LM only, not for {style}"
        )
    else:
        make_target = build_legacy_target if style == "legacy" else build_shards_target
    options = options or Options()
    return _convert(
        source,
        destination,
        options,
        report,
        lambda mapped: make_target(mapped, size, options.dtype),
    )


def merge(
    source: Path,
    destination: Path,
    options: Options | None = None,
    report: ProgressReport | None = None,
    style: Literal["hf", "dcp", "universal"] = "hf",
) -> Outcome:
    """Writes a Hugging Face folder, which `transformers.AutoModel…from_pretrained(destination)` loads.

    The style "dcp" writes a folder that `torch.distributed.checkpoint.load` loads into such a model's state, and
    "universal" writes weights and optimizer of a training checkpoint as DeepSpeed's universal checkpoint.

    The source is a folder of any format, training checkpoints included. Arguments and errors are those of `split`.
    """
    options = options or Options()
    if style == "universal":
        return _convert(source, destination, options, report, None)
    make_target = build_dcp_target if style == "dcp" else build_huggingface_target
    return _convert(
        source,
        destination,
        options,
        report,
        lambda mapped: make_target(mapped, options.dtype, options.largest_file),
    )


def _convert(
    source: Path,
    destination: Path,
    options: Options,
    report: ProgressReport | None,
    make_target: Callable[[MappedCheckpoint], Target] | None,
) -> Outcome:
    """Converts to a target, or without one to a universal checkpoint."""
    options.check()
    place = Destination(destination)
    place.check(source, overwrite=options.overwrite, resume=options.resume)
    todo = _plan(source, options, make_target)
    if options.resume and place.is_complete():
        _check_complete(todo, destination)
        place.tidy()
        return Outcome(len(todo.copies), todo.nbytes, todo.nbytes)
    texts = _companions(
        todo, options
    )  # before the weights are copied, so that an error in them costs no time
    before = source_state(todo.files)
    journal = place.begin(todo.target.files, todo.fingerprint(), overwrite=options.overwrite)
    try:
        return _run(
            todo, place, journal, texts, before, options, report or (lambda done, total: None)
        )
    except (ValueError, MemoryError):
        place.abandon()
        raise
    except OSError as error:  # e.g. too many open files
        place.abandon()
        raise ValueError(f"cannot convert {source} to {destination}: {error}") from None
    finally:
        journal.close()


def _plan(
    source: Path, options: Options, make_target: Callable[[MappedCheckpoint], Target] | None
) -> ConversionPlan:
    if make_target is None:
        if options.adapter is not None or options.dtype is not None:
            raise ValueError(
                "a universal checkpoint has a run's own weights in fp32: leave out adapter and dtype"
            )
        return plan_universal(source, options.config_file, step_as_tensor=options.step_as_tensor)
    todo = plan_conversion(
        source, make_target, options.config_file, options.adapter, keep_adapter=options.keep_adapter
    )
    return add_optimizer(todo) if options.with_optimizer else todo


def _run(
    todo: ConversionPlan,
    place: Destination,
    journal: Journal,
    texts: Mapping[str, bytes | Path],
    before: Mapping[Path, tuple[int, int]],
    options: Options,
    report: ProgressReport,
) -> Outcome:
    source, target = todo.mapped.checkpoint, todo.target
    digests: Digests = {}
    opener = partial(open_partial, place.work)
    with OpenFiles(open_for_reading) as inputs, OpenFiles(opener) as outputs:
        inputs.open(todo.files)
        names = [Path(file.name) for file in target.files]
        outputs.open(names)
        kept = _intact(todo, journal.finished, outputs)
        for index in kept:
            digests |= journal.finished[index]
        rest = [index for index in range(len(todo.copies)) if index not in kept]
        done = kept_bytes = sum(todo.copies[index].nbytes for index in kept)
        report(done, todo.nbytes)
        copies = [todo.copies[index] for index in rest]
        if options.workers > 1:
            worker = Worker(
                todo.files, names, opener, todo.mapped.digests, block_size(options.workers)
            )
            work = run_copies_in_processes(copies, worker, options.workers)
        else:
            work = run_copies(
                copies,
                inputs,
                todo.mapped.digests,
                lambda tensors: HashingWriter(tensors, outputs),
                options.threads,
            )
        for position, written in work:
            journal.record(rest[position], written)
            digests |= written
            done += copies[position].nbytes
            report(done, todo.nbytes)
    if source_state(todo.files) != before:
        raise ValueError(f"{source.folder} changed while it was being read; convert it again")
    # A run that resumes from another number of ranks makes random states of its own.
    shards = target.kind == "shards"
    state = (
        {**read_state_file(source.folder), "world_size": 0} if shards and todo.optimizer else None
    )
    place.finish(target.files, texts, _manifest(todo, digests) if shards else None, state)
    return Outcome(len(todo.copies), todo.nbytes, kept_bytes)


def _intact(todo: ConversionPlan, finished: Mapping[int, Digests], outputs: OpenFiles) -> set[int]:
    """Returns the copies that an interrupted run finished and whose bytes still have the recorded hashes."""
    kept = set()
    for index, digests in finished.items():
        if index not in range(len(todo.copies)):
            continue
        tensors = {
            (part.tensor.file, part.tensor.name): part.tensor
            for part in todo.copies[index].target.slices()
        }
        if digests.keys() == tensors.keys() and all(
            hash_stored(tensor, outputs[tensor.file], 1 << 20) == digests[key]
            for key, tensor in tensors.items()
        ):
            kept.add(index)
    return kept


def _companions(todo: ConversionPlan, options: Options) -> dict[str, bytes | Path]:
    """Returns the small files of source and target and `config.json` by name: contents, or the file to copy."""
    texts: dict[str, bytes | Path] = {
        path.name: path for path in list_auxiliary_files(todo.mapped.checkpoint.folder)
    }
    config = dict(todo.mapped.checkpoint.config or todo.mapped.model.config.to_dict())
    if options.dtype is not None:
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        config |= dict.fromkeys(keys, torch_name(options.dtype))
    if "config.json" not in texts or options.dtype is not None or options.config_file is not None:
        texts["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    if todo.adapter is not None and options.keep_adapter:
        texts |= {f"{ADAPTER_FOLDER}/{path.name}": path for path in todo.adapter.files}
    return texts | {
        name: text.encode() if isinstance(text, str) else text
        for name, text in todo.target.texts.items()
    }


def _manifest(todo: ConversionPlan, digests: Digests) -> Manifest:
    source, model, target, names = (
        todo.mapped.checkpoint,
        todo.mapped.model,
        todo.target,
        todo.mapped.names,
    )
    canonical = model.new_names()
    records = {}
    for name, parameter in model.parameters.items():
        tensors = list(target.layout.placements[name].slices())
        records[name] = TensorRecord(
            shape=parameter.shape,
            dtype=torch_name(tensors[0].tensor.dtype),
            shard=parameter.shard.to_record() if parameter.shard else None,
            sha256=tuple(digests[part.tensor.file, part.tensor.name] for part in tensors),
            stored=names.by_parameter[name] if names.by_parameter[name] != canonical[name] else (),
        )
    extras = {
        name: ExtraRecord(tensor.shape, torch_name(tensor.dtype), digests[Path(EXTRAS), name])
        for name, tensor in target.layout.extras.items()
    }
    return Manifest(
        model_type=model.config.model_type,
        tensor_parallel_size=target.size,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.padded_vocab_size(target.size),
        tensors=records,
        ties=dict(names.ties),
        extras=extras,
        vocabulary=source.manifest.vocabulary if source.manifest else None,
    )


def _check_complete(todo: ConversionPlan, destination: Path) -> None:
    """Raises ValueError if the headers of the existing destination differ from what the plan would write."""
    names = [file.name for file in todo.target.files]
    missing = [name for name in names if not (destination / name).exists()]
    wanted = {_where(tensor) for tensor in todo.target.layout.tensors()}
    if todo.target.kind == "universal":  # it is not read, and each file has one tensor
        sizes = {name: (destination / name).stat().st_size for name in names if name not in missing}
        there = wanted if sizes == {file.name: file.size for file in todo.target.files} else set()
    else:
        found = open_checkpoint(destination, destination)
        there = {
            _where(tensor) for rank in (*found.ranks, found.extras) for tensor in rank.values()
        }
    if missing or there != wanted:
        raise ValueError(
            f"{destination} is the result of another conversion; replace it with --overwrite"
        )


def _where(tensor: StoredTensor) -> tuple[str, str, str, int, int]:
    return tensor.file.name, tensor.name, tensor.dtype, tensor.nbytes, tensor.offset
