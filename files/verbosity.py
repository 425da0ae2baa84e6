"""How much a command prints, which its options `--quiet` and `--verbose` say.

It is an environment variable, because a command may start other processes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

VARIABLE = "SHARDZOO_VERBOSITY"
OPTIONS = {"--quiet": "quiet", "--verbose": "verbose"}


def is_quiet() -> bool:
    """Returns whether only results and errors are printed: no progress, no notices, no summary."""
    return os.environ.get(VARIABLE) == "quiet"


def is_verbose() -> bool:
    """Returns whether errors of the user are printed with their traceback."""
    return os.environ.get(VARIABLE) == "verbose"


def take_verbosity(argv: Sequence[str]) -> list[str]:
    """Returns a command line without `--quiet` and `--verbose`, and makes this process, and those
    that it starts, print accordingly. If both are given, the last one counts.
    """
    words: list[str] = []
    for place, word in enumerate(argv):
        if word == "--":
            return [*words, *argv[place:]]
        if word in OPTIONS:
            os.environ[VARIABLE] = OPTIONS[word]
        else:
            words.append(word)
    return words
