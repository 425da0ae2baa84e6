"""Tells PyTorch's compiler what it should not trace, without importing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Marks a function whose result the compiler may compute once and treat as a constant.

    This does what `torch.compiler.assume_constant_result` does. That decorator imports
    torch._dynamo, which takes longer to import than PyTorch itself does, in every process that
    never compiles anything.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function
