"""Whether tests visit all their cases, as `make test-all` does before a release, or the everyday part of them."""

import os
from collections.abc import Iterable
from typing import Any

EVERY_CASE = os.environ.get("SHARDZOO_TESTS") == "all"


def every_day(cases: Iterable[Any], *, more: Iterable[Any]) -> list[Any]:
    """The cases of `make test`; with `make test-all` also the others, which are no harder for the code under test."""
    return [*cases, *(more if EVERY_CASE else ())]
