"""Defines Qwen3's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import HiddenSize
from ..qwen2.config import QwenConfig


@dataclass
class Qwen3Config(QwenConfig):
    """The sizes and constants of a Qwen3.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "qwen3"
    qk_norm: ClassVar[bool] = True

    head_dim: HiddenSize | None = 128
    architecture: str = "Qwen3ForCausalLM"
