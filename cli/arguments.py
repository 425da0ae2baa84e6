"""Command-line arguments from dataclasses, with a YAML file's values as defaults, and clean errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml
from rich.console import Console
from rich.text import Text

from ..trainer.keywords import RENAMED, SWITCHES

Arguments = TypeVar("Arguments")

USAGE_ERROR = 2


def parse(
    kind: type[Arguments],
    argv: Sequence[str],
    *,
    program: str,
    description: str,
    quiet: bool,
    defaults: Path | None = None,
) -> Arguments:
    """Arguments of the dataclass `kind`; `--config file.yaml` among them gives defaults, else the file `defaults`.

    `-` and `_` are one in names. A mistake in the command exits with code 2 after a message; `quiet` (every rank
    but the first) keeps the message back. Values that do not fit raise `ValueError`.
    """
    config = _config_file(argv) or defaults
    default = kind(**read_yaml(kind, config)) if config else kind()
    return tyro.cli(kind, prog=program, args=argv, default=default, description=description, console_outputs=not quiet)


def familiar_options(argv: Sequence[str]) -> list[str]:
    """Options by our names where they are given by FlagAI's or transformers', such as `--learning_rate` or `--bf16`."""
    options = []
    for word in argv:
        option, equals, value = word.partition("=")
        name = option[2:].replace("-", "_") if option.startswith("--") else ""
        if name in SWITCHES:
            options.append("--{}={}".format(*SWITCHES[name]))
        else:
            options.append(f"--{RENAMED[name]}{equals}{value}" if name in RENAMED else word)
    return options


def read_yaml(kind: type, path: Path) -> dict[str, Any]:
    """The values of a YAML file whose keys are `kind`'s fields."""
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError:
        raise ValueError(f"--config: there is no file {path}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--config: {path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config: {path} must hold `name: value` lines, not a {type(values).__name__}")
    values = {str(name).replace("-", "_"): value for name, value in values.items()}
    known = [field.name for field in fields(kind)]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"--config: {path} sets {name}, which is no argument{hint}")
    return values


def exit_code_of(work: Callable[[], int], *, quiet: bool = False) -> int:
    """Runs `work`; a user's mistake (`ValueError`) becomes one message on stderr and exit code 2."""
    try:
        return work()
    except ValueError as error:
        if not quiet:
            Console(stderr=True, soft_wrap=True).print(Text("error: ", style="bold red") + Text(str(error)))
        return USAGE_ERROR


def _config_file(argv: Sequence[str]) -> Path | None:
    for position, argument in enumerate(argv):
        if argument.startswith("--config="):
            return Path(argument.partition("=")[2])
        if argument == "--config" and position + 1 < len(argv):
            return Path(argv[position + 1])
    return None
