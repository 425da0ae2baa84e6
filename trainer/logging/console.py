"""Makes the console on which a run or a command prints."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

# Columns of output that goes to a file or a program. Nothing that is printed is wider, so that no
# path is broken into lines there.
WITHOUT_TERMINAL = 1 << 14


def make_console(**options: Any) -> Console:
    """Returns a console that fits its lines to a terminal's width, and breaks none elsewhere.

    Args:
        options: Of rich's `Console`.
    """
    stream = sys.stderr if options.get("stderr") else sys.stdout
    is_terminal = stream is not None and stream.isatty()
    return Console(width=None if is_terminal else WITHOUT_TERMINAL, **options)
