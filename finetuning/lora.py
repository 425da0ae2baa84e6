"""Adds LoRA weights (Hu et al., 2021, arXiv:2106.09685) with the library peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def import_peft() -> Any:
    """Returns the module peft. ValueError if it is not installed."""
    try:
        import peft
    except ImportError:
        raise ValueError('LoRA needs the package peft: pip install "shardzoo[lora]"') from None
    return peft


def add_lora(model: Any, folder: Path, seed: int, settings: dict[str, Any]) -> None:
    """Adds LoRA weights to a model of transformers, in place, and freezes all others.

    Args:
        folder: The model's folder, which the adapter's file records as its base model.
        settings: Arguments of peft's LoraConfig.

    Raises:
        ValueError: peft refuses the settings, or is not installed.
    """
    peft = import_peft()
    try:
        with torch.random.fork_rng():  # the same weights on every rank
            torch.manual_seed(seed)
            config = peft.LoraConfig(**settings)
            model.add_adapter(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"LoRA: {error}") from None
    config.base_model_name_or_path = str(folder.resolve())
