"""Whether tests visit all their cases, as `make test-all` does before a release, or the everyday part of them."""

import os
from collections.abc import Iterable
from typing import Any

EVERY_CASE = os.environ.get("SHARDZOO_TESTS") == "all"


def by_turns(cases: Iterable[Any], step: int) -> list[Any]:
    """Of cases that are alike, the first of each `step` ones; with `make test-all` all of them."""
    return list(cases)[:: 1 if EVERY_CASE else step]


def every_day(cases: Iterable[Any], *, more: Iterable[Any]) -> list[Any]:
    """The cases of `make test`; with `make test-all` also the others, which are no harder for the code under test."""
    return [*cases, *(more if EVERY_CASE else ())]


def examples(number: int) -> int:
    """How many inputs hypothesis tries: all with `make test-all`, else a quarter, the same ones each time."""
    return number if EVERY_CASE else max(1, number // 4)
