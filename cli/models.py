"""Implements `shardzoo models`: lists the families, or presets and the memory that each needs on a
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich import box
from rich.table import Table

from ..models import FAMILIES, family, find_config
from ..models.auto import build_on_meta
from ..models.config import ModelConfig
from ..models.sizes import compute_uneven_work, largest_size, measure_parameters
from ..trainer.logging.console import make_console
from ..trainer.optimizers.registry import ENTRIES_BY_NAME
from ..trainer.precisions import PRECISIONS, PrecisionName
from .console import run_and_report
from .help import HelpPage, show_help
from .parsing import list_fields, parse_words
from .spellings import SHORT_NAMES, respell

NO_OPTIMIZER = "none"
# Bytes of fp32 state for each parameter. Adafactor's depend on the shapes, and Muon's on the
# layers; `shardzoo estimate` counts them.
OPTIMIZER_BYTES = {
    name: 4 * len(entry.element_states)
    for name, entry in ENTRIES_BY_NAME.items()
    if entry.element_states
    and entry.hidden_matrix_states is None
    and entry.count_state_bytes is None
}
GIB = 1 << 30

if TYPE_CHECKING:
    OptimizerChoice = str
else:
    OptimizerChoice = Literal[(NO_OPTIMIZER, *OPTIMIZER_BYTES)]


@dataclass(frozen=True)
class ModelsArguments:
    """Lists the zoo's families, or named models and the memory that weights, gradients and
    optimizer take on a rank.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Families, presets, folders with a config.json, or names on the Hub; without one, all families
    with their architectures."""
    model_parallel_size: int = 1
    """Tensor-parallel size."""
    precision: PrecisionName = "bf16"
    """Data type of weights and gradients."""
    optimizer: OptimizerChoice = "adam"
    """Optimizer; its state is in fp32, and it keeps an fp32 copy of 16-bit weights. "none" is
    inference.
    """


HELP = HelpPage("shardzoo models", ModelsArguments, names=SHORT_NAMES)


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


def main(argv: list[str]) -> int:
    """Runs the command. Returns 2 after a user's error."""
    show_help(HELP, argv)
    names = [field.name for field in fields(ModelsArguments)]
    argv = respell(argv, names, positional="model")
    arguments = parse_words(ModelsArguments, argv, HELP.program)
    return run_and_report(lambda: run(arguments), options=list_fields(ModelsArguments))


def run(arguments: ModelsArguments) -> int:
    """Prints the table that was asked for. Raises ValueError for a user's mistake."""
    if arguments.model_parallel_size < 1:
        raise ValueError(f"--tp must be at least 1, not {arguments.model_parallel_size}")
    console = make_console()
    if not arguments.names:
        console.print(build_family_table())
        console.print(
            "`shardzoo models NAME …` shows sizes on a rank of families, presets or folders.",
            style="dim",
        )
        return 0
    console.print(build_model_table(arguments))
    console.print(
        "Activations and the engine's buffers are not included: see `shardzoo estimate`.",
        style="dim",
    )
    return 0


def build_family_table() -> Table:
    """Returns a table of all families: their architectures, and their presets with the number of
    parameters.
    """
    table = Table(title="the zoo", box=box.SIMPLE, pad_edge=False)
    for column in ("family", "kind", "architectures", "presets"):
        table.add_column(column, overflow="fold")
    for name in FAMILIES:
        facts = family(name)
        presets: list[str] = []
        for preset, config in facts.presets.items():
            presets.append(f"{preset} ({shorten(measure(config, 1).parameters)})")
        architectures = "\n".join(facts.architectures)
        table.add_row(name, facts.kind, architectures, "\n".join(presets), end_section=True)
    return table


def build_model_table(arguments: ModelsArguments) -> Table:
    """Returns a table with a row for each model."""
    purpose = f"training with {arguments.optimizer}"
    if arguments.optimizer == NO_OPTIMIZER:
        purpose = "inference"
    ranks = "1 tensor-parallel rank"
    if arguments.model_parallel_size > 1:
        ranks = f"{arguments.model_parallel_size} tensor-parallel ranks"
    table = Table(
        title=f"{arguments.precision}, {purpose}, {ranks}", box=box.SIMPLE, pad_edge=False
    )
    for column in ("family", "model"):
        table.add_column(column, overflow="fold")
    for column in ("parameters", "on a rank", "GiB on a rank", "uneven work", "ranks at most"):
        table.add_column(column, justify="right", overflow="fold")

    for name, config in find_models(arguments.names):
        size = measure(config, arguments.model_parallel_size)
        on_rank = "cannot be split so"
        memory = on_rank
        uneven = on_rank
        if size.on_rank is not None and size.uneven is not None:
            needed = bytes_on_rank(size.on_rank, arguments.precision, arguments.optimizer)
            on_rank = f"{size.on_rank:,}"
            memory = f"{needed / GIB:.2f}"
            uneven = f"{size.uneven:.1%}"
        parameters = f"{size.parameters:,}"
        table.add_row(
            config.model_type, name, parameters, on_rank, memory, uneven, str(size.largest)
        )
    return table


def find_models(names: Sequence[str]) -> list[tuple[str, ModelConfig]]:
    """Returns the presets of named families, and named presets and folders.

    Raises ValueError for any other name.
    """
    found: list[tuple[str, ModelConfig]] = []
    for name in names:
        if name in FAMILIES:
            found += family(name).presets.items()
        else:
            found.append((name, find_config(name)))
    return found


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
    if optimizer != NO_OPTIMIZER:
        each += precision.itemsize  # the gradient
        each += OPTIMIZER_BYTES[optimizer]
        if precision.needs_master_weights:
            each += 4
    return parameters * each


def shorten(parameters: int) -> str:
    """Returns a number of parameters as text of three digits: 124M, 1.56B."""
    scale = 1e6
    letter = "M"
    if parameters >= 1e9:
        scale = 1e9
        letter = "B"
    return f"{parameters / scale:#.3g}".rstrip(".") + letter
