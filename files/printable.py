"""Makes text that comes from a foreign file safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """Returns a text whose unprintable characters are written as escapes, such as `\\x1b`.

    Such characters could control a terminal, or change the order in which a line is shown.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
