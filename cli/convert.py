"""`shardzoo convert`: splits, merges, reshards, verifies and inspects checkpoints."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args

import tyro
from tyro.conf import Positional

from ..checkpoint.folder_files import CONFIG
from ..checkpoint.hub import find_model
from ..files.heap import return_freed_memory
from ..files.object_store import find_url
from ..files.printable import printable
from ..files.strict_json import read_folder_json
from ..files.verbosity import is_quiet
from ..files.working_copies import find_source, find_work
from .arguments import given_value
from .console import (
    USAGE_ERROR,
    explain_error,
    format_bytes,
    format_facts,
    format_table,
    print_error,
    run_and_report,
    show_transfer,
)
from .help import HelpPage, show_commands
from .parsing import parse_words, refuse_unknown_command
from .spellings import SHORT_NAMES, respell

if TYPE_CHECKING:
    from ..convert.operations import Options, Outcome
    from ..convert.verification import VerificationReport

DIFFERENT = 1
INTERRUPTED = 130
MOST_DIFFERENCES = 50

Precision = Literal["fp32", "fp16", "bf16", "float8_e4m3fn", "float8_e5m2"]
Format = Literal["shardzoo", "legacy", "megatron"]
FullDType = Literal["bfloat16", "float16", "float32", "bf16", "fp16", "fp32"]
FULL_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
Names = Literal["transformer_engine", "local", "legacy"]


@dataclass(frozen=True, kw_only=True)
class Common:
    json: bool = False
    """Print one JSON object instead of text, and progress as JSON lines on stderr."""
    config: Path | None = None
    """A config.json, or its folder, for sources that have none."""


@dataclass(frozen=True, kw_only=True)
class Converting(Common):
    source: Positional[Path]
    """Hugging Face folder, shardzoo folder, training checkpoint, folder of mp_rank files, or a name
    on the Hub.
    """
    destination: Positional[Path]
    """The folder to make."""
    overwrite: bool = False
    """Replace the destination if it exists."""
    resume: bool = False
    """Continue an interrupted conversion."""
    jobs: int | None = None
    """Threads; by default one for each core, at most four."""
    workers: int = 1
    """Processes, each with one thread, for folders of hundreds of files; 1 means threads."""
    adapter: Path | None = None
    """peft's folder of LoRA weights for the model, or its name on the Hub.

    They are added to the model's weights.
    """
    keep_adapter: bool = False
    """Keep an adapter in DESTINATION/adapter, instead of adding it to the weights."""
    precision: Precision | None = None
    """Convert floating-point tensors to this type; by default every byte is unchanged."""
    dequantize: FullDType | None = None
    """Dequantize the weights of a quantized Hugging Face folder, or of a GGUF file, to this type."""


@dataclass(frozen=True, kw_only=True)
class PlanConversion(Common):
    """Show every tensor, its split and its bytes, and what a conversion would need.

    Writes nothing.
    """

    source: Positional[Path]
    """The folder to inspect."""
    model_parallel_size: int | None = None
    """Plan a split over this many ranks; by default, plan a merge."""


@dataclass(frozen=True, kw_only=True)
class WritingRanks(Converting):
    model_parallel_size: int = 2
    """Number of tensor-parallel ranks."""
    to: Format = "shardzoo"
    """Format of the destination. legacy: mp_rank_XX_model_states.pt files; megatron: Megatron-LM's
    folders."""
    pipeline_parallel_size: int = 1
    """Number of pipeline stages, for megatron."""
    with_optimizer: bool = False
    """Of a training checkpoint, move the optimizer's state too, so that a run resumes from the
    result.
    """
    names: Names | None = None
    """Names of the tensors, for megatron: those of Transformer Engine, of megatron-core's local
    layers, or before megatron-core. By default the first that can hold the model."""


@dataclass(frozen=True, kw_only=True)
class SplitCheckpoint(WritingRanks):
    """Split a model over tensor-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class MergeShards(Converting):
    """Merge shards into a Hugging Face folder, torch.distributed.checkpoint's, megatron-core's
    torch_dist, or DeepSpeed's universal checkpoint.
    """

    to: Literal["hf", "dcp", "torch_dist", "universal"] = "hf"
    """Format of the destination.

    A universal checkpoint has weights and optimizer of a training checkpoint in fp32.
    """
    step: Literal["int", "tensor"] | None = None
    """Type of a universal checkpoint's step counts: as DeepSpeed's Adam keeps them, the default, or
    torch's.
    """
    max_file_gb: float = 5.0
    """Largest weight file, in gigabytes of 10^9 bytes."""


@dataclass(frozen=True, kw_only=True)
class ReshardCheckpoint(WritingRanks):
    """Split shards over another number of ranks."""


@dataclass(frozen=True, kw_only=True)
class UpcycleCheckpoint(Common):
    """Make a mixture of experts of a dense model.

    Each expert is a copy of the MLP, so that the mixture computes what the dense model does, until
    it is trained.
    """

    source: Positional[Path]
    """Hugging Face folder of a Llama, Mistral or Qwen3, or its name on the Hub."""
    destination: Positional[Path]
    """The folder to make."""
    num_experts: int = 8
    """Number of experts of each layer."""
    experts_per_token: int = 2
    """Number of experts that compute a token."""
    seed: int = 0
    """Seed of the routers' weights."""
    overwrite: bool = False
    """Replace the destination if it exists."""
    resume: bool = False
    """Continue an interrupted conversion."""
    max_file_gb: float = 5.0
    """Largest weight file, in gigabytes of 10^9 bytes."""


@dataclass(frozen=True, kw_only=True)
class VerifyCheckpoint(Common):
    """Check a folder's hashes, or compare the weights of two folders of any formats.

    Exit code 1 if they differ.
    """

    first: Positional[Path]
    """The folder to verify."""
    second: Positional[Path | None] = None
    """Another folder with the same weights."""
    round_trip: bool = False
    """Prove that converting loses nothing: convert to a temporary folder, and compare it with the
    original.
    """
    logits: bool = False
    """Run the split model and transformers on the same tokens, and show the largest difference of
    the logits.
    """
    model_parallel_size: int | None = None
    """Number of ranks for --round-trip and --logits; by default those of the folder, or two."""
    jobs: int | None = None
    """Threads; by default one for each core, at most four."""


@dataclass(frozen=True, kw_only=True)
class InspectCheckpoint(Common):
    """Show what a folder holds."""

    folder: Positional[Path]
    """The folder to inspect."""


@dataclass(frozen=True, kw_only=True)
class DiffCheckpoints(Common):
    """Show the tensors in which two folders differ. Exit code 1 if they do."""

    first: Positional[Path]
    """A folder of any format."""
    second: Positional[Path]
    """Another folder, which may have another format."""


Command = Union[  # noqa: UP007 - tyro reads the annotations of a Union at run time
    Annotated[PlanConversion, tyro.conf.subcommand("plan")],
    Annotated[SplitCheckpoint, tyro.conf.subcommand("split")],
    Annotated[MergeShards, tyro.conf.subcommand("merge")],
    Annotated[ReshardCheckpoint, tyro.conf.subcommand("reshard")],
    Annotated[UpcycleCheckpoint, tyro.conf.subcommand("upcycle")],
    Annotated[VerifyCheckpoint, tyro.conf.subcommand("verify")],
    Annotated[InspectCheckpoint, tyro.conf.subcommand("inspect")],
    Annotated[DiffCheckpoints, tyro.conf.subcommand("diff")],
]

WRITING = {
    "model_parallel_size": "result",
    "adapter": "result",
    "overwrite": "run",
    "json": "source and output",
}
HELP = {
    "plan": HelpPage("shardzoo convert plan", PlanConversion, names=SHORT_NAMES),
    "split": HelpPage(
        "shardzoo convert split", SplitCheckpoint, sections=WRITING, names=SHORT_NAMES
    ),
    "merge": HelpPage(
        "shardzoo convert merge",
        MergeShards,
        sections={**WRITING, "to": "result"},
        names=SHORT_NAMES,
    ),
    "reshard": HelpPage(
        "shardzoo convert reshard", ReshardCheckpoint, sections=WRITING, names=SHORT_NAMES
    ),
    "upcycle": HelpPage(
        "shardzoo convert upcycle",
        UpcycleCheckpoint,
        sections={"num_experts": "result", "overwrite": "run", "json": "source and output"},
        names=SHORT_NAMES,
    ),
    "verify": HelpPage(
        "shardzoo convert verify",
        VerifyCheckpoint,
        sections={"round_trip": "what is compared", "json": "options"},
        names=SHORT_NAMES,
    ),
    "inspect": HelpPage("shardzoo convert inspect", InspectCheckpoint, names=SHORT_NAMES),
    "diff": HelpPage("shardzoo convert diff", DiffCheckpoints, names=SHORT_NAMES),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, 1 if `verify` or `diff` found differences, or 2 after a user's
    error.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    show_commands(
        "shardzoo convert",
        "Splits, merges, reshards, upcycles and compares checkpoints.",
        HELP,
        argv,
    )
    refuse_unknown_command("shardzoo convert", HELP, argv)
    names = [field.name for field in fields(HELP[argv[0]].arguments)]
    argv = [*argv[:1], *respell(argv[1:], names)]
    if argv[0] == "merge" and given_value(argv, "to") in get_args(Format):
        print_error(ValueError("merge makes whole models: use `split` or `reshard` for that --to"))
        return USAGE_ERROR
    command_type: Any = Command  # Any for type checkers; tyro itself accepts a Union
    command = parse_words(
        command_type, argv, "shardzoo convert", config=(tyro.conf.OmitSubcommandPrefixes,)
    )
    return run_and_report(lambda: run(command), options=names)


def run(command: Common) -> int:
    """Runs a command; returns its exit code.

    An `OSError` of the user's disk becomes a `ValueError`.
    """
    try:
        if any(isinstance(path, Path) and find_url(path) for path in vars(command).values()):
            return_freed_memory()
        return COMMANDS[type(command)](_find_folders(command))
    except OSError as error:
        raise ValueError(explain_error(error)) from None


def _find_folders(command: Common) -> Common:
    """Returns the command with folders instead of names on the Hub, `org/name[@revision]`, which
    are downloaded.
    """
    folders: dict[str, Path] = {}
    for name in ("source", "first", "second", "folder", "adapter"):
        path = getattr(command, name, None)
        if path is not None:
            folders[name] = find_model(path, name)
    if command.config is not None:
        folders["config"] = find_source(command.config) or command.config
    return replace(command, **folders)


def run_conversion(command: SplitCheckpoint | MergeShards | ReshardCheckpoint) -> int:
    """Converts a folder. Returns 130 after Ctrl-C."""
    from concurrent.futures.process import BrokenProcessPool

    from ..checkpoint.checkpoint import open_checkpoint
    from ..convert import operations
    from ..convert.libai import convert_libai, is_libai

    options = _build_options(command)
    if is_libai(command.source):
        if not isinstance(command, MergeShards) or command.to != "hf":
            raise ValueError(
                f"{command.source} is LiBai's: make a Hugging Face folder of it first, by `shardzoo "
                f"convert merge {command.source} NEW_FOLDER --config config.json`"
            )
        began = time.monotonic()
        found = convert_libai(command.source, command.destination, command.config)
        _print_outcome(command, operations.Outcome(*found, 0), time.monotonic() - began)
        return 0
    if isinstance(command, ReshardCheckpoint):
        source = open_checkpoint(command.source, command.config)
        if source.kind == "huggingface":
            raise ValueError(
                f"{command.source} is a {source.description}; use `split` instead of `reshard`"
            )
    started = time.monotonic()
    if options.adapter is not None and not command.json and not is_quiet():
        # Long before the first byte is written.
        print(f"reading {printable(str(options.adapter))} and its model", file=sys.stderr)
    try:
        with show_transfer(as_json=command.json) as report:
            if isinstance(command, MergeShards):
                outcome = operations.merge(
                    command.source, command.destination, options, report, command.to
                )
            else:
                outcome = operations.split(
                    command.source,
                    command.destination,
                    command.model_parallel_size,
                    options,
                    report,
                    command.to,
                    stages=command.pipeline_parallel_size,
                    names=command.names,
                )
    except KeyboardInterrupt:
        print("interrupted; continue with --resume", file=sys.stderr)
        return INTERRUPTED
    except BrokenProcessPool:
        raise ValueError("a worker process died (out of memory?); continue with --resume") from None
    _print_outcome(command, outcome, time.monotonic() - started)
    return 0


def run_upcycle(command: UpcycleCheckpoint) -> int:
    """Makes a mixture. Returns 130 after Ctrl-C."""
    from ..convert.operations import Outcome
    from ..convert.upcycling import upcycle

    if command.config is not None:
        raise ValueError("upcycle reads the config.json of its source: leave out --config")
    if not 0 < command.max_file_gb < 1e9:
        raise ValueError(f"max_file_gb must be more than 0, not {command.max_file_gb}")
    started = time.monotonic()
    try:
        with show_transfer(as_json=command.json) as report:
            found = upcycle(
                command.source,
                command.destination,
                command.num_experts,
                command.experts_per_token,
                seed=command.seed,
                largest_file=int(command.max_file_gb * 1e9),
                report=report,
                overwrite=command.overwrite,
                resume=command.resume,
            )
    except KeyboardInterrupt:
        print("interrupted; continue with --resume", file=sys.stderr)
        return INTERRUPTED
    _print_outcome(command, Outcome(*found), time.monotonic() - started)
    return 0


def _build_options(command: Converting) -> Options:
    from ..checkpoint.dtypes import from_torch_name
    from ..convert.operations import LARGEST_FILE, Options

    if isinstance(command, MergeShards) and command.step is not None and command.to != "universal":
        raise ValueError(
            f"step is a property of universal checkpoints: leave it out for --to {command.to}"
        )
    largest = getattr(command, "max_file_gb", LARGEST_FILE / 1e9)
    if not 0 < largest < 1e9:
        raise ValueError(f"max_file_gb must be more than 0, not {largest}")
    dtype = command.precision
    return Options(
        overwrite=command.overwrite,
        resume=command.resume,
        jobs=command.jobs,
        workers=command.workers,
        adapter=command.adapter,
        keep_adapter=command.keep_adapter,
        with_optimizer=getattr(command, "with_optimizer", False),
        step_as_tensor=getattr(command, "step", None) == "tensor",
        dtype=from_torch_name(FULL_DTYPES.get(dtype, dtype)) if dtype else None,
        dequantize=_find_full_dtype(command.dequantize),
        config_file=command.config,
        largest_file=int(largest * 1e9),
    )


def _find_full_dtype(name: str | None) -> str | None:
    """Returns safetensors' name of a type that weights are dequantized to."""
    from ..checkpoint.dtypes import from_torch_name

    if name is None:
        return None
    return from_torch_name(FULL_DTYPES.get(name, name))


def _print_outcome(
    command: Converting | UpcycleCheckpoint, outcome: Outcome, seconds: float
) -> None:
    speed = (outcome.nbytes - outcome.kept) / max(seconds, 1e-9)
    destination = find_url(command.destination) or str(command.destination)
    if command.json:
        pace = {"seconds": seconds, "bytes_per_second": round(speed), "destination": destination}
        print(json.dumps({**asdict(outcome), **pace}))
        return
    if is_quiet():
        return
    size = format_bytes(outcome.nbytes)
    if outcome.kept:
        size += f", of which {format_bytes(outcome.kept)} already existed"
    print(
        f"{destination}: {outcome.tensors:,} tensors, {size}, {_name_layout(command)}"
        f"in {seconds:.1f} s ({speed / 1e9:.2f} GB/s)"
    )
    if isinstance(command, MergeShards):
        from ..models.huggingface import CRF_NOTE

        config = read_folder_json(find_work(command.destination), CONFIG) or {}
        if config.get("crf"):
            print(CRF_NOTE)


def _name_layout(command: Converting | UpcycleCheckpoint) -> str:
    """Returns over how many ranks a conversion has split a model, if it has."""
    if not isinstance(command, WritingRanks):
        return ""
    ranks = command.model_parallel_size
    layout = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if command.pipeline_parallel_size > 1:
        layout += f" x {command.pipeline_parallel_size} stages"
    return f"for {layout}, "


def run_plan(command: PlanConversion) -> int:
    from ..convert.plan import dry_run

    planned = dry_run(command.source, command.model_parallel_size, command.config)
    if command.json:
        print(json.dumps(planned))
        return 0
    rows: list[tuple[str, ...]] = []
    for row in planned["tensors"]:
        shape = _write_shape(row["shape"])
        size = f"{row['bytes_per_rank']:,}"
        rows.append((row["name"], row["dtype"], shape, row["split"], size))
    sys.stdout.write(format_table(("tensor", "type", "shape", "split", "bytes per file"), rows))
    print(format_facts({name: value for name, value in planned.items() if name != "tensors"}))
    return 0


def run_inspect(command: InspectCheckpoint) -> int:
    from ..convert.inspection import inspect_folder

    found = inspect_folder(command.folder, command.config)
    if command.json:
        print(json.dumps({**found.facts, "tensors": found.tensors}))
        return 0
    rows: list[tuple[str, ...]] = []
    for row in found.tensors:
        shape = _write_shape(row["shape"])
        rows.append((row["name"], row["dtype"], shape, row.get("split", ""), f"{row['bytes']:,}"))
    sys.stdout.write(format_table(("tensor", "type", "shape", "split", "bytes"), rows))
    print(format_facts(dict(found.facts)))
    return 0


def run_diff(command: DiffCheckpoints) -> int:
    from ..checkpoint.checkpoint import open_checkpoint
    from ..convert.inspection import comparable, diff

    first = open_checkpoint(command.first)
    second = open_checkpoint(command.second)
    if not comparable(first, second):
        from ..convert.operations import Options
        from ..convert.verification import verify_equal

        with show_transfer(as_json=command.json) as report:
            result = verify_equal(command.first, command.second, Options(), report)
        return _print_verification(command.json, result, "compared")
    found = diff(first, second)
    if command.json:
        print(json.dumps(asdict(found)))
    else:
        for entry in found.differences[:MOST_DIFFERENCES]:
            line = f"{entry.name}: {entry.what}"
            if entry.elements:
                line += f" in {entry.elements:,} elements"
            if entry.largest is not None:
                line += f", by up to {entry.largest:.3g}"
            print(printable(line))
        if len(found.differences) > MOST_DIFFERENCES:
            print(f"… and {len(found.differences) - MOST_DIFFERENCES} more")
        print(f"{len(found.differences):,} of {found.tensors:,} tensors differ")
    return DIFFERENT if found.differences else 0


def run_verify(command: VerifyCheckpoint) -> int:
    from ..convert import verification
    from ..convert.operations import Options

    options = Options(jobs=command.jobs, config_file=command.config)
    if command.logits + command.round_trip + (command.second is not None) > 1:
        raise ValueError(
            "a second folder, --round-trip and --logits are separate checks: use one of them"
        )
    if command.logits:
        return _run_logits(command)
    with show_transfer(as_json=command.json) as report:
        if command.second is not None:
            result = verification.verify_equal(command.first, command.second, options, report)
            done = "compared"
        elif command.round_trip:
            result = verification.verify_round_trip(
                command.first, command.model_parallel_size, options, report
            )
            done = "converted and compared"
        else:
            result = verification.verify_folder(command.first, options)
            done = "hashed"
    return _print_verification(command.json, result, done)


def _run_logits(command: VerifyCheckpoint) -> int:
    from ..convert.logits import compare_logits

    found = compare_logits(command.first, command.model_parallel_size, command.config)
    if command.json:
        print(json.dumps({**asdict(found), "relative": found.relative}))
    else:
        print(
            f"largest difference of native TP={found.size} from {found.reference}: "
            f"{found.largest:.2e}, {found.relative:.1e} of the logits' scale {found.scale:.3g}"
        )
    return 0 if found.is_close else DIFFERENT


def _print_verification(as_json: bool, result: VerificationReport, done: str) -> int:
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        for difference in result.differences[:MOST_DIFFERENCES]:
            print(printable(difference))
        state = "all equal"
        if result.differences:
            state = f"{len(result.differences):,} differences"
        elif result.recorded == 0:
            compared = "nothing was compared"
            if result.copied:
                compared = f"only the copies of {result.copied:,} tensors were compared"
            state = (
                f"no digests recorded: {compared}; name a second folder to compare with, or use "
                "--round-trip or --logits"
            )
        print(f"{done} {result.tensors:,} tensors, {format_bytes(result.nbytes)}: {state}")
    return DIFFERENT if result.differences else 0


def _write_shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape)) or "number"


COMMANDS: dict[type, Callable[[Any], int]] = {
    PlanConversion: run_plan,
    SplitCheckpoint: run_conversion,
    MergeShards: run_conversion,
    ReshardCheckpoint: run_conversion,
    UpcycleCheckpoint: run_upcycle,
    VerifyCheckpoint: run_verify,
    InspectCheckpoint: run_inspect,
    DiffCheckpoints: run_diff,
}
