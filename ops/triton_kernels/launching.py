"""Launches Triton kernels that have been compiled, without asking again what to compile.

Triton looks at every argument of a launch to find the compiled kernel. With the forty arguments of
attention's kernels that takes several times as long as the launch itself. Here the kernel is found
by a key of all that Triton's answer depends on: types of tensors and whether they begin at 16 bytes,
which arguments are None, all integers, constants and options, and the device.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..dispatcher import KINDS, Kind

# Lengths that change all the time would make the table grow without end.
MAX_KEPT = 4096
_compiled: dict[Hashable, Any] = {}


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    description: Hashable = None,
    **options: Any,
) -> None:
    """Runs a kernel with so many programs.

    Args:
        arguments: What is known when it runs: tensors, numbers, None, and tuples of these. The
            first is a tensor, whose device is the current one.
        constants: What is known when it is compiled, in the order of the kernel's arguments.
        description: `describe` of all the arguments, or as much as that tells. Kernels with many
            arguments in common describe these once.
        options: Of the compiler, such as `num_warps`.
    """
    device = arguments[0].device.index
    values = tuple(constants.values())
    described = tuple(describe(arguments)) if description is None else description
    key = (id(kernel), device, values, tuple(options.values()), described)
    found = _compiled.get(key)
    if found is not None:
        found[(programs, 1, 1)](*arguments, *values)
        return
    found = kernel[(programs, 1, 1)](*arguments, **constants, **options)
    if found is None:  # in the interpreter, which compiles nothing
        return
    if len(_compiled) >= MAX_KEPT:
        _compiled.clear()
    _compiled[key] = found


def describe(arguments: tuple[Any, ...]) -> list[Any]:
    """Returns what Triton compiles for these arguments depends on."""
    described: list[Any] = []
    for value in arguments:
        kind = type(value)
        if value is None:
            described.append(None)
        elif KINDS[kind] is not Kind.OTHER:
            described += value.dtype, value.data_ptr() % 16
        elif kind is float:
            described.append(kind)
        elif kind is int or kind is bool:
            described += kind, value
        else:  # a tuple
            described += kind, *describe(value), kind
    return described
