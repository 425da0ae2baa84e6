"""Parses command-line arguments into dataclasses, with a YAML file's values as defaults."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin, get_type_hints

from ..compat.spellings import RESUME, SAVE_EPOCH
from ..files.strict_yaml import read_strict_yaml
from ..trainer.arguments.aliases import SPELLINGS, argument_aliases, hint, resolve_aliases
from .help import HelpPage, show_help
from .parsing import parse_words
from .spellings import respell

Arguments = TypeVar("Arguments")

# An index in brackets is LiBai's, as in dataloader.train.dataset[0].data_prefix.
OVERRIDE = re.compile(r"([a-z]\w*(?:\[\d+\])?(?:\.[a-z]\w*(?:\[\d+\])?)*)=(.*)", re.DOTALL)
YAML_NAMES = {"true": "True", "false": "False", "null": "None"}


def parse(
    kind: type[Arguments],
    page: HelpPage,
    argv: Sequence[str],
    *,
    quiet: bool,
    values: Mapping[str, Any] | None = None,
) -> Arguments:
    """Parses a command line into an object of the dataclass `kind`, whose help is `page`.

    In names, `-` and `_` are equivalent, and the names of FlagAI and transformers are accepted too.
    An unknown option exits with code 2 after a message, and a question for help with code 0 after
    the page.

    Args:
        quiet: Print neither; for every rank except the first.
        values: The defaults, by the names of fields; by default those of the YAML file that
            `--config` names.

    Raises ValueError if the dataclass refuses a value, or the YAML file cannot be used.
    """
    config = given_value(argv, "config")
    if values is None:
        values = read_yaml(kind, Path(config)) if config else {}
    try:
        default = kind(**values)
    except ValueError as error:
        if config is None:
            raise
        raise ValueError(f"--config: {config}: {error}") from None
    show_help(page, argv, default, quiet=quiet)
    argv = respell(argv, [field.name for field in fields(cast(Any, default))], quiet=quiet)
    argv = join_repeated_lists(resolve_alias_options(argv, default), default)
    return parse_words(kind, argv, page.program, quiet=quiet, default=default)


def given_value(argv: Sequence[str], name: str) -> str | None:
    """Returns the last value that a command line gives an option, `True` for one without a value,
    else None.
    """
    found = None
    for word, following in pairwise((*argv, "--")):
        option, equals, value = word.partition("=")
        if not option.startswith("--") or option[2:].replace("-", "_") != name:
            continue
        if equals:
            found = value
        elif following.startswith("--"):
            found = "True"
        else:
            found = following
    return found


def list_given(argv: Sequence[str]) -> list[str]:
    """Returns the names of a command line's options, those of other systems by ours."""
    names: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            names.append(SPELLINGS.renamed.get(name, name))
    return names


def read_yaml(kind: type, path: Path) -> dict[str, Any]:
    """Returns a YAML file's values, by `kind`'s fields or their aliases.

    A dataclass is written as a nested mapping.
    """
    values = read_strict_yaml(path, "--config") or {}
    return _check_values(kind, values, path, "")


def _check_values(kind: type, values: Any, path: Path, part: str) -> dict[str, Any]:
    """Returns `values` by the names of `kind`'s fields.

    `part` is the dotted prefix of their keys, for messages.
    """
    if not isinstance(values, dict):
        where = f"{part.rstrip('.')} in {path}" if part else path
        raise ValueError(
            f"--config: {where} must hold `name: value` lines, not a {type(values).__name__}"
        )
    known = [field.name for field in fields(kind)]
    taken = [*known, *argument_aliases(known)]
    named = {str(given).replace("-", "_"): value for given, value in values.items()}
    for name in named:
        if name not in taken:
            raise ValueError(
                f"--config: {path} sets {part}{name}, which is not an argument{hint(name, taken, part)}"
            )
    try:
        named = resolve_aliases(named, known)
    except ValueError as error:
        raise ValueError(f"--config: {path}: {error}") from None
    kinds = get_type_hints(kind)
    checked: dict[str, Any] = {}
    for name, value in named.items():
        field_kind = kinds[name]
        if isinstance(field_kind, type) and is_dataclass(field_kind):
            nested = _check_values(field_kind, value, path, f"{part}{name}.")
            checked[name] = field_kind(**nested)
        else:
            checked[name] = value
    return checked


def overrides_as_options(argv: Sequence[str], kind: type) -> list[str]:
    """Returns a command line with `--key value` for each `key=value`, whose value is written as in
    YAML.

    A word after an option of `kind` that takes a value is that value.
    """
    switches = set(SPELLINGS.switches)
    for name, annotation in get_type_hints(kind).items():
        if annotation is bool:
            switches.add(name)
    options: list[str] = []
    for word in argv:
        before = options[-1] if options else ""
        is_value = (
            before.startswith("--")
            and "=" not in before
            and before[2:].replace("-", "_") not in switches
        )
        override = None if is_value else OVERRIDE.fullmatch(word)
        if override is None:
            options.append(word)
            continue
        name, value = override.groups()
        items = [YAML_NAMES.get(value, value)]
        if value.startswith("[") and value.endswith("]"):
            items = value[1:-1].split(",")
        options += [f"--{name}", *(item.strip() for item in items if item)]
    return options


VALUES = {"True": True, "true": True, "False": False, "false": False, "None": None}


def resolve_alias_options(argv: Sequence[str], default: Any) -> list[str]:
    """Returns the command line with all options in the form that tyro reads.

    Options may have FlagAI's or transformers' names, as in `--learning_rate` and `--bf16`. A
    boolean may have a value, as in `--bf16=False` or `--bf16 False`.

    Args:
        argv: The words.
        default: An object of the command's dataclass, with the default values.

    Raises:
        ValueError: A boolean has another value, or an option is for something that this package
            does otherwise, or not.
    """
    kinds = dict(_list_kinds(default))
    aliases = argument_aliases(kinds)
    options: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        option, equals, value = word.partition("=")
        name = ""
        if option.startswith("--"):
            name = option[2:].replace("-", "_")

        # transformers' options of what happens here anyway, and its way to resume.
        if name in (*SPELLINGS.taken_as_is, RESUME) and name not in kinds:
            if not equals:
                value = "True"
                if words and not words[0].startswith("--"):
                    value = words.popleft()
            if SPELLINGS.is_without_effect(name, value):
                continue
            if name == RESUME and value not in VALUES:
                options.append(f"--load_dir={value}")
                continue
            equals = "="
        if name in SPELLINGS.explained and name not in kinds:
            shown = name if "." in name else option  # A path of LiBai's is typed as key=value.
            raise ValueError(f"there is no option {shown}{hint(name, kinds)}")

        is_optional = kinds.get(name.removeprefix("no_")) == bool | None
        if name == RESUME:
            name = "resume"
        is_switch = name in aliases and name in SPELLINGS.switches
        is_boolean = kinds.get(name) is bool or (is_optional and name in kinds)
        if is_switch or is_boolean:
            if not equals:
                value = words.popleft() if words and words[0] in VALUES else "True"
            on = _parse_truth(name, value, is_optional)
            if is_switch:
                target, setting = SPELLINGS.switches[name]
                options = _set_switch(options, target, setting, on, default)
            elif is_optional:
                options.append(f"--{name}={on}")
            elif on:
                options.append(f"--{name}")
            else:
                part, dot, leaf = name.rpartition(".")
                options.append(f"--{part}{dot}no_{leaf}")
        elif is_optional and not equals:
            options.append(f"--{name.removeprefix('no_')}=False")
        elif name in aliases and name == SAVE_EPOCH:
            if not equals:
                value = words.popleft() if words else ""
            options.append(f"--save_strategy={'epoch' if value == '1' else value}")
        elif name in aliases:
            options.append(f"--{SPELLINGS.renamed[name]}{equals}{value}")
        else:
            options.append(word)
    return options


def join_repeated_lists(argv: Sequence[str], default: Any) -> list[str]:
    """Returns the command line with the values of an option that takes several in one place.

    `--prompt A --prompt B` means `--prompt A B`; otherwise the last one would replace the others.
    """
    lists: set[str] = set()
    for name, kind in _list_kinds(default):
        if get_origin(kind) in (tuple, list):
            lists.add(name)

    # Each option with the words after it; the first group is what precedes all options.
    groups: list[list[str]] = [[]]
    groups_of_lists: dict[str, list[str]] = {}
    current = groups[0]
    for word in argv:
        if not word.startswith("--"):
            current.append(word)
            continue
        option, equals, value = word.partition("=")
        name = option[2:].replace("-", "_")
        if name not in groups_of_lists:
            current = [word]
            groups.append(current)
            if name in lists:
                groups_of_lists[name] = current
            continue
        current = groups_of_lists[name]
        first, first_equals, first_value = current[0].partition("=")
        if first_equals:
            current[:1] = [first, first_value]
        if equals:
            current.append(value)
    return list(chain.from_iterable(groups))


def _list_kinds(default: Any, part: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the type of each field of a dataclass object, and of the objects
    in its fields.
    """
    hints = get_type_hints(type(default), include_extras=True)
    for field in fields(default):
        yield f"{part}{field.name}", hints[field.name]
        if is_dataclass(value := getattr(default, field.name)):
            yield from _list_kinds(value, f"{part}{field.name}.")


def _parse_truth(name: str, value: str, is_optional: bool) -> bool | None:
    if value not in VALUES or (value == "None" and not is_optional):
        known = "True or False or None" if is_optional else "True or False"
        raise ValueError(f"--{name} must be {known}, not {value!r}")
    return VALUES[value]


def _set_switch(
    options: list[str], target: str, value: str, on: bool | None, default: Any
) -> list[str]:
    """Returns the options with a switch that sets `target` to `value`.

    A switch that is off does not change others.
    """
    if on:
        return [*options, f"--{target}={value}"]
    if getattr(default, target) != value:
        return options
    off = next(field.default for field in fields(default) if field.name == target)
    return [f"--{target}={off}", *options]  # if an option occurs twice, the last one counts
