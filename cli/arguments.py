"""Parses command-line arguments into dataclasses, with a YAML file's values as defaults."""

from __future__ import annotations

import difflib
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro
import yaml

from ..trainer.arguments.aliases import ALIASES, SWITCHES, argument_aliases, resolve_aliases

Arguments = TypeVar("Arguments")

OVERRIDE = re.compile(r"([a-z]\w*(?:\.[a-z]\w*)*)=(.*)", re.DOTALL)
YAML_NAMES = {"true": "True", "false": "False", "null": "None"}


class ConfigLoader(yaml.SafeLoader):
    """Reads floating-point numbers as in YAML 1.2: 1e-4 is a number. In YAML 1.1, PyYAML's version, it is a string."""


ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def parse(
    kind: type[Arguments],
    argv: Sequence[str],
    *,
    program: str,
    description: str,
    quiet: bool,
    defaults: Path | None = None,
    overrides: bool = False,
) -> Arguments:
    """Parses a command line into an object of the dataclass `kind`.

    In names, `-` and `_` are equivalent, and the names of FlagAI and transformers are accepted too. An unknown option
    exits with code 2 after a message.

    Args:
        quiet: Do not print that message; for every rank except the first.
        defaults: A YAML file with defaults, used if `--config` does not name one.
        overrides: Accept `key=value` as `--key value`, and `part.key=value` for a field of the dataclass in the field
            `part`. Values are written as in YAML.

    Raises ValueError if the dataclass refuses a value, or the YAML file cannot be used.
    """
    config = _config_file(argv) or defaults
    default = kind(**read_yaml(kind, config)) if config else kind()
    if overrides:
        argv = [text for argument in argv for text in _as_option(argument)]
    argv = resolve_alias_options(argv, default)
    return tyro.cli(kind, prog=program, args=argv, default=default, description=description, console_outputs=not quiet)


def read_yaml(kind: type, path: Path) -> dict[str, Any]:
    """Returns a YAML file's values, by `kind`'s fields or their aliases. A dataclass is written as a nested mapping."""
    try:
        values = yaml.load(path.read_text(), ConfigLoader) or {}  # a SafeLoader
    except FileNotFoundError:
        raise ValueError(f"--config: there is no file {path}") from None
    except OSError as error:
        raise ValueError(f"--config: {path} cannot be read ({error.strerror}); name a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config: {path} is not YAML: {error}") from None
    return _checked(kind, values, path, "")


def _checked(kind: type, values: Any, path: Path, part: str) -> dict[str, Any]:
    """Returns `values` by the names of `kind`'s fields. `part` is the dotted prefix of their keys, for messages."""
    if not isinstance(values, dict):
        where = f"{part.rstrip('.')} in {path}" if part else path
        raise ValueError(f"--config: {where} must hold `name: value` lines, not a {type(values).__name__}")
    known = [field.name for field in fields(kind)]
    taken = [*known, *argument_aliases(known)]
    named = {str(given).replace("-", "_"): value for given, value in values.items()}
    for name in named:
        if name not in taken:
            close = difflib.get_close_matches(name, taken, n=1)
            hint = f"; did you mean {part}{close[0]}?" if close else ""
            raise ValueError(f"--config: {path} sets {part}{name}, which is not an argument{hint}")
    try:
        named = resolve_aliases(named, known)
    except ValueError as error:
        raise ValueError(f"--config: {path}: {error}") from None
    kinds = get_type_hints(kind)
    return {name: _part(kinds[name], value, path, f"{part}{name}.") for name, value in named.items()}


def _part(kind: Any, value: Any, path: Path, part: str) -> Any:
    """Returns a field's value. For a field that is a dataclass, it is created from the nested mapping."""
    nested = isinstance(kind, type) and is_dataclass(kind)
    return kind(**_checked(kind, value, path, part)) if nested else value


def _as_option(argument: str) -> tuple[str, ...]:
    override = OVERRIDE.fullmatch(argument)
    if override is None:
        return (argument,)
    return f"--{override[1]}", YAML_NAMES.get(override[2], override[2])


def _config_file(argv: Sequence[str]) -> Path | None:
    for position, argument in enumerate(argv):
        if argument.startswith("--config="):
            return Path(argument.partition("=")[2])
        if argument == "--config" and position + 1 < len(argv):
            return Path(argv[position + 1])
    return None


VALUES = {"True": True, "true": True, "False": False, "false": False, "None": None}


def resolve_alias_options(argv: Sequence[str], default: Any) -> list[str]:
    """Returns the command line with all options in the form that tyro reads.

    Options may have FlagAI's or transformers' names, as in `--learning_rate` and `--bf16`. A boolean may have a value,
    as in `--bf16=False` or `--bf16 False`; another value raises ValueError. `default` holds the default values.
    """
    kinds = get_type_hints(type(default), include_extras=True)
    aliases = argument_aliases(kinds)
    options: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        option, equals, value = word.partition("=")
        name = option[2:].replace("-", "_") if option.startswith("--") else ""
        optional = kinds.get(name.removeprefix("no_")) == bool | None
        switch = name in aliases and name in SWITCHES
        if switch or kinds.get(name) is bool or (optional and name in kinds):
            if not equals:
                value = words.popleft() if words and words[0] in VALUES else "True"
            on = _truth(name, value, optional)
            if switch:
                options = _switched(options, *SWITCHES[name], on, default)
            else:
                options.append(f"--{name}={on}" if optional else f"--{'' if on else 'no_'}{name}")
        elif optional and not equals:
            options.append(f"--{name.removeprefix('no_')}=False")
        elif name in aliases:
            options.append(f"--{ALIASES[name]}{equals}{value}")
        else:
            options.append(word)
    return options


def _truth(name: str, value: str, optional: bool) -> bool | None:
    if value not in VALUES or (value == "None" and not optional):
        raise ValueError(f"--{name} must be True or False{' or None' if optional else ''}, not {value!r}")
    return VALUES[value]


def _switched(options: list[str], target: str, value: str, on: bool | None, default: Any) -> list[str]:
    """Returns the options with a switch that sets `target` to `value`. A switch that is off does not change others."""
    if on:
        return [*options, f"--{target}={value}"]
    if getattr(default, target) != value:
        return options
    off = next(field.default for field in fields(default) if field.name == target)
    return [f"--{target}={off}", *options]  # if an option occurs twice, the last one counts
