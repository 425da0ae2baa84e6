"""Diagnostics of training steps: FLOPs utilization, peak memory, a profiler trace, and where a NaN
comes from.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...ops import matmul
from ..engines.engine import Engine, ForwardStep
from ..launch.ranks import Ranks

LOGGED_RANKS = 16  # whose memory is logged one by one
# Dense 16-bit matmul, FLOP/s, from the data sheets.
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "V100": 125e12,
}


class Throughput:
    """Computes the model FLOPs utilization of this rank.

    The FLOPs of the first forward pass are counted, operation by operation. A backward pass is
    taken to need twice as many, and other micro-batches in proportion to their tokens (Chowdhery et
    al. 2022, appendix B, without recomputation).
    """

    def __init__(self, device: torch.device) -> None:
        self.flops_per_token: float | None = None
        self._device = device
        self._peak: float | None = None

    @contextlib.contextmanager
    def counting(self, tokens: int) -> Iterator[None]:
        """Counts the FLOPs of the enclosed forward pass, which has `tokens` tokens."""
        # Imported here because it brings Triton, which a rank without `mfu` does not need.
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            yield
        self.flops_per_token = counter.get_total_flops() / tokens

    def values(self, tokens: int, seconds: float) -> dict[str, float]:
        """Returns the values to log for a step."""
        if self._peak is None:
            self._peak = device_peak(self._device)
        flops = 3 * (self.flops_per_token or 0.0) * tokens
        return {"mfu": flops / seconds / self._peak}


def memory_by_rank(device: torch.device, ranks: Ranks) -> dict[str, float]:
    """Returns peak memory in GB: the most of any rank, and where there are several ranks that of
    each of the first.
    """
    peaks = [peak / 1e9 for peak in ranks.gather(peak_memory(device))]
    values = {"memory_gb": max(peaks)}
    if len(peaks) > 1:
        for rank, peak in enumerate(peaks[:LOGGED_RANKS]):
            values[f"memory_gb_rank_{rank}"] = peak
    return values


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory of this process in bytes: allocated on its GPU, or resident in CPU
    memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_peak(device: torch.device) -> float:
    """Returns the peak FLOP/s: of a known GPU from its data sheet, else from timing a large fp32
    product.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peak in PEAKS.items():
            if known in name:
                return peak
    return _matmul_flops(device, torch.get_num_threads())


@functools.cache
def _matmul_flops(device: torch.device, threads: int) -> float:
    """Returns the FLOP/s of a product as the models compute it.

    It is timed once for each number of threads.
    """
    size = 1024
    a = torch.ones(size, size, device=device)
    best = min(_seconds(a) for _ in range(3))
    return 2 * size**3 / best


def _seconds(a: Tensor) -> float:
    started = time.perf_counter()
    matmul(a, a)[0, 0].item()
    return time.perf_counter() - started


SKIPPED_STEPS = 2  # not recorded, because the first ones allocate memory and choose kernels


class StepProfiler:
    """Records `steps` steps, after the first two, with torch's profiler. Writes a Chrome trace."""

    def __init__(self, steps: int, path: Path) -> None:
        self._steps = steps
        self._path = path
        self._profile: Any = None

    def __enter__(self) -> StepProfiler:
        from torch.profiler import profile, schedule

        self._profile = profile(
            schedule=schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=self._steps, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(self._path)),
            profile_memory=True,
        )
        self._profile.__enter__()
        return self

    def step(self) -> None:
        """Tells the profiler that a training step has ended."""
        self._profile.step()

    def __exit__(self, *exception: object) -> None:
        self._profile.__exit__(None, None, None)


@torch.no_grad()
def diagnose_non_finite(
    engine: Engine, forward_step: ForwardStep, batch: dict[str, Any], ranks: Ranks
) -> str:
    """Repeats a forward pass.

    Returns a message that names the parameter or module output that is not finite, or "".
    """
    wrong = ""
    for name, parameter in engine.module.named_parameters():
        if not torch.isfinite(parameter).all():
            wrong = f"the parameter {name} is not finite"
            break
    if any(ranks.gather(wrong)):
        return wrong
    found: list[str] = []
    hooks = [
        module.register_forward_hook(_make_hook(name, found))
        for name, module in engine.module.named_modules()
        if name
    ]
    try:
        forward_step(batch, engine.model, None)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else ""


def _make_hook(name: str, found: list[str]) -> Any:
    """Returns a hook that adds a message to `found` if an output of the module `name` is not
    finite.
    """

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        values = output if isinstance(output, (tuple, list)) else (output,)
        kind = type(module).__name__
        for value in values:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if not torch.isfinite(value).all():
                found.append(f"{name} ({kind}) is the first module whose output is not finite")

    return hook
