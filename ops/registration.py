"""Registers the operators of `torch.ops.shardzoo`: each an `Op`, described by pure functions.

    allocate(*arguments) -> tuple of new, uninitialized outputs; it is also the fake kernel
    reference(*arguments) -> tuple of outputs, computed with PyTorch operators; defines the results
        of all variants
    prepare(*arguments) -> the arguments for the compiled kernels (contiguous), or a string: why
        they cannot run; None for an op without kernels of its own, whose reference calls ops that
        have them

An op `name` also has a form `name_out` that writes into tensors passed by the caller. Calling the
`Op` itself does what `torch.ops.shardzoo.<name>` does, but skips PyTorch's dispatcher if nothing
needs it (dispatcher.py).

variants.py chooses the variant that runs. A single call that this variant does not support (mixed
dtypes, an empty tensor) runs on the reference, which computes the same function; the cause is
logged once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import library, variants
from .autograd import bind_apply
from .device import make_current
from .dispatcher import KINDS, Kind, is_watched

LIBRARY = torch.library.Library("shardzoo", "DEF")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LONGEST_TRITON_ROW = 65536  # columns; the Triton kernels hold a row in registers
Outputs = tuple[torch.Tensor, ...]
OPS: dict[str, Op] = {}  # by name


class Op:
    """One operator of `torch.ops.shardzoo`.

    Args:
        name: The operator's name.
        arguments: Its arguments in schema syntax.
        outputs: The names of the tensors it returns. An output that a call does not need is a
            tensor of size 0.
        allocate, reference, prepare: See above.
        compiled: The variants whose compiled kernels exist, of "cpp" and "cuda".
        prepare_compiled: As `prepare`, for the compiled kernels, where they take other calls or
            arguments than Triton's.
        triton: Launches the Triton kernels with the prepared arguments and the outputs; None if
            there are none. Instead of a variant that does not exist the reference runs; where the
            choice is free, an accelerator runs the Triton kernels before that.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        outputs: Sequence[str],
        *,
        allocate: Callable[..., Outputs],
        reference: Callable[..., Outputs],
        prepare: Callable[..., tuple | str] | None,
        compiled: Sequence[str] = ("cpp", "cuda"),
        prepare_compiled: Callable[..., tuple | str] | None = None,
        triton: Callable[..., None] | None = None,
    ) -> None:
        self.name = name
        self.outputs = tuple(outputs)
        self.allocate = allocate
        self.reference = reference
        self.prepare = prepare
        self.prepare_compiled = prepare if prepare_compiled is None else prepare_compiled
        self.triton = triton
        self.variants = tuple(compiled) if triton is None else (*compiled, "triton")
        self._has_one_output = len(self.outputs) == 1
        # Calls the operator with its gradient formula, which `autograd` sets.
        self._apply: Callable[..., Any] | None = None
        OPS[name] = self

        returned = ", ".join(f"Tensor {output}" for output in outputs)
        LIBRARY.define(f"{name}({arguments}) -> ({returned})")
        LIBRARY.impl(name, self._call_dispatched, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardzoo::{name}", self._fake, lib=LIBRARY)
        self._operator = getattr(torch.ops.shardzoo, name).default

        # A schema marks each tensor that the call writes by a letter of its own.
        written = ", ".join(
            f"Tensor({chr(ord('a') + i)}!) {output}" for i, output in enumerate(outputs)
        )
        LIBRARY.define(f"{name}_out({arguments}, *, {written}) -> ()")
        LIBRARY.impl(f"{name}_out", self._call_out, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardzoo::{name}_out", lambda *_, **__: None, lib=LIBRARY)

    def __call__(self, *arguments) -> Any:
        """Calls the operator, without PyTorch's dispatcher if nothing watches the call.

        A small call spends most of its time in the dispatcher. The code inlines
        `can_bypass_dispatcher` and `needs_gradient`: on an accelerator, where a kernel call returns
        at once, a step waits for the Python before it.
        """
        first = arguments[0]
        if is_watched() or not (first.is_cpu or first.is_cuda):
            return self._operator(*arguments)
        device = first.device
        gradient = False
        for value in arguments:
            kind = KINDS[type(value)]
            if kind is Kind.OTHER:
                continue
            if kind is Kind.INTERCEPTING_TENSOR:
                return self._operator(*arguments)
            if value.device != device:
                self._check_devices(arguments)
            if value.requires_grad:
                gradient = True
        if not gradient or not torch.is_grad_enabled():
            return self._call(*arguments)
        if self._apply is None:
            return self._operator(*arguments)
        return self._apply(*arguments)

    def autograd(self, setup_context: Callable, backward: Callable) -> None:
        """Sets the op's gradient formula.

        The arguments are those of `torch.library.register_autograd`.
        """
        torch.library.register_autograd(
            f"shardzoo::{self.name}", backward, setup_context=setup_context, lib=LIBRARY
        )

        call = self._call
        compute_gradients = staticmethod(backward)

        class OpFunction(torch.autograd.Function):
            """Runs the op without PyTorch's dispatcher, with the gradient formula registered above."""

            @staticmethod
            def forward(ctx, *arguments):
                outputs = call(*arguments)
                setup_context(ctx, arguments, outputs)
                return outputs

            backward = compute_gradients

        self._apply = bind_apply(OpFunction)

    def _fake(self, *arguments) -> Any:
        outputs = self.allocate(*arguments)
        return outputs[0] if self._has_one_output else outputs

    def _call_dispatched(self, *arguments) -> Any:
        """Calls the operator for PyTorch's dispatcher."""
        self._check_devices(arguments)
        return self._call(*arguments)

    def _check_devices(self, arguments: tuple) -> None:
        """Raises ValueError if there are tensors on two devices."""
        device = arguments[0].device
        for value in arguments:
            if KINDS[type(value)] is not Kind.OTHER and value.device != device:
                raise ValueError(
                    f"{self.name} got tensors on {device} and on {value.device}; use one device"
                )

    def _call(self, *arguments) -> Any:
        outputs = self.allocate(*arguments)
        if not self.run_fast(arguments, outputs):
            values = self.reference(*arguments)
            outputs = tuple(map(_in_layout, values, outputs))
        return outputs[0] if self._has_one_output else outputs

    def _call_out(self, *arguments, **outputs) -> None:
        self._check_devices(arguments)
        targets = tuple(outputs[name] for name in self.outputs)
        described = self._describe_outputs(arguments)
        for name, target, expected in zip(self.outputs, targets, described, strict=True):
            if target.shape != expected.shape or target.dtype != expected.dtype:
                raise ValueError(
                    f"{self.name}_out writes `{name}` as {tuple(expected.shape)} {expected.dtype}, "
                    f"got {tuple(target.shape)} {target.dtype}"
                )
        fits = all(a.stride() == b.stride() for a, b in zip(targets, described, strict=True))
        if fits and self.run_fast(arguments, targets):
            return
        for target, value in zip(targets, self.reference(*arguments), strict=True):
            target.copy_(value)

    def _describe_outputs(self, arguments: tuple) -> Outputs:
        """Returns tensors without data that have the outputs' shapes, dtypes and strides."""
        meta = [
            value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments
        ]
        return self.allocate(*meta)

    def run_fast(self, arguments: tuple, outputs: Outputs) -> bool:
        """Runs a variant other than the reference into `outputs`.

        All tensors are on one device. Returns False if the reference must run instead.
        """
        first = arguments[0]
        device = first.device
        variant = variants.choose_variant(device.type)
        if variant not in self.variants:
            variant = self._choose_other_variant(device.type)
        prepare = self.prepare if variant == "triton" else self.prepare_compiled
        if variant == "reference" or prepare is None:
            return False
        prepared = "an empty tensor" if 0 in first.shape else prepare(*arguments)
        if variant == "triton" and type(prepared) is not str:
            prepared = unfit_for_triton(first) or prepared
        if type(prepared) is str:
            log_fallback(self.name, variant, prepared)
            return False
        if variant == "triton" and self.triton is not None:
            with make_current(device):
                self.triton(*prepared, *outputs)
        else:
            # As `library.call_compiled`, without a call of Python's more.
            try:
                library.find_kernel(self.name)(*prepared, *outputs)
            except RuntimeError as error:
                library.refuse_stale_library(error)
                raise
        return True

    def choose_variant(self, device_type: str) -> str:
        """Returns the variant of this op for tensors of `device_type` under the current choice."""
        variant = variants.choose_variant(device_type)
        return variant if variant in self.variants else self._choose_other_variant(device_type)

    def _choose_other_variant(self, device_type: str) -> str:
        """Returns what runs instead of the chosen variant, which this op does not have."""
        is_free = variants.current_choice() == "auto" and device_type != "cpu"
        has_triton = "triton" in self.variants
        if is_free and has_triton and variants.triton_unavailable(device_type) is None:
            return "triton"
        return "reference"


def _in_layout(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns `value` with the strides of `like`, in its memory if it has others."""
    return value if value.stride() == like.stride() else like.copy_(value)


@functools.cache
def log_fallback(op: str, variant: str, why: str) -> None:
    """Logs, once per cause, that a call ran on the reference."""
    variants.log.info("%s ran on the reference instead of %s: %s", op, variant, why)


def runs_compiled(tensor: torch.Tensor) -> bool:
    """Returns whether an op whose first tensor this is runs in a compiled kernel, which widens
    nothing but registers.

    Tensors without data count as compiled, so that counting a step's operators needs no device.
    """
    if tensor.is_meta:
        return True
    if not tensor.is_contiguous() or same_dtype(tensor) is not None:
        return False
    variant = variants.choose_variant(tensor.device.type)
    return variant in ("cpp", "cuda") or (variant == "triton" and unfit_for_triton(tensor) is None)


# Functions for the description of an op.


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which every variant computes: fp64 for fp64, else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def same_dtype(*tensors: torch.Tensor | None) -> str | None:
    """Returns why compiled kernels cannot take these tensors together, or None if they can."""
    first = None
    for tensor in tensors:
        if tensor is None:
            continue
        if first is None:
            first = tensor.dtype
        elif tensor.dtype != first:
            dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
            return "mixed dtypes " + ", ".join(sorted(str(dtype) for dtype in dtypes))
    return None if first in KERNEL_DTYPES else f"no kernel for {first}"


def unfit_for_triton(tensor: torch.Tensor) -> str | None:
    """Returns why the Triton kernels do not take this tensor, or None if they do."""
    if tensor.dtype == torch.float64:
        return "the Triton kernels compute in fp32"
    if tensor.dim() != 2 and tensor.shape[-1] > LONGEST_TRITON_ROW:
        return f"rows longer than {LONGEST_TRITON_ROW}"
    return None


def contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Returns each tensor in row-major order; None stays None."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def empty_placeholder(like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of size 0 for an output that a call does not need."""
    return like.new_empty(0)
