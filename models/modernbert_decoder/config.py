"""Defines the configuration of ModernBERT's decoder, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..modernbert.config import ModernBertConfig


@dataclass
class ModernBertDecoderConfig(ModernBertConfig):
    """The sizes and constants of a ModernBERT decoder.

    Names, meanings and defaults are those of transformers.

    Attributes:
        local_attention: Twice the positions that a layer with a window attends to.
    """

    model_type: ClassVar[str] = "modernbert-decoder"

    architecture: str = "ModernBertDecoderForCausalLM"

    @property
    def window(self) -> int:
        """The positions that a layer with a window attends to, that of the token included."""
        return self.local_attention // 2
