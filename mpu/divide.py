"""Dividing a count among ranks, with an error that names the sizes that work."""

from __future__ import annotations

from collections.abc import Sequence


def divisors(count: int) -> list[int]:
    """All divisors of a positive count, ascending."""
    low = [d for d in range(1, int(count**0.5) + 1) if count % d == 0]
    return sorted({*low, *(count // d for d in low)})


def describe_sizes(sizes: Sequence[int]) -> str:
    """`1, 2, 3 or 6`."""
    *head, last = (str(size) for size in sizes)
    return f"{', '.join(head)} or {last}" if head else last


def divide(count: int, size: int, what: str) -> int:
    """`count / size`, e.g. `divide(12, 4, "attention heads")`.

    Raises `ValueError` such as "12 attention heads cannot be split 5 ways; use 1, 2, 3, 4, 6 or 12".
    """
    if size < 1 or count % size:
        choices = f"; use {describe_sizes(divisors(count))}" if count > 0 else ""
        raise ValueError(f"{count} {what} cannot be split {size} ways{choices}")
    return count // size
