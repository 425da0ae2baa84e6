"""Tells what PyTorch would do with a call: trace it, intercept it, differentiate it, or just run it.

A small call spends most of its time in PyTorch's dispatcher, so our operators bypass it where
nothing depends on it.
"""

from __future__ import annotations

import enum
from operator import attrgetter
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

torch_dispatch = attrgetter("__torch_dispatch__")


class Kind(enum.Enum):
    """What an argument's class is to the dispatcher.

    Members: a tensor class, like `nn.Parameter`, that neither intercepts calls nor passes itself to
    results; one that may; and a class that is no tensor's.
    """

    PLAIN_TENSOR = enum.auto()
    INTERCEPTING_TENSOR = enum.auto()
    OTHER = enum.auto()


class _Kinds(dict[type, Kind]):
    """The kinds of classes, each found once: a call asks for all its arguments."""

    def __missing__(self, argument_type: type) -> Kind:
        if not issubclass(argument_type, torch.Tensor):
            kind = Kind.OTHER
        elif argument_type is torch.Tensor or (
            argument_type.__torch_function__ is torch.nn.Parameter.__torch_function__
            and torch_dispatch(argument_type) is torch_dispatch(torch.Tensor)
        ):
            kind = Kind.PLAIN_TENSOR
        else:
            kind = Kind.INTERCEPTING_TENSOR
        self[argument_type] = kind
        return kind


KINDS = _Kinds()


def can_bypass_dispatcher(*arguments: Any) -> bool:
    """Returns whether a call may bypass the dispatcher.

    It may if nothing watches calls, the first tensor holds data, and no tensor has a subclass that
    intercepts calls.
    """
    if is_watched() or not (arguments[0].is_cpu or arguments[0].is_cuda):
        return False
    for value in arguments:  # noqa: SIM110 - a generator would be one more call for each argument
        if KINDS[type(value)] is Kind.INTERCEPTING_TENSOR:
            return False
    return True


def is_watched() -> bool:
    """Returns whether something traces, transforms or intercepts calls now.

    FLOP counters are ignored, so a step with a counter gives the same bits as a step without one.
    `torch.export` and other tracers without Dynamo are seen by their dispatch modes.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        or (
            torch._C._len_torch_dispatch_stack() > 0
            and torch._C._len_torch_dispatch_stack() > len(flop_counters())
        )
        or torch._C._len_torch_function_stack() > 0
        or peek_interpreter_stack() is not None
        or torch._C._is_tracing()
    )


def flop_counters() -> list[Any]:
    """Returns the active `FlopCounterMode`s; none in compiled code, which a mode does not see and
    cannot be traced.
    """
    if torch.compiler.is_compiling():
        return []
    modes: list[Any] = _get_current_dispatch_mode_stack()
    return [mode.counter for mode in modes if type(mode).__module__ == "torch.utils.flop_counter"]


def needs_gradient(*arguments: Any) -> bool:
    """Returns whether autograd must record a call with these arguments."""
    if not torch.is_grad_enabled():
        return False
    for value in arguments:  # noqa: SIM110 - a generator would be one more call for each argument
        if KINDS[type(value)] is not Kind.OTHER and value.requires_grad:
            return True
    return False


def in_inference_mode() -> bool:
    """Returns whether this runs eagerly in `torch.inference_mode()`, where nothing differentiates
    or repeats it.

    `no_grad` is not enough: such a pass may be repeated with gradients later, and must then round
    in the same way.
    """
    if torch.compiler.is_dynamo_compiling():  # it cannot trace the next question
        return False
    return torch.is_inference_mode_enabled() and not torch.compiler.is_compiling()
