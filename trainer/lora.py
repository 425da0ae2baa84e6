"""Adds LoRA weights (Hu et al., 2021, arXiv:2106.09685) to a model of the zoo or of transformers,
as arguments say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.hub import find_model
from ..files.working_copies import fetch_whole
from ..models.auto import build_on_meta
from ..models.config import ModelConfig
from ..models.lora import add_lora, attach_factors, import_peft, load_adapter, lora_config
from .arguments.training_arguments import TrainingArguments

REGEX = frozenset("\\*+?|()[]{}^$")


def check_lora_names(config: ModelConfig, arguments: TrainingArguments) -> None:
    """Raises ValueError if the arguments ask for LoRA weights that a model of the zoo cannot have,
    such as those of a layer that it lacks. Reads no weights.
    """
    if arguments.lora_rank:
        attach_factors(build_on_meta(config, None), lora_config(**lora_settings(arguments)))


def has_lora(model: Any) -> bool:
    """Returns whether a model of the zoo or of transformers has LoRA weights."""
    return getattr(model, "lora", None) is not None or bool(getattr(model, "peft_config", None))


def lora_settings(arguments: TrainingArguments) -> dict[str, Any]:
    """Returns the arguments of peft's LoraConfig that the training arguments name."""
    names = [part.strip() for name in arguments.lora_target_modules for part in _parts(name)]
    saved = [part for name in arguments.lora_modules_to_save for part in _parts(name)]
    parameters = [part for name in arguments.lora_target_parameters for part in _parts(name)]
    # peft takes a list of names, or a text: a regular expression, or "all-linear".
    targets: Any = names
    if names in (["all"], ["all-linear"]):
        targets = "all-linear"
    elif len(names) == 1 and REGEX & set(names[0]):
        targets = names[0]
    if parameters and not targets:
        targets = []
    return {
        "r": arguments.lora_rank,
        "lora_alpha": arguments.lora_alpha,
        "lora_dropout": arguments.lora_dropout,
        "use_rslora": arguments.use_rslora,
        "target_modules": targets if targets or parameters else None,
        "target_parameters": parameters or None,
        "modules_to_save": saved or None,
    }


def _parts(name: str) -> list[str]:
    """Returns the names in a text such as "q_proj,v_proj"; a regular expression stays whole."""
    if REGEX & set(name):
        return [name]
    return [part for part in name.split(",") if part.strip()]


def convert_to_lora(
    model: Any, settings: Mapping[str, Any], seed: int, base: Path | None = None
) -> None:
    """Adds LoRA weights to a model, in place, and freezes all other parameters.

    Args:
        model: A model of the zoo, of any layout, or of transformers.
        settings: Arguments of peft's LoraConfig.
        base: The model's folder, which the adapter's files name.

    Raises:
        ValueError: peft or the zoo's model refuses the settings, or peft is not installed.
    """
    if isinstance(getattr(model, "config", None), ModelConfig):
        add_lora(model, lora_config(**settings), seed)
        return
    peft = import_peft()
    try:
        with torch.random.fork_rng():  # the same weights on every rank
            torch.manual_seed(seed)
            config = peft.LoraConfig(**settings)
            model.add_adapter(config)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"LoRA: {error}") from None
    if base is not None:
        config.base_model_name_or_path = str(base.resolve())


def take_adapter(model: Any, folder: str | Path) -> None:
    """Adds the LoRA weights in a folder of peft, or at its URL or name on the Hub, to be trained
    further, and freezes all other parameters.
    """
    folder = find_model(folder, "adapter")
    if isinstance(getattr(model, "config", None), ModelConfig):
        load_adapter(model, folder)
        return
    import_peft()
    model.load_adapter(str(fetch_whole(folder)), is_trainable=True)


def apply_lora(model: Any, arguments: TrainingArguments) -> None:
    """Adds the LoRA weights that the training arguments ask for, unless the model has some already.

    Raises ValueError for what does not work with them.
    """
    if not has_lora(model) and arguments.adapter is not None:
        take_adapter(model, arguments.adapter)
    elif not has_lora(model) and arguments.lora_rank:
        convert_to_lora(model, lora_settings(arguments), arguments.seed)
    if getattr(model, "lora", None) is not None and arguments.zero_stage == 3:
        raise ValueError(
            "ZeRO stage 3 does not work with LoRA weights of the zoo's models; use zero_stage 0, "
            "1 or 2"
        )
