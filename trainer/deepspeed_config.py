"""DeepSpeed's configuration, made from the arguments and the user's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .arguments import TrainingArguments


def deepspeed_config(arguments: TrainingArguments, data_parallel_size: int) -> dict[str, Any]:
    """The DeepSpeed configuration of a run: what the arguments decide, and the keys of the user's file."""
    accumulation_steps = arguments.accumulation_steps(data_parallel_size)
    decided: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "train_batch_size": arguments.micro_batch_size * accumulation_steps * data_parallel_size,
        "gradient_clipping": arguments.clip_grad,
        "steps_per_print": 2**31,  # our own progress is shown instead
    }
    if arguments.zero_stage:
        decided["zero_optimization"] = {"stage": arguments.zero_stage}
    if arguments.precision == "bf16":
        decided |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return _merge(decided, read_deepspeed_file(arguments.deepspeed_config))


def read_deepspeed_file(path: str | None) -> dict[str, Any]:
    """The user's configuration; ValueError if it is not there or is no JSON."""
    if path is None:
        return {}
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"deepspeed_config: there is no file {path}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"deepspeed_config: {path} is not JSON: {error}") from None


def _merge(decided: dict[str, Any], added: dict[str, Any], where: str = "") -> dict[str, Any]:
    merged = dict(decided)
    for key, value in added.items():
        if key not in decided or decided[key] == value or value == "auto":
            merged.setdefault(key, value)
        elif isinstance(decided[key], dict) and isinstance(value, dict):
            merged[key] = _merge(decided[key], value, f"{where}{key}.")
        else:
            raise ValueError(
                f"deepspeed_config sets {where}{key} to {value!r}, but the arguments decide it to be "
                f'{decided[key]!r}; leave the key out or set it to "auto"'
            )
    return merged
