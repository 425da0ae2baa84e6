"""LoRA (Hu et al., 2021, arXiv:2106.09685) by the library peft."""

from __future__ import annotations

from typing import Any

import torch

from .loading import Source


def import_peft() -> Any:
    """ValueError if peft is not installed."""
    try:
        import peft
    except ImportError:
        raise ValueError('LoRA needs the package peft: pip install "shardzoo[lora]"') from None
    return peft


def add_lora(model: Any, source: Source, seed: int, settings: dict[str, Any]) -> None:
    """Adds LoRA weights to a model of transformers, in place, and freezes all others. settings: of peft's LoraConfig.

    ValueError for a model of the zoo, settings that peft refuses, and without peft.
    """
    if source.native:
        raise ValueError(
            "LoRA (peft) wraps whole linear layers, which the zoo's models split: use native=False with "
            "model_parallel_size=1, or soft prompts or freeze(), which the zoo's models have"
        )
    peft = import_peft()
    try:
        with torch.random.fork_rng():  # the same on every rank
            torch.manual_seed(seed)
            config = peft.LoraConfig(**settings)
            model.add_adapter(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"LoRA: {error}") from None
    # What the adapter's file says it belongs to.
    config.base_model_name_or_path = str(source.folder.resolve())
