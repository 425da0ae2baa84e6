"""Measures a case: checks correctness first, then times all contenders in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch

from .. import variants
from ..registration import OPS
from .cases import Case, Tensors

# The error of a few roundings in the dtype: relative, and as a share of the largest value.
TOLERANCE = {
    torch.float32: (1e-4, 1e-5),
    torch.bfloat16: (2**-6, 2**-7),
    torch.float16: (2**-8, 2**-9),
}

# For so many clock cycles, about a millisecond, a GPU waits while the host queues the work, so that
# queuing is not timed.
QUEUED_CYCLES = 2_000_000
# More than any GPU's L2 cache holds.
FLUSHED_BYTES = 256 << 20


@dataclass
class Timing:
    """The times of repeated runs, in milliseconds.

    Attributes:
        spread: The third quartile minus the first.
    """

    median: float
    least: float
    spread: float

    @classmethod
    def from_seconds(cls, seconds: list[float]) -> Timing:
        """Returns the statistics of the times of runs, in seconds."""
        ms = sorted(1000 * s for s in seconds)
        quarter = len(ms) // 4
        return cls(ms[len(ms) // 2], ms[0], ms[-1 - quarter] - ms[quarter])


@dataclass
class Result:
    """The result of one case at one dtype.

    Bandwidths are the fewest necessary bytes per median time, in GB/s.

    Attributes:
        missing: The contenders that failed, with the reasons.
    """

    op: str
    dtype: str
    shape: list[int]
    variant: str
    baseline: str
    error: str | None
    timings: dict[str, Timing]
    gigabytes_forward: float = 0.0
    gigabytes_backward: float = 0.0
    gigabytes_copy: float = 0.0
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def rivals(self) -> list[str]:
        """The names of the measured contenders besides ours, eager and compiled PyTorch and the
        copy.
        """
        return [
            name
            for name in self.timings
            if name not in ("copy", "eager", "compile") and "ours" not in name
        ]

    def bandwidth(self, contender: str) -> float:
        """Returns the GB/s of a contender: forward, backward, both or a copy."""
        moved = {
            "ours forward out": self.gigabytes_forward,
            "ours backward out": self.gigabytes_backward,
            "copy": self.gigabytes_copy,
        }
        total = moved.get(contender, self.gigabytes_forward + self.gigabytes_backward)
        return 1000 * total / self.timings[contender].median

    def of_copy(self, contender: str) -> float:
        """Returns a contender's share of the bandwidth of the measured copy."""
        return self.bandwidth(contender) / self.bandwidth("copy")

    def of_copy_both(self) -> float:
        """Returns the share of the copy's bandwidth that forward and backward with `out` reach
        together.
        """
        forward = self.timings["ours forward out"].median
        backward = self.timings["ours backward out"].median
        moved = self.gigabytes_forward + self.gigabytes_backward
        return 1000 * moved / (forward + backward) / self.bandwidth("copy")

    def speedup(self, contender: str) -> float | None:
        """Returns how many times faster than a contender ours is, forward and backward."""
        if contender not in self.timings or "ours" not in self.timings:
            return None
        return self.timings[contender].median / self.timings["ours"].median

    def to_dict(self) -> dict:
        """Returns the result for JSON, with the derived figures."""
        derived = {
            name: {"GB/s": self.bandwidth(name), "of copy": self.of_copy(name)}
            for name in self.timings
        }
        ratios = {
            name: self.speedup(name)
            for name in self.timings
            if name != "copy" and "out" not in name
        }
        both = self.of_copy_both() if self.timings else None
        return {**asdict(self), "out_of_copy": both, "bandwidth": derived, "ours_is_faster": ratios}


def gradients(
    function: Callable, tensors: Tensors, leaves: tuple[str, ...], cotangent: torch.Tensor | None
):
    """Returns the output and the gradients of the leaves. A cotangent of None means ones."""
    inputs = {name: t.detach().requires_grad_(name in leaves) for name, t in tensors.items()}
    output = function(inputs)
    cotangent = torch.ones_like(output) if cotangent is None else cotangent.to(output.dtype)
    return output.detach(), torch.autograd.grad(
        output, [inputs[name] for name in leaves], cotangent
    )


def check(case: Case, tensors: Tensors, dtype: torch.dtype, cotangent: torch.Tensor) -> str | None:
    """Returns None if ours agrees with the fp64 reference in outputs and gradients, else the
    difference.
    """
    wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    output, grads = gradients(case.ours, tensors, case.leaves, cotangent)
    with variants.kernels("reference"):
        wanted, wanted_grads = gradients(case.ours, wide, case.leaves, cotangent)
    relative, absolute = TOLERANCE[dtype]
    pairs = [("output", output, wanted), *zip(case.leaves, grads, wanted_grads, strict=True)]
    for name, got, expected in pairs:
        error = (got.double() - expected).abs()
        allowed = relative * expected.abs() + absolute * expected.abs().max()
        if not bool((error <= allowed).all()):
            return f"{name} is off by {error.max().item():.3g} (largest value {expected.abs().max().item():.3g})"
    return None


def contenders(
    case: Case, tensors: Tensors, cotangent: torch.Tensor, compiled: bool
) -> dict[str, Callable]:
    """Returns the functions to time, by name."""
    op = OPS[case.forward[0]]
    arguments = case.forward[1]
    inputs = arguments(tensors)
    outputs = op.allocate(*inputs)
    run_forward = getattr(torch.ops.shardzoo, f"{op.name}_out")
    kept = dict(zip(op.outputs, outputs, strict=True))
    run_forward(*inputs, **kept)
    back = OPS[case.backward[0]]
    back_arguments = case.backward[1]
    back_inputs = back_arguments(tensors, outputs, cotangent)
    back_outputs = dict(zip(back.outputs, back.allocate(*back_inputs), strict=True))
    run_backward = getattr(torch.ops.shardzoo, f"{back.name}_out")
    source = tensors["x"]
    target = torch.empty_like(source)

    def training(function, leaves=case.rival_leaves or case.leaves):
        return lambda: gradients(function, tensors, leaves, cotangent)

    timed = {
        "copy": lambda: target.copy_(source),
        "ours": training(case.ours, case.leaves),
        "ours forward out": lambda: run_forward(*inputs, **kept),
        "ours backward out": lambda: run_backward(*back_inputs, **back_outputs),
        "eager": training(case.eager),
    }
    if compiled:
        timed["compile"] = training(torch.compile(case.eager, dynamic=False))
    return timed | {name: training(function) for name, function in case.rivals.items()}


def warm_up(timed: dict[str, Callable]) -> dict[str, str]:
    """Runs every contender twice, to compile it and to touch its memory; removes rivals that fail.

    Returns:
        The names of the removed contenders with their errors.
    """
    failed = {}
    for name, function in list(timed.items()):
        try:
            function()
            function()
        except Exception as error:
            if name.startswith(("ours", "copy")):
                raise
            failed[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            del timed[name]
    return failed


def time_interleaved(
    timed: dict[str, Callable], device: str, repetitions: int
) -> dict[str, Timing]:
    """Times all contenders.

    Each round runs every contender once, so that a disturbance affects all of them. On a GPU
    nothing of the inputs is in the L2 cache, as for an operator of a large model.
    """
    flushed_bytes = FLUSHED_BYTES if device == "cuda" else 0
    flushed = torch.empty(flushed_bytes, dtype=torch.uint8, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(repetitions):
        for name, function in timed.items():
            if device == "cuda":
                start = torch.cuda.Event(enable_timing=True)
                stop = torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                flushed.zero_()
                torch.cuda._sleep(QUEUED_CYCLES)
                start.record()
                function()
                stop.record()
                stop.synchronize()
                seconds[name].append(start.elapsed_time(stop) / 1000)
            else:
                begin = time.perf_counter()
                function()
                seconds[name].append(time.perf_counter() - begin)
    return {name: Timing.from_seconds(values) for name, values in seconds.items()}


def measure(
    case: Case, device: str, dtype: torch.dtype, *, repetitions: int, compiled: bool
) -> Result:
    """Checks and times one case. A wrong result has an `error` and no timings."""
    tensors = case.make(device, dtype)
    x = tensors["x"]
    with torch.no_grad():
        shape = case.ours(tensors).shape
    cotangent = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(1))
    # Losses are fp32 in any case.
    if case.name != "cross_entropy":
        cotangent = cotangent.to(dtype)
    error = check(case, tensors, dtype, cotangent)
    variant = variants.choose_variant(device)
    named = str(dtype).removeprefix("torch.")
    result = Result(case.name, named, list(x.shape), variant, case.baseline, error, {})
    size = x.numel() * x.element_size() / 1e9
    mask = tensors["mask"].numel() / 1e9 if "mask" in tensors else 0.0
    result.gigabytes_forward = case.forward_passes * size + mask
    result.gigabytes_backward = case.backward_passes * size
    result.gigabytes_copy = 2 * size
    if error is None:
        timed = contenders(case, tensors, cotangent, compiled)
        result.missing = warm_up(timed)
        result.timings = time_interleaved(timed, device, repetitions)
    return result
