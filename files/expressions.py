"""Tries foreign regular expressions before they are used, because some never end.

Python's `re` goes back and forth: `(a+)+!` needs 2**n steps to find that n letters do not match.
An expression with nested repetitions is therefore first run in a process of its own, whose time is
limited. There is no other way to stop `re` in a thread.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Collection, Iterable

from .printable import describe

SECONDS = 3  # of processor time that all expressions together may take
PATIENCE = 60  # seconds of a busy machine until the process is ended
MEMORY = 1 << 29  # bytes
LONGEST = 10_000  # characters of an expression
# Two repetitions, one after the other, take the square of a name's length, and each choice at most
# doubles that. More of them, or a repeated group, may take long.
MOST_REPETITIONS = 2
MOST_CHOICES = 4
_REPETITION = re.compile(r"[*+{]")
_CHOICE = re.compile(r"[|?]")
_REPEATED_GROUP = re.compile(r"\)[*+{]|\\\d|\(\?P=")

# Reads the expressions and texts, and matches each with each.
_PROGRAM = f"""
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
expressions, texts = json.load(sys.stdin)
for expression in expressions:
    for text in texts:
        re.match(expression, text)
        re.fullmatch(expression, text)
"""


def compile_expression(expression: str, what: str) -> re.Pattern[str]:
    """Compiles a foreign expression.

    Raises:
        ValueError: It is none, or too long; the message begins with `what`.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"{what} has {len(expression):,} characters; at most {LONGEST:,} are used")
    try:
        with warnings.catch_warnings():
            # Flags in the middle are an error since Python 3.11.
            warnings.simplefilter("error", DeprecationWarning)
            return re.compile(expression)
    except (re.error, OverflowError, RecursionError, MemoryError, DeprecationWarning) as error:
        raise ValueError(
            f"{what} {describe(expression)} is no regular expression: {error}"
        ) from None


def check_matching_time(expressions: Iterable[str], texts: Collection[str], what: str) -> None:
    """Checks that expressions can be matched with all texts in a few seconds.

    Args:
        expressions: What `re.match` or `re.fullmatch` will be called with.
        texts: Names of modules, for example.
        what: What a message calls the expressions.

    Raises:
        ValueError: They take longer.
    """
    slow = [expression for expression in expressions if not _is_quick(expression)]
    if not slow:
        return
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            input=json.dumps([slow, list(texts)]),
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        code = 1
    else:
        code = done.returncode
    if code != 0:
        raise ValueError(
            f"{what} {describe(slow[0])} takes too long to match, or too much memory; "
            f"write it without repetitions inside repetitions"
        )


def _is_quick(expression: str) -> bool:
    """Returns whether an expression is plainly quick; of others nothing is known."""
    if _REPEATED_GROUP.search(expression):
        return False
    has_few_repetitions = len(_REPETITION.findall(expression)) <= MOST_REPETITIONS
    return has_few_repetitions and len(_CHOICE.findall(expression)) <= MOST_CHOICES
