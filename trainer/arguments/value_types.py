"""Checks that the values of a dataclass of arguments have the declared types."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from numbers import Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {int: "an integer", float: "a finite number", bool: "True or False", str: "a string"}
NO_MATCH = object()


def check_types(arguments: Any) -> None:
    """Converts every value of a dataclass object to the declared type of its field.

    A float without a fraction is accepted as an integer, NumPy's numbers as numbers, and a path as
    a string. A boolean is not a number, and a number must be finite. Fields of other types, and
    fields that a user's subclass adds, are not checked.

    Raises ValueError if a value has another type.
    """
    package = __name__.partition(".")[0]
    declared = next(
        kind for kind in type(arguments).__mro__ if kind.__module__.partition(".")[0] == package
    )
    for name, hint in get_type_hints(declared).items():
        if get_origin(hint) is ClassVar:
            continue
        object.__setattr__(arguments, name, checked_value(name, hint, getattr(arguments, name)))


def checked_value(name: str, hint: Any, value: Any) -> Any:
    """Returns a value as the declared type of its field, as `check_types` does."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        converted = _convert(kind, value)
        if converted is not NO_MATCH:
            return converted
    raise ValueError(_describe_problem(name, value, kinds))


def texts(name: str, given: Any) -> tuple[str, ...]:
    """Returns a tuple from the value of a YAML file or the command line, a string or a list of
    strings.
    """
    found = given
    if isinstance(given, str):
        found = (given,)
    elif given is None:
        found = ()
    if not isinstance(found, Sequence) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{name} must be a list of strings, not {given!r}")
    return tuple(found)


def _convert(kind: Any, value: Any) -> Any:
    """Returns `value` as a `kind`, or NO_MATCH."""
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if value == choice and not isinstance(value, bool):
                return choice
        return NO_MATCH
    if kind is NoneType or kind is bool:
        return value if isinstance(value, kind) else NO_MATCH
    if kind is int:
        return int(value) if _is_number(value) and value == int(value) else NO_MATCH
    if kind is float:
        return float(value) if _is_number(value) else NO_MATCH
    if kind is str:
        return os.fspath(value) if isinstance(value, (str, os.PathLike)) else NO_MATCH
    return value


def _is_number(value: Any) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer above the largest float
        return False


def _describe_problem(name: str, value: Any, kinds: tuple[Any, ...]) -> str:
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        return f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}"
    wanted = [NAMES[kind] for kind in kinds if kind in NAMES]
    if NoneType in kinds:
        wanted.append("None")
    return f"{name} must be {' or '.join(wanted)}, not {value!r}"
