"""Bounds the work that loading a pickle may cause, before anything is loaded.

A pickle of a few hundred bytes can describe a tuple of 2**45 elements, because a tuple may hold
the same part twice. Hashing such a value, as a key of a dictionary, or writing it into a message,
never ends. So the pickle is first run on sizes alone.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from dataclasses import dataclass
from typing import Any, cast

# The pickles of torch files describe each tensor in about 250 bytes. The limit bounds the time and
# the memory.
LARGEST_PICKLE = 4 << 20

# Unpickling a bytearray allocates as much memory as its argument says. In a pickle, a newline
# follows its name.
ALLOCATION = b"bytearray\n"

# Errors that torch raises for damaged pickles.
DAMAGE = (
    RuntimeError,
    OSError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    AssertionError,
    MemoryError,
    ArithmeticError,
    struct.error,
)

# Elements, counted as often as they are used. A file of 10,000 tensors has half a million, in
# dictionaries within one another.
MOST_ELEMENTS = 1 << 24

_PUTS = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))
_GETS = frozenset(("GET", "BINGET", "LONG_BINGET"))
_GLOBALS = frozenset(("GLOBAL", "STACK_GLOBAL"))
_CALLS = frozenset(("REDUCE", "NEWOBJ", "NEWOBJ_EX"))
# These change their first argument and leave it on the stack.
_CHANGES = frozenset(("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"))


@dataclass
class _Value:
    """What is known of a value on the stack.

    Attributes:
        size: Its elements, including those of its parts.
        is_global: Whether it is a class or a function.
    """

    size: int = 1
    is_global: bool = False


def check_pickle(content: Any) -> None:
    """Checks that a pickle describes no more than `MOST_ELEMENTS` elements.

    Args:
        content: The bytes, or a file from its current position; it is read to the pickle's end.

    Raises:
        pickle.UnpicklingError: It describes more, or calls something that is no class or function.
        ValueError, IndexError, KeyError: The pickle is damaged.
    """
    stack: list[_Value] = []
    marks: list[int] = []
    memo: dict[int, _Value] = {}
    elements = 0
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "MARK":
            marks.append(len(stack))
            continue
        if opcode.name in _PUTS or opcode.name == "MEMOIZE":
            place = len(memo)
            if argument is not None:
                place = int(argument)
            memo[place] = stack[-1]
            continue
        if opcode.name in _GETS:
            stack.append(memo[int(cast(int, argument))])
            continue

        # Take the arguments: a fixed number, and all since the last mark.
        before = opcode.stack_before
        start = len(stack) - len(before)
        if pickletools.markobject in before:
            start = marks.pop() - before.index(pickletools.markobject)
        if start < 0:
            raise IndexError("it takes more values than there are")
        taken = stack[start:]
        del stack[start:]
        changed = opcode.name in _CHANGES
        used = sum(value.size for value in taken[changed:])
        elements += used
        if elements > MOST_ELEMENTS:
            raise pickle.UnpicklingError(f"it describes more than {MOST_ELEMENTS:,} elements")
        if opcode.name in _CALLS and not taken[0].is_global:
            raise pickle.UnpicklingError("it calls something that is no class or function")

        if changed:
            taken[0].size += used
            stack.append(taken[0])
        else:
            is_global = opcode.name in _GLOBALS
            stack += [_Value(1 + used, is_global) for _ in opcode.stack_after]
