"""Verifies that a folder is intact, that two folders hold the same weights, and that a conversion loses nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint.checkpoint import open_checkpoint
from ..checkpoint.file_io import ComparingSink, OpenFiles, check_hash, hash_stored, open_for_reading
from ..checkpoint.stored_tensor import StoredTensor
from ..models.mapping import MappedCheckpoint, map_checkpoint
from .operations import Options, merge, split
from .plan import compose
from .target import build_huggingface_target
from .workers import block_size, run_copies

SMALLEST_SPLIT = 2  # ranks; every model with two heads can be split so


@dataclass(frozen=True)
class Verdict:
    """The result of a verification; `differences` describes what differs, and is empty if everything is equal."""

    differences: tuple[str, ...]
    tensors: int
    nbytes: int


def verify_folder(folder: Path, options: Options) -> Verdict:
    """Verifies that every tensor of a folder has its recorded hash, and that stored copies are equal.

    The verdict lists wrong contents. A wrong structure, such as a missing tensor, raises ValueError.
    """
    mapped = map_checkpoint(open_checkpoint(folder, options.config_file))
    tensors = mapped.layout.tensors()
    with OpenFiles(open_for_reading) as files, ThreadPoolExecutor(options.threads) as pool:
        files.open(mapped.checkpoint.files)

        def check(tensor: StoredTensor) -> str:
            found = hash_stored(tensor, files[tensor.file], block_size(options.threads))
            try:
                check_hash(tensor, found, mapped.digests.get((tensor.file, tensor.name)))
            except ValueError as error:
                return str(error)
            digests[tensor.file, tensor.name] = found
            return ""

        digests: dict[tuple[Path, str], str] = {}
        problems = [problem for problem in pool.map(check, tensors) if problem]
    problems += _differing_copies(mapped, digests) + _repeated_ranks(mapped, digests)
    return Verdict(tuple(problems), len(tensors), sum(tensor.nbytes for tensor in tensors))


def _differing_copies(mapped: MappedCheckpoint, digests: dict[tuple[Path, str], str]) -> list[str]:
    problems = []
    for placement in mapped.layout.placements.values():
        first = placement.copies[0]
        for copy in placement.copies[1:]:
            # a copy in other chunks is compared when it is converted
            for mine, other in zip(first, copy, strict=True) if len(first) == len(copy) else ():
                keys = [(part.tensor.file, part.tensor.name) for part in (mine, other)]
                if all(key in digests for key in keys) and digests[keys[0]] != digests[keys[1]]:
                    problems.append(
                        f"{other.tensor} differs from {mine.tensor}; both must be equal"
                    )
    return problems


def _repeated_ranks(mapped: MappedCheckpoint, digests: dict[tuple[Path, str], str]) -> list[str]:
    """Describes rank files that are copies of one another, if the format records no hashes."""
    if mapped.checkpoint.kind not in ("legacy", "megatron"):
        return []
    parts = [
        placement.copies[0]
        for placement in mapped.layout.placements.values()
        if len(placement.copies[0]) > 1
    ]
    seen: dict[tuple, int] = {}
    for rank in range(len(mapped.checkpoint.ranks)):
        contents = tuple(
            digests.get((copy[rank].tensor.file, copy[rank].tensor.name)) for copy in parts
        )
        if contents in seen:
            return [
                f"rank {rank} of {mapped.checkpoint.folder} repeats rank {seen[contents]} in every split tensor"
            ]
        seen[contents] = rank
    return []


def verify_equal(
    first: Path, second: Path, options: Options, report: Callable[[int, int], None]
) -> Verdict:
    """Compares all weights of two folders of any formats byte by byte, without padding."""
    ours, theirs = (
        map_checkpoint(open_checkpoint(folder, options.config_file)) for folder in (first, second)
    )
    return _compare(ours, theirs, options, report)


def verify_round_trip(
    folder: Path, size: int | None, options: Options, report: Callable[[int, int], None]
) -> Verdict:
    """Converts the folder into a temporary folder beside it and compares the result with it, tensor names included.

    A Hugging Face folder is split over `size` ranks, by default two. A folder of
    another format is merged.
    """
    mapped = map_checkpoint(open_checkpoint(folder, options.config_file))
    with tempfile.TemporaryDirectory(
        prefix=".round-trip-", dir=folder.resolve().parent
    ) as temporary:
        there = Path(temporary) / "converted"
        if mapped.checkpoint.kind == "huggingface":
            split(folder, there, size or SMALLEST_SPLIT, options, report)
        else:
            merge(folder, there, replace(options, largest_file=1 << 62), report)
        back = map_checkpoint(open_checkpoint(there))
        verdict = _compare(back, mapped, options, report)
        problems = list(verdict.differences)
        if mapped.checkpoint.kind == "huggingface":
            named = {
                (t.name, t.dtype, t.shape) for t in build_huggingface_target(back).layout.tensors()
            }
            wanted = {(t.name, t.dtype, t.shape) for t in mapped.checkpoint.ranks[0].values()}
            names = {name for name, *_ in named} ^ {name for name, *_ in wanted}
            problems += [f"tensor {name} does not keep its name" for name in sorted(names)]
    return Verdict(tuple(problems), verdict.tensors, verdict.nbytes)


def _compare(
    source: MappedCheckpoint,
    target: MappedCheckpoint,
    options: Options,
    report: Callable[[int, int], None],
) -> Verdict:
    copies = compose(source.layout, target.layout)
    comparers: list[ComparingSink] = []
    problems = [
        f"{copy.name} is {copy.source.dtype} in {source.checkpoint.folder}, "
        f"but {copy.target.dtype} in {target.checkpoint.folder}"
        for copy in copies
        if copy.source.dtype != copy.target.dtype
    ]
    copies = [copy for copy in copies if copy.source.dtype == copy.target.dtype]
    total, done = sum(copy.nbytes for copy in copies), 0
    with OpenFiles(open_for_reading) as inputs, OpenFiles(open_for_reading) as others:
        inputs.open(source.checkpoint.files)
        others.open(target.checkpoint.files)

        def compare(tensors: Sequence[StoredTensor]) -> ComparingSink:
            comparers.append(ComparingSink(tensors, others))
            return comparers[-1]

        for index, _ in run_copies(copies, inputs, source.digests, compare, options.threads):
            done += copies[index].nbytes
            report(done, total)
    for comparer in comparers:
        problems += [
            f"{tensor} differs, first at byte {at:,}" for tensor, at in comparer.differing.items()
        ]
    return Verdict(tuple(problems), len(copies), total)
