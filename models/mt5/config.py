"""Defines mT5's configuration: T5's keys with other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from ..config import HeadCount, InnerSize, LayerCount, VocabSize
from ..t5.config import T5Config


@dataclass
class MT5Config(T5Config):
    """The sizes and constants of an mT5. Names, meanings and defaults are those of transformers.

    The decoder's output is never scaled.
    """

    model_type: ClassVar[str] = "mt5"

    vocab_size: VocabSize = 250112
    d_ff: InnerSize = 1024
    num_layers: LayerCount = 8
    num_heads: HeadCount = 6
    feed_forward_proj: str = "gated-gelu"
    architecture: str = "MT5ForConditionalGeneration"
    tie_word_embeddings: bool = False

    def scales_by_default(self) -> bool:
        return False

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return super().from_dict({**values, "scale_decoder_outputs": False})

    @classmethod
    def ties_in_version(cls, values: dict[str, Any]) -> bool:
        return False
