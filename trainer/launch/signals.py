"""Ending a run when the machine is wanted back."""

from __future__ import annotations

import signal
import threading
from typing import Any


class StopSignal:
    """While open, SIGTERM sets `is_set` and no more; the loop ends after its step."""

    def __init__(self) -> None:
        self.is_set = False
        self._previous: Any = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # only there Python takes handlers
            self._previous = signal.signal(signal.SIGTERM, self._set)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _set(self, number: int, frame: object) -> None:
        self.is_set = True
