"""Prints the help page of a command: what is required first, then its options by topic, on one
screen.

`--help` has a line for each option. A command with more options than fit shows the most used ones.
`--help-all` shows every one, with its whole text.
"""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
import tyro

SHORT = ("-h", "--help")
WHOLE = "--help-all"
# Topics.
REQUIRED = "required"
POSITIONAL = "arguments"
# Columns of a page.
NARROWEST = 60
WIDEST = 110
WIDEST_NAME = 33  # columns of an option and its value, where its text begins beside it
SHORTEST = 20  # characters that a shortened text has at least
SIMPLE = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class HelpPage:
    """The help of a command whose arguments are the dataclass `arguments`.

    Args:
        usage: What the line of usage shows after the program; by default the required arguments.
        description: By default the docstring of `arguments`.
        required: Fields that are needed although they have a default: the command asks for one of
            them.
        sections: The topics in the order of the page: the first field of each, in the order in
            which the fields are declared, and its title. Fields before the first one belong to
            "options".
        common: The fields that the short page shows, in this order within a topic; by default all.
        names: Other spellings of an option that the page shows too, such as {"model_parallel_size":
            "--tp"}.
        texts: Texts in place of the fields' own.
    """

    program: str
    arguments: type
    usage: str = ""
    description: str = ""
    required: Sequence[str] = ()
    sections: Mapping[str, str] = field(default_factory=dict)
    common: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """An argument on a page: its name with what it takes, its text, its default value, and its
    topic.
    """

    field: str
    name: str
    text: str
    default: str
    section: str

    def lines(self, indent: int, width: int, *, whole: bool) -> list[str]:
        """Returns the lines of the argument; its text begins at column `indent`."""
        name = f"  {self.name}"
        default = f" [{self.default}]" if self.default else ""
        if not whole:
            name = f"{name:<{indent - 2}}  "
            return [
                f"{name}{shortened(self.text, width - len(name) - len(default))}{default}".rstrip()
            ]
        wrapped = textwrap.wrap(self.text + default, width - indent, break_long_words=False) or [""]
        if len(name) > indent - 2:
            return [name, *(" " * indent + line for line in wrapped if line)]
        return [
            f"{name:<{indent}}{wrapped[0]}".rstrip(),
            *(" " * indent + line for line in wrapped[1:]),
        ]


def show_help(
    page: HelpPage, argv: Sequence[str], default: Any = None, *, quiet: bool = False
) -> None:
    """Prints the page and raises SystemExit(0), if the command line asks for help; otherwise
    returns.

    Args:
        default: An object with the values that arguments have if they are not given; by default
            those of the class.
        quiet: Print nothing; for every rank except the first.
    """
    asked = next((word for word in argv if word in (*SHORT, WHOLE)), None)
    if asked is None:
        return
    if not quiet:
        print(
            render(
                page,
                default,
                whole=asked == WHOLE,
                width=shutil.get_terminal_size((100, 24)).columns,
            )
        )
    raise SystemExit(0)


def show_commands(
    program: str, description: str, pages: Mapping[str, HelpPage], argv: Sequence[str]
) -> None:
    """Prints the help of a command that has commands of its own, or of one of these, like
    `show_help`.
    """
    if argv and argv[0] in pages:
        show_help(pages[argv[0]], argv[1:])
    elif argv and argv[0] in (*SHORT, WHOLE):
        texts = {name: _description(page) for name, page in pages.items()}
        print(commands_page(program, description, texts))
        raise SystemExit(0)


def commands_page(program: str, description: str, commands: Mapping[str, str]) -> str:
    """Returns the page that lists the commands of a program."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, NARROWEST), WIDEST)
    indent = max(map(len, commands)) + 4
    lines = [f"usage: {program} COMMAND [options]", "", description, "", "commands:"]
    lines += [
        f"  {name:<{indent - 2}}{shortened(text, width - indent)}"
        for name, text in commands.items()
    ]
    return "\n".join([*lines, "", f"`{program} COMMAND --help` shows the options of a command."])


def render(page: HelpPage, default: Any = None, *, whole: bool = False, width: int = 100) -> str:
    """Returns a page's text.

    Args:
        whole: With every option and its whole text, instead of a line for each of the most used
            ones.
        width: Columns of the terminal.
    """
    width = min(max(width, NARROWEST), WIDEST)
    every = list(entries(page, default))
    shown = every
    if page.common and not whole:
        order = {name: place for place, name in enumerate(page.common)}
        shown = [entry for entry in every if entry.field in order or entry.section == REQUIRED]
        shown.sort(key=lambda entry: order.get(entry.field, -1))
    usage = page.usage or _usage(every)
    lines = [f"usage: {page.program} {usage}", ""]
    for paragraph in _description(page).split("\n\n"):
        lines += textwrap.wrap(paragraph, width)
    indent = min(WIDEST_NAME, max((len(entry.name) for entry in shown), default=0)) + 4
    titles = dict.fromkeys(
        [REQUIRED, POSITIONAL, *page.sections.values(), *(entry.section for entry in shown)]
    )
    for title in titles:
        found = [entry for entry in shown if entry.section == title]
        lines += ["", f"{title}:"] if found else []
        for entry in found:
            lines += entry.lines(indent, width, whole=whole)
    hidden = len(every) - len(shown)
    if not whole and (
        hidden or any(shortened(entry.text, width) + "." != entry.text for entry in shown)
    ):
        lines += [
            "",
            f"{WHOLE} shows {f'{hidden} more options and ' if hidden else ''}the texts in full.",
        ]
    return "\n".join(lines)


def entries(page: HelpPage, default: Any = None) -> Iterator[Entry]:
    """Yields the arguments of a page, in the order of their declaration."""
    section = "options"
    for item, kind, text in _declared(page.arguments):
        section = page.sections.get(item.name, section)
        if tyro.conf.Suppress in _markers(kind):
            continue
        place = POSITIONAL if tyro.conf.Positional in _markers(kind) else section
        needed = item.name in page.required or (
            item.default is MISSING and item.default_factory is MISSING
        )
        value = getattr(default, item.name) if default is not None else _default(item)
        name = _name(page, item.name, kind, value, needed)
        text = page.texts.get(item.name, text)
        if (choices := _choices(_plain(kind))) and name.endswith((" NAME", " NAME ...")):
            text = f"{text} One of {', '.join(choices)}.".strip()
        yield Entry(
            item.name, name, text, "" if needed else _shown(value), REQUIRED if needed else place
        )
        if is_dataclass(value) and not isinstance(value, type):
            for entry in entries(HelpPage("", type(value)), value):
                name = entry.name.replace("--", f"--{item.name.replace('_', '-')}.", 1)
                yield replace(
                    entry,
                    field=f"{item.name}.{entry.field}",
                    name=name,
                    section=f"settings of {item.name}",
                )


def shortened(text: str, room: int) -> str:
    """Returns the first sentence of a text, or as many of its clauses or words as there is room
    for.
    """
    sentence = text.partition(". ")[0].removesuffix(".")
    if len(sentence) <= room:
        return sentence
    clauses = [
        match.start() for match in re.finditer(r"[;:,] | \(", sentence) if match.start() <= room
    ]
    if clauses and clauses[-1] >= SHORTEST:
        return sentence[: clauses[-1]]
    return textwrap.shorten(sentence, room, placeholder=" ...")


def _declared(kind: type) -> Iterator[tuple[Field[Any], Any, str]]:
    """Yields the fields of a dataclass, their types, and their texts, which those of a base class
    may lend.
    """
    parts = [part for part in reversed(kind.__mro__) if is_dataclass(part)]
    found = chain.from_iterable(docstring_parser.parse_from_object(part).params for part in parts)
    texts = {param.arg_name: " ".join((param.description or "").split()) for param in found}
    hints = get_type_hints(kind, include_extras=True)
    for item in fields(kind):
        helps = [
            marker.help for marker in _markers(hints[item.name]) if getattr(marker, "help", None)
        ]
        yield item, hints[item.name], helps[0] if helps else texts.get(item.name, "")


def _description(page: HelpPage) -> str:
    return page.description or inspect.getdoc(page.arguments) or ""


def _usage(every: Sequence[Entry]) -> str:
    """Returns the required arguments, then the word for the others."""
    required = [entry.name for entry in every if entry.section in (REQUIRED, POSITIONAL)]
    return " ".join([*required, "[options]"] if len(required) < len(every) else required)


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return None if item.default is MISSING else item.default


def _markers(kind: Any) -> Sequence[Any]:
    """Returns what tyro's annotations say about a field."""
    return getattr(kind, "__metadata__", ())


def _plain(kind: Any) -> Any:
    """Returns a type without tyro's annotations, and without None."""
    kind = get_args(kind)[0] if _markers(kind) else kind
    if get_origin(kind) in (Union, UnionType):
        kinds = [part for part in get_args(kind) if part is not NoneType]
        return kinds[0] if len(kinds) == 1 else kind
    return kind


def _name(page: HelpPage, name: str, kind: Any, value: Any, needed: bool) -> str:
    """Returns how an argument is written: `MODEL`, `--tp N`, `--resume`, `--no-padded`."""
    plain = _plain(kind)
    many = (
        " ..."
        if get_origin(plain) in (tuple, list) and Ellipsis in (*get_args(plain), Ellipsis)
        else ""
    )
    if tyro.conf.Positional in _markers(kind):
        return f"{name.upper()}{many}" if needed else f"[{name.upper()}{many}]"
    option = f"--{name.replace('_', '-')}"
    if plain is bool and NoneType not in get_args(kind):
        return f"--[no-]{option[2:]}" if value else option
    taken = f"{option} {_value_name(plain)}"
    if len(taken) > WIDEST_NAME and _choices(plain):
        taken = f"{option} NAME{many}"
    return f"{taken}, {page.names[name]}" if name in page.names else taken


def _value_name(kind: Any) -> str:
    if kind is bool:
        return "{True,False}"
    if get_origin(kind) is Literal:
        choices = ",".join(str(choice) for choice in get_args(kind) if choice is not None)
        return f"{{{choices}}}"
    if get_origin(kind) in (tuple, list):
        inner = [part for part in get_args(kind) if part is not Ellipsis]
        repeated = Ellipsis in get_args(kind) or get_origin(kind) is list
        return (
            f"{_value_name(_plain(inner[0]))} ..."
            if repeated
            else " ".join(map(_value_name, inner))
        )
    return SIMPLE.get(kind, "NAME" if is_dataclass(kind) else "VALUE")


def _choices(kind: Any) -> list[str]:
    """Returns the choices of a type, or of its items; none if it has other values too."""
    inner = _plain(get_args(kind)[0]) if get_origin(kind) in (tuple, list) else kind
    return [str(choice) for choice in get_args(inner)] if get_origin(inner) is Literal else []


def _shown(value: Any) -> str:
    """Returns a default value as a page shows it, or an empty string if it says nothing."""
    if value is None or value is False or value in ((), "") or is_dataclass(value):
        return ""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    text = (
        f"{value:g}"
        if isinstance(value, float)
        else value.name
        if isinstance(value, Path)
        else str(value)
    )
    return repr(text) if text.isspace() else text
