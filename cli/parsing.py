"""Parses command lines by tyro, whose boxes of errors become one line as all other errors are."""

from __future__ import annotations

import difflib
import io
import re
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin

import tyro

from .console import USAGE_ERROR, print_error

LONGEST_HINT = 60  # characters of an argument's text in a message


def parse_words(
    kind: Any, words: Sequence[str], program: str, *, quiet: bool = False, **options: Any
) -> Any:
    """Returns the arguments of a command line as an object of `kind`.

    A mistake exits with code 2 after one line on stderr; with `quiet` without it.

    Args:
        program: The name of the command, for messages.
        options: More arguments of `tyro.cli`.
    """
    with errors_in_one_line(list_fields(kind)):
        return tyro.cli(kind, prog=program, args=words, console_outputs=not quiet, **options)


def list_fields(kind: Any) -> list[str]:
    """Returns the names of the fields of a dataclass, or of those in a union."""
    names: list[str] = []
    for part in get_args(kind) or (kind,):
        if get_origin(part) is not None:
            names += list_fields(part)
        elif is_dataclass(part):
            names += [field.name for field in fields(part)]
    return names


def refuse_unknown_command(program: str, names: Iterable[str], words: Sequence[str]) -> None:
    """Exits with code 2 after one line, unless the first word is one of the commands `names` of a
    program.
    """
    names = list(names)
    if words and words[0] in names:
        return
    if not words or words[0].startswith("-"):
        message = f"{program} needs a command: {', '.join(names)}"
    else:
        message = f"there is no command {f'{program} {words[0]}'!r}"
        close = difflib.get_close_matches(words[0], names, n=1)
        message += f"; did you mean {close[0]}?" if close else f"; use one of {', '.join(names)}"
    print_error(ValueError(message))
    raise SystemExit(USAGE_ERROR)


@contextmanager
def errors_in_one_line(options: Iterable[str] = ()) -> Generator[None]:
    """Prints one line instead of each box that tyro prints before it exits.

    Args:
        options: The names of arguments, which the line spells as options.
    """
    shown = io.StringIO()
    try:
        with redirect_stderr(shown):
            yield
    except SystemExit as end:
        if end.code and shown.getvalue().strip():
            print_error(ValueError(shorten_box(shown.getvalue())), options)
        raise
    sys.stderr.write(shown.getvalue())


def shorten_box(box: str) -> str:
    """Returns what a box of tyro's says, without the texts of help in it."""
    lines = [line for line in box.splitlines() if line.strip()]
    # The first line is a title. A terminal without Unicode gets a box without borders.
    sections: list[list[str]] = [[]]
    for line in lines[1:]:
        if not line.strip("╭╮╰╯│ ─-"):
            sections.append([])
        else:
            sections[-1].append(line[2:].rstrip("│ "))
    message = ""
    for section in sections:
        words = " ".join(" ".join(section).split())
        if words.startswith("Missing from "):
            message = f"missing: {_list_missing(section[1:])}"
        elif words.startswith("Perhaps you meant"):
            names = re.findall(r"^ {4}(--\S+)", "\n".join(section), flags=re.MULTILINE)
            message += f"; did you mean {' or '.join(names)}?" if names else ""
        elif words.startswith("Available subcommands"):
            message += f"; {words[0].lower()}{words[1:]}"
        elif words.startswith("For full helptext"):
            page = re.search(r"(?:run:?|see) (.*)", words)
            message += f"; see {page[1]}" if page else ""
        elif words and not words.startswith("Argument helptext"):
            message += f"; {words}" if message else words
    # A dataclass's name says nothing to who types a command.
    message = re.sub(r"^Error parsing (?:[A-Z]\w*: )?", "", message.strip()).replace(".; ", "; ")
    message = re.sub(
        r"^[Ii]nvalid choice '([^']*)' for argument '([^']*)'. Expected one of \(([^)]*)\)",
        lambda found: _explain_choice(*found.groups()),
        message,
    ).replace("?; see", "? See")
    for pattern, text in PYTHON_MESSAGES:
        message = re.sub(pattern, text, message)
    return message[:1].lower() + message[1:]


def _list_options(found: re.Match[str]) -> str:
    """Returns the unknown options of a message without the values after them."""
    words = found[2].split(", ")
    return found[1] + ", ".join([word for word in words if word.startswith("-")] or words)


PYTHON_MESSAGES: tuple[tuple[str, Any], ...] = (
    # A number or nothing.
    (r"no type matching \{None\}\|(?:INT|FLOAT) could be .*?(?=invalid lit|could not conv)", ""),
    (r"invalid literal for int\(\) with base 10: ('[^']*')", r"a whole number is needed, not \1"),
    (r"could not convert string to float: ('[^']*')", r"a number is needed, not \1"),
    (r"([Uu]nrecognized options: )([^;]*)", _list_options),
)
"""What Python and tyro say about a wrong value, and what is said instead."""


def _explain_choice(given: str, option: str, listed: str) -> str:
    """Returns what an option may be, and which of that a wrong value may mean."""
    choices = re.findall(r"'([^']*)'", listed) or listed.split(", ")
    if "None" in choices:  # It is left out instead. tyro lists an optional choice in any order.
        choices = sorted(choice for choice in choices if choice != "None")
    text = f"{option} must be one of {', '.join(choices)}, not {given!r}"
    close = difflib.get_close_matches(given, choices, n=1)
    return f"{text}; did you mean {close[0]}?" if close else text


def _list_missing(lines: Sequence[str]) -> str:
    """Returns the arguments of a box that are missing, each with the beginning of its text."""
    found: list[tuple[str, str]] = []
    for line in lines:
        if not line.startswith(" " * 8):
            found.append((line.strip(), ""))
        elif found:
            name, text = found[-1]
            found[-1] = (name, f"{text} {line.strip()}".strip())
    shown: list[str] = []
    for name, text in found:
        if name.startswith("--"):
            shown.append(name)
            continue
        # An argument without an option has a type alone: its text says what it is.
        hint = re.split(r"[.,] ", text.removesuffix("(required)"))[0].strip()
        shown.append(f"{name} ({hint[:LONGEST_HINT].rstrip('. ')})")
    return ", ".join(shown)
