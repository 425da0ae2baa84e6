"""Registers an op in `torch.ops.shardzoo`: schema, fake kernel, `out` form, and the variants behind them.

Every op is described by pure functions:

    allocate(*arguments) -> tuple of fresh, empty_pooled outputs (it is also the fake kernel)
    reference(*arguments) -> tuple of outputs, in PyTorch operators, naive: the ground truth of every other
    variant prepare(*arguments) -> the arguments as the compiled kernels take them (contiguous), or a string:
    why they cannot

An op `name` gets a sibling `name_out` that writes into tensors passed by the caller. Calling the `Op` itself does
what `torch.ops.shardzoo.<name>` does, without the cost of torch's dispatcher where nothing needs it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from . import dispatch, native

LIBRARY = torch.library.Library("shardzoo", "DEF")
Outputs = tuple[torch.Tensor, ...]
OPS: dict[str, Op] = {}  # by name
POOLED = 1 << 20  # bytes of an output, from which the pool has memory for it (csrc/binding/pool.cpp)


class Op:
    """One operator of `torch.ops.shardzoo`.

    Args:
        name: the operator's name.
        arguments: its arguments in schema syntax.
        outputs: names of the tensors it returns; an output that a call has no use for is a tensor of size 0.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        outputs: Sequence[str],
        *,
        allocate: Callable[..., Outputs],
        reference: Callable[..., Outputs],
        prepare: Callable[..., tuple | str],
    ) -> None:
        self.name, self.outputs = name, tuple(outputs)
        self.allocate, self.reference, self.prepare = allocate, reference, prepare
        self._function: type[torch.autograd.Function] | None = None  # the gradient formula, once there is one
        OPS[name] = self
        returned = ", ".join(f"Tensor {output}" for output in outputs)
        LIBRARY.define(f"{name}({arguments}) -> ({returned})")
        LIBRARY.impl(name, self._call, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardzoo::{name}", self._fake, lib=LIBRARY)
        written = ", ".join(f"Tensor({chr(ord('a') + i)}!) {output}" for i, output in enumerate(outputs))
        LIBRARY.define(f"{name}_out({arguments}, *, {written}) -> ()")
        LIBRARY.impl(f"{name}_out", self._call_out, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardzoo::{name}_out", lambda *_, **__: None, lib=LIBRARY)
        self._operator = getattr(torch.ops.shardzoo, name).default

    def __call__(self, *arguments) -> Any:
        """The operator, without PyTorch's dispatcher where nobody looks: most of a small call's time is spent there."""
        if not can_bypass_dispatcher(*arguments):
            return self._operator(*arguments)
        if not needs_gradient(*arguments):
            return self._call(*arguments)
        return self._operator(*arguments) if self._function is None else self._function.apply(*arguments)

    def _single_or_tuple(self, outputs: Outputs) -> Any:
        return outputs[0] if len(outputs) == 1 else outputs

    def _fake(self, *arguments) -> Any:
        return self._single_or_tuple(self.allocate(*arguments))

    def _call(self, *arguments) -> Any:
        outputs = self.allocate(*arguments)
        if not self.run_fast(arguments, outputs):
            outputs = tuple(output.contiguous() for output in self.reference(*arguments))
        return self._single_or_tuple(outputs)

    def _call_out(self, *arguments, **outputs) -> None:
        targets = tuple(outputs[name] for name in self.outputs)
        for name, target, expected in zip(self.outputs, targets, self._shapes(arguments), strict=True):
            if target.shape != expected.shape or target.dtype != expected.dtype:
                raise ValueError(
                    f"{self.name}_out writes `{name}` as {tuple(expected.shape)} {expected.dtype}, "
                    f"got {tuple(target.shape)} {target.dtype}"
                )
        if all(target.is_contiguous() for target in targets) and self.run_fast(arguments, targets):
            return
        for target, value in zip(targets, self.reference(*arguments), strict=True):
            target.copy_(value)

    def _shapes(self, arguments: tuple) -> Outputs:
        meta = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments]
        return self.allocate(*meta)

    def run_fast(self, arguments: tuple, outputs: Outputs) -> bool:
        """Run a variant other than the reference into `outputs`; False if the reference has to."""
        first, *others = (value for value in arguments if isinstance(value, torch.Tensor))
        for other in others:
            if other.device != first.device:
                raise ValueError(f"{self.name} got tensors on {first.device} and on {other.device}; use one device")
        variant = dispatch.choose(first.device.type)
        if variant == "reference":
            return False
        prepared = "an empty tensor" if first.numel() == 0 else self.prepare(*arguments)
        if not isinstance(prepared, str) and variant == "triton":
            prepared = unfit_for_triton(first) or prepared
        if isinstance(prepared, str):
            dispatch.announce_fallback(self.name, variant, prepared)
            return False
        if variant == "triton":
            from .triton_kernels import KERNELS

            KERNELS[self.name](*prepared, *outputs)
        else:
            native.call(self.name, *prepared, *outputs)
        return True

    def autograd(self, setup_context: Callable, backward: Callable) -> None:
        """Give the op its gradient formula (`torch.library.register_autograd`)."""
        torch.library.register_autograd(f"shardzoo::{self.name}", backward, setup_context=setup_context, lib=LIBRARY)

        def forward(ctx, *arguments):
            outputs = self._call(*arguments)
            setup_context(ctx, arguments, outputs)
            return outputs

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._function = type(self.name, (torch.autograd.Function,), methods)


def needs_gradient(*arguments: Any) -> bool:
    """Whether autograd has to know of a call with these arguments."""
    return torch.is_grad_enabled() and any(
        value.requires_grad for value in arguments if isinstance(value, torch.Tensor)
    )


def can_bypass_dispatcher(*arguments: Any) -> bool:
    """Whether a call may go past the dispatcher: nothing traces, transforms or intercepts it, its tensors are no
    subclass that would want to, and the first of them holds data. Counters of arithmetic may look on: a step that is
    counted has the bits of one that is not."""
    return not (
        torch.compiler.is_compiling()
        or (torch._C._len_torch_dispatch_stack() and torch._C._len_torch_dispatch_stack() > len(flop_counters()))
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or arguments[0].device.type not in ("cpu", "cuda")
        or any(isinstance(value, torch.Tensor) and not is_plain(type(value)) for value in arguments)
    )


def flop_counters() -> list[Any]:
    """Each `FlopCounterMode` that looks on."""
    modes: list[Any] = _get_current_dispatch_mode_stack()
    return [mode.counter for mode in modes if type(mode).__module__ == "torch.utils.flop_counter"]


@functools.cache
def is_plain(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of this class neither see the calls made with them nor pass their class on, as parameters."""
    return kind is torch.Tensor or (
        kind.__torch_function__ is torch.nn.Parameter.__torch_function__
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    )


def unfit_for_triton(tensor: torch.Tensor) -> str | None:
    """Why the Triton kernels do not take this tensor, or None if they do."""
    from .triton_kernels.common import LONGEST_ROW

    if tensor.dtype == torch.float64:
        return "the Triton kernels calculate in fp32"
    if tensor.dim() != 2 and tensor.shape[-1] > LONGEST_ROW:
        return f"rows longer than {LONGEST_ROW}"
    return None


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """fp32 for fp32 and the half types, fp64 for fp64: the type every variant calculates in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def empty_pooled(like: torch.Tensor, *size: int) -> torch.Tensor:
    """A contiguous, uninitialized tensor of `size` (default: that of `like`) with the dtype and device of `like`.

    On the CPU the memory of a large one is that of an earlier output, where the compiled parts are there.
    """
    size = size or like.shape
    large = math.prod(size) * like.itemsize >= POOLED
    if large and is_plain(type(like)) and like.device.type == "cpu" and native.load_error() is None:
        return native.recycled(like, size)
    return like.new_empty(size)


def nothing(like: torch.Tensor) -> torch.Tensor:
    """A size-0 tensor that stands for an output this call has no use for."""
    return like.new_empty(0)
