"""Provides `torch.autograd.Function` and `once_differentiable` with type annotations, which PyTorch
lacks, and with fewer calls in Python: on an accelerator, a step waits for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    Backward = TypeVar("Backward")

    class Function:
        """A differentiable function with a custom gradient formula."""

        @classmethod
        def apply(cls, *args: Any) -> Any: ...

    def once_differentiable(backward: Backward) -> Backward:
        """Marks a backward pass that cannot be differentiated again."""
        ...
else:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    from torch.autograd.function import once_differentiable as _forbid_second_derivatives

    class Function(torch.autograd.Function):
        """A differentiable function with a custom gradient formula."""

        @classmethod
        def apply(cls, *args):
            """Calls the function, like PyTorch's method, with fewer calls in Python."""
            if torch._C._are_functorch_transforms_active():
                return super().apply(*args)
            return super(torch.autograd.Function, cls).apply(*args)

    # Behind a graph break the compiler would take this method for the start of a graph, and stop. It
    # leaves PyTorch's own method out in the same way, and knows the call where it traces the caller.
    set_code_exec_strategy(
        Function.apply.__func__.__code__,
        _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT),
    )

    def once_differentiable(backward):
        """Marks a backward pass that cannot be differentiated again.

        Where nothing records it, which is where no gradient of gradients is computed, it is called
        directly.
        """
        recorded = _forbid_second_derivatives(backward)

        @functools.wraps(backward)
        def run(ctx, *grads):
            if torch.is_grad_enabled():
                return recorded(ctx, *grads)
            return backward(ctx, *grads)

        return run


def bind_apply(function: Any) -> Callable[..., Any]:
    """Returns the `apply` of a differentiable function without what PyTorch does before it in
    Python: it looks for transforms of functorch. A caller makes sure that there are none.
    """
    inherited: Any = super(torch.autograd.Function, function)
    return inherited.apply


__all__ = ["Function", "bind_apply", "once_differentiable"]
