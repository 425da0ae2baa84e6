"""Makes text and values of a foreign file safe to print."""

from __future__ import annotations

LONGEST_VALUE = 100  # characters of a value in a message


def printable(text: str) -> str:
    """Returns a text whose unprintable characters are written as escapes, such as `\\x1b`.

    Such characters could control a terminal, or change the order in which a line is shown.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def describe(value: object) -> str:
    """Returns a short text for a value of a foreign file, such as `'abc'`, `3` or `a tuple`.

    Tuples and lists are not written out: a few hundred bytes of a file can describe one whose
    parts are shared so often that its text would never end.
    """
    if isinstance(value, str):
        return repr(value[:LONGEST_VALUE])
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int) and abs(value) < 1 << 64:
        return repr(value)
    return f"a {type(value).__name__}"
