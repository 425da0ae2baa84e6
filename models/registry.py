"""Lists the model families, and finds them by name. A new family is added to `_FAMILIES`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from . import (
    bart,
    bert,
    camembert,
    distilbert,
    electra,
    glm,
    glm4,
    gpt2,
    llama,
    m2m_100,
    mbart,
    mistral,
    modernbert,
    mt5,
    qwen2,
    qwen3,
    roberta,
    t5,
    umt5,
    xlm_roberta,
)
from .config import ModelConfig
from .family import Family
from .nearest import refuse_family

_FAMILIES = (
    bart.FAMILY,
    bert.FAMILY,
    camembert.FAMILY,
    distilbert.FAMILY,
    electra.FAMILY,
    glm.FAMILY,
    glm4.FAMILY,
    gpt2.FAMILY,
    llama.FAMILY,
    m2m_100.FAMILY,
    mbart.FAMILY,
    mistral.FAMILY,
    modernbert.FAMILY,
    mt5.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    roberta.FAMILY,
    t5.FAMILY,
    umt5.FAMILY,
    xlm_roberta.FAMILY,
)
_BY_MODEL_TYPE = {facts.config.model_type: facts for facts in _FAMILIES}
FAMILIES = tuple(_BY_MODEL_TYPE)
"""The `model_type` of each family."""


def family(model_type: str, architecture: str = "") -> Family:
    """Returns the facts about a family.

    Args:
        architecture: The name of a class, which helps to find the nearest model if the zoo lacks
            the family.

    Raises:
        ValueError: The zoo does not have the family. The message names the nearest model.
    """
    if model_type not in FAMILIES:  # A file may hold something that is no name, such as a list.
        raise ValueError(refuse_family(model_type, architecture, architectures()))
    return _BY_MODEL_TYPE[model_type]


def find_family(values: Mapping[str, Any]) -> Family:
    """Returns the family of the contents of a `config.json`.

    Raises:
        ValueError: They name no family, or one that is not in the zoo.
    """
    if "model_type" in values:
        names = values.get("architectures")
        first = cast(list[Any], names)[0] if isinstance(names, list) and names else ""
        return family(values["model_type"], first)
    for facts in _FAMILIES:
        if facts.has_config is not None and facts.has_config(values):
            return facts
    raise ValueError("the configuration has no model_type, so its family is unknown")


def architectures() -> dict[str, list[str]]:
    """Returns the names of all architectures, by family."""
    return {name: list(facts.architectures) for name, facts in _BY_MODEL_TYPE.items()}


def presets() -> Iterator[tuple[str, ModelConfig]]:
    """Yields the name and the configuration of all presets, family by family."""
    for facts in _FAMILIES:
        yield from facts.presets.items()
