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
    table = input_embedding(model)
    # A pipeline stage may lack the weight.
    width = getattr(table, "embedding_dim", None) or table.weight.shape[1]
    found: dict[str, nn.Parameter] = {}
    for name, module in model.named_modules():
        if not isinstance(module, EMBEDDINGS):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 2 and parameter.shape[1] == width:
                found[f"{name}.{own}"] = parameter
    return found


def part_parameters(model: nn.Module, source: ModelSource, part: str) -> dict[str, nn.Parameter]:
    """Returns the parameters of "encoder", "decoder" or "embeddings" by name.

    Encoder and decoder are their blocks and norms, without embeddings, poolers and heads.

    Raises:
        ValueError: the model does not have this part.
    """
    embeddings = embedding_parameters(model)
    if part == "embeddings":
        return embeddings
    parts = list_parts(model, source)
    if part not in parts:
        kind = "an encoder" if parts[0] == "encoder" else "a decoder"
        raise ValueError(
            f"{type(model).__name__} is {kind} and has no {part}: freeze its {parts[0]} or its "
            "embeddings"
        )
    apart = {id(parameter) for parameter in embeddings.values()}
    modules = {id(module) for module in _find_modules(model, source, part)}
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if id(module) in modules)
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if name.startswith(prefixes) and id(parameter) not in apart:
            found[name] = parameter
    return found


def _find_modules(model: Any, source: ModelSource, part: str) -> list[nn.Module]:
    """Returns the modules of an encoder or a decoder."""
    if source.native:
        # Some encoders have an `encoder`, too.
        if hasattr(model, part):
            return [getattr(model, part)]
        return [model.blocks, model.final_norm]
    if source.shape == "encoder-decoder":
        return [model.get_encoder() if part == "encoder" else model.decoder]
    # The pooler belongs to the head.
    return [child for name, child in model.base_model.named_children() if name != "pooler"]


def list_parts(model: nn.Module, source: ModelSource) -> tuple[str, ...]:
    """Returns the names of a model's parts besides embeddings and head."""
    if source.shape != "encoder-decoder":
        return (source.shape,)
    # Texts are embedded by the encoder alone.
    is_encoder = source.native and not hasattr(model, "decoder")
    return ("encoder",) if is_encoder else ("encoder", "decoder")


def head_parameters(model: nn.Module, source: ModelSource) -> dict[str, nn.Parameter]:
    """Returns the parameters that are in no other part."""
    others: set[int] = set()
    for part in (*list_parts(model, source), "embeddings"):
        others.update(id(parameter) for parameter in part_parameters(model, source, part).values())
    return {name: p for name, p in model.named_parameters() if id(p) not in others}


@dataclass(frozen=True)
class ModelSummary:
    """Counts the parameters of the whole model, independent of how it is split. A shared parameter
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
    """Returns the numbers of parameters of a model, or of one of its pipeline stages."""
    groups: dict[str, dict[str, nn.Parameter]] = {}
    for part in ("embeddings", *list_parts(model, source)):
        groups[part] = part_parameters(model, source, part)
    groups["head"] = head_parameters(model, source)
    parts: dict[str, tuple[int, int]] = {}
    copies = find_copied_parameters(model)
    for part, parameters in groups.items():
        distinct = {id(p): p for name, p in parameters.items() if name not in copies}
        if distinct:
            total = sum(full_size(p) for p in distinct.values())
            trainable = sum(full_size(p) for p in distinct.values() if p.requires_grad)
            parts[part] = (total, trainable)
    return merge_summaries(type(model).__name__, [parts])


def merge_summaries(name: str, stages: Sequence[dict[str, tuple[int, int]]]) -> ModelSummary:
    """Returns the summary of a model from the parts of each of its pipeline stages."""
    parts: dict[str, tuple[int, int]] = {}
    for stage in stages:
        for part, (total, trainable) in stage.items():
            total_before, trainable_before = parts.get(part, (0, 0))
            parts[part] = (total_before + total, trainable_before + trainable)
    total = sum(count for count, _ in parts.values())
    trainable = sum(count for _, count in parts.values())
    return ModelSummary(name, total, trainable, parts)
