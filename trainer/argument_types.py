"""Whether the values of a dataclass are of the types that it declares."""

from __future__ import annotations

import math
import os
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {int: "an integer", float: "a finite number", bool: "True or False", str: "a text"}


def check_types(arguments: Any) -> None:
    """ValueError for a value of another type than its field's, or none of its literals.

    Integers are numbers too, but booleans are neither; numbers must be finite; a path may stand for a text. Fields of
    other types than these are not checked.
    """
    for name, hint in get_type_hints(type(arguments)).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        value = getattr(arguments, name)
        if any(_fits(value, kind) for kind in kinds):
            continue
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if choices:
            raise ValueError(f"{name} {value!r} is none of {', '.join(map(str, choices))}")
        wanted = " or ".join([NAMES[kind] for kind in kinds if kind in NAMES] + ["None"] * (NoneType in kinds))
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    if kind is NoneType or kind is bool:
        return isinstance(value, kind)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, (str, os.PathLike)) if kind is str else True
