"""Adapts this package to scripts for FlagAI: its `EnvArgs` and `EnvTrainer`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ..trainer import Trainer

# Launchers add the rank, which they say in the environment too.
_OF_THE_LAUNCHER = ("local_rank", "not_call_launch")


class EnvArgs:
    """A trainer's arguments, which a script's command line may replace.

        env_args = EnvArgs(batch_size=4)  # python train.py --epochs=3 --env_type=pytorchDDP
        trainer = EnvTrainer(env_args)

    Args:
        defaults: The arguments of `Trainer`, also under FlagAI's names.
    """

    def __init__(self, **defaults: Any) -> None:
        self.defaults = defaults

    def parse_args(self, words: Sequence[str] | None = None) -> SimpleNamespace:
        """Returns the arguments, with those of a command line: `--name=value` or `--name value`.

        Raises:
            ValueError: A word names no argument, or an argument has no value.
        """
        values = dict(self.defaults)
        rest = list(sys.argv[1:] if words is None else words)
        while rest:
            word = rest.pop(0)
            if not word.startswith("--"):
                raise ValueError(f"{word} is no argument; write --name=value")
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name == "not_call_launch":
                continue
            if not has_value:
                if not rest or rest[0].startswith("--"):
                    raise ValueError(f"--{name} needs a value, as in --{name}=1")
                value = rest.pop(0)
            values[name] = _read_value(value)
        for name in _OF_THE_LAUNCHER:
            values.pop(name, None)
        return SimpleNamespace(**values, not_call_launch=True)


class EnvTrainer(Trainer):
    """A `Trainer` that is made from `EnvArgs`, or from what their `parse_args` returns.

    Raises ValueError as `Trainer` does.
    """

    def __init__(self, env_args: EnvArgs | SimpleNamespace) -> None:
        given = env_args.parse_args() if isinstance(env_args, EnvArgs) else env_args
        values = {
            name: value for name, value in vars(given).items() if name not in _OF_THE_LAUNCHER
        }
        super().__init__(**values)


def _read_value(text: str) -> Any:
    """Returns the number, truth value, list or None that a word spells; else the word itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
