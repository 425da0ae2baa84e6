"""Implements `shardzoo models`: lists the families, or presets and the memory that each needs on a
rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from ..models import FAMILIES, family, find_config
from ..models.auto import build_on_meta
from ..models.config import ModelConfig
from ..models.sizes import compute_uneven_work, largest_size, measure_parameters
from ..trainer.precisions import PRECISIONS, PrecisionName
from .console import exit_code_of
from .help import HelpPage, show_help

OPTIMIZER_BYTES = {"none": 0, "adam": 8, "sgd": 0, "momentum": 4, "lion": 4}
"""Bytes of fp32 state for each parameter."""
GIB = 1 << 30


@dataclass(frozen=True)
class ModelsArguments:
    """Lists the zoo's families, or named models and the memory that weights, gradients and
    optimizer take on a rank.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Families, presets, folders with a config.json, or names on the Hub; without one, all families
    with their architectures."""
    tp: int = 1
    """Tensor-parallel size."""
    dtype: PrecisionName = "bf16"
    """Data type of weights and gradients."""
    optimizer: Literal["none", "sgd", "momentum", "lion", "adam"] = "adam"
    """Optimizer; its state is in fp32, and it keeps an fp32 copy of 16-bit weights. "none" is
    inference.
    """


HELP = HelpPage("shardzoo models", ModelsArguments)


@dataclass(frozen=True)
class Size:
    """The size of a model.

    Attributes:
        parameters: Elements of the unsplit model, without padding.
        on_rank: Elements of the largest rank, with padding; None if the model cannot be split so.
        largest: The largest tensor-parallel size that the model can be split into.
        uneven: How much more the busiest rank computes than an even share, e.g. 0.04; None if
            `on_rank` is.
    """

    parameters: int
    on_rank: int | None
    largest: int
    uneven: float | None


def measure(config: ModelConfig, tensor_parallel_size: int) -> Size:
    """Measures the model, which is built on the meta device."""
    model = build_on_meta(config, None)
    largest = largest_size(model)
    parameters = sum(size.full for size in measure_parameters(model, 1))
    if tensor_parallel_size > largest:
        return Size(parameters, None, largest, None)
    on_rank = sum(size.local for size in measure_parameters(model, tensor_parallel_size))
    return Size(parameters, on_rank, largest, compute_uneven_work(model, tensor_parallel_size))


def bytes_on_rank(parameters: int, dtype: str, optimizer: str) -> int:
    """Returns the bytes of the weights; for training also of gradients, optimizer state and fp32
    master weights.
    """
    precision = PRECISIONS[dtype]
    each = precision.itemsize
    if optimizer != "none":
        each += precision.itemsize + OPTIMIZER_BYTES[optimizer]
        each += 4 if precision.needs_master_weights else 0
    return parameters * each


def select(names: Sequence[str]) -> list[tuple[str, ModelConfig]]:
    """Returns the presets of named families, and named presets and folders.

    Raises ValueError for any other name.
    """
    found = []
    for name in names:
        found += family(name).presets.items() if name in FAMILIES else [(name, find_config(name))]
    return found


def families_table() -> Table:
    """Returns a table of all families: their architectures, and their presets with the number of
    parameters.
    """
    table = Table(title="the zoo", box=box.SIMPLE, pad_edge=False)
    for column in ("family", "kind", "architectures", "presets"):
        table.add_column(column, overflow="fold")
    for name in FAMILIES:
        facts = family(name)
        sizes = {preset: measure(config, 1).parameters for preset, config in facts.presets.items()}
        listed = "\n".join(f"{preset} ({short(size)})" for preset, size in sizes.items())
        table.add_row(name, facts.kind, "\n".join(facts.architectures), listed, end_section=True)
    return table


def short(parameters: int) -> str:
    """Returns a number of parameters as text of three digits: 124M, 1.56B."""
    scale, letter = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{parameters / scale:#.3g}".rstrip(".") + letter


def table_of(arguments: ModelsArguments) -> Table:
    """Returns a table with a row for each model."""
    purpose = (
        "inference" if arguments.optimizer == "none" else f"training with {arguments.optimizer}"
    )
    table = Table(
        title=f"{arguments.dtype}, {purpose}, {arguments.tp} tensor-parallel rank{'s' if arguments.tp > 1 else ''}",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for column in (
        "family",
        "model",
        "parameters",
        "on a rank",
        "GiB on a rank",
        "uneven work",
        "ranks at most",
    ):
        table.add_column(
            column, justify="left" if column in ("family", "model") else "right", overflow="fold"
        )
    for name, config in select(arguments.names):
        size = measure(config, arguments.tp)
        on_rank = memory = uneven = "cannot be split so"
        if size.on_rank is not None and size.uneven is not None:
            on_rank = f"{size.on_rank:,}"
            memory = (
                f"{bytes_on_rank(size.on_rank, arguments.dtype, arguments.optimizer) / GIB:.2f}"
            )
            uneven = f"{size.uneven:.1%}"
        table.add_row(
            config.model_type,
            name,
            f"{size.parameters:,}",
            on_rank,
            memory,
            uneven,
            str(size.largest),
        )
    return table


def main(argv: list[str]) -> int:
    show_help(HELP, argv)
    arguments = tyro.cli(ModelsArguments, prog=HELP.program, args=argv)

    def run() -> int:
        if arguments.tp < 1:
            raise ValueError(f"--tp must be at least 1, not {arguments.tp}")
        console = Console(width=None if sys.stdout.isatty() else 160)
        if not arguments.names:
            console.print(families_table())
            console.print(
                "`shardzoo models NAME …` shows sizes on a rank of families, presets or folders.",
                style="dim",
            )
            return 0
        console.print(table_of(arguments))
        console.print(
            "Activations and the engine's buffers are not included: see `shardzoo estimate`.",
            style="dim",
        )
        return 0

    return exit_code_of(run)
