"""How fast a step is: FLOPs utilization, peak memory, and a profiler's trace."""

from __future__ import annotations

import contextlib
import functools
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

# Dense 16-bit matrix products, FLOP/s, from the makers' data sheets.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "V100": 125e12}


class Throughput:
    """Model FLOPs utilisation and peak memory of this rank.

    The arithmetic of the first forward pass is counted, operation by operation; a backward pass is twice as much, and
    other micro-batches cost in proportion to their elements (Chowdhery et al. 2022, appendix B, without recomputation).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._per_element: float | None = None
        self._elements = 0
        self._peak: float | None = None

    @contextlib.contextmanager
    def counting(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Around the forward pass of a micro-batch."""
        elements = _elements(batch)
        self._elements += elements
        if self._per_element is not None or not elements:
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        self._per_element = counter.get_total_flops() / elements

    def values(self, seconds: float) -> dict[str, float]:
        """Of the step that took so long."""
        if self._peak is None:
            self._peak = device_peak(self._device)
        flops = 3 * (self._per_element or 0.0) * self._elements
        self._elements = 0
        return {"mfu": flops / seconds / self._peak, "memory_gb": peak_memory(self._device) / 1e9}


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that this process has had allocated on its GPU, or resident in CPU memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_peak(device: torch.device) -> float:
    """FLOP/s of a GPU by its data sheet; of anything else, of a large fp32 matrix product that is timed here."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peak in PEAKS.items():
            if known in name:
                return peak
    return _matrix_products(device, torch.get_num_threads())


@functools.cache
def _matrix_products(device: torch.device, threads: int) -> float:
    """FLOP/s with so many threads, timed once in a process."""
    size = 1024
    a = torch.ones(size, size, device=device)
    best = min(_seconds(a) for _ in range(3))
    return 2 * size**3 / best


def _seconds(a: Tensor) -> float:
    started = time.perf_counter()
    (a @ a)[0, 0].item()
    return time.perf_counter() - started


def _elements(batch: Mapping[str, Any]) -> int:
    ids = batch.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else 0


WAITED = 2  # the first steps allocate and choose kernels


class StepProfiler:
    """Records `steps` steps after the first two with torch's profiler into a Chrome trace; with 0 it does nothing."""

    def __init__(self, steps: int, path: Path) -> None:
        self._steps, self._path = steps, path
        self._profile: Any = None

    def __enter__(self) -> StepProfiler:
        if self._steps:
            from torch.profiler import profile, schedule

            self._profile = profile(
                schedule=schedule(wait=WAITED - 1, warmup=1, active=self._steps, repeat=1),
                on_trace_ready=lambda done: done.export_chrome_trace(str(self._path)),
                profile_memory=True,
            )
            self._profile.__enter__()
        return self

    def step(self) -> None:
        """After each training step."""
        if self._profile is not None:
            self._profile.step()

    def __exit__(self, *exception: object) -> None:
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self._profile = None
