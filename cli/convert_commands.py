"""What the subcommands of `shardzoo convert` do with their arguments, and what they print."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from .convert_report import columns, facts, gigabytes, transfer_progress

if TYPE_CHECKING:
    from ..convert.operations import Options, Outcome
    from ..convert.verification import Verdict
    from .convert import Converting, Diff, Inspect, Merge, Plan, Reshard, Split, Verify

MOST_DIFFERENCES = 50
INTERRUPTED = 130


def run_conversion(command: Split | Merge | Reshard) -> int:
    from ..checkpoint.checkpoint import open_checkpoint
    from ..convert import operations
    from .convert import Merge, Reshard

    options = _options(command)
    if isinstance(command, Reshard):
        source = open_checkpoint(command.source, command.config)
        if source.kind == "huggingface":
            raise ValueError(f"{command.source} is a {source.description}; `split` it")
    started = time.monotonic()
    try:
        with transfer_progress(quiet=command.json) as report:
            if isinstance(command, Merge):
                outcome = operations.merge(command.source, command.destination, options, report)
            else:
                outcome = operations.split(
                    command.source, command.destination, command.tp, options, report, command.format
                )
    except KeyboardInterrupt:
        print("interrupted; go on with --resume", file=sys.stderr)
        return INTERRUPTED
    _print_outcome(command, outcome, time.monotonic() - started)
    return 0


def _options(command: Converting) -> Options:
    from ..checkpoint.dtypes import from_torch_name
    from ..convert.operations import LARGEST_FILE, Options

    largest = getattr(command, "max_file_gb", LARGEST_FILE / 1e9)
    if not 0 < largest < 1e9:
        raise ValueError(f"max_file_gb must be more than 0, not {largest}")
    return Options(
        overwrite=command.overwrite,
        resume=command.resume,
        jobs=command.jobs,
        dtype=from_torch_name(command.dtype) if command.dtype else None,
        config_file=command.config,
        largest_file=int(largest * 1e9),
    )


def _print_outcome(command: Converting, outcome: Outcome, seconds: float) -> None:
    speed = (outcome.nbytes - outcome.kept) / max(seconds, 1e-9)
    if command.json:
        print(json.dumps({**asdict(outcome), "seconds": seconds, "destination": str(command.destination)}))
        return
    kept = f", of which {gigabytes(outcome.kept)} were there already" if outcome.kept else ""
    print(
        f"{command.destination}: {outcome.tensors:,} tensors, {gigabytes(outcome.nbytes)}{kept}, "
        f"in {seconds:.1f} s ({speed / 1e9:.2f} GB/s)"
    )


def run_plan(command: Plan) -> int:
    from ..convert.plan import dry_run

    planned = dry_run(command.source, command.tp, command.config)
    if command.json:
        print(json.dumps(planned))
        return 0
    rows = [
        (row["name"], row["dtype"], _shape(row["shape"]), row["split"], f"{row['bytes_per_rank']:,}")
        for row in planned["tensors"]
    ]
    sys.stdout.write(columns(("tensor", "type", "shape", "split", "bytes per file"), rows))
    print(facts({name: value for name, value in planned.items() if name != "tensors"}))
    return 0


def run_inspect(command: Inspect) -> int:
    from ..convert.inspection import inspect_folder

    found = inspect_folder(command.folder, command.config)
    if command.json:
        print(json.dumps({**found.facts, "tensors": found.tensors}))
        return 0
    rows = [
        (row["name"], row["dtype"], _shape(row["shape"]), row.get("split", ""), f"{row['bytes']:,}")
        for row in found.tensors
    ]
    sys.stdout.write(columns(("tensor", "type", "shape", "split", "bytes"), rows))
    print(facts(dict(found.facts)))
    return 0


def run_diff(command: Diff) -> int:
    from ..convert.inspection import comparable, diff, open_both
    from .convert import DIFFERENT

    first, second = open_both(command.first, command.second)
    if not comparable(first, second):
        from ..convert.operations import Options
        from ..convert.verification import verify_equal

        with transfer_progress(quiet=command.json) as report:
            return _print_verdict(
                command.json, verify_equal(command.first, command.second, Options(), report), "compared"
            )
    found = diff(first, second)
    if command.json:
        print(json.dumps(asdict(found)))
    else:
        for entry in found.differences[:MOST_DIFFERENCES]:
            count = f" in {entry.elements:,} elements" if entry.elements else ""
            largest = f", by up to {entry.largest:.3g}" if entry.largest is not None else ""
            print(f"{entry.name}: {entry.what}{count}{largest}")
        if len(found.differences) > MOST_DIFFERENCES:
            print(f"… and {len(found.differences) - MOST_DIFFERENCES} more")
        print(f"{len(found.differences):,} of {found.tensors:,} tensors differ")
    return DIFFERENT if found.differences else 0


def run_verify(command: Verify) -> int:
    from ..convert import verification
    from ..convert.operations import Options

    options = Options(jobs=command.jobs, config_file=command.config)
    if command.logits + command.round_trip + (command.second is not None) > 1:
        raise ValueError("a second folder, --round-trip and --logits are checks of their own: ask for one of them")
    if command.logits:
        return _run_logits(command)
    with transfer_progress(quiet=command.json) as report:
        if command.second is not None:
            verdict, done = verification.verify_equal(command.first, command.second, options, report), "compared"
        elif command.round_trip:
            verdict = verification.verify_round_trip(command.first, command.tp, options, report)
            done = "converted and compared"
        else:
            verdict, done = verification.verify_folder(command.first, options), "hashed"
    return _print_verdict(command.json, verdict, done)


def _run_logits(command: Verify) -> int:
    from ..convert.logits import compare_logits
    from .convert import DIFFERENT

    found = compare_logits(command.first, command.tp, command.config)
    if command.json:
        print(json.dumps({**asdict(found), "relative": found.relative}))
    else:
        print(
            f"largest difference of native TP={found.size} from {found.reference}: {found.largest:.2e}, "
            f"{found.relative:.1e} of the logits' scale {found.scale:.3g}"
        )
    return 0 if found.is_close else DIFFERENT


def _print_verdict(as_json: bool, verdict: Verdict, done: str) -> int:
    from .convert import DIFFERENT

    if as_json:
        print(json.dumps(asdict(verdict)))
    else:
        for difference in verdict.differences[:MOST_DIFFERENCES]:
            print(difference)
        state = f"{len(verdict.differences):,} differences" if verdict.differences else "all equal"
        print(f"{done} {verdict.tensors:,} tensors, {gigabytes(verdict.nbytes)}: {state}")
    return DIFFERENT if verdict.differences else 0


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) or "number"
