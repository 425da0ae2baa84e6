"""Provides `torch.autograd.Function` and `once_differentiable` with type annotations, which PyTorch
lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

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
    from torch.autograd import Function
    from torch.autograd.function import once_differentiable

__all__ = ["Function", "once_differentiable"]
