"""How many parameters a model has, and how many of them are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from rich.table import Table
from torch import nn

from .loading import Source
from .parts import head_parameters, part_parameters


@dataclass(frozen=True)
class ModelSummary:
    """Numbers of parameters of the whole model, however it is split; one that is used twice counts once.

    parts: name -> (all, trainable).
    """

    name: str
    total: int
    trainable: int
    parts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def table(self) -> Table:
        table = Table(title=self.name, title_justify="left")
        for column in ("part", "parameters", "trainable"):
            table.add_column(column, justify="left" if column == "part" else "right")
        for part, (total, trainable) in self.parts.items():
            table.add_row(part, f"{total:,}", f"{trainable:,}")
        table.add_section()
        table.add_row("model", f"{self.total:,}", f"{self.trainable:,}")
        return table


def summarize(model: nn.Module, source: Source) -> ModelSummary:
    shapes = ("encoder", "decoder") if source.shape == "encoder-decoder" else (source.shape,)
    groups = {part: part_parameters(model, source, part) for part in ("embeddings", *shapes)}
    groups["head"] = head_parameters(model, source)
    parts = {}
    for part, parameters in groups.items():
        distinct = {id(p): (full_size(p), p.requires_grad) for p in parameters.values()}
        if distinct:
            sizes = distinct.values()
            parts[part] = (sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains))
    total, trainable = (sum(counts[i] for counts in parts.values()) for i in (0, 1))
    return ModelSummary(type(model).__name__, total, trainable, parts)


def full_size(parameter: nn.Parameter) -> int:
    """Elements of the unsplit parameter, without padding."""
    shard = getattr(parameter, "shard", None)
    return parameter.numel() if shard is None else prod(shard.shape)
