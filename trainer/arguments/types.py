"""Whether the values of a dataclass are of the types that it declares."""

from __future__ import annotations

import math
import os
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {int: "an integer", float: "a finite number", bool: "True or False", str: "a text"}
NOT_ONE = object()


def check_types(arguments: Any) -> None:
    """Makes every value one of its field's type. ValueError for a value that is none, or none of the literals.

    Integers may be floats without a fraction, numbers NumPy's, and texts paths; booleans are no numbers, and numbers
    must be finite. Fields of other types are left as they are, and so are those that a user's subclass adds.
    """
    package = __name__.partition(".")[0]
    declared = next(kind for kind in type(arguments).__mro__ if kind.__module__.partition(".")[0] == package)
    for name, hint in get_type_hints(declared).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        value = getattr(arguments, name)
        converted = next((c for kind in kinds if (c := _as(kind, value)) is not NOT_ONE), NOT_ONE)
        if converted is NOT_ONE:
            raise ValueError(_problem(name, value, kinds))
        object.__setattr__(arguments, name, converted)


def _as(kind: Any, value: Any) -> Any:
    """`value` as one of `kind`, or NOT_ONE."""
    if get_origin(kind) is Literal:
        same = (c for c in get_args(kind) if value == c and not isinstance(value, bool))
        return next(same, NOT_ONE)
    if kind is NoneType or kind is bool:
        return value if isinstance(value, kind) else NOT_ONE
    if kind is int:
        return int(value) if _is_number(value) and value == int(value) else NOT_ONE
    if kind is float:
        return float(value) if _is_number(value) else NOT_ONE
    if kind is str:
        return os.fspath(value) if isinstance(value, (str, os.PathLike)) else NOT_ONE
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _problem(name: str, value: Any, kinds: tuple[Any, ...]) -> str:
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        return f"{name} {value!r} is none of {', '.join(map(str, choices))}"
    wanted = " or ".join([NAMES[kind] for kind in kinds if kind in NAMES] + ["None"] * (NoneType in kinds))
    return f"{name} must be {wanted}, not {value!r}"
