"""The operator library `torch.ops.shardzoo`: how an op is registered, and which of its variants runs.

An op is described by pure functions:

    allocate(*arguments) -> tuple of fresh, uninitialized outputs; it is also the fake kernel
    reference(*arguments) -> tuple of outputs, naive, in PyTorch operators: the ground truth of every other variant
    prepare(*arguments) -> the arguments as the compiled kernels take them (contiguous), or a string: why they cannot

An op `name` gets a sibling `name_out` that writes into tensors passed by the caller. Calling the `Op` itself does
what `torch.ops.shardzoo.<name>` does, without the cost of torch's dispatcher where nothing needs it.

`SHARDZOO_KERNELS` (or `kernels(...)` for a block of code) chooses the variant:

    auto       the fastest variant that exists for the tensor's device, else the reference (the default)
    reference  PyTorch's own operators
    cpp        the compiled kernels for CPU tensors
    cuda       the compiled kernels for CUDA tensors
    triton     the Triton kernels (CUDA tensors, or CPU tensors under TRITON_INTERPRET=1)

A forced variant that does not exist here is an error, never a silent fallback. A single call that a variant does not
cover (mixed dtypes, an empty tensor) runs on the reference, which computes the same function; it is logged once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import logging
import math
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
POOLED = 1 << 20  # bytes: outputs of this size and more get their memory from the pool (csrc/binding/pool.cpp)
Outputs = tuple[torch.Tensor, ...]
OPS: dict[str, Op] = {}  # by name
torch_dispatch = attrgetter("__torch_dispatch__")
log = logging.getLogger("shardzoo.ops")

_forced: str | None = None  # set by `kernels`; None means the environment decides


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
        """The operator, without PyTorch's dispatcher where nobody watches: a small call spends most of its time there.

        This is `can_bypass_dispatcher` and `needs_gradient` written out: on an accelerator, where a call of a kernel
        returns at once, the Python before it is what a step waits for.
        """
        if is_watched() or arguments[0].device.type not in ("cpu", "cuda"):
            return self._operator(*arguments)
        gradient = False
        for value in arguments:
            if isinstance(value, torch.Tensor):
                if type(value) is not torch.Tensor and not is_plain(type(value)):
                    return self._operator(*arguments)
                gradient = gradient or value.requires_grad
        if not gradient or not torch.is_grad_enabled():
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
        variant = choose_variant(first.device.type)
        if variant == "reference":
            return False
        prepared = "an empty tensor" if first.numel() == 0 else self.prepare(*arguments)
        if not isinstance(prepared, str) and variant == "triton":
            prepared = unfit_for_triton(first) or prepared
        if isinstance(prepared, str):
            log_fallback(self.name, variant, prepared)
            return False
        if variant == "triton":
            from .triton_kernels import KERNELS

            KERNELS[self.name](*prepared, *outputs)
        else:
            call_compiled(self.name, *prepared, *outputs)
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


# What an op's description is written with.


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """fp32 for fp32 and the half types, fp64 for fp64: the type every variant calculates in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def same_dtype(*tensors: torch.Tensor | None) -> str | None:
    """The reason why compiled kernels cannot take these tensors together, or None if they can."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(dtypes) > 1:
        return "mixed dtypes " + ", ".join(sorted(str(dtype) for dtype in dtypes))
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16, torch.float64}:
        return f"no kernel for {dtypes.pop()}"
    return None


def contiguous(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Each tensor in row-major order; None stays None."""
    return tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)


def empty_pooled(like: torch.Tensor, *size: int) -> torch.Tensor:
    """A contiguous, uninitialized tensor of `size` (default: that of `like`) with the dtype and device of `like`.

    A large one on the CPU gets memory that an earlier tensor left, if the compiled kernels are there.
    """
    size = size or like.shape
    large = math.prod(size) * like.itemsize >= POOLED
    if large and is_plain(type(like)) and like.device.type == "cpu" and load_error() is None:
        return recycled(like, size)
    return like.new_empty(size)


def empty_placeholder(like: torch.Tensor) -> torch.Tensor:
    """A tensor of size 0 in the place of an output that this call has no use for."""
    return like.new_empty(0)


# Whether a call may go past PyTorch's dispatcher.


def is_watched() -> bool:
    """Whether something traces, transforms or intercepts calls now.

    Counters of arithmetic do not count: a step that is counted has the bits of one that is not.
    """
    return (
        torch.compiler.is_compiling()
        or (torch._C._len_torch_dispatch_stack() > 0 and torch._C._len_torch_dispatch_stack() > len(flop_counters()))
        or torch._C._len_torch_function_stack() > 0
        or peek_interpreter_stack() is not None
        or torch._C._is_tracing()
    )


def can_bypass_dispatcher(*arguments: Any) -> bool:
    """Whether a call may go past the dispatcher: nobody watches, the first tensor holds data, and no tensor is of a
    subclass that would want to see the call."""
    return (
        not is_watched()
        and arguments[0].device.type in ("cpu", "cuda")
        and all(not isinstance(value, torch.Tensor) or is_plain(type(value)) for value in arguments)
    )


def needs_gradient(*arguments: Any) -> bool:
    """Whether autograd has to know of a call with these arguments."""
    return torch.is_grad_enabled() and any(
        value.requires_grad for value in arguments if isinstance(value, torch.Tensor)
    )


def in_inference_mode() -> bool:
    """Inside `torch.inference_mode()`, eagerly: nothing will ever differentiate, repeat or trace this calculation.

    `no_grad` is not enough: that pass may be repeated with gradients later, and must round as it does then.
    """
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def flop_counters() -> list[Any]:
    """Each active `FlopCounterMode`."""
    modes: list[Any] = _get_current_dispatch_mode_stack()
    return [mode.counter for mode in modes if type(mode).__module__ == "torch.utils.flop_counter"]


@functools.cache
def is_plain(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of this class neither see the calls made with them nor pass their class on; parameters do not."""
    return kind is torch.Tensor or (
        kind.__torch_function__ is torch.nn.Parameter.__torch_function__
        and torch_dispatch(kind) is torch_dispatch(torch.Tensor)
    )


# Which variant runs.


def current_choice() -> str:
    """The choice in force: the innermost `kernels` block, else SHARDZOO_KERNELS, else "auto"."""
    return _forced or _validated(os.environ.get("SHARDZOO_KERNELS") or "auto")


@contextlib.contextmanager
def kernels(choice: str) -> Iterator[None]:
    """Run the enclosed ops with one choice of `CHOICES`; backward passes started inside follow it too.

    The choice is process-wide, because autograd runs backward passes on threads of its own.

    Raises:
        ValueError: an unknown choice.
    """
    global _forced
    previous, _forced = _forced, _validated(choice)
    try:
        yield
    finally:
        _forced = previous


def _validated(choice: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"kernels {choice!r} do not exist; use one of {', '.join(CHOICES)}")
    return choice


def choose_variant(device_type: str) -> str:
    """The variant for tensors of `device_type` under the choice in force.

    Raises:
        RuntimeError: a forced variant cannot run here.
    """
    choice = current_choice()
    if choice != "auto":
        reason = unavailable(choice, device_type)
        if reason is not None:
            raise RuntimeError(f"SHARDZOO_KERNELS={choice} cannot run here: {reason}")
        log_choice(choice, device_type, "forced")
        return choice
    preferred = ("cpp",) if device_type == "cpu" else ("cuda", "triton")
    reasons = []
    for variant in preferred:
        reason = unavailable(variant, device_type)
        if reason is None:
            log_choice(variant, device_type, "fastest available")
            return variant
        reasons.append(reason)
    log_choice("reference", device_type, "; ".join(reasons))
    return "reference"


def unavailable(variant: str, device_type: str) -> str | None:
    """None if `variant` can run on `device_type`, else the reason why not, as one clause."""
    if variant == "reference":
        return None
    if variant == "triton":
        return triton_runs_on(device_type)
    if device_type != ("cpu" if variant == "cpp" else "cuda"):
        return f"{variant} kernels do not run on {device_type} tensors"
    return missing_kernels(device_type)


@functools.cache
def triton_runs_on(device_type: str) -> str | None:
    """None if Triton kernels can run on this device type, else the reason why not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device_type == "cpu" and not interpreted:
        return "Triton has no CPU target (TRITON_INTERPRET=1 runs its interpreter, for tests)"
    if device_type not in ("cpu", "cuda"):
        return f"the Triton kernels are not written for {device_type}"
    return None


def unfit_for_triton(tensor: torch.Tensor) -> str | None:
    """Why the Triton kernels do not take this tensor, or None if they do."""
    from .triton_kernels.common import LONGEST_ROW

    if tensor.dtype == torch.float64:
        return "the Triton kernels calculate in fp32"
    if tensor.dim() != 2 and tensor.shape[-1] > LONGEST_ROW:
        return f"rows longer than {LONGEST_ROW}"
    return None


@functools.cache
def log_choice(variant: str, device_type: str, why: str) -> None:
    """Log a choice the first time it is made."""
    log.info("kernels on %s: %s (%s)", device_type, variant, why)


@functools.cache
def log_fallback(op: str, variant: str, why: str) -> None:
    """Log, once per cause, that one call ran on the reference."""
    log.info("%s ran on the reference instead of %s: %s", op, variant, why)


# The compiled kernels, if they were built.


@functools.cache
def load_error() -> str | None:
    """Load the compiled kernels once. None if their operators are registered, else the reason why not."""
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
    symbols.shardzoo_cpu_isa.restype = ctypes.c_char_p
    return symbols


def has_cuda_kernels() -> bool:
    """Whether the library was compiled with the CUDA kernels."""
    return load_error() is None and bool(_symbols().shardzoo_has_cuda())


def cpu_isa() -> str:
    """The instruction set that the CPU kernels run on here; needs the library."""
    return _symbols().shardzoo_cpu_isa().decode()


def is_amd_with_avx512() -> bool:
    """Whether the processor is AMD's and the CPU kernels run on AVX-512; False without the library."""
    return load_error() is None and bool(_symbols().shardzoo_cpu_is_amd()) and cpu_isa() == "x86-64-v4"


@functools.cache
def missing_kernels(device_type: str) -> str | None:
    """None if compiled kernels exist for `device_type` ("cpu" or "cuda"), else the reason why not."""
    error = load_error()
    if error is None and device_type == "cuda" and not has_cuda_kernels():
        return "the library was built without CUDA kernels (no working nvcc at build time)"
    return error


@functools.cache
def _compiled_operator(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.shardzoo_kernels, name).default


def call_compiled(name: str, *arguments) -> None:
    """Run one compiled kernel; the last arguments are the tensors it writes."""
    _compiled_operator(name)(*arguments)


def recycled(like: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """An uninitialized CPU tensor; a large one gets memory that an earlier one left (csrc/binding/pool.h)."""
    return _compiled_operator("recycled")(like, size)
