"""Defines Mistral's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import HeadCount, InnerSize, PositionCount, TokenId
from ..llama.config import DecoderConfig


@dataclass
class MistralConfig(DecoderConfig):
    """The sizes and constants of a Mistral.

    Names, meanings and defaults are those of transformers.
    """

    model_type: ClassVar[str] = "mistral"

    intermediate_size: InnerSize = 14336
    num_key_value_heads: HeadCount | None = 8
    max_position_embeddings: PositionCount = 131072
    sliding_window: PositionCount | None = 4096
    bos_token_id: TokenId | None = 1
    eos_token_id: TokenId | list[TokenId] | None = 2
    architecture: str = "MistralForCausalLM"

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers
