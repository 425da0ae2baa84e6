"""Registers the operators of `torch.ops.shardzoo`, and chooses which variant of an operator runs.

An op is described by pure functions:

    allocate(*arguments) -> tuple of new, uninitialized outputs; it is also the fake kernel
    reference(*arguments) -> tuple of outputs, computed with PyTorch operators; defines the results
        of all variants
    prepare(*arguments) -> the arguments for the compiled kernels (contiguous), or a string: why
        they cannot run; None for an op without kernels of its own, whose reference calls ops that
        have them

An op `name` also has a form `name_out` that writes into tensors passed by the caller. Calling the
`Op` itself does what `torch.ops.shardzoo.<name>` does, but skips PyTorch's dispatcher if nothing
needs it.

`SHARDZOO_KERNELS`, which is read once (or `kernels(...)` for a block of code), chooses the variant:

    auto       the fastest variant that exists for the tensor's device, else the reference (the default)
    reference  PyTorch's own operators
    cpp        the compiled kernels for CPU tensors
    cuda       the compiled kernels for CUDA tensors (for CPU tensors in the build of tests/ops/cuda_emulation)
    triton     the Triton kernels (CUDA tensors, or CPU tensors under TRITON_INTERPRET=1)

If a forced variant cannot run on this machine, that is an error. A single call that a variant does
not support (mixed dtypes, an empty tensor) runs on the reference, which computes the same function;
the cause is logged once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

LIBRARY = torch.library.Library("shardzoo", "DEF")
COMPILED = Path(__file__).with_name("_kernels.so")
VARIANTS = ("reference", "cpp", "cuda", "triton")
CHOICES = ("auto", *VARIANTS)
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LONGEST_TRITON_ROW = 65536  # columns; the Triton kernels hold a row in registers
Outputs = tuple[torch.Tensor, ...]
OPS: dict[str, Op] = {}  # by name
torch_dispatch = attrgetter("__torch_dispatch__")
log = logging.getLogger("shardzoo.ops")

_forced: str | None = None  # set by `kernels`; None means that the environment variable applies


class Op:
    """One operator of `torch.ops.shardzoo`.

    Args:
        name: The operator's name.
        arguments: Its arguments in schema syntax.
        outputs: The names of the tensors it returns. An output that a call does not need is a
            tensor of size 0.
        allocate, reference, prepare: See above.
        compiled: The variants whose compiled kernels exist, of "cpp" and "cuda".
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
        triton: Callable[..., None] | None = None,
    ) -> None:
        self.name = name
        self.outputs = tuple(outputs)
        self.allocate = allocate
        self.reference = reference
        self.prepare = prepare
        self.triton = triton
        self.variants = tuple(compiled) if triton is None else (*compiled, "triton")
        # The gradient formula, which `autograd` sets.
        self._function: type[torch.autograd.Function] | None = None
        OPS[name] = self
        returned = ", ".join(f"Tensor {output}" for output in outputs)
        LIBRARY.define(f"{name}({arguments}) -> ({returned})")
        LIBRARY.impl(name, self._call, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardzoo::{name}", self._fake, lib=LIBRARY)
        written = ", ".join(
            f"Tensor({chr(ord('a') + i)}!) {output}" for i, output in enumerate(outputs)
        )
        LIBRARY.define(f"{name}_out({arguments}, *, {written}) -> ()")
        LIBRARY.impl(f"{name}_out", self._call_out, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardzoo::{name}_out", lambda *_, **__: None, lib=LIBRARY)
        self._operator = getattr(torch.ops.shardzoo, name).default

    def __call__(self, *arguments) -> Any:
        """Calls the operator, without PyTorch's dispatcher if nothing watches the call.

        A small call spends most of its time in the dispatcher. The code inlines
        `can_bypass_dispatcher` and `needs_gradient`: on an accelerator, where a kernel call returns
        at once, a step waits for the Python before it.
        """
        first = arguments[0]
        if is_watched() or not (first.is_cpu or first.is_cuda):
            return self._operator(*arguments)
        gradient = False
        for value in arguments:
            if isinstance(value, torch.Tensor):
                if type(value) is not torch.Tensor and not is_plain(type(value)):
                    return self._operator(*arguments)
                gradient = gradient or value.requires_grad
        if not gradient or not torch.is_grad_enabled():
            return self._call(*arguments)
        return (
            self._operator(*arguments)
            if self._function is None
            else self._function.apply(*arguments)
        )

    def _single_or_tuple(self, outputs: Outputs) -> Any:
        return outputs[0] if len(outputs) == 1 else outputs

    def _fake(self, *arguments) -> Any:
        return self._single_or_tuple(self.allocate(*arguments))

    def _call(self, *arguments) -> Any:
        outputs = self.allocate(*arguments)
        if not self.run_fast(arguments, outputs):
            values = self.reference(*arguments)
            outputs = tuple(map(_in_layout, values, outputs))
        return self._single_or_tuple(outputs)

    def _call_out(self, *arguments, **outputs) -> None:
        targets = tuple(outputs[name] for name in self.outputs)
        described = self._shapes(arguments)
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

    def _shapes(self, arguments: tuple) -> Outputs:
        meta = [
            value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments
        ]
        return self.allocate(*meta)

    def run_fast(self, arguments: tuple, outputs: Outputs) -> bool:
        """Runs a variant other than the reference into `outputs`.

        Returns False if the reference must run instead.
        """
        first = arguments[0]
        device = first.device
        for value in arguments:
            if isinstance(value, torch.Tensor) and value.device != device:
                raise ValueError(
                    f"{self.name} got tensors on {device} and on {value.device}; use one device"
                )
        variant = self.choose_variant(device.type)
        if variant == "reference" or self.prepare is None:
            return False
        prepared = "an empty tensor" if first.numel() == 0 else self.prepare(*arguments)
        if not isinstance(prepared, str) and variant == "triton":
            prepared = unfit_for_triton(first) or prepared
        if isinstance(prepared, str):
            log_fallback(self.name, variant, prepared)
            return False
        if variant == "triton" and self.triton is not None:
            self.triton(*prepared, *outputs)
        else:
            call_compiled(self.name, *prepared, *outputs)
        return True

    def choose_variant(self, device_type: str) -> str:
        """Returns the variant of this op for tensors of `device_type` under the current choice."""
        variant = choose_variant(device_type)
        if variant in self.variants:
            return variant
        is_free = current_choice() == "auto" and device_type != "cpu" and "triton" in self.variants
        return "triton" if is_free and triton_runs_on(device_type) is None else "reference"

    def autograd(self, setup_context: Callable, backward: Callable) -> None:
        """Sets the op's gradient formula.

        The arguments are those of `torch.library.register_autograd`.
        """
        torch.library.register_autograd(
            f"shardzoo::{self.name}", backward, setup_context=setup_context, lib=LIBRARY
        )

        call = self._call
        compute_gradients = backward

        class OpFunction(torch.autograd.Function):
            """Runs the op without PyTorch's dispatcher, with the gradient formula registered above."""

            @staticmethod
            def forward(ctx, *arguments):
                outputs = call(*arguments)
                setup_context(ctx, arguments, outputs)
                return outputs

            @staticmethod
            def backward(ctx, *grads):
                return compute_gradients(ctx, *grads)

        self._function = OpFunction


def _in_layout(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns `value` with the strides of `like`, in its memory if it has others."""
    return value if value.stride() == like.stride() else like.copy_(value)


# Functions for the description of an op.


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which every variant computes: fp64 for fp64, else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def same_dtype(*tensors: torch.Tensor | None) -> str | None:
    """Returns why compiled kernels cannot take these tensors together, or None if they can."""
    first = next(tensor for tensor in tensors if tensor is not None).dtype
    for tensor in tensors:
        if tensor is not None and tensor.dtype != first:
            dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
            return "mixed dtypes " + ", ".join(sorted(str(dtype) for dtype in dtypes))
    return None if first in KERNEL_DTYPES else f"no kernel for {first}"


def contiguous(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Returns each tensor in row-major order; None stays None."""
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def empty_placeholder(like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of size 0 for an output that a call does not need."""
    return like.new_empty(0)


# Conditions under which a call may bypass PyTorch's dispatcher.


def is_watched() -> bool:
    """Returns whether something traces, transforms or intercepts calls now.

    FLOP counters are ignored, so a step with a counter gives the same bits as a step without one.
    """
    return (
        torch.compiler.is_compiling()
        or (
            torch._C._len_torch_dispatch_stack() > 0
            and torch._C._len_torch_dispatch_stack() > len(flop_counters())
        )
        or torch._C._len_torch_function_stack() > 0
        or peek_interpreter_stack() is not None
        or torch._C._is_tracing()
    )


def can_bypass_dispatcher(*arguments: Any) -> bool:
    """Returns whether a call may bypass the dispatcher.

    It may if nothing watches calls, the first tensor holds data, and no tensor has a subclass that
    intercepts calls.
    """
    if is_watched() or not (arguments[0].is_cpu or arguments[0].is_cuda):
        return False
    for value in arguments:
        kind = type(value)
        if kind is not torch.Tensor and isinstance(value, torch.Tensor) and not is_plain(kind):
            return False
    return True


def needs_gradient(*arguments: Any) -> bool:
    """Returns whether autograd must record a call with these arguments."""
    return torch.is_grad_enabled() and any(
        value.requires_grad for value in arguments if isinstance(value, torch.Tensor)
    )


def in_inference_mode() -> bool:
    """Returns whether this runs eagerly in `torch.inference_mode()`, where nothing differentiates
    or repeats it.

    `no_grad` is not enough: such a pass may be repeated with gradients later, and must then round
    in the same way.
    """
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def flop_counters() -> list[Any]:
    """Returns the active `FlopCounterMode`s; none in compiled code, which a mode does not see and
    cannot be traced.
    """
    if torch.compiler.is_compiling():
        return []
    modes: list[Any] = _get_current_dispatch_mode_stack()
    return [mode.counter for mode in modes if type(mode).__module__ == "torch.utils.flop_counter"]


@functools.cache
def is_plain(kind: type[torch.Tensor]) -> bool:
    """Returns whether a tensor class, like `nn.Parameter`, neither intercepts calls nor passes
    itself to results.
    """
    return kind is torch.Tensor or (
        kind.__torch_function__ is torch.nn.Parameter.__torch_function__
        and torch_dispatch(kind) is torch_dispatch(torch.Tensor)
    )


# The choice of the variant.


def current_choice() -> str:
    """Returns the current choice: that of the innermost `kernels` block, else SHARDZOO_KERNELS,
    else "auto".
    """
    return _forced or choice_of_environment()


@functools.cache
def choice_of_environment() -> str:
    """Returns what SHARDZOO_KERNELS chooses.

    It is read once: a decoding step asks a hundred times.
    """
    return _validated(os.environ.get("SHARDZOO_KERNELS") or "auto")


@contextlib.contextmanager
def kernels(choice: str) -> Iterator[None]:
    """Runs the enclosed ops, and backward passes started inside, with one choice of `CHOICES`.

    The choice applies to the whole process, because autograd runs backward passes on other threads.

    Raises:
        ValueError: The choice is unknown.
    """
    global _forced
    validated = _validated(choice)
    previous = _forced
    _forced = validated
    try:
        yield
    finally:
        _forced = previous


def _validated(choice: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"kernels {choice!r} do not exist; use one of {', '.join(CHOICES)}")
    return choice


def runs_compiled(tensor: torch.Tensor) -> bool:
    """Returns whether an op whose first tensor this is runs in a compiled kernel, which widens
    nothing but registers.

    Tensors without data count as compiled, so that counting a step's operators needs no device.
    """
    if tensor.is_meta or not tensor.is_contiguous() or same_dtype(tensor) is not None:
        return tensor.is_meta
    variant = choose_variant(tensor.device.type)
    return variant in ("cpp", "cuda") or (variant == "triton" and unfit_for_triton(tensor) is None)


def choose_variant(device_type: str) -> str:
    """Returns the variant for tensors of `device_type` under the current choice.

    Raises:
        RuntimeError: A forced variant cannot run on this machine.
    """
    return _best_variant(current_choice(), device_type)


@functools.cache
def _best_variant(choice: str, device_type: str) -> str:
    if choice != "auto":
        reason = unavailable(choice, device_type)
        if reason is not None:
            raise RuntimeError(f"SHARDZOO_KERNELS={choice} cannot run here: {reason}")
        log.info("kernels on %s: %s (forced)", device_type, choice)
        return choice
    preferred = ("cpp",) if device_type == "cpu" else ("cuda", "triton")
    reasons = {variant: unavailable(variant, device_type) for variant in preferred}
    best = next((variant for variant, reason in reasons.items() if reason is None), "reference")
    why = (
        "; ".join(reason for reason in reasons.values() if reason)
        if best == "reference"
        else "fastest available"
    )
    log.info("kernels on %s: %s (%s)", device_type, best, why)
    return best


def unavailable(variant: str, device_type: str) -> str | None:
    """Returns None if `variant` can run on `device_type`, else the reason why not, as one clause."""
    if variant == "reference":
        return None
    if variant == "triton":
        return triton_runs_on(device_type)
    if device_type == "cpu" and emulates_cuda():
        return (
            None
            if variant == "cuda"
            else "this build of the library runs its CUDA kernels on CPU tensors"
        )
    if device_type != ("cpu" if variant == "cpp" else "cuda"):
        return f"{variant} kernels do not run on {device_type} tensors"
    return missing_kernels(device_type)


@functools.cache
def triton_runs_on(device_type: str) -> str | None:
    """Returns None if Triton kernels can run on this device type, else the reason why not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device_type == "cpu" and not interpreted:
        return "Triton has no CPU target (TRITON_INTERPRET=1 runs its interpreter, for tests)"
    if device_type not in ("cpu", "cuda"):
        return f"the Triton kernels are not written for {device_type}"
    return None


def unfit_for_triton(tensor: torch.Tensor) -> str | None:
    """Returns why the Triton kernels do not take this tensor, or None if they do."""
    if tensor.dtype == torch.float64:
        return "the Triton kernels compute in fp32"
    if tensor.dim() != 2 and tensor.shape[-1] > LONGEST_TRITON_ROW:
        return f"rows longer than {LONGEST_TRITON_ROW}"
    return None


@functools.cache
def log_fallback(op: str, variant: str, why: str) -> None:
    """Logs, once per cause, that a call ran on the reference."""
    log.info("%s ran on the reference instead of %s: %s", op, variant, why)


# The compiled kernels.


@functools.cache
def load_error() -> str | None:
    """Loads the compiled kernels once.

    Returns None if their operators are registered, else the reason why not.
    """
    if not COMPILED.exists():
        return "the compiled kernels were not built (see `shardzoo doctor`)"
    try:
        torch.ops.load_library(str(COMPILED))
    except OSError as error:
        return f"{COMPILED.name} does not load: {error}"
    return None


@functools.cache
def _symbols() -> ctypes.CDLL:
    symbols = ctypes.CDLL(str(COMPILED))
    symbols.shardzoo_cpu_isa.restype = symbols.shardzoo_build_info.restype = ctypes.c_char_p
    return symbols


def has_cuda_kernels() -> bool:
    """Returns whether the library was compiled with the CUDA kernels."""
    return load_error() is None and bool(_symbols().shardzoo_has_cuda())


@functools.cache
def emulates_cuda() -> bool:
    """Returns whether the library is that of tests/ops/cuda_emulation, which runs CUDA kernels on
    CPU tensors.
    """
    return load_error() is None and hasattr(_symbols(), "shardzoo_emulates_cuda")


def cpu_isa() -> str:
    """Returns the instruction set that the CPU kernels use on this machine.

    Requires the library.
    """
    return _symbols().shardzoo_cpu_isa().decode()


def build_info() -> str:
    """Returns the compiler, torch's ABI and the machine code of the library, which is required."""
    return _symbols().shardzoo_build_info().decode()


def is_amd_with_avx512_bf16() -> bool:
    """Returns whether the processor is AMD's and the CPU kernels use AVX512-BF16; False without the
    library.
    """
    return (
        load_error() is None
        and bool(_symbols().shardzoo_cpu_is_amd())
        and cpu_isa() == "x86-64-v4+bf16"
    )


@functools.cache
def missing_kernels(device_type: str) -> str | None:
    """Returns None if compiled kernels exist for `device_type` ("cpu" or "cuda"), else the reason
    why not.
    """
    error = load_error()
    if error is None and device_type == "cuda" and not has_cuda_kernels():
        return "the library was built without CUDA kernels (no working nvcc at build time)"
    return error


@functools.cache
def _compiled_operator(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.shardzoo_kernels, name).default


def call_compiled(name: str, *arguments: Any) -> Any:
    """Runs one compiled kernel.

    The last arguments are the tensors that it writes, unless it returns its results.
    """
    return _compiled_operator(name)(*arguments)
