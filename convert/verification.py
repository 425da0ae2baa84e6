"""Verifies that a folder is intact, that two are equal, and that a conversion is lossless."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint.checkpoint import open_checkpoint
from ..checkpoint.file_io import ComparingSink, OpenFiles, check_hash, hash_stored
from ..checkpoint.layout import TensorSlice
from ..checkpoint.stored_tensor import StoredTensor
from ..files.working_copies import is_copy, open_for_reading
from ..models.mapping import MappedCheckpoint, map_checkpoint
from .copying import Digests, TensorCopy
from .operations import Options, merge, split
from .plan import pair_common_tensors
from .target import build_huggingface_target
from .workers import block_size, run_copies

SMALLEST_SPLIT = 2  # ranks; every model with two heads can be split so


@dataclass(frozen=True)
class VerificationReport:
    """The result of a verification.

    Attributes:
        differences: Descriptions of what differs; empty if everything is equal.
        tensors: The number of tensors that were compared.
        nbytes: Their bytes.
        recorded: The number of tensors that were compared with a recorded hash; None if tensors of
            two folders were compared.
        copied: The number of tensors whose copies in the folder were compared with one another.
    """

    differences: tuple[str, ...]
    tensors: int
    nbytes: int
    recorded: int | None = None
    copied: int = 0


def verify_folder(folder: Path, options: Options) -> VerificationReport:
    """Verifies that every tensor of a folder has its recorded hash, and that copies are equal.

    Wrong contents are differences in the report.

    Raises:
        ValueError: The structure is wrong; a tensor is missing, for example.
    """
    mapped = map_checkpoint(open_checkpoint(folder, options.config_file))
    tensors = mapped.layout.tensors()
    threads = options.threads
    problems: list[str] = []
    digests: Digests = {}  # of the tensors that have their recorded hash, or none recorded
    with OpenFiles(open_for_reading) as files, ThreadPoolExecutor(threads) as pool:
        files.open(mapped.checkpoint.files)

        def hash_tensor(tensor: StoredTensor) -> str:
            return hash_stored(tensor, files[tensor.file], block_size(threads))

        for tensor, digest in zip(tensors, pool.map(hash_tensor, tensors), strict=True):
            key = (tensor.file, tensor.name)
            try:
                check_hash(tensor, digest, mapped.digests.get(key))
            except ValueError as error:
                problems.append(str(error))
            else:
                digests[key] = digest
    problems += _find_differing_copies(mapped, digests)
    problems += _find_repeated_ranks(mapped, digests)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    recorded = sum((tensor.file, tensor.name) in mapped.digests for tensor in tensors)
    copied = sum(len(placement.copies) > 1 for placement in mapped.layout.placements.values())
    return VerificationReport(tuple(problems), len(tensors), nbytes, recorded, copied)


def _find_digest(part: TensorSlice, digests: Digests) -> str | None:
    return digests.get((part.tensor.file, part.tensor.name))


def _find_differing_copies(mapped: MappedCheckpoint, digests: Digests) -> list[str]:
    problems: list[str] = []
    for placement in mapped.layout.placements.values():
        first = placement.copies[0]
        for copy in placement.copies[1:]:
            # A copy in other chunks is compared when it is converted.
            if len(copy) != len(first):
                continue
            for mine, other in zip(first, copy, strict=True):
                my_digest = _find_digest(mine, digests)
                other_digest = _find_digest(other, digests)
                if my_digest is None or other_digest is None:
                    continue
                if my_digest != other_digest:
                    problems.append(
                        f"{other.tensor} differs from {mine.tensor}; both must be equal"
                    )
    return problems


def _find_repeated_ranks(mapped: MappedCheckpoint, digests: Digests) -> list[str]:
    """Describes rank files that are copies of one another, if the format records no hashes."""
    if mapped.checkpoint.kind not in ("legacy", "megatron"):
        return []
    split_parameters = []
    for placement in mapped.layout.placements.values():
        if len(placement.copies[0]) > 1:
            split_parameters.append(placement.copies[0])
    rank_by_contents: dict[tuple, int] = {}
    for rank in range(len(mapped.checkpoint.ranks)):
        contents = tuple(_find_digest(parts[rank], digests) for parts in split_parameters)
        if contents in rank_by_contents:
            return [
                f"rank {rank} of {mapped.checkpoint.folder} repeats rank "
                f"{rank_by_contents[contents]} in every split tensor"
            ]
        rank_by_contents[contents] = rank
    return []


def verify_equal(
    first: Path, second: Path, options: Options, report: Callable[[int, int], None]
) -> VerificationReport:
    """Compares all weights of two folders of any formats byte by byte, without padding."""
    ours = map_checkpoint(open_checkpoint(first, options.config_file))
    theirs = map_checkpoint(open_checkpoint(second, options.config_file))
    return _compare(ours, theirs, options, report)


def verify_round_trip(
    folder: Path, size: int | None, options: Options, report: Callable[[int, int], None]
) -> VerificationReport:
    """Converts the folder into a temporary one beside it and compares the result with it.

    The names of tensors are compared too. Of a folder in a store, the temporary one is where the
    system has its temporary files.

    Args:
        folder: A Hugging Face folder is split; a folder of another format is merged.
        size: The number of ranks to split over; by default two.
        options: Those of the conversion.
        report: Called with the bytes done and the bytes in all.
    """
    mapped = map_checkpoint(open_checkpoint(folder, options.config_file))
    is_huggingface = mapped.checkpoint.kind == "huggingface"
    parent = None if is_copy(folder) else folder.resolve().parent
    with tempfile.TemporaryDirectory(prefix=".round-trip-", dir=parent) as temporary:
        converted = Path(temporary) / "converted"
        if is_huggingface:
            split(folder, converted, size or SMALLEST_SPLIT, options, report)
        else:
            merge(folder, converted, replace(options, largest_file=1 << 62), report)
        back = map_checkpoint(open_checkpoint(converted))
        result = _compare(back, mapped, options, report)
        problems = list(result.differences)
        if is_huggingface:
            merged = build_huggingface_target(back)
            names = {name for file in merged.files for name in file.tensors}
            original_names = {tensor.name for tensor in mapped.checkpoint.ranks[0].values()}
            for name in sorted(names ^ original_names):
                problems.append(f"tensor {name} does not keep its name")
    return VerificationReport(tuple(problems), result.tensors, result.nbytes)


def _compare(
    source: MappedCheckpoint,
    target: MappedCheckpoint,
    options: Options,
    report: Callable[[int, int], None],
) -> VerificationReport:
    """Runs the copies of a conversion, with sinks that compare instead of writing."""
    folders = (str(source.checkpoint.folder), str(target.checkpoint.folder))
    pairs, problems = pair_common_tensors(source.layout, target.layout, folders)
    copies: list[TensorCopy] = []
    for copy in pairs:
        if copy.source.dtype == copy.target.dtype:
            copies.append(copy)
        else:
            problems.append(
                f"{copy.name} is {copy.source.dtype} in {source.checkpoint.folder}, "
                f"but {copy.target.dtype} in {target.checkpoint.folder}"
            )
    sinks: list[ComparingSink] = []
    total = sum(copy.nbytes for copy in copies)
    done = 0
    with OpenFiles(open_for_reading) as inputs, OpenFiles(open_for_reading) as others:
        inputs.open(source.checkpoint.files)
        others.open(target.checkpoint.files)

        def make_sink(tensors: Sequence[StoredTensor]) -> ComparingSink:
            sink = ComparingSink(tensors, others)
            sinks.append(sink)
            return sink

        finished = run_copies(copies, inputs, source.digests, make_sink, options.threads)
        for index, _ in finished:
            done += copies[index].nbytes
            report(done, total)
    for sink in sinks:
        for tensor, position in sink.differing.items():
            problems.append(f"{tensor} differs, first at byte {position:,}")
    return VerificationReport(tuple(problems), len(copies), total)
