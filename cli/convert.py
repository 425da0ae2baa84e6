"""`shardzoo convert`: split, merge, reshard, verify and look into checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, Union

import tyro
from tyro.conf import Positional

from .arguments import exit_code_of

DIFFERENT = 1

DType = Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
Format = Literal["shardzoo", "legacy"]


@dataclass(frozen=True, kw_only=True)
class Common:
    json: bool = False
    """Print one JSON object instead of text."""
    config: Path | None = None
    """A config.json, or its folder, for sources that have none."""


@dataclass(frozen=True, kw_only=True)
class Converting(Common):
    source: Positional[Path]
    """Hugging Face folder, shardzoo folder, training checkpoint, or folder of mp_rank files."""
    destination: Positional[Path]
    """The folder to make."""
    overwrite: bool = False
    """Replace the destination if it exists."""
    resume: bool = False
    """Go on with an interrupted conversion."""
    jobs: int | None = None
    """Threads; by default one for each core, at most four."""
    dtype: DType | None = None
    """Convert floating-point tensors to this type; by default every byte stays as it is."""


@dataclass(frozen=True, kw_only=True)
class Plan(Common):
    """Show every tensor, its split and its bytes, and what a conversion would take. Writes nothing."""

    source: Positional[Path]
    """The folder to look at."""
    tp: int | None = None
    """Plan a split over this many ranks; without it, a merge."""


@dataclass(frozen=True, kw_only=True)
class Split(Converting):
    """Split a model over tensor-parallel ranks."""

    tp: int = 2
    """Number of ranks."""
    format: Format = "shardzoo"
    """Of the destination; legacy: mp_rank_XX_model_states.pt files."""


@dataclass(frozen=True, kw_only=True)
class Merge(Converting):
    """Merge shards into a Hugging Face folder."""

    max_file_gb: float = 5.0
    """Largest weight file, in gigabytes of 10^9 bytes."""


@dataclass(frozen=True, kw_only=True)
class Reshard(Converting):
    """Split shards anew, over another number of ranks."""

    tp: int = 2
    """Number of ranks."""
    format: Format = "shardzoo"
    """Of the destination; legacy: mp_rank_XX_model_states.pt files."""


@dataclass(frozen=True, kw_only=True)
class Verify(Common):
    """Check a folder's hashes, or compare the weights of two folders of any formats. Exit code 1 if they differ."""

    first: Positional[Path]
    """The folder to verify."""
    second: Positional[Path | None] = None
    """Another folder with the same weights."""
    round_trip: bool = False
    """Prove that converting loses nothing: convert into a temporary folder, compare with the original."""
    logits: bool = False
    """Run the split model and transformers on the same tokens, and show the largest difference of the logits."""
    tp: int | None = None
    """Number of ranks for --round-trip and --logits; by default the smallest legal one above one."""
    jobs: int | None = None
    """Threads; by default one for each core, at most four."""


@dataclass(frozen=True, kw_only=True)
class Inspect(Common):
    """Show what a folder holds."""

    folder: Positional[Path]
    """The folder to look at."""


@dataclass(frozen=True, kw_only=True)
class Diff(Common):
    """Show the tensors in which two folders differ. Exit code 1 if they do."""

    first: Positional[Path]
    second: Positional[Path]


Command = Union[  # noqa: UP007 - tyro reads the annotations of a Union at run time
    Annotated[Plan, tyro.conf.subcommand("plan")],
    Annotated[Split, tyro.conf.subcommand("split")],
    Annotated[Merge, tyro.conf.subcommand("merge")],
    Annotated[Reshard, tyro.conf.subcommand("reshard")],
    Annotated[Verify, tyro.conf.subcommand("verify")],
    Annotated[Inspect, tyro.conf.subcommand("inspect")],
    Annotated[Diff, tyro.conf.subcommand("diff")],
]


def main(argv: Sequence[str] | None = None) -> int:
    """0: done, or equal. 1: `verify` or `diff` found differences. 2: refused, after a message on stderr."""
    command = tyro.cli(
        Command,  # type: ignore[arg-type]
        prog="shardzoo convert",
        args=None if argv is None else list(argv),
        description=__doc__,
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )
    return exit_code_of(lambda: run(command))


def run(command: Plan | Split | Merge | Reshard | Verify | Inspect | Diff) -> int:
    # Each imports what it needs, because some commands need no torch.
    from . import convert_commands as commands

    try:
        return _run(command, commands)
    except OSError as error:
        raise ValueError(str(error)) from None


def _run(command: Plan | Split | Merge | Reshard | Verify | Inspect | Diff, commands: ModuleType) -> int:
    if isinstance(command, Plan):
        return commands.run_plan(command)
    if isinstance(command, Verify):
        return commands.run_verify(command)
    if isinstance(command, Inspect):
        return commands.run_inspect(command)
    if isinstance(command, Diff):
        return commands.run_diff(command)
    return commands.run_conversion(command)
