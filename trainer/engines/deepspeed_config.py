"""Builds DeepSpeed's configuration from the arguments and the user's file."""

from __future__ import annotations

from typing import Any

from ..arguments.deepspeed_file import read_deepspeed_file, translated
from ..arguments.training_arguments import TrainingArguments
from ..optimizers.registry import ELEMENTWISE_NAMES, find_optimizer
from .buckets import bucket_elements


def deepspeed_config(arguments: TrainingArguments, replicas: int, trained: int) -> dict[str, Any]:
    """Returns the DeepSpeed configuration of a run: the keys that the arguments decide, and the
    user's file's.

    Args:
        replicas: The number of ranks that hold the same parameters, which DeepSpeed calls data-parallel.
            Of them, context-parallel ranks read the same samples.
        trained: The number of elements that a rank trains.
    """
    accumulation_steps = arguments.accumulation_steps(replicas // arguments.context_parallel_size)
    decided: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "train_batch_size": arguments.micro_batch_size * accumulation_steps * replicas,
        "gradient_clipping": arguments.clip_grad,
        "bf16": {"enabled": arguments.precision == "bf16"},
        "fp16": {"enabled": arguments.precision == "fp16"},
    }
    stage = zero_stage(arguments)
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        decided |= {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }  # all of them can be split
    if arguments.offload_optimizer:
        # Any torch optimizer can update on the CPU; DeepSpeed's own CPU optimizer would be compiled
        # at run time.
        zero["offload_optimizer"] = {"device": "cpu"}
        decided["zero_force_ds_cpu_optimizer"] = False
    elif stage:
        zero["offload_optimizer"] = {"device": "none"}
    if arguments.precision == "bf16":
        decided["data_types"] = {"grad_accum_dtype": "fp32"}
    config = _merge(decided, translated(read_deepspeed_file(arguments.deepspeed_config)).others)
    config.setdefault("steps_per_print", 2**31)  # the trainer shows its own progress
    if not stage and not config.get("torch_autocast", {}).get(
        "enabled"
    ):  # with which DeepSpeed may scale gradients
        # The engine clips: DeepSpeed returns no norm, and counts what several pipeline stages hold
        # several times.
        config["gradient_clipping"] = 0.0
    if stage:
        _set_buckets(config, arguments, replicas, trained)
    return config


def _set_buckets(
    config: dict[str, Any], arguments: TrainingArguments, replicas: int, trained: int
) -> None:
    """Lets ZeRO add up gradients in buckets during the backward pass, unless the user's file says
    otherwise.
    """
    zero = config["zero_optimization"]
    if zero.get("reduce_bucket_size", "auto") == "auto":
        zero["reduce_bucket_size"] = bucket_elements(trained, replicas)
    if zero["stage"] < 3 and zero.get("overlap_comm", "auto") == "auto":  # stage 3 does so anyway
        # DeepSpeed's pipelines reduce after the last micro-batch.
        zero["overlap_comm"] = replicas > 1 and arguments.pipeline_parallel_size == 1
    if zero["stage"] == 1 and zero["overlap_comm"] and arguments.precision == "bf16":
        config.setdefault(
            "communication_data_type", "fp32"
        )  # in which the micro-batches are added up


def zero_stage(arguments: TrainingArguments) -> int:
    """Returns the ZeRO stage of a run.

    Raises ValueError if the arguments or the user's file do not allow it.
    """
    of_file = (
        read_deepspeed_file(arguments.deepspeed_config)
        .get("zero_optimization", {})
        .get("stage", "auto")
    )
    elementwise = find_optimizer(arguments.optimizer).is_elementwise
    stage = arguments.zero_stage
    if stage is None:
        needed = elementwise or arguments.precision != "fp32" or arguments.offload_optimizer
        stage = of_file if of_file != "auto" else int(needed)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"deepspeed_config: there is no ZeRO stage {stage!r}; use 0, 1, 2 or 3")
    if stage == 3 and arguments.env_type == "deepspeed+mpu":
        raise ValueError(
            f"deepspeed_config {arguments.deepspeed_config} asks for ZeRO stage 3, which splits "
            "parameters that deepspeed+mpu has already split; use stage 0, 1 or 2, or "
            "env_type='deepspeed'; to split parameters beside layers, use env_type='fsdp' without "
            "deepspeed_config"
        )
    if stage > 1 and arguments.pipeline_parallel_size > 1:
        raise ValueError(
            f"deepspeed_config {arguments.deepspeed_config} asks for ZeRO stage {stage}, which "
            "splits the gradients that a pipeline accumulates; use stage 0 or 1, or "
            "pipeline_parallel_size=1"
        )
    if stage == 3 and not elementwise:
        raise ValueError(
            f"{arguments.optimizer} needs statistics of whole parameters, which ZeRO stage 3 "
            f"splits without saying where; use stage 0, 1 or 2, or {', '.join(ELEMENTWISE_NAMES)}"
        )
    if not stage and arguments.precision != "fp32":
        raise ValueError(
            f"{arguments.precision} needs the ZeRO optimizer, which keeps the fp32 master "
            "weights, and zero_stage=0 has none; use 1 or 2"
        )
    if not stage and arguments.offload_optimizer:
        raise ValueError(
            "offload_optimizer needs ZeRO, which zero_stage=0 switches off; use 1, 2 or 3"
        )
    return stage


def _merge(decided: dict[str, Any], added: dict[str, Any], where: str = "") -> dict[str, Any]:
    merged = dict(decided)
    for key, value in added.items():
        if key not in decided or decided[key] == value or value == "auto":
            merged.setdefault(key, value)
        elif isinstance(decided[key], dict) and isinstance(value, dict):
            merged[key] = _merge(decided[key], value, f"{where}{key}.")
        else:
            raise ValueError(
                f"deepspeed_config sets {where}{key} to {value!r}, but the arguments decide it to "
                "be "
                f'{decided[key]!r}; leave the key out or set it to "auto"'
            )
    return merged
