"""Finds the parts of a model that can be frozen (encoder, decoder, embeddings), and counts their
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from torch import nn

from ..models.pipeline import find_copied_parameters
from ..models.sizes import full_size
from ..mpu import VocabParallelEmbedding
from .loading import ModelSource
from .soft_prompt import PromptedEmbedding, input_embedding

EMBEDDINGS = (nn.Embedding, VocabParallelEmbedding, PromptedEmbedding)


def embedding_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the tables of tokens, positions and segments by name: embeddings with rows as wide as
    the model.

    A head that is tied to the token table is the same parameter.
    """
    table = input_embedding(model)  # a pipeline stage may lack the weight
    width = getattr(table, "embedding_dim", None) or table.weight.shape[1]
    return {
        f"{name}.{own}": parameter
        for name, module in model.named_modules()
        if isinstance(module, EMBEDDINGS)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 2 and parameter.shape[1] == width
    }


def part_parameters(model: nn.Module, source: ModelSource, part: str) -> dict[str, nn.Parameter]:
    """Returns the parameters of "encoder", "decoder" or "embeddings" by name.

    Encoder and decoder are their blocks and norms, without embeddings, poolers and heads.

    Raises:
        ValueError: the model does not have this part.
    """
    embeddings = embedding_parameters(model)
    if part == "embeddings":
        return embeddings
    if source.shape != "encoder-decoder" and source.shape != part:
        raise ValueError(
            f"{type(model).__name__} is a {source.shape} and has no {part}: freeze its {source.shape} or its embeddings"
        )
    apart = {id(parameter) for parameter in embeddings.values()}
    modules = (
        _native_part(model, part) if source.native else _transformers_part(model, source, part)
    )
    prefixes = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if any(module is one for one in modules)
    )
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.startswith(prefixes) and id(parameter) not in apart
    }


def _native_part(model: Any, part: str) -> list[nn.Module]:
    if hasattr(model, part):  # BERT also has an `encoder`
        return [getattr(model, part)]
    return [model.blocks, model.final_norm]


def _transformers_part(model: Any, source: ModelSource, part: str) -> list[nn.Module]:
    if source.shape == "encoder-decoder":
        return [model.get_encoder() if part == "encoder" else model.get_decoder()]
    # The pooler belongs to the head.
    return [child for name, child in model.base_model.named_children() if name != "pooler"]


def head_parameters(model: nn.Module, source: ModelSource) -> dict[str, nn.Parameter]:
    """Returns the parameters that are in no other part."""
    parts = ("encoder", "decoder") if source.shape == "encoder-decoder" else (source.shape,)
    others = {
        id(p)
        for part in (*parts, "embeddings")
        for p in part_parameters(model, source, part).values()
    }
    return {name: p for name, p in model.named_parameters() if id(p) not in others}


@dataclass(frozen=True)
class ModelSummary:
    """Numbers of parameters of the whole model, independent of how it is split. A shared parameter
    counts once.

    Attributes:
        name: The model's class.
        total: Number of parameters.
        trainable: Number of trainable parameters.
        parts: Name of a part -> (parameters, trainable parameters).
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


def summarize(model: nn.Module, source: ModelSource) -> ModelSummary:
    shapes = ("encoder", "decoder") if source.shape == "encoder-decoder" else (source.shape,)
    groups = {part: part_parameters(model, source, part) for part in ("embeddings", *shapes)}
    groups["head"] = head_parameters(model, source)
    parts = {}
    copies = find_copied_parameters(model)
    for part, parameters in groups.items():
        owned = (p for name, p in parameters.items() if name not in copies)
        distinct = {id(p): (full_size(p), p.requires_grad) for p in owned}
        if distinct:
            sizes = distinct.values()
            parts[part] = (sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains))
    return summary_of(type(model).__name__, [parts])


def summary_of(name: str, stages: Sequence[dict[str, tuple[int, int]]]) -> ModelSummary:
    """Returns the summary of a model from the parts of each of its pipeline stages."""
    parts: dict[str, tuple[int, int]] = {}
    for part in dict.fromkeys(part for stage in stages for part in stage):
        pairs = [stage[part] for stage in stages if part in stage]
        parts[part] = (sum(total for total, _ in pairs), sum(trained for _, trained in pairs))
    total, trainable = (sum(counts[i] for counts in parts.values()) for i in (0, 1))
    return ModelSummary(name, total, trainable, parts)
