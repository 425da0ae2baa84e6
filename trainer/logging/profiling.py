"""A trace of a few steps, on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
