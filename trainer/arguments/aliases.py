"""Resolves aliases of arguments, the names of FlagAI, transformers and LiBai, and suggests corrections of typos."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import PurePath
from typing import Any, TypeVar

Arguments = TypeVar("Arguments")

# Another tool's name -> our name, where only the name differs. Those with a dot are paths in LiBai's configuration.
ALIASES = {
    **dict.fromkeys(
        ("tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size"),
        "model_parallel_size",
    ),
    "model_parallel_gpus": "model_parallel_size",
    "train.dist.tensor_parallel_size": "model_parallel_size",
    "train.dist.pipeline_parallel_size": "pipeline_parallel_size",
    "train.dist.num_nodes": "num_nodes",
    "train.train_iter": "train_steps",
    "train.train_epoch": "epochs",
    "train.train_micro_batch_size": "micro_batch_size",
    "train.global_batch_size": "global_batch_size",
    "train.num_accumulation_steps": "gradient_accumulation_steps",
    "train.warmup_ratio": "warmup_ratio",
    "train.log_period": "log_interval",
    "train.evaluation.eval_period": "eval_interval",
    "train.checkpointer.period": "save_interval",
    "train.checkpointer.max_to_keep": "save_total_limit",
    "train.output_dir": "output_dir",
    "train.seed": "seed",
    "train.load_weight": "load_dir",
    "train.resume": "resume",
    "optim.lr": "lr",
    "optim.weight_decay": "weight_decay",
    "batch_size": "micro_batch_size",
    "warm_up": "warmup_ratio",
    "optimizer_type": "optimizer",
    "max_steps": "train_steps",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "adam_eps",
    "dataloader_num_workers": "num_workers",
    "deepspeed": "deepspeed_config",
    "eval_steps": "eval_interval",
    "learning_rate": "lr",
    "lora_r": "lora_rank",
    **dict.fromkeys(("lora_target", "target_modules"), "lora_target_modules"),
    **dict.fromkeys(("additional_target", "modules_to_save"), "lora_modules_to_save"),
    "adapter_name_or_path": "adapter",
    "logging_steps": "log_interval",
    "lr_scheduler_type": "lr_schedule",
    "max_grad_norm": "clip_grad",
    "num_train_epochs": "epochs",
    "overwrite_output_dir": "overwrite",
    "output_dir": "save_dir",
    "per_device_train_batch_size": "micro_batch_size",
    "num_pipeline_stages": "pipeline_parallel_size",
    "pipe_parallel_size": "pipeline_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "pp": "pipeline_parallel_size",
    "resume_from_checkpoint": "resume",
    "save_steps": "save_interval",
    "evaluation_strategy": "eval_strategy",
    "per_device_eval_batch_size": "eval_batch_size",
    "train.test_micro_batch_size": "eval_batch_size",
    "metric_for_best_model": "save_best",
    "label_smoothing_factor": "label_smoothing",
}
# FlagAI's number of epochs between checkpoints, of which 1 is our strategy.
SAVE_EPOCH = "save_epoch"
RESUME = "resume_from_checkpoint"  # with a path instead of a boolean it is our load_dir
# Another tool's boolean switch -> our argument, and its value when the switch is on.
SWITCHES = {
    "adafactor": ("optimizer", "adafactor"),
    "train.amp.enabled": ("precision", "fp16"),
    "train.activation_checkpoint.enabled": ("recompute", "full"),
    "fp16": ("precision", "fp16"),
    "bf16": ("precision", "bf16"),
    "checkpoint_activations": ("recompute", "full"),
}
# Names that resemble one of our arguments, but mean something else -> what to do instead.
_DATA = (
    "it follows from the number of processes: num_nodes x num_gpus / (model_parallel_size x pipeline_parallel_size); "
    "set num_gpus, or start more processes"
)
_CONTEXT = "sequences are split only within a tensor-parallel group: use sequence_parallel with model_parallel_size"
_EXPERT = "the zoo has no mixture-of-experts models; leave it out"
_WANDB = "report_to names the trackers; tensorboard wandb are TensorBoard and Weights & Biases"
_BEST = "save_best names a validation value, and keeps the checkpoint where it was best"
EXPLAINED = {
    **dict.fromkeys(("load_best_model_at_end", "greater_is_better"), _BEST),
    "wandb": _WANDB,
    "torch_ort": "ONNX Runtime's training has ended; use torch_compile",
    "mode": "set task to text2text-generation for pairs, or to text-generation for plain text",
    "do_train": "name a train_file to train, or call train with a data set",
    "do_eval": "name a validation_file to evaluate, or call train with a valid_dataset",
    **dict.fromkeys(
        ("dp", "dp_size", "data_parallel_size", "train.dist.data_parallel_size"), _DATA
    ),
    **dict.fromkeys(("cp", "context_parallel_size", "sequence_parallel_size"), _CONTEXT),
    **dict.fromkeys(("ep", "expert_parallel_size", "expert_model_parallel_size"), _EXPERT),
}
# transformers' arguments -> the value that means what happens here anyway, with which they are taken.
NOWHERE = object()
AS_HERE: dict[str, Any] = {
    "num_checkpoints": 1,  # FlagAI: blocks between recomputed activations
    "wandb": False,
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
    targets = {
        **ALIASES,
        SAVE_EPOCH: "save_strategy",
        **{name: target for name, (target, _) in SWITCHES.items()},
    }
    return [name for name, target in targets.items() if target in known and name not in known]


def resolve_aliases(keywords: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """Returns the keywords under their names in `known`. Raises ValueError if one is unknown or two mean the same."""
    aliases = argument_aliases(known)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in keywords.items():
        if name not in known and AS_HERE.get(name, NOWHERE) == value:
            continue
        target, set_to = _resolved(name, value) if name in aliases else (name, value)
        if target is None:
            continue
        if target not in known:
            raise ValueError(f"there is no argument {name!r}{hint(name, [*known, *aliases])}")
        if target in values:
            raise ValueError(f"{origin[target]} and {name} both set {target}; give one of them")
        values[target], origin[target] = set_to, name
    return values


def _resolved(name: str, value: Any) -> tuple[str | None, Any]:
    """Returns our argument and its value for an alias; None for a switch that is off."""
    if name == SAVE_EPOCH:
        if value != 1:
            raise ValueError(
                f"{name} must be 1, a checkpoint after each epoch, not {value!r}; use save_interval in steps"
            )
        return "save_strategy", "epoch"
    if name == RESUME and isinstance(value, (str, PurePath)):
        return "load_dir", value
    if name not in SWITCHES:
        return ALIASES[name], value
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    target, set_to = SWITCHES[name]
    return (target if value else None), set_to


def hint(name: str, taken: Collection[str], prefix: str = "") -> str:
    """Returns the end of a message about an unknown argument: what to use instead, if that is known.

    Args:
        taken: The arguments that exist.
        prefix: A dotted prefix of their names.
    """
    if name in EXPLAINED and name not in taken:
        return f": {EXPLAINED[name]}"
    words = set(name.split("_"))
    # A name with a whole word more or less is another argument, and no misspelling: train_samples, max_train_samples.
    alike = [
        other
        for other in taken
        if not (words < set(other.split("_")) or words > set(other.split("_")))
    ]
    close = difflib.get_close_matches(_letters(name), map(_letters, alike), n=1, cutoff=0.87)
    meant = next((other for other in alike if close and _letters(other) == close[0]), None)
    same_digits = meant is not None and re.findall(r"\d", meant) == re.findall(r"\d", name)
    return f"; did you mean {prefix}{meant}?" if same_digits else ""


def _letters(name: str) -> str:
    return name.replace("_", "")
