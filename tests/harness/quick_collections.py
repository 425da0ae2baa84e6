"""Garbage collections that take little time in the processes of the harness."""

import gc


def ignore_what_exists() -> None:
    """Keeps collections from visiting what exists, whose pages a forked process would copy; later ones are rare.

    With Python's usual threshold of 700 they take a tenth of the tests' time, and what tests leave is seldom a cycle.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
