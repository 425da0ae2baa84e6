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
            text = shorten(self.text, width - len(name) - len(default))
            return [f"{name}{text}{default}".rstrip()]

        texts = textwrap.wrap(self.text + default, width - indent, break_long_words=False)
        margin = " " * indent
        if len(name) > indent - 2:  # The text begins below the name.
            return [name, *(margin + text for text in texts)]
        first = texts[0] if texts else ""
        return [f"{name:<{indent}}{first}".rstrip(), *(margin + text for text in texts[1:])]


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
        width = shutil.get_terminal_size((100, 24)).columns
        print(render(page, default, whole=asked == WHOLE, width=width))
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
        texts = {name: _describe(page) for name, page in pages.items()}
        print(render_commands(program, description, texts))
        raise SystemExit(0)


def render_commands(program: str, description: str, commands: Mapping[str, str]) -> str:
    """Returns the page that lists the commands of a program."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, NARROWEST), WIDEST)
    indent = max(map(len, commands)) + 4
    lines = [f"usage: {program} COMMAND [options]", "", description, "", "commands:"]
    for name, text in commands.items():
        lines.append(f"  {name:<{indent - 2}}{shorten(text, width - indent)}")
    return "\n".join([*lines, "", f"`{program} COMMAND --help` shows the options of a command."])


def render(page: HelpPage, default: Any = None, *, whole: bool = False, width: int = 100) -> str:
    """Returns a page's text.

    Args:
        whole: With every option and its whole text, instead of a line for each of the most used
            ones.
        width: Columns of the terminal.
    """
    width = min(max(width, NARROWEST), WIDEST)
    every = list(list_entries(page, default))
    shown = every
    if page.common and not whole:
        order = {name: place for place, name in enumerate(page.common)}
        shown = [entry for entry in every if entry.field in order or entry.section == REQUIRED]
        shown.sort(key=lambda entry: order.get(entry.field, -1))

    lines = [f"usage: {page.program} {page.usage or _list_usage(every)}", ""]
    for paragraph in _describe(page).split("\n\n"):
        lines += textwrap.wrap(paragraph, width)

    # The topics: first what is required, then those of the page in their order, then others.
    longest_name = max((len(entry.name) for entry in shown), default=0)
    indent = min(WIDEST_NAME, longest_name) + 4
    others = [entry.section for entry in shown]
    for title in dict.fromkeys([REQUIRED, POSITIONAL, *page.sections.values(), *others]):
        found = [entry for entry in shown if entry.section == title]
        if found:
            lines += ["", f"{title}:"]
        for entry in found:
            lines += entry.lines(indent, width, whole=whole)

    hidden = len(every) - len(shown)
    is_cut = any(shorten(entry.text, width) + "." != entry.text for entry in shown)
    if not whole and (hidden or is_cut):
        more = f"{hidden} more options and " if hidden else ""
        lines += ["", f"{WHOLE} shows {more}the texts in full."]
    if whole:
        lines += ["", "Every command also takes --quiet and --verbose."]
    return "\n".join(lines)


def list_entries(page: HelpPage, default: Any = None) -> Iterator[Entry]:
    """Yields the arguments of a page, in the order of their declaration.

    The fields of an argument that is itself a dataclass follow it, as `--name.field`.
    """
    section = "options"
    for item, kind, text in _list_fields(page.arguments):
        section = page.sections.get(item.name, section)
        markers = _find_markers(kind)
        if tyro.conf.Suppress in markers:
            continue
        value = _find_default(item)
        if default is not None:
            value = getattr(default, item.name)
        has_no_default = item.default is MISSING and item.default_factory is MISSING
        is_required = item.name in page.required or has_no_default

        name = _write_name(page, item.name, kind, value, is_required)
        text = page.texts.get(item.name, text)
        choices = _list_choices(_strip(kind))
        if choices and name.endswith((" NAME", " NAME ...")):
            text = f"{text} One of {', '.join(choices)}.".strip()
        if is_required:
            yield Entry(item.name, name, text, "", REQUIRED)
        elif tyro.conf.Positional in markers:
            yield Entry(item.name, name, text, _write_value(value), POSITIONAL)
        else:
            yield Entry(item.name, name, text, _write_value(value), section)

        if is_dataclass(value) and not isinstance(value, type):
            prefix = f"--{item.name.replace('_', '-')}."
            for entry in list_entries(HelpPage("", type(value)), value):
                yield replace(
                    entry,
                    field=f"{item.name}.{entry.field}",
                    name=entry.name.replace("--", prefix, 1),
                    section=f"settings of {item.name}",
                )


def shorten(text: str, room: int) -> str:
    """Returns the first sentence of a text, or as many of its clauses or words as there is room
    for.
    """
    sentence = text.partition(". ")[0].removesuffix(".")
    if len(sentence) <= room:
        return sentence
    end = 0  # of the last clause that there is room for
    for match in re.finditer(r"[;:,] | \(", sentence):
        before = sentence[: match.start()]
        if match.start() <= room and before.count("{") == before.count("}"):
            end = match.start()
    if end >= SHORTEST:
        return sentence[:end]
    return textwrap.shorten(sentence, room, placeholder=" ...")


def _list_fields(kind: type) -> Iterator[tuple[Field[Any], Any, str]]:
    """Yields the fields of a dataclass, their types, and their texts, which those of a base class
    may lend.
    """
    texts: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        if is_dataclass(part):
            for param in docstring_parser.parse_from_object(part).params:
                texts[param.arg_name] = " ".join((param.description or "").split())
    hints = get_type_hints(kind, include_extras=True)
    for item in fields(kind):
        text = texts.get(item.name, "")
        for marker in reversed(_find_markers(hints[item.name])):
            text = getattr(marker, "help", None) or text
        yield item, hints[item.name], text


def _describe(page: HelpPage) -> str:
    return page.description or inspect.getdoc(page.arguments) or ""


def _list_usage(every: Sequence[Entry]) -> str:
    """Returns the required arguments, then the word for the others."""
    words = [entry.name for entry in every if entry.section in (REQUIRED, POSITIONAL)]
    if len(words) < len(every):
        words.append("[options]")
    return " ".join(words)


def _find_default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    if item.default is MISSING:
        return None
    return item.default


def _find_markers(kind: Any) -> Sequence[Any]:
    """Returns what tyro's annotations say about a field."""
    return getattr(kind, "__metadata__", ())


def _strip(kind: Any) -> Any:
    """Returns a type without tyro's annotations, and without None."""
    if _find_markers(kind):
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, UnionType):
        kinds = [part for part in get_args(kind) if part is not NoneType]
        if len(kinds) == 1:
            return kinds[0]
    return kind


def _takes_many(kind: Any) -> bool:
    """Returns whether a type has any number of items: a list, or a tuple such as tuple[int, ...]."""
    if get_origin(kind) is list:
        return True
    return get_origin(kind) is tuple and Ellipsis in get_args(kind)


def _write_name(page: HelpPage, name: str, kind: Any, value: Any, is_required: bool) -> str:
    """Returns how an argument is written: `MODEL`, `--tp N`, `--resume`, `--no-padded`."""
    plain = _strip(kind)
    if tyro.conf.Positional in _find_markers(kind):
        written = name.upper()
        if get_origin(plain) in (tuple, list):
            written += " ..."
        return written if is_required else f"[{written}]"

    option = f"--{name.replace('_', '-')}"
    if plain is bool and NoneType not in get_args(kind):
        return f"--[no-]{option[2:]}" if value else option
    written = f"{option} {_write_type(plain)}"
    if len(written) > WIDEST_NAME and _list_choices(plain):
        written = f"{option} NAME"
        if get_origin(plain) in (tuple, list):
            written += " ..."
    if name in page.names:
        written += f", {page.names[name]}"
    return written


def _write_type(kind: Any) -> str:
    """Returns what an option of a type takes: `N`, `PATH`, `{a,b}`, `N N`, `TEXT ...`."""
    if kind is bool:
        return "{True,False}"
    if get_origin(kind) is Literal:
        choices = ",".join(str(choice) for choice in get_args(kind) if choice is not None)
        return f"{{{choices}}}"
    if get_origin(kind) in (tuple, list):
        items = [part for part in get_args(kind) if part is not Ellipsis]
        if _takes_many(kind):
            return f"{_write_type(_strip(items[0]))} ..."
        return " ".join(map(_write_type, items))
    if is_dataclass(kind):
        return "NAME"
    return SIMPLE.get(kind, "VALUE")


def _list_choices(kind: Any) -> list[str]:
    """Returns the choices of a type, or of its items; none if it has other values too."""
    if get_origin(kind) in (tuple, list):
        kind = _strip(get_args(kind)[0])
    if get_origin(kind) is not Literal:
        return []
    return [str(choice) for choice in get_args(kind)]


def _write_value(value: Any) -> str:
    """Returns a default value as a page shows it, or an empty string if it says nothing."""
    if value is None or value is False or value in ((), "") or is_dataclass(value):
        return ""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Path):
        return value.name
    text = str(value)
    return repr(text) if text.isspace() else text
