"""Divides counts (heads, rows, ranks) into parts, and names the numbers of parts that work."""

from __future__ import annotations

from collections.abc import Sequence


def find_first_unit(count: int, rank: int, size: int) -> int:
    """Returns the first of `count` units that a rank of `size` holds: ceil(rank * count / size).

    If k divides both `count` and `size`, each k-th of the units lands on whole ranks. This keeps
    the query heads of one key-value head together.
    """
    return -(-rank * count // size)


def divisors(count: int) -> list[int]:
    """Returns all divisors of a positive count in ascending order."""
    low = [d for d in range(1, int(count**0.5) + 1) if count % d == 0]
    return sorted({*low, *(count // d for d in low)})


def describe_sizes(sizes: Sequence[int]) -> str:
    """Returns a list for a message, such as "1, 2, 3 or 6"."""
    *head, last = (str(size) for size in sizes)
    return f"{', '.join(head)} or {last}" if head else last


def divide(count: int, size: int, what: str) -> int:
    """Returns `count / size`, e.g. `divide(12, 4, "attention heads")`.

    Raises:
        ValueError: `size` does not divide `count`; the message names the sizes that do, as in
            "12 attention heads cannot be split 5 ways; use 1, 2, 3, 4, 6 or 12".
    """
    if size < 1 or count % size:
        choices = f"; use {describe_sizes(divisors(count))}" if count > 0 else ""
        raise ValueError(f"{count} {what} cannot be split {size} ways{choices}")
    return count // size
