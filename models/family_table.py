"""Finds model families by name. `registry.py` fills the table, as the package is imported.

The table is apart from the list so that what finds a family, such as a model that saves itself, can
be imported by the families.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from ..checkpoint.formats.gguf_file import GgufArchitecture
from .config import ModelConfig
from .family import Family
from .nearest import refuse_family

_BY_MODEL_TYPE: dict[str, Family] = {}


def add_family(facts: Family) -> None:
    """Adds a family to the table."""
    _BY_MODEL_TYPE[facts.config.model_type] = facts


def list_gguf() -> list[GgufArchitecture]:
    """Returns how GGUF files store the families that are read from them."""
    return [architecture for facts in list_families() for architecture in facts.gguf]


def list_families() -> Iterator[Family]:
    """Yields the facts about each family."""
    yield from _BY_MODEL_TYPE.values()


def family(model_type: str, architecture: str = "") -> Family:
    """Returns the facts about a family.

    Args:
        architecture: The name of a class, which helps to find the nearest model if the zoo lacks
            the family.

    Raises:
        ValueError: The zoo does not have the family. The message names the nearest model.
    """
    # A file may hold something that is no name, such as a list.
    if model_type not in tuple(_BY_MODEL_TYPE):
        raise ValueError(refuse_family(model_type, architecture, architectures()))
    return _BY_MODEL_TYPE[model_type]


def find_architecture(architecture: type[Any]) -> tuple[Family | None, str]:
    """Returns the family of a class, and the name of the family's architecture that it is.

    A user's class is the architecture that it inherits from. For a class of no family of the zoo
    the result is None and "".
    """
    for base in architecture.__mro__:
        for facts in _BY_MODEL_TYPE.values():
            for name, known in facts.architectures.items():
                if known is base:
                    return facts, name
    return None, ""


def find_family(values: Mapping[str, Any]) -> Family:
    """Returns the family of the contents of a `config.json`.

    Raises:
        ValueError: They name no family, or one that is not in the zoo.
    """
    names = values.get("architectures")
    first = cast(list[Any], names)[0] if isinstance(names, list) and names else ""
    if "model_type" in values:
        return family(values["model_type"], first)
    for facts in list_families():
        if facts.has_config is not None and facts.has_config(values):
            return facts
    for facts in list_families():
        if first in facts.architectures:
            return facts
    raise ValueError(
        "the configuration has no model_type and no architectures of the zoo, so its family is "
        "unknown"
    )


def architectures() -> dict[str, list[str]]:
    """Returns the names of all architectures, by family."""
    return {name: list(facts.architectures) for name, facts in _BY_MODEL_TYPE.items()}


def presets() -> Iterator[tuple[str, ModelConfig]]:
    """Yields the name and the configuration of all presets, family by family."""
    for facts in list_families():
        yield from facts.presets.items()
