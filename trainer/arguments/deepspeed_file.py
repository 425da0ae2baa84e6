"""Reads DeepSpeed's JSON file, and translates settings that are arguments of the trainer."""

from __future__ import annotations

import copy
import reprlib
from pathlib import Path
from typing import Any, NamedTuple

from ...files.strict_json import is_object, parse_record, read_regular_file
from ..optimizers.registry import OPTIMIZERS
from ..schedules import SCHEDULES

# DeepSpeed's type of an optimizer, in lower case -> ours. Its Adam decays weights like AdamW unless
# told otherwise.
OPTIMIZER_TYPES = {
    kind: entry.name for entry in OPTIMIZERS.values() for kind in entry.deepspeed_types
}
# DeepSpeed's type of a scheduler, in lower case -> our schedule.
SCHEDULE_TYPES = {
    kind: entry.name for entry in SCHEDULES.values() for kind in entry.deepspeed_types
}
# The path of a key -> our argument, where the value is the same.
RENAMED = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "clip_grad",
    "optimizer.params.lr": "lr",
    "optimizer.params.eps": "adam_eps",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "lr",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "train_steps",
}
# Values of further settings of both sections that say what the trainer does anyway.
UNUSED = {
    "torch_adam": True,
    "bias_correction": True,
    "amsgrad": False,
    "warmup_min_lr": 0,
    "warmup_type": "linear",
}
# The path of a section that is read here -> an example of it.
SECTIONS = {
    "zero_optimization": '{"stage": 2}',
    "zero_optimization.offload_optimizer": '{"device": "cpu"}',
    "zero_optimization.offload_param": '{"device": "cpu"}',
    "fp16": '{"enabled": true}',
    "bf16": '{"enabled": true}',
    "torch_autocast": '{"enabled": true}',
    "optimizer": '{"type": "AdamW"}',
    "optimizer.params": '{"lr": 0.001}',
    "scheduler": '{"type": "WarmupLR"}',
    "scheduler.params": '{"warmup_num_steps": 100}',
}
OPTIONAL_SECTIONS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
AUTO = ("auto", None)  # values that leave a setting to the trainer


class Translated(NamedTuple):
    """A file's settings.

    Attributes:
        arguments: Those that are arguments of the trainer, under our names.
        others: The rest of the file.
    """

    arguments: dict[str, Any]
    others: dict[str, Any]


def read_deepspeed_file(path: str | None) -> dict[str, Any]:
    """Returns the user's configuration, in which each of the `SECTIONS` that it has is an object.

    Raises:
        ValueError: The file cannot be read, is not a JSON object, or has something else as a
            section.
    """
    if path is None:
        return {}
    try:
        text = read_regular_file(Path(path))
    except OSError as error:
        raise ValueError(f"deepspeed_config: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        if Path(path).is_dir():
            raise ValueError(f"deepspeed_config: {path} cannot be read: Is a directory") from None
        raise ValueError(f"deepspeed_config: {error}") from None
    try:
        config = parse_record(text)
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"deepspeed_config: {path} is not JSON: {error}") from None
    if not is_object(config):
        raise ValueError(
            f"deepspeed_config: {path} must hold a JSON object, not a {type(config).__name__}"
        )
    for name, example in SECTIONS.items():
        *outer, key = name.split(".")
        parent = config
        for part in outer:
            parent = parent.get(part, {})
        if parent.get(key) is None and name in OPTIONAL_SECTIONS:
            parent.pop(key, None)  # as in DeepSpeed, null is no offloading
        if not is_object(parent.get(key, {})):
            raise ValueError(
                f"deepspeed_config: {name} must be an object such as {example}, not "
                f"{reprlib.repr(parent[key])}"
            )
    return config


def take_file_arguments(
    path: str | None, given: dict[str, Any], defaults: dict[str, Any]
) -> dict[str, Any]:
    """Returns the arguments that a run takes from a DeepSpeed file: those that are not `given`
    another value.

    Args:
        given: All arguments of the run; one that has its default value counts as not given.
    """
    taken = translated(read_deepspeed_file(path)).arguments
    alternatives = {
        "gradient_accumulation_steps": "global_batch_size",
        "global_batch_size": "gradient_accumulation_steps",
    }
    used = {}
    for name, value in taken.items():
        is_given = given[name] != defaults[name]
        alternative_is_given = given.get(alternatives.get(name, "")) is not None
        if not is_given and not alternative_is_given:
            used[name] = value
    return used


def deepspeed_notice(path: str | None, given: dict[str, Any]) -> str | None:
    """Returns what a run takes from a DeepSpeed file, and what the arguments replace;

    None if neither.
    """
    taken = translated(read_deepspeed_file(path)).arguments
    used = [f"{name}={value}" for name, value in taken.items() if given[name] == value]
    replaced = [
        f"{name}={given[name]} (not {value})"
        for name, value in taken.items()
        if given[name] != value
    ]
    parts = []
    if used:
        parts.append(f"{path} sets {', '.join(used)}")
    if replaced:
        parts.append(f"the arguments set {', '.join(replaced)}")
    return "; ".join(parts) or None


def translated(config: dict[str, Any]) -> Translated:
    """Translates a DeepSpeed configuration.

    Raises ValueError for an optimizer or a schedule that the trainer lacks.
    """
    others = copy.deepcopy(config)
    taken: dict[str, Any] = {}
    for path, name in RENAMED.items():
        value = _take(others, path)
        if value not in AUTO:
            taken[name] = value
    whole = _take(others, "train_batch_size")
    if (
        whole not in AUTO
        and not {"micro_batch_size", "gradient_accumulation_steps"} <= taken.keys()
    ):
        taken["global_batch_size"] = whole
    for precision in ("fp16", "bf16"):
        if _take(others, f"{precision}.enabled") is True:
            if "precision" in taken:
                raise ValueError("deepspeed_config enables both fp16 and bf16; enable one of them")
            taken["precision"] = precision
    if _take(others, "zero_optimization.cpu_offload") is True:
        taken["offload_optimizer"] = True
    if _take(others, "zero_optimization.offload_optimizer.device") == "cpu":
        taken["offload_optimizer"] = True
    taken |= _updates(others)
    return Translated(taken, others)


def _updates(others: dict[str, Any]) -> dict[str, Any]:
    """Takes the optimizer and the scheduler, which the trainer creates itself, out of a file;
    returns their kinds.
    """
    taken: dict[str, Any] = {}
    for part, name, known in (
        ("optimizer", "optimizer", OPTIMIZER_TYPES),
        ("scheduler", "lr_schedule", SCHEDULE_TYPES),
    ):
        left = {
            key: value
            for key, value in _take(others, f"{part}.params", {}).items()
            if value not in AUTO
        }
        betas = left.pop("betas", None)
        if betas is not None:
            if not isinstance(betas, list) or len(betas) != 2:
                raise ValueError(
                    f"deepspeed_config: {part}.params.betas must be two numbers, not {betas!r}"
                )
            taken["beta1"], taken["beta2"] = betas
        kind = others.pop(part, {}).get("type")
        if kind not in AUTO:
            if str(kind).lower() not in known:
                raise ValueError(
                    f"deepspeed_config: there is no {part} {kind!r} here; use one of "
                    f"{', '.join(known)}"
                )
            taken[name] = known[str(kind).lower()]
        if left.pop("adam_w_mode", True) is False and taken.get("optimizer") == "adamw":
            taken["optimizer"] = "adam"
        unknown = [key for key, value in left.items() if value != UNUSED.get(key, object())]
        if unknown:
            raise ValueError(
                f"deepspeed_config sets the {part}'s {unknown[0]}, for which the trainer has no "
                "argument; leave it out"
            )
    return taken


def _take(config: dict[str, Any], path: str, default: Any = None) -> Any:
    """Removes and returns the value at a dotted path."""
    *sections, key = path.split(".")
    for section in sections:
        config = config.get(section, {})
    return config.pop(key, default)
