"""Options as other trainers write them: by their names, and booleans with a value."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from ..trainer.keywords import RENAMED, SWITCHES, familiar_names

VALUES = {"True": True, "true": True, "False": False, "false": False, "None": None}


def familiar_options(argv: Sequence[str], default: Any) -> list[str]:
    """The options of the dataclass `default`, whose values they replace, in the one form that tyro reads.

    Besides our names they may have FlagAI's or transformers', as in `--learning_rate` and `--bf16`; a boolean may have
    a value, as in `--bf16=False` or `--bf16 False`. ValueError for a boolean with another value.
    """
    kinds = get_type_hints(type(default), include_extras=True)
    familiar = familiar_names(kinds)
    options: list[str] = []
    words = deque(argv)
    while words:
        word = words.popleft()
        option, equals, value = word.partition("=")
        name = option[2:].replace("-", "_") if option.startswith("--") else ""
        optional = kinds.get(name.removeprefix("no_")) == bool | None
        switch = name in familiar and name in SWITCHES
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
        elif name in familiar:
            options.append(f"--{RENAMED[name]}{equals}{value}")
        else:
            options.append(word)
    return options


def _truth(name: str, value: str, optional: bool) -> bool | None:
    if value not in VALUES or (value == "None" and not optional):
        raise ValueError(f"--{name} must be True or False{' or None' if optional else ''}, not {value!r}")
    return VALUES[value]


def _switched(options: list[str], target: str, value: str, on: bool | None, default: Any) -> list[str]:
    """With a switch that sets `target` to `value`. One that is off leaves other options as they are."""
    if on:
        return [*options, f"--{target}={value}"]
    if getattr(default, target) != value:
        return options
    off = next(field.default for field in fields(default) if field.name == target)
    return [f"--{target}={off}", *options]  # the last one wins
