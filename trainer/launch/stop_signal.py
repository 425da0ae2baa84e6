"""Lets a signal end a run after its step: SIGTERM, and the SIGHUP of a terminal that is closed."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any


def signals_that_save() -> list[signal.Signals]:
    """Returns the signals after which a run saves and ends.

    Under `nohup`, SIGHUP is ignored: the run is to outlive its terminal.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return [signal.SIGTERM]
    return [signal.SIGTERM, signal.SIGHUP]


class StopSignal:
    """A context in which SIGTERM and SIGHUP only set `is_set`. The training loop then ends after
    its step.

    A step reads `is_set` once, before its update, so that all ranks end after the same one. If the
    context does not end within `grace_period` seconds, such as because a step never ends, the
    process does, with the exit code that a shell reports for the signal.

    Attributes:
        is_set: Whether a signal has come.
        number: The first one; SIGTERM before any has come.
    """

    def __init__(self, grace_period: float) -> None:
        self.is_set = False
        self.number = signal.SIGTERM
        self._grace_period = grace_period
        self._previous: dict[signal.Signals, Any] = {}
        self._deadline: threading.Timer | None = None

    @property
    def exit_code(self) -> int:
        """128 + the number of the signal."""
        return 128 + self.number

    def __enter__(self) -> StopSignal:
        # Python allows signal handlers only in the main thread.
        if threading.current_thread() is threading.main_thread():
            for number in signals_that_save():
                self._previous[number] = signal.signal(number, self._set)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._deadline is not None:
            self._deadline.cancel()

    def _set(self, number: int, frame: object) -> None:
        leave_closed_terminal()
        if not self.is_set:
            self.number = signal.Signals(number)
            self._deadline = threading.Timer(self._grace_period, self._end)
            self._deadline.daemon = True
            self._deadline.start()
        self.is_set = True

    def _end(self) -> None:
        with suppress(OSError):
            print(
                f"the run did not end within --grace-period {self._grace_period:g} s of "
                f"{self.number.name}",
                file=sys.stderr,
                flush=True,
            )
        os._exit(self.exit_code)


@contextmanager
def printing() -> Generator[None]:
    """A context in which a run prints, which may fail because the terminal is closed at this
    moment. The SIGHUP that saves the run then follows.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO or not leave_closed_terminal():
            raise


def leave_closed_terminal() -> bool:
    """Discards from now on what this process would print to a terminal that has been closed.

    Each attempt to print there fails, which would end a run that only wants to say that it has
    saved.

    Returns:
        Whether the process printed to a closed terminal.
    """
    has_left = False
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
                has_left = True
    return has_left
