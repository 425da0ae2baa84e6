"""Resolves aliases of arguments, the names that FlagAI and transformers use, and suggests corrections of typos."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

Arguments = TypeVar("Arguments")

# FlagAI's or transformers' name -> our name, where only the name differs.
ALIASES = {
    "batch_size": "micro_batch_size",
    "warm_up": "warmup_ratio",
    "optimizer_type": "optimizer",
    "max_steps": "train_steps",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "adam_eps",
    "eval_steps": "eval_interval",
    "learning_rate": "lr",
    "logging_steps": "log_interval",
    "lr_scheduler_type": "lr_schedule",
    "max_grad_norm": "clip_grad",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "save_steps": "save_interval",
}
# A boolean switch of FlagAI -> our argument, and its value when the switch is on.
SWITCHES = {
    "fp16": ("precision", "fp16"),
    "bf16": ("precision", "bf16"),
    "checkpoint_activations": ("recompute", "full"),
}


def with_argument_aliases(kind: type[Arguments]) -> type[Arguments]:
    """Lets a dataclass's constructor accept the aliases above, and suggest a name for an unknown one."""
    dataclass_type: Any = kind
    plain = dataclass_type.__init__

    @functools.wraps(plain)
    def __init__(self: Any, **keywords: Any) -> None:
        plain(self, **resolve_aliases(keywords, [field.name for field in fields(dataclass_type)]))

    kind.__init__ = __init__
    return kind


def argument_aliases(known: Collection[str]) -> list[str]:
    """Returns the aliases of the `known` arguments, without those that are arguments themselves."""
    targets = {**ALIASES, **{name: target for name, (target, _) in SWITCHES.items()}}
    return [name for name, target in targets.items() if target in known and name not in known]


def resolve_aliases(keywords: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """Returns the keywords under their names in `known`. Raises ValueError if one is unknown or two mean the same."""
    aliases = argument_aliases(known)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in keywords.items():
        target, set_to = ALIASES.get(name, name) if name in aliases else name, value
        if name in aliases and name in SWITCHES:
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, not {value!r}")
            if not value:
                continue
            target, set_to = SWITCHES[name]
        elif target not in known:
            raise ValueError(f"there is no argument {name!r}{_suggestion(name, [*known, *aliases])}")
        if target in values:
            raise ValueError(f"{origin[target]} and {name} both set {target}; give one of them")
        values[target], origin[target] = set_to, name
    return values


def _suggestion(name: str, taken: list[str]) -> str:
    close = difflib.get_close_matches(name, taken, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
