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
    "num_pipeline_stages": "pipeline_parallel_size",
    "pipe_parallel_size": "pipeline_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "pp": "pipeline_parallel_size",
    "save_steps": "save_interval",
}
# A boolean switch of FlagAI -> our argument, and its value when the switch is on.
SWITCHES = {
    "fp16": ("precision", "fp16"),
    "bf16": ("precision", "bf16"),
    "checkpoint_activations": ("recompute", "full"),
}
# Names that resemble one of our arguments, but mean something else -> what to do instead.
_TENSOR = "the number of processes that each layer is split over is called model_parallel_size"
_DATA = (
    "it follows from the number of processes: num_nodes x num_gpus / (model_parallel_size x pipeline_parallel_size); "
    "set num_gpus, or start more processes"
)
_CONTEXT = "sequences are split only within a tensor-parallel group: use sequence_parallel with model_parallel_size"
_EXPERT = "the zoo has no mixture-of-experts models; leave it out"
EXPLAINED = {
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size"), _TENSOR),
    **dict.fromkeys(("dp", "dp_size", "data_parallel_size"), _DATA),
    **dict.fromkeys(("cp", "context_parallel_size", "sequence_parallel_size"), _CONTEXT),
    **dict.fromkeys(("ep", "expert_parallel_size", "expert_model_parallel_size"), _EXPERT),
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
            raise ValueError(f"there is no argument {name!r}{hint(name, [*known, *aliases])}")
        if target in values:
            raise ValueError(f"{origin[target]} and {name} both set {target}; give one of them")
        values[target], origin[target] = set_to, name
    return values


def hint(name: str, taken: Collection[str], prefix: str = "") -> str:
    """Returns the end of a message about an unknown argument: what to use instead, if that is known.

    Args:
        taken: The arguments that exist.
        prefix: A dotted prefix of their names.
    """
    if name in EXPLAINED and name not in taken:
        return f": {EXPLAINED[name]}"
    close = [other for other in difflib.get_close_matches(name, taken, n=5, cutoff=0.5) if _resembles(name, other)]
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _resembles(name: str, other: str) -> bool:
    """Returns whether `name` is a misspelling of `other`, or consists of words of it or their beginnings."""
    if difflib.get_close_matches(name, [other], cutoff=0.9):
        return True
    words = other.split("_")
    return all(
        difflib.get_close_matches(word, words, cutoff=0.7) or any(longer.startswith(word) for longer in words)
        for word in name.split("_")
    )
