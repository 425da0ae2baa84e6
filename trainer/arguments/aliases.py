"""Accepts other names of arguments, and suggests corrections of misspelled ones.

The short names here are our own. The names of other systems are handed in by `add_spellings`, from
`compat/spellings.py`.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

Arguments = TypeVar("Arguments")


ANY_VALUE: Any = object()
_NOWHERE = object()


@dataclass
class Spellings:
    """Other names of arguments.

    Attributes:
        renamed: Name -> our name, where only the name differs.
        switches: Name of a boolean switch -> our argument, and its value when the switch is on.
        translated: Name, which `renamed` has too -> a function of its value that returns our
            argument and its value.
        taken_as_is: Name of something that happens here anyway -> the value that means so, with
            which it is taken; `ANY_VALUE` if no value changes what is computed.
        left_at_default: One of our own arguments -> a value that means its default elsewhere.
        explained: Name that resembles one of our arguments but means something else -> what to do
            instead.
    """

    renamed: dict[str, str] = field(default_factory=dict)
    switches: dict[str, tuple[str, str]] = field(default_factory=dict)
    translated: dict[str, Callable[[Any], tuple[str, Any]]] = field(default_factory=dict)
    taken_as_is: dict[str, Any] = field(default_factory=dict)
    explained: dict[str, str] = field(default_factory=dict)
    left_at_default: dict[str, Any] = field(default_factory=dict)

    def add(self, other: Spellings) -> None:
        """Adds the names of `other`."""
        self.renamed |= other.renamed
        self.switches |= other.switches
        self.translated |= other.translated
        self.taken_as_is |= other.taken_as_is
        self.explained |= other.explained
        self.left_at_default |= other.left_at_default

    def is_without_effect(self, name: str, value: Any) -> bool:
        """Returns whether an argument that is none of ours asks for what happens here anyway.

        Args:
            value: The value, or its text on a command line.
        """
        wanted = self.taken_as_is.get(name, _NOWHERE)
        return wanted is ANY_VALUE or value == wanted or value == str(wanted)


DATA_PARALLEL = (
    "it follows from the number of processes: num_nodes x num_gpus / (model_parallel_size x "
    "pipeline_parallel_size x context_parallel_size); set num_gpus, or start more processes"
)
SPELLINGS = Spellings(
    renamed={
        "tp": "model_parallel_size",
        "tp_size": "model_parallel_size",
        "tensor_parallel_size": "model_parallel_size",
        "tensor_model_parallel_size": "model_parallel_size",
        "pp": "pipeline_parallel_size",
        "ep": "expert_parallel_size",
        "expert_model_parallel_size": "expert_parallel_size",
        "pipeline_model_parallel_size": "pipeline_parallel_size",
        "cp": "context_parallel_size",
        "sequence_parallel_size": "context_parallel_size",
    },
    explained={"dp": DATA_PARALLEL, "dp_size": DATA_PARALLEL, "data_parallel_size": DATA_PARALLEL},
)
"""All names that are accepted."""


def add_spellings(spellings: Spellings) -> None:
    """Makes all dataclasses of arguments, and the command line, accept further names."""
    SPELLINGS.add(spellings)


def with_argument_aliases(kind: type[Arguments]) -> type[Arguments]:
    """Lets a dataclass's constructor accept the names above, and suggest a correction."""
    dataclass_type: Any = kind
    plain = dataclass_type.__init__

    @functools.wraps(plain)
    def __init__(self: Any, **keywords: Any) -> None:
        known = [own_field.name for own_field in fields(dataclass_type)]
        plain(self, **resolve_aliases(keywords, known))

    kind.__init__ = __init__
    return kind


def argument_aliases(known: Collection[str]) -> list[str]:
    """Returns the other names of the `known` arguments, without those that are arguments
    themselves.
    """
    targets = dict(SPELLINGS.renamed)
    for name, (target, _) in SPELLINGS.switches.items():
        targets[name] = target
    return [name for name, target in targets.items() if target in known and name not in known]


def resolve_aliases(keywords: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """Returns the keywords under their names in `known`.

    Raises ValueError if one is unknown or two mean the same.
    """
    aliases = argument_aliases(known)
    values: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for name, value in keywords.items():
        if name not in known and SPELLINGS.is_without_effect(name, value):
            continue
        if SPELLINGS.left_at_default.get(name, _NOWHERE) is value:
            continue
        target: str | None = name
        if name in aliases:
            target, value = _resolve(name, value)
        if target is None:
            continue
        if target not in known:
            raise ValueError(f"there is no argument {name!r}{hint(name, [*known, *aliases])}")
        if target in values:
            raise ValueError(f"{given_as[target]} and {name} both set {target}; give one of them")
        values[target] = value
        given_as[target] = name
    return values


def _resolve(name: str, value: Any) -> tuple[str | None, Any]:
    """Returns our argument and its value for an alias; None for a switch that is off."""
    if name in SPELLINGS.translated:
        return SPELLINGS.translated[name](value)
    if name not in SPELLINGS.switches:
        return SPELLINGS.renamed[name], value
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    target, value_when_on = SPELLINGS.switches[name]
    return (target if value else None), value_when_on


def hint(name: str, taken: Collection[str], prefix: str = "") -> str:
    """Returns the end of a message about an unknown argument: what to use instead, if that is
    known.

    Args:
        taken: The arguments that exist.
        prefix: A dotted prefix of their names.
    """
    if name in SPELLINGS.explained and name not in taken:
        return f": {SPELLINGS.explained[name]}"
    # A name with a whole word more or less is another argument, and no misspelling: train_samples,
    # max_train_samples.
    words = set(name.split("_"))
    alike = []
    for other in taken:
        other_words = set(other.split("_"))
        if not (words < other_words or words > other_words):
            alike.append(other)
    close = difflib.get_close_matches(_letters(name), map(_letters, alike), n=1, cutoff=0.87)
    meant = next((other for other in alike if close and _letters(other) == close[0]), None)
    if meant is None or re.findall(r"\d", meant) != re.findall(r"\d", name):
        return ""
    return f"; did you mean {prefix}{meant}?"


def _letters(name: str) -> str:
    return name.replace("_", "")
