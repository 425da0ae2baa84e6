"""`torch.autograd.Function` and `once_differentiable` with types, which torch leaves unknown to a type checker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    Backward = TypeVar("Backward")

    class Function:
        """A differentiable function with a gradient formula of its own."""

        @classmethod
        def apply(cls, *args: Any) -> Any: ...

    def once_differentiable(backward: Backward) -> Backward:
        """A backward pass that cannot be differentiated itself."""
        ...
else:
    from torch.autograd import Function
    from torch.autograd.function import once_differentiable

__all__ = ["Function", "once_differentiable"]
