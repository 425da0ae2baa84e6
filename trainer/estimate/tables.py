"""Shows the stages of a pipeline: their blocks, parameters, micro-batches in flight and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from .estimate import Estimate
from .model import Job
from .pipeline import bubble, in_flight

GIB = 1 << 30


def stage_rows(stages: Sequence[Estimate], job: Job) -> Iterator[tuple[int, Estimate, int]]:
    """Yields the number of blocks, the memory and the micro-batches in flight of each stage."""
    assert job.pipeline_blocks is not None
    for stage, (count, found) in enumerate(zip(job.pipeline_blocks, stages, strict=True)):
        yield count, found, in_flight(stage, len(stages), job.accumulation_steps)


def stage_table(stages: Sequence[Estimate], job: Job) -> Table:
    """Returns a table of the stages; its title says how long each rank is idle."""
    idle = bubble(len(stages), job.accumulation_steps)
    title = (
        f"Pipeline: {len(stages)} stages x {job.accumulation_steps} micro-batches, idle {idle:.0%} "
        "of the time"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in (
        "stage",
        "blocks",
        "parameters on a rank",
        "micro-batches in flight",
        "GiB at the peak",
    ):
        table.add_column(name, justify="right")
    for stage, (count, found, flying) in enumerate(stage_rows(stages, job)):
        peak = f"{found.peak.total / GIB:.2f}"
        table.add_row(str(stage), str(count), f"{found.parameters:,}", str(flying), peak)
    return table
