"""Splits and merges checkpoint folders.

From Hugging Face to shards, from shards to other shards, from shards to Hugging Face, and from and
to the formats of other programs. `split` and `merge` differ only in the target that they plan.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from ..checkpoint.checkpoint import EXTRAS, open_checkpoint
from ..checkpoint.dtypes import set_config_dtype, torch_name
from ..checkpoint.file_io import HashingWriter, OpenFiles, hash_stored
from ..checkpoint.folder_files import CONFIG, list_auxiliary_files
from ..checkpoint.manifest import ExtraRecord, Manifest, TensorRecord
from ..checkpoint.stored_tensor import StoredTensor
from ..files.working_copies import find_source, naming_urls, open_for_reading
from ..models.mapping import MappedCheckpoint
from ..models.megatron import Style
from .copying import Digests, TensorCopy
from .destination import Destination
from .journal import Journal, open_partial
from .plan import ConversionPlan, add_optimizer, plan_conversion, plan_universal
from .target import (
    LARGEST_FILE,
    Target,
    build_dcp_target,
    build_huggingface_target,
    build_legacy_target,
    build_megatron_target,
    build_shards_target,
    build_torch_dist_target,
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
        workers: The number of processes that convert, each with one thread; 1 means the threads of
            this process.
        adapter: A folder of peft with LoRA weights for the model, which are merged.
        keep_adapter: Whether to keep the adapter beside the weights, in the folder `adapter`,
            instead of merging it.
        with_optimizer: Whether to also move the optimizer's state of a training checkpoint, so that
            a run resumes from the result.
        step_as_tensor: Whether a universal checkpoint has the step count as torch's optimizers keep
            it, a tensor, or as DeepSpeed's, an int.
        dequantize: The safetensors name of the type that the weights of a quantized Hugging Face
            folder are dequantized to.
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
    dequantize: str | None = None

    def check(self) -> None:
        """Raises ValueError for wrong numbers, or options that exclude one another."""
        if self.keep_adapter and self.adapter is None:
            raise ValueError("keep_adapter needs an adapter")
        if self.with_optimizer and (self.adapter is not None or self.dtype is not None):
            raise ValueError(
                "with_optimizer moves a run as it is, so it allows neither an adapter nor a dtype"
            )
        if self.dequantize is not None and self.dtype is not None:
            raise ValueError(
                "dequantize names the type of the dequantized weights: leave out dtype"
            )
        for name, count in (("jobs", self.jobs), ("workers", self.workers)):
            if count is not None and not 1 <= count <= MOST_WORKERS:
                raise ValueError(f"{name} must be from 1 to {MOST_WORKERS}, not {count}")
        if self.workers > 1 and self.jobs is not None:
            raise ValueError(
                "jobs are threads of one process, and workers are processes of one thread: "
                "use one of them"
            )

    @property
    def threads(self) -> int:
        self.check()
        return self.jobs or min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Outcome:
    """What a conversion did.

    Attributes:
        tensors: The number of tensors.
        nbytes: The bytes of all tensors.
        kept: The bytes that an interrupted run had written and that were still intact.
    """

    tensors: int
    nbytes: int
    kept: int


@naming_urls()
def split(
    source: str | Path,
    destination: str | Path,
    size: int,
    options: Options | None = None,
    report: ProgressReport | None = None,
    style: Literal["shardzoo", "legacy", "megatron"] = "shardzoo",
    *,
    stages: int = 1,
    names: Style | None = None,
) -> Outcome:
    """Writes a folder of `size` tensor-parallel ranks from a folder of any format.

    Args:
        source: The folder to read, or its URL in an object store.
        destination: The folder to write, or its URL.
        size: The number of ranks.
        options: By default those of `Options`.
        report: Called with the bytes done and the bytes in all.
        style: "shardzoo" for `rank_XX.safetensors` files, "legacy" for
            `mp_rank_XX_model_states.pt` files, or "megatron" for Megatron-LM's folders.
        stages: The number of pipeline stages, for Megatron-LM only.
        names: The kind of names of the tensors, for Megatron-LM only.

    Raises:
        ValueError: The source is damaged or incomplete, the model cannot be split over `size`
            ranks, the destination exists, or its disk is too full. Nothing is left of the failed
            conversion.
    """
    if style != "megatron" and (stages != 1 or names is not None):
        raise ValueError(
            f"pipeline stages and names of tensors can be chosen for Megatron-LM only, "
            f"not for {style}"
        )
    options = options or Options()

    def build_target(mapped: MappedCheckpoint) -> Target:
        if style == "megatron":
            return build_megatron_target(mapped, size, options.dtype, stages, names)
        if style == "legacy":
            return build_legacy_target(mapped, size, options.dtype)
        return build_shards_target(mapped, size, options.dtype)

    return _convert(source, destination, options, report, build_target)


@naming_urls()
def merge(
    source: str | Path,
    destination: str | Path,
    options: Options | None = None,
    report: ProgressReport | None = None,
    style: Literal["hf", "dcp", "torch_dist", "universal"] = "hf",
) -> Outcome:
    """Writes a folder with whole tensors from a folder of any format.

    A training checkpoint may be the source too. Other arguments and errors are those of `split`.

    Args:
        style: "hf" for a Hugging Face folder, which `AutoModel…from_pretrained` of transformers
            loads; "dcp" for a folder that `torch.distributed.checkpoint.load` loads into such a
            model's state; "torch_dist" for megatron-core's distributed checkpoint; "universal"
            for weights and optimizer of a training checkpoint as DeepSpeed's universal checkpoint.
    """
    options = options or Options()
    if style == "hf" and options.dequantize is not None and options.adapter is None:
        return _dequantize(source, destination, options, report)
    if style == "universal":
        return _convert(source, destination, options, report, None)

    def build_target(mapped: MappedCheckpoint) -> Target:
        if style == "dcp":
            return build_dcp_target(mapped, options.dtype, options.largest_file)
        if style == "torch_dist":
            return build_torch_dist_target(mapped, options.dtype, options.largest_file)
        return build_huggingface_target(mapped, options.dtype, options.largest_file)

    return _convert(source, destination, options, report, build_target)


def _convert(
    source: str | Path,
    destination: str | Path,
    options: Options,
    report: ProgressReport | None,
    build_target: Callable[[MappedCheckpoint], Target] | None,
) -> Outcome:
    """Converts to the target that `build_target` plans, or without it to a universal checkpoint."""
    options.check()
    source = find_source(source) or Path(source)
    if options.dequantize is not None:
        return _convert_dequantized(source, destination, options, report, build_target)
    place = Destination(destination)
    place.check(source, overwrite=options.overwrite, resume=options.resume)
    plan = _plan(source, options, build_target)
    if options.resume and place.is_complete():
        _check_is_result(plan, place.folder)
        place.tidy()
        return Outcome(len(plan.copies), plan.nbytes, plan.nbytes)

    # The small files come first, so that an error in them costs no time.
    texts = _collect_texts(plan, options)
    planned_states = plan.planned_states()
    journal = place.begin(plan.target.files, plan.fingerprint(), overwrite=options.overwrite)
    report = report or (lambda done, total: None)
    try:
        digests, kept_bytes = _copy_tensors(plan, place, journal, options, report)
        plan.check_source(planned_states)
        _finish(plan, place, texts, digests)
    except (ValueError, MemoryError):
        place.abandon()
        raise
    except OSError as error:  # For example too many open files.
        place.abandon()
        raise ValueError(f"cannot convert {source} to {destination}: {error}") from None
    finally:
        journal.close()
    return Outcome(len(plan.copies), plan.nbytes, kept_bytes)


def _dequantize(
    source: str | Path, destination: str | Path, options: Options, report: ProgressReport | None
) -> Outcome:
    """Writes a Hugging Face folder of full weights."""
    from .dequantizing import dequantize

    options.check()
    source = find_source(source) or Path(source)
    assert options.dequantize is not None
    tensors, nbytes, kept = dequantize(
        source,
        destination,
        options.dequantize,
        options.largest_file,
        report,
        config_file=options.config_file,
        overwrite=options.overwrite,
        resume=options.resume,
    )
    return Outcome(tensors, nbytes, kept)


def _convert_dequantized(
    source: Path,
    destination: str | Path,
    options: Options,
    report: ProgressReport | None,
    build_target: Callable[[MappedCheckpoint], Target] | None,
) -> Outcome:
    """Converts by way of a folder of full weights beside the destination, which is then removed.

    An interruption leaves that folder, so that a resumed conversion goes on with it.
    """
    place = Destination(destination)
    place.check(source, overwrite=options.overwrite, resume=options.resume)
    full = place.folder.with_name(f".{place.folder.name}.dequantized")
    has_full = full.is_dir() and options.resume
    if not has_full:
        shutil.rmtree(full, ignore_errors=True)
        _dequantize(source, full, options, report)
    try:
        rest = replace(options, dequantize=None, config_file=None)
        outcome = _convert(full, destination, rest, report, build_target)
    except ValueError:
        shutil.rmtree(full, ignore_errors=True)
        raise
    shutil.rmtree(full, ignore_errors=True)
    return outcome


def _plan(
    source: Path, options: Options, build_target: Callable[[MappedCheckpoint], Target] | None
) -> ConversionPlan:
    if build_target is None:
        if options.adapter is not None or options.dtype is not None:
            raise ValueError(
                "a universal checkpoint has a run's own weights in fp32: "
                "leave out adapter and dtype"
            )
        return plan_universal(source, options.config_file, step_as_tensor=options.step_as_tensor)
    plan = plan_conversion(
        source,
        build_target,
        options.config_file,
        options.adapter,
        keep_adapter=options.keep_adapter,
    )
    if options.with_optimizer:
        plan = add_optimizer(plan)
    return plan


def _copy_tensors(
    plan: ConversionPlan,
    place: Destination,
    journal: Journal,
    options: Options,
    report: ProgressReport,
) -> tuple[Digests, int]:
    """Copies all tensors that an interrupted run has not copied.

    Returns:
        The sha256 of every target tensor, and the bytes that were kept of an interrupted run.
    """
    digests: Digests = {}
    open_output = partial(open_partial, place.work)
    with OpenFiles(open_for_reading) as inputs, OpenFiles(open_output) as outputs:
        inputs.open(plan.files)
        output_names = [Path(file.name) for file in plan.target.files]
        outputs.open(output_names)

        kept = _find_intact(plan, journal.finished, outputs)
        for index in kept:
            digests |= journal.finished[index]
        kept_bytes = sum(plan.copies[index].nbytes for index in kept)
        done = kept_bytes
        report(done, plan.nbytes)

        remaining = [index for index in range(len(plan.copies)) if index not in kept]
        copies = [plan.copies[index] for index in remaining]
        finished: Iterator[tuple[int, Digests]]
        if options.workers > 1:
            worker = Worker(
                sources=plan.files,
                targets=output_names,
                open_target=open_output,
                hashes=plan.mapped.digests,
                block_bytes=block_size(options.workers),
            )
            finished = run_copies_in_processes(copies, worker, options.workers)
        else:
            finished = run_copies(
                copies,
                inputs,
                plan.mapped.digests,
                lambda tensors: HashingWriter(tensors, outputs),
                options.threads,
            )
        for position, written in finished:
            journal.record(remaining[position], written)
            digests |= written
            done += copies[position].nbytes
            report(done, plan.nbytes)
    return digests, kept_bytes


def _find_intact(
    plan: ConversionPlan, finished: Mapping[int, Digests], outputs: OpenFiles
) -> set[int]:
    """Returns the copies that an interrupted run finished and whose bytes have their hashes."""
    kept: set[int] = set()
    for index, digests in finished.items():
        if index in range(len(plan.copies)) and _is_intact(plan.copies[index], digests, outputs):
            kept.add(index)
    return kept


def _is_intact(copy: TensorCopy, digests: Digests, outputs: OpenFiles) -> bool:
    tensors = {(part.tensor.file, part.tensor.name): part.tensor for part in copy.target.slices()}
    if digests.keys() != tensors.keys():
        return False
    return all(
        hash_stored(tensor, outputs[tensor.file], 1 << 20) == digests[key]
        for key, tensor in tensors.items()
    )


def _collect_texts(plan: ConversionPlan, options: Options) -> dict[str, bytes | Path]:
    """Returns the small files of the destination by name: their contents, or the file to copy.

    They are those of the source, `config.json`, a kept adapter, and those of the target's format.
    """
    source = plan.mapped.checkpoint
    texts: dict[str, bytes | Path] = {
        path.name: path for path in list_auxiliary_files(source.folder)
    }
    if CONFIG not in texts or options.dtype is not None or options.config_file is not None:
        config = dict(source.config or plan.mapped.model.config.to_dict())
        if options.dtype is not None:
            set_config_dtype(config, options.dtype)
        texts[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    if plan.adapter is not None and options.keep_adapter:
        for path in plan.adapter.files:
            texts[f"{ADAPTER_FOLDER}/{path.name}"] = path
    for name, text in plan.target.texts.items():
        texts[name] = text.encode() if isinstance(text, str) else text
    return texts


def _finish(
    plan: ConversionPlan, place: Destination, texts: Mapping[str, bytes | Path], digests: Digests
) -> None:
    """Completes the destination; shards get a manifest, and a moved run its state."""
    manifest = None
    state = None
    if plan.target.kind == "shards":
        manifest = _build_manifest(plan, digests)
        state = plan.state
    place.finish(plan.target.files, texts, manifest, state)


def _build_manifest(plan: ConversionPlan, digests: Digests) -> Manifest:
    source = plan.mapped.checkpoint
    model = plan.mapped.model
    names = plan.mapped.names
    target = plan.target
    current_names = model.list_hf_names()
    records: dict[str, TensorRecord] = {}
    for name, parameter in model.parameters.items():
        tensors = [part.tensor for part in target.layout.placements[name].slices()]
        stored = names.by_parameter[name]
        if stored == current_names[name]:
            stored = ()
        records[name] = TensorRecord(
            shape=parameter.shape,
            dtype=torch_name(tensors[0].dtype),
            shard=parameter.shard.to_record() if parameter.shard else None,
            sha256=tuple(digests[tensor.file, tensor.name] for tensor in tensors),
            stored=stored,
        )
    extras: dict[str, ExtraRecord] = {}
    for name, tensor in target.layout.extras.items():
        sha256 = digests[Path(EXTRAS), name]
        extras[name] = ExtraRecord(tensor.shape, torch_name(tensor.dtype), sha256)
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


def _check_is_result(plan: ConversionPlan, destination: Path) -> None:
    """Raises ValueError if the existing destination differs from what the plan would write.

    Only headers are compared.
    """
    target = plan.target
    has_all_files = all((destination / file.name).exists() for file in target.files)
    whole = {tensor for file in target.files for tensor in file.tensors.values()}
    if target.kind == "universal" or not whole.issuperset(target.layout.tensors()):
        # Such a checkpoint is not read, or read in parts of its tensors; sizes tell enough.
        is_result = has_all_files and all(
            (destination / file.name).stat().st_size == file.size for file in target.files
        )
    else:
        found = open_checkpoint(destination, destination)
        stored = {_describe_place(tensor) for tensor in found.tensors()}
        planned = {_describe_place(tensor) for tensor in target.layout.tensors()}
        is_result = has_all_files and stored == planned
    if not is_result:
        raise ValueError(
            f"{destination} is the result of another conversion; replace it with --overwrite"
        )


def _describe_place(tensor: StoredTensor) -> tuple[str, str, str, int, int]:
    return tensor.file.name, tensor.name, tensor.dtype, tensor.nbytes, tensor.offset
